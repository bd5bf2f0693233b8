"""Keys and values of everything the target has read: one slot a row, with the draft behind the committed tokens.

A row keeps its slot as long as it runs; nothing moves when other rows end. A slot is one piece of memory, or a table of
blocks of `BLOCK` entries. Blocks may lie anywhere in the storage and belong to several slots, see `Blocks`.

Shapes: N pieces of storage (slots, or blocks) of E entries each, R slots, J blocks of a slot, C capacity of a slot in
tokens, H key/value heads, D head width, B active rows, P places or path nodes, K entries of all rows, F state width.

Storage starts as zeros, because attention multiplies even masked entries, and NaN left in old memory would survive the
mask. On a CPU the zeros come from the operating system, which backs only the pages that hold tokens.
"""

from math import prod

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64
BLOCK = 64
"""Entries of a block. The native kernels contain the same number."""
NO_BLOCK = -1
"""Marks table entries where a slot has no block."""


class KVCache:
    """The storage for keys and values, which the attention function writes and reads.

    Args:
        shapes: (key heads, key width, value heads, value width) of every layer.
        slots: the most rows at a time.
        capacity: the most tokens of a row, including the nodes of a draft.
        blocks: how many blocks all slots share; `Blocks` says which slot has which. None gives every slot memory of its
            own for its whole capacity.
        features: width of the states kept beside keys and values, for drafters that read prompts; 0 keeps none.
    """

    def __init__(
        self,
        shapes: list[tuple[int, int, int, int]],
        slots: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        blocks: int | None = None,
        features: int = 0,
    ) -> None:
        self.slots, self.capacity = slots, capacity
        size = (slots, capacity) if blocks is None else (blocks, BLOCK)
        # One tensor per layer and side: compiled code changes each in place, which views of one large tensor would
        # prevent.
        self.keys_NEHD = [_lazy_zeros((*size, h, d), dtype, device) for h, d, _, _ in shapes]
        self.values_NEHD = [_lazy_zeros((*size, h, d), dtype, device) for _, _, h, d in shapes]
        self.tensors = self.keys_NEHD + self.values_NEHD
        """Keys of every layer, then values, (N, E, H, D) each."""
        self.states_NEF = _lazy_zeros((*size, features), dtype, device) if features else None
        """States of the entries; None if none are kept."""
        self.tables_RJ: Tensor | None = None
        """The blocks of every slot, int32; None if every slot is one piece."""
        if blocks is not None:
            self.tables_RJ = torch.full((slots, -(-capacity // BLOCK)), NO_BLOCK, dtype=torch.int32, device=device)

    def entries(self, slots_B: Tensor | None, places_BP: Tensor) -> Tensor:
        """Return the storage entries (B, P) of places in rows.

        Args:
            slots_B: slot of every row; None for row b in slot b.
            places_BP: indices of tokens in their rows. If the slot has no block for a place, the returned number is
                negative.
        """
        if self.tables_RJ is not None:
            tables_BJ = self.tables_RJ[: len(places_BP)] if slots_B is None else self.tables_RJ.index_select(0, slots_B)
            return tables_BJ.gather(1, places_BP // BLOCK).long() * BLOCK + places_BP % BLOCK
        if slots_B is None:
            slots_B = torch.arange(len(places_BP), device=places_BP.device)
        return slots_B.unsqueeze(1) * self.capacity + places_BP

    def store_states(self, slots_B: Tensor | None, places_BP: Tensor, states_BPF: Tensor) -> None:
        """Keep states beside the keys and values of these places; see `entries`."""
        assert self.states_NEF is not None, "the cache was made without room for states"
        entries_K = self.entries(slots_B, places_BP).flatten()
        self.states_NEF.flatten(0, 1).index_copy_(0, entries_K, states_BPF.flatten(0, 1).to(self.states_NEF.dtype))

    def read_states(self, slot: int, begin: int, end: int) -> Tensor:
        """Return a copy of the states of the places from `begin` to `end` - 1 of a slot (P, F)."""
        assert self.states_NEF is not None, "the cache was made without room for states"
        device = self.states_NEF.device
        places_1P = torch.arange(begin, end, device=device).unsqueeze(0)
        entries_1P = self.entries(torch.tensor([slot], device=device), places_1P)
        return self.states_NEF.flatten(0, 1).index_select(0, entries_1P[0])


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy takes zeroed memory, which costs nothing until it is touched; torch.zeros would write all of it.
    size = prod(shape) * dtype.itemsize
    memory = np.zeros(size + ALIGNMENT, dtype=np.uint8)
    skip = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[skip : skip + size]).view(dtype).view(shape)


def keep_path(
    cache: KVCache, cached_B: Tensor, path_BP: Tensor, slots_B: Tensor | None = None, counts_B: Tensor | None = None
) -> None:
    """Move the accepted nodes of every row into place behind its committed tokens.

    Args:
        cached_B: tokens the row held before the verification; the root is at this index, node n at cached + 1 + n.
        path_BP: nodes of the accepted path, 1-based (0 is the root) and increasing; entry p moves to index
            cached + 1 + p. Entries past a row's accepted count may be anything: what they move is not committed.
        slots_B: slot of every row; None for row b in slot b.
        counts_B: nodes that the row has, including the root; None for all. Nothing moves behind them.
    """
    targets_BP = torch.arange(1, 1 + path_BP.shape[1], device=path_BP.device).expand_as(path_BP)
    if counts_B is not None:
        beyond_BP = targets_BP >= counts_B.unsqueeze(1)
        targets_BP, path_BP = targets_BP.masked_fill(beyond_BP, 0), path_BP.masked_fill(beyond_BP, 0)
    cached_B1 = cached_B.unsqueeze(1)
    targets_K = cache.entries(slots_B, cached_B1 + targets_BP).flatten()
    sources_K = cache.entries(slots_B, cached_B1 + path_BP).flatten()
    for tensor_NEHD in cache.tensors:
        entries_KHD = tensor_NEHD.flatten(0, 1)
        entries_KHD.index_copy_(0, targets_K, entries_KHD.index_select(0, sources_K))
