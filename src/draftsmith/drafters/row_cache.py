"""Keys and values that a drafter keeps of its own, and where the new ones of each row go.

Slot b belongs to row b of the batch, as in the target's cache, so that what a batch needs is a slice and never a copy;
only when rows leave do the entries of the rows that moved up move too.

Shapes: B rows, N newly committed entries of all rows together, S entries looked at, C capacity of a slot, G key/value
heads, W head width, T context tokens, F feature width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.target import KVCache
from draftsmith.types import Context, DraftsmithError


@dataclass(frozen=True)
class Reading:
    """What a context adds to every row, row after row without padding.

    Args:
        tokens_N: the tokens.
        features_NF: the states that predicted them.
        slots: slot of every entry (N), or 0 for a batch of one.
        places: position of every entry in its row, as indices (N) or, for a batch of one, as a slice.
        roots: index of every row's root among the entries (B), or a slice for a batch of one.
        last_B1: position of every row's root.
        span: S, one more than the last position of any row.
        mask_B1S: the committed entries of every row, root included; None where all are.
    """

    tokens_N: Tensor
    features_NF: Tensor
    slots: Tensor | int
    places: Tensor | slice
    roots: Tensor | slice
    last_B1: Tensor
    span: int
    mask_B1S: Tensor | None


class RowCache:
    """Storage for the rows of one call to the engine.

    Args:
        heads, width: G and W.
        like: the engine's cache, whose slots and capacity this one has.
    """

    def __init__(self, heads: int, width: int, like: KVCache, dtype: torch.dtype, device: torch.device) -> None:
        storage = KVCache([(heads, width, heads, width)], like.slots, like.capacity, dtype, device)
        self.keys_RCGW, self.values_RCGW = storage.keys_RCHD[0], storage.values_RCHD[0]
        self.dtype = dtype
        self._rows: list[int] = []
        self._seen: Tensor | None = None
        self._longest = 0

    def forget(self, rows: list[int]) -> None:
        """Let go of rows that ended, and of what they held: NaN left there would reach later rows through a mask."""
        ended = set(rows)
        slots = [slot for slot, row in enumerate(self._rows) if row in ended]
        for storage_RCGW in (self.keys_RCGW, self.values_RCGW):
            storage_RCGW[slots, : self._longest] = 0
        self._rows = [-1 if row in ended else row for row in self._rows]
        self._seen = None

    def _arrange(self, rows_B: Tensor) -> None:
        """Bring every row that is known to its slot."""
        # The engine hands over the same tensor until rows come or go, which saves asking the device.
        if rows_B is self._seen:
            return
        wanted = rows_B.tolist()
        if len(wanted) > len(self.keys_RCGW):
            raise DraftsmithError(
                f"{len(wanted)} rows are drafted for at once, but there is room for {len(self.keys_RCGW)}; raise "
                "max_batch."
            )
        held = {row: slot for slot, row in enumerate(self._rows) if row >= 0}
        moved = [(held[row], slot) for slot, row in enumerate(wanted) if held.get(row, slot) != slot]
        if moved:
            sources, targets = (list(side) for side in zip(*moved, strict=True))
            for storage_RCGW in (self.keys_RCGW, self.values_RCGW):
                storage_RCGW[targets, : self._longest] = storage_RCGW[sources, : self._longest]
        self._rows, self._seen = wanted, rows_B

    def settle(self, context: Context) -> Tensor:
        """Bring the rows to their slots; return how many entries each held before what the context adds (B)."""
        self._arrange(context.rows_B)
        starts_B = context.lengths_B - 1 - context.counts_B
        if min(self._rows) < 0:
            # The lengths of padding rows go on growing and mean nothing.
            starts_B = starts_B.masked_fill(context.rows_B < 0, 0)
        self._longest = max(1, int((starts_B + context.counts_B).max()))
        return starts_B

    def lay_out(self, context: Context) -> Reading:
        """Find the place of everything that the context adds."""
        self._arrange(context.rows_B)
        lengths = context.lengths_B.tolist()
        # Of n committed tokens n - 1 are entries: the first token of a text was predicted by nothing.
        end = max(length for length, row in zip(lengths, self._rows, strict=True) if row >= 0) - 1
        self._longest = max(end, 1)
        if len(lengths) == 1:
            count = int(context.counts_B)
            return Reading(
                context.tokens_BT[0, :count], context.features_BTF[0, :count], 0, slice(end - count, end),
                slice(count - 1, count), context.lengths_B.unsqueeze(1) - 2, end, None,
            )
        counts_B = context.counts_B
        starts_B = context.lengths_B - 1 - counts_B
        if min(self._rows) < 0:
            # The lengths of padding rows go on growing and mean nothing.
            starts_B = starts_B.masked_fill(context.rows_B < 0, 0)
        columns_T = torch.arange(context.tokens_BT.shape[1], device=counts_B.device)
        rows_N, columns_N = (columns_T < counts_B.unsqueeze(1)).nonzero(as_tuple=True)
        last_B1 = (starts_B + counts_B - 1).unsqueeze(1)
        mask_B1S = (torch.arange(end, device=counts_B.device) <= last_B1).unsqueeze(1)
        return Reading(
            context.tokens_BT[rows_N, columns_N], context.features_BTF[rows_N, columns_N], rows_N,
            starts_B[rows_N] + columns_N, counts_B.cumsum(0) - 1, last_B1, end, mask_B1S,
        )

    def store(self, reading: Reading, keys_NGW: Tensor, values_NGW: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the new entries and return what the rows hold now, keys and values (B, S, G, W), as views."""
        self.keys_RCGW[reading.slots, reading.places] = keys_NGW
        self.values_RCGW[reading.slots, reading.places] = values_NGW
        batch = len(reading.last_B1)
        return self.keys_RCGW[:batch, : reading.span], self.values_RCGW[:batch, : reading.span]
