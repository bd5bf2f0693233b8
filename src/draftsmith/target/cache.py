"""Keys and values of everything the target has read: one slot a row, and the draft behind the committed tokens.

Shapes: L layers, R slots, C capacity of a slot in tokens, H key/value heads, D head width, B active rows, P path nodes,
M nodes of a verification. A row keeps its slot as long as it runs; nothing moves when others leave.

Storage starts as zeros, because attention multiplies even what its mask hides, and NaN left in old memory would
survive that. On a CPU the zeros come from the operating system, which backs only the pages that hold tokens.
"""

from math import prod

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64


class KVCache:
    """Own storage for keys and values, which the attention function writes and reads.

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
        self.tables_RJ: Tensor | None = None
        """For native operators: the blocks of every slot; None where a slot is one block."""

    def entries(self, slots_B: Tensor | None, places_BP: Tensor) -> Tensor:
        """Return where places of rows lie in the storage, as numbers of entries (B, P).

        Args:
            slots_B: slot of every row; None for row b in slot b.
            places_BP: numbers of tokens in their rows.
        """
        if slots_B is None:
            slots_B = torch.arange(places_BP.shape[0], device=places_BP.device)
        return slots_B.unsqueeze(1) * self.capacity + places_BP

    def wipe(self, slot: int, begin: int, end: int) -> None:
        """Zero the tokens from `begin` to `end` - 1 of a slot after NaN: masked attention would carry it on."""
        for tensor_RCHD in self.tensors:
            tensor_RCHD[slot, begin:end] = 0


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy asks for zeroed memory, which costs nothing until touched; torch.zeros would write it all.
    size = prod(shape) * dtype.itemsize
    memory = np.zeros(size + ALIGNMENT, dtype=np.uint8)
    skip = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[skip : skip + size]).view(dtype).view(shape)


def keep_path(
    cache: KVCache, cached_B: Tensor, path_BP: Tensor, slots_B: Tensor | None = None, counts_B: Tensor | None = None
) -> None:
    """Move the accepted nodes of every row into place behind its committed tokens.

    Args:
        cached_B: tokens the row held before the verification; the root sits at this index, node n at + 1 + n.
        path_BP: nodes of the accepted path, 1-based (0 is the root) and increasing; entry p moves to index
            cached + 1 + p. Entries past a row's accepted count may be anything: what they move is not committed.
        slots_B: slot of every row; None for row b in slot b.
        counts_B: nodes that the row has, the root included; None for all. Nothing moves behind them.
    """
    targets_BP = torch.arange(1, 1 + path_BP.shape[1], device=path_BP.device).expand_as(path_BP)
    if counts_B is not None:
        beyond_BP = targets_BP >= counts_B.unsqueeze(1)
        targets_BP, path_BP = targets_BP.masked_fill(beyond_BP, 0), path_BP.masked_fill(beyond_BP, 0)
    cached_B1 = cached_B.unsqueeze(1)
    targets_K = cache.entries(slots_B, cached_B1 + targets_BP).flatten()
    sources_K = cache.entries(slots_B, cached_B1 + path_BP).flatten()
    for tensor_RCHD in cache.tensors:
        entries_KHD = tensor_RCHD.flatten(0, 1)
        entries_KHD.index_copy_(0, targets_K, entries_KHD.index_select(0, sources_K))
