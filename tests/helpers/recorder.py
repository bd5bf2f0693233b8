"""A recorder that works on a CPU, in the place of CUDA's graphs, and like them knows nothing of Python.

It records PyTorch's operations with the tensors that they read and the numbers that Python gave them, refuses what a
GPU cannot record, and does the same on the same memory at every replay. Before a replay it spoils whatever other
recordings of its own computed, because that may lie where this one works.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest.mock import patch

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

R = TypeVar("R")

WAITING = ("_local_scalar_dense", "item", "lift_fresh", "lift_fresh_copy", "masked_select", "nonzero")
"""Operations that ask the device for numbers, or copy them to it."""
REFUSED = "operation not permitted when stream is capturing"


@dataclass
class Done:
    """An operation, its arguments, and the tensors that it returned; `own` says which of them lie in new memory."""

    operation: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    made: list[Tensor]
    own: list[int]


class _Listening(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.done: list[Done] = []

    def __torch_dispatch__(
        self, operation: Any, types: Sequence[type], arguments: tuple[Any, ...] = (),
        options: dict[str, Any] | None = None,
    ) -> Any:
        options = options or {}
        if operation.overloadpacket.__name__ in WAITING:
            raise RuntimeError(f"{REFUSED}: {operation}")
        made = operation(*arguments, **options)
        given = {tensor.untyped_storage().data_ptr() for tensor in tensors((arguments, options))}
        found = tensors(made)
        own = [at for at, one in enumerate(found) if one.numel() and one.untyped_storage().data_ptr() not in given]
        self.done.append(Done(operation, arguments, options, found, own))
        return made


class OnCPU:
    """Stands for `CudaGraphs`."""

    def __init__(self) -> None:
        self.computed: list[list[Tensor]] = []
        """What each recording computes, step by step."""
        self.replays = 0

    def record(self, function: Callable[[], R]) -> tuple[R, Callable[[], None]]:
        def refuse(tensor: Tensor) -> Any:
            raise RuntimeError(f"{REFUSED}: tolist")

        listening = _Listening()
        with patch.object(Tensor, "tolist", refuse), listening:
            made = function()
        computed = [one.made[at] for one in listening.done for at in one.own]
        self.computed.append(computed)
        is_new = True

        def replay() -> None:
            nonlocal is_new
            self.replays += 1
            for other in self.computed:
                if other is not computed:
                    spoil(other)
            # What was done to record it must not be done twice, such as moving keys and values.
            if not is_new:
                spoil(computed)
                again(listening.done)
            is_new = False

        return made, replay


def again(done: Sequence[Done]) -> None:
    """Do operations once more, their results in the memory of the first time."""
    for one in done:
        if one.operation._schema.is_mutable or one.own:
            new = tensors(one.operation(*one.arguments, **one.options))
            for at in one.own:
                one.made[at].data.copy_(new[at])  # as on a device: the tensor does not know that it was changed


def spoil(some: Sequence[Tensor]) -> None:
    """Overwrite tensors with what no result should be made of."""
    for tensor in some:
        tensor.data.fill_(float("nan") if tensor.is_floating_point() else 1)


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors of nested containers."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
