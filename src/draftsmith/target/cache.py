"""Keys and values of everything the target has read: one slot a row, and the draft behind the committed tokens.

Shapes: L layers, R slots, C capacity of a slot in tokens, H key/value heads, D head width, B active rows, P path nodes,
M nodes of a verification. Active rows are the first `rows` slots, in the order of the engine's own lists.

Storage starts as zeros, because attention multiplies even what its mask hides, and NaN left in old memory would
survive that. On a CPU the zeros come from the operating system, which backs only the pages that hold tokens.
"""

from math import prod

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64


class KVCache:
    """Own storage for keys and values; the attention function writes and reads it, the engine moves its rows.

    Args:
        shapes: (key heads, key width, value heads, value width) of every layer.
        slots: most rows at a time.
        capacity: most tokens a row, the nodes of a draft included.
    """

    def __init__(
        self,
        shapes: list[tuple[int, int, int, int]],
        slots: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.slots, self.capacity = slots, capacity
        # One tensor a layer and side: compiled code mutates each in place, which aliases of one tensor would prevent.
        self.keys_RCHD = [_lazy_zeros((slots, capacity, h, d), dtype, device) for h, d, _, _ in shapes]
        self.values_RCHD = [_lazy_zeros((slots, capacity, h, d), dtype, device) for _, _, h, d in shapes]
        self.tensors = self.keys_RCHD + self.values_RCHD
        """All storage, keys of every layer and then values."""
        self.rows = 0

    def admit(self, count: int) -> int:
        """Take `count` slots behind the active rows and return the first."""
        first = self.rows
        if first + count > self.slots:
            raise RuntimeError(f"the cache has {self.slots} slots, and {first + count} are needed.")
        self.rows += count
        return first

    def copy_row(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` tokens of one row over another."""
        for tensor_RCHD in self.tensors:
            tensor_RCHD[destination, :length] = tensor_RCHD[source, :length]

    def wipe(self, row: int, begin: int, end: int) -> None:
        """Zero the tokens from `begin` to `end` - 1 of a row after NaN: masked attention would carry it on."""
        for tensor_RCHD in self.tensors:
            tensor_RCHD[row, begin:end] = 0

    def release(self, row: int, last_length: int) -> None:
        """Free a row at once: the last active row, `last_length` tokens long, moves into its slot."""
        last = self.rows - 1
        if row != last:
            self.copy_row(last, row, last_length)
        self.rows = last


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy asks for zeroed memory, which costs nothing until touched; torch.zeros would write it all.
    size = prod(shape) * dtype.itemsize
    memory = np.zeros(size + ALIGNMENT, dtype=np.uint8)
    skip = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[skip : skip + size]).view(dtype).view(shape)


def keep_path(tensors: list[Tensor], cached_B: Tensor, path_BP: Tensor) -> None:
    """Move the accepted nodes of every active row into place behind its committed tokens.

    Args:
        tensors: storage, each (R, C, H, D).
        cached_B: tokens the row held before the verification; the root sits at this index, node n at + 1 + n.
        path_BP: nodes of the accepted path, 1-based (0 is the root) and increasing; entry p moves to index
            cached + 1 + p. Entries past a row's accepted count may be anything: what they move is not committed.
    """
    rows_B1 = torch.arange(cached_B.shape[0], device=cached_B.device).unsqueeze(1)
    base_B1 = cached_B.unsqueeze(1)
    sources_BP = base_B1 + path_BP
    targets_BP = base_B1 + 1 + torch.arange(path_BP.shape[1], device=cached_B.device)
    for tensor_RCHD in tensors:
        tensor_RCHD[rows_B1, targets_BP] = tensor_RCHD[rows_B1, sources_BP]
