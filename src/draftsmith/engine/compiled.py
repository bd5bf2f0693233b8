"""Compilation of the pieces of a step: when, how, and with which shapes left open."""

from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any, ParamSpec, TypeVar, get_args

import torch
from torch import Tensor

from draftsmith.types import CompileLevel, DraftsmithError

SPAN_STEP = 64
# One entry for every (batch bucket, plan) that a run meets; the default of 8 would silently fall back to eager.
MOST_SHAPES = 256

P = ParamSpec("P")
R = TypeVar("R")

LEVELS: tuple[CompileLevel, ...] = get_args(CompileLevel)


class Compiler:
    """Wraps functions in torch.compile, or leaves them alone.

    Levels: "off" runs the model's own code; "trace" records it once a shape and replays the tensor operations without
    the Python around them (seconds); "full" generates machine code (a minute or so a shape, kept in PyTorch's on-disk
    cache for the next run).

    The batch is padded to powers of two, the draft has the plan's own size, and only the number of cached entries
    looked at stays open, so one graph serves a whole generation. At level "full" on a CPU the weights are frozen into
    the graph in the layout its kernels like best: such an engine keeps the weights it was compiled with.
    """

    def __init__(self, level: CompileLevel, device: torch.device, native: bool = False) -> None:
        if level not in LEVELS:
            raise DraftsmithError(f"compile is {level!r}; use one of {', '.join(LEVELS)}.")
        if native:  # there is nothing to compile, and rows need no padding
            level = "off"
        self.level: CompileLevel = level
        self.enabled = level != "off"
        self.packs = level != "full"
        self._backend = "eager" if level == "trace" else "inductor"
        self._options: dict[str, Any] = {"guard_filter_fn": keep_argument_guards}
        if self.enabled:
            torch._dynamo.config.recompile_limit = MOST_SHAPES
        if level == "full" and device.type == "cpu":
            self._options |= {"max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN"}
            # Tracing reads this before the options of one compilation apply; graphs with gradients ignore it.
            torch._inductor.config.freezing = True
        self._columns_S: Tensor | None = None

    def wrap(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return the function, compiled if that is on; the result serves one engine and no other."""
        if not self.enabled:
            return function
        copy = _private_copy(function)
        return torch.compile(
            copy, fullgraph=True, dynamic=False, backend=self._backend, options=self._options
        )

    def bucket(self, rows: int, most: int) -> int:
        """Rows to compute for so many requests: a power of two in compiled mode."""
        if not self.enabled or rows == 0:
            return rows
        return min(1 << (rows - 1).bit_length(), most)

    def slots(self, max_batch: int) -> int:
        """Cache slots needed so that padding rows have somewhere to write."""
        return 1 << (max_batch - 1).bit_length() if self.enabled else max_batch

    def span(self, longest: int, capacity: int, device: torch.device) -> Tensor:
        """Return 0 … S - 1 for the cached entries to look at, S rounded up so that few lengths occur."""
        if self._columns_S is None or self._columns_S.shape[0] < capacity:
            self._columns_S = torch.arange(capacity, device=device)
        span = min(capacity, -(-longest // SPAN_STEP) * SPAN_STEP)
        columns_S = self._columns_S[:span]
        if self.enabled:
            torch._dynamo.mark_dynamic(columns_S, 0)
        return columns_S


def keep_argument_guards(entries: Sequence[Any]) -> list[bool]:
    """Say which conditions to check at every call: those on the arguments (shapes, plans), none on the model.

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
