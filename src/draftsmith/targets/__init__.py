"""The model to be accelerated, and the memory of what it has read.

Names are loaded when they are first used, because reading records, which is also in this package, needs no PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftsmith.targets.cache.blocks import Blocks, Namespace, OutOfBlocks
    from draftsmith.targets.cache.cache import BLOCK, KVCache, keep_path
    from draftsmith.targets.cache.nodes import Nodes
    from draftsmith.targets.sublayers import Skipped
    from draftsmith.targets.target import Target
    from draftsmith.targets.upper import UpperLayers

__all__ = [
    "BLOCK", "Blocks", "KVCache", "Namespace", "Nodes", "OutOfBlocks", "Skipped", "Target", "UpperLayers", "keep_path",
]

_HOMES = {
    "BLOCK": "draftsmith.targets.cache.cache",
    "Blocks": "draftsmith.targets.cache.blocks",
    "KVCache": "draftsmith.targets.cache.cache",
    "Namespace": "draftsmith.targets.cache.blocks",
    "Nodes": "draftsmith.targets.cache.nodes",
    "OutOfBlocks": "draftsmith.targets.cache.blocks",
    "Skipped": "draftsmith.targets.sublayers",
    "Target": "draftsmith.targets.target",
    "UpperLayers": "draftsmith.targets.upper",
    "keep_path": "draftsmith.targets.cache.cache",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
