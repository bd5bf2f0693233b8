"""A recorder that works on a CPU, in the place of CUDA's. It overwrites what it may, as early as it may."""

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from draftsmith.replays import tensors_in

R = TypeVar("R")


class OnCPU:
    """Records by keeping the function. A replay spoils the results of all others, which may lie where it works."""

    def __init__(self) -> None:
        self.made: list[list[Tensor]] = []
        self.replays = 0

    def record(self, function: Callable[[], R]) -> tuple[R, Callable[[], None]]:
        made = function()
        mine = list(tensors_in(made))
        results_of: list[Tensor] = []  # those that are not arguments handed through
        self.made.append(results_of)
        is_new = True

        def replay() -> None:
            nonlocal is_new
            self.replays += 1
            # What a recording did when it was made must not be done twice, such as moving keys and values.
            results = mine if is_new else list(tensors_in(function()))
            for other in self.made:
                if other is not results_of:
                    spoil(other)
            if not is_new and not results_of:
                results_of.extend(held for held, result in zip(mine, results, strict=True) if held is not result)
            is_new = False
            for held, result in zip(mine, results, strict=True):
                if held is not result:
                    once(held.data).copy_(once(result))  # as on a device: the tensor does not know that it was changed

        return made, replay


def once(tensor: Tensor) -> Tensor:
    """Each element of an expanded tensor once."""
    return tensor[tuple(slice(1) if step == 0 else slice(None) for step in tensor.stride())]


def spoil(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        if tensor._is_view() or tensor.requires_grad:
            continue
        tensor.data.fill_(float("nan") if tensor.is_floating_point() else 1)
