"""Compilation of the pieces of a step: when, how, and with which shapes left open."""

from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

SPAN_STEP = 64
# One entry for every (batch bucket, plan) that a run meets; the default of 8 would silently fall back to eager.
MOST_SHAPES = 256

P = ParamSpec("P")
R = TypeVar("R")


class Compiler:
    """Wraps functions in torch.compile, or leaves them alone.

    The batch is padded to powers of two, the draft has the plan's own size, and only the number of cached entries
    looked at stays open, so one graph serves a whole generation. On a CPU the weights are frozen into the graph in
    the layout its kernels like best: a compiled engine keeps the weights it was compiled with. Generated code is kept
    in PyTorch's own on-disk cache between runs.
    """

    def __init__(self, enabled: bool, device: torch.device) -> None:
        self.enabled = enabled
        self._options: dict[str, Any] = {"guard_filter_fn": keep_argument_guards}
        if enabled:
            torch._dynamo.config.recompile_limit = MOST_SHAPES
        if enabled and device.type == "cpu":
            self._options |= {"max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN"}
            # Tracing reads the switch before the options of a single compilation apply; graphs with gradients ignore it.
            torch._inductor.config.freezing = True
        self._columns_S: Tensor | None = None

    def wrap(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return the function, compiled if that is on; the result serves one engine and no other."""
        if not self.enabled:
            return function
        return torch.compile(  # type: ignore[no-any-return]
            _private_copy(function), fullgraph=True, dynamic=False, options=self._options
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
    return [entry.name.startswith("L[") and not entry.name.startswith("L['self']") for entry in entries]


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
