"""Draftsmith: train, prove and run the small draft models that make a causal language model generate faster.

Names are loaded when first used, so that `import draftsmith` and the command line's help stay quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftsmith.drafters.registry import load_drafter
    from draftsmith.engine import AsyncEngine, Engine
    from draftsmith.engine.wrapped.model import wrap
    from draftsmith.plan import Plan
    from draftsmith.targets import Target
    from draftsmith.types import Constraint, DraftsmithError, SamplingParams
    from draftsmith.workflows.benchmark import bench
    from draftsmith.workflows.checking import check
    from draftsmith.workflows.comparison import compare
    from draftsmith.workflows.exporting import export
    from draftsmith.workflows.fitting import fit_drafts
    from draftsmith.workflows.proving import prove
    from draftsmith.workflows.training import train
    from draftsmith.workflows.tuning import tune_layers

__version__ = "0.1.0"

__all__ = [
    "AsyncEngine",
    "Constraint",
    "DraftsmithError",
    "Engine",
    "Plan",
    "SamplingParams",
    "Target",
    "__version__",
    "bench",
    "check",
    "compare",
    "export",
    "fit_drafts",
    "load_drafter",
    "prove",
    "train",
    "tune_layers",
    "wrap",
]

_HOMES = {
    "AsyncEngine": "draftsmith.engine",
    "Constraint": "draftsmith.types",
    "DraftsmithError": "draftsmith.types",
    "Engine": "draftsmith.engine",
    "Plan": "draftsmith.plan",
    "SamplingParams": "draftsmith.types",
    "Target": "draftsmith.targets",
    "bench": "draftsmith.workflows.benchmark",
    "check": "draftsmith.workflows.checking",
    "compare": "draftsmith.workflows.comparison",
    "export": "draftsmith.workflows.exporting",
    "fit_drafts": "draftsmith.workflows.fitting",
    "load_drafter": "draftsmith.drafters.registry",
    "prove": "draftsmith.workflows.proving",
    "train": "draftsmith.workflows.training",
    "tune_layers": "draftsmith.workflows.tuning",
    "wrap": "draftsmith.engine.wrapped.model",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
