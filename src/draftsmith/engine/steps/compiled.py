"""Compiles the pieces of a step: at which level, and with which shapes left open."""

from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any, ParamSpec, TypeVar, get_args

import torch
from torch import Tensor, nn

from draftsmith.drafters.base import Drafter
from draftsmith.engine.steps.commit import commit_greedily_natively, commit_greedy
from draftsmith.engine.steps.layout import Drafting, StaticDrafting, lay_out
from draftsmith.engine.steps.replay import Replayed
from draftsmith.engine.steps.runner import DraftRows, FixedShapes, Runner
from draftsmith.replays import CudaGraphs, can_replay
from draftsmith.targets import Target
from draftsmith.targets.packing import without_prepacking
from draftsmith.types import CompileLevel, DraftsmithError

# Compiled variants: one for every (batch bucket, plan) of a run; PyTorch's default of 8 would silently run eagerly.
MOST_SHAPES = 256

P = ParamSpec("P")
R = TypeVar("R")

LEVELS: tuple[CompileLevel, ...] = get_args(CompileLevel)


def runner_for(target: Target, level: CompileLevel) -> Runner:
    """Return what runs the steps of an engine at a level: "off", or see `Compiled`.

    A target that one native operator reads has nothing to compile: then every level is "off". On a GPU, "off" is
    `Replayed`.
    """
    if level not in LEVELS:
        raise DraftsmithError(f"compile is {level!r}; use one of {', '.join(LEVELS)}.")
    if level != "off" and target.backend.compiles:
        return Compiled(target, level)
    device = target.device
    return Replayed(target, lambda: CudaGraphs(device)) if can_replay(device) else Runner(target)


class Compiled(FixedShapes):
    """Runs the pieces through torch.compile, for fixed shapes.

    Levels: "trace" records the model's own code once a shape and replays the tensor operations without the Python
    around them (seconds); "full" generates machine code (a minute or so a shape, kept in PyTorch's on-disk cache for
    the next run).

    The batch is padded to powers of two, the draft has the plan's own size, and only the number of cached entries that
    are looked at stays open, so one graph serves a whole generation. At level "full" on a CPU the weights are frozen
    into the graph in the layout that suits its kernels: such an engine keeps the weights it was compiled with.
    """

    def __init__(self, target: Target, level: CompileLevel) -> None:
        super().__init__(target)
        self.level = level
        self._generates = level == "full"
        self._options: dict[str, Any] = {"guard_filter_fn": keep_argument_guards}
        torch._dynamo.config.recompile_limit = MOST_SHAPES
        if self._generates and target.device.type == "cpu":
            self._options |= {"max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN"}
            # Set globally: tracing reads it before a compilation's own options apply. Graphs with gradients ignore it.
            torch._inductor.config.freezing = True
        self.forward = self.wrap((target.without_prepacking() if self._generates else target).forward)
        self.columns = self._open_columns
        self.commit_greedily = self.backend.choose(self.wrap(commit_greedy), commit_greedily_natively)

    def wrap(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return the function compiled; the result serves one engine and no other."""
        backend = "inductor" if self._generates else "eager"
        return torch.compile(
            _private_copy(function), fullgraph=True, dynamic=False, backend=backend, options=self._options
        )

    def drafting(self, drafter: Drafter) -> DraftRows:
        """Compile a drafter together with the layout of its drafts; if it cannot be, pad its drafts to their plan."""
        if not drafter.can_compile:
            return StaticDrafting(drafter, self.lay_out).run
        if self._generates and isinstance(drafter, nn.Module):
            drafter = without_prepacking(drafter)
        return self.wrap(Drafting(drafter, lay_out).run)

    def _open_columns(self, span: Callable[[], int]) -> Tensor | None:
        """Return the cached entries to look at, their number left open for the compiler."""
        columns_S = self.backend.columns(span)
        torch._dynamo.mark_dynamic(columns_S, 0)
        return columns_S


def keep_argument_guards(entries: Sequence[Any]) -> list[bool]:
    """Say which conditions to check at every call: those on the arguments (shapes, plans), but none on the model.

    The model cannot change under an engine, and checking all its attributes costs as much as a small layer.
    """
    return [not (entry.is_global or entry.name.startswith(("self", "L['self']"))) for entry in entries]


def _private_copy(function: Callable[P, R]) -> Callable[P, R]:
    """Copy a function with a code object of its own.

    PyTorch files compiled variants under the code object. Frozen weights and unchecked models make a variant right
    for one engine only, so engines must not share them.
    """
    owner = function.__self__ if isinstance(function, MethodType) else None
    plain = function.__func__ if isinstance(function, MethodType) else function
    assert isinstance(plain, FunctionType)
    copy = FunctionType(
        plain.__code__.replace(), plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__
    )
    copy.__kwdefaults__ = plain.__kwdefaults__
    return copy if owner is None else MethodType(copy, owner)
