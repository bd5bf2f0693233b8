"""A drafter's own keys and values, and where the new ones of each row go.

A row has the same slot here as in the target's cache. It keeps the slot as long as it runs, so nothing moves when other
rows end. If the slots of a batch are consecutive, they are read as a slice, without a copy.

A drafter's `attach` makes a `RowCache`. Every step, whether it drafts or not, calls `lay_out` on its context, makes the
layer's inputs from the returned `tokens_N` and `features_NF`, and passes them to `store`; `reset_rows` calls `forget`.
Where the context says how long rows may be (`Context.span`), the host does its part in `ready`, and `lay_out` works
on the device alone, on shapes that follow from the context's.
Entry t of a row is the token at position t + 1 of its text, with the state that predicted it, because no state predicts
the first token of a text. A drafter with several attending layers keeps a `RowCache` for each.

Shapes: B rows, N newly committed entries of all rows together, S entries looked at, C capacity of a slot, H query
heads, G key/value heads, W head width, E width of what attention reads, T context tokens, F feature width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.drafters.attention.decoder_layer import Attention, Rotary
from draftsmith.drafters.attention.layer_sizes import LayerSizes
from draftsmith.targets import KVCache
from draftsmith.types import Context, DraftsmithError


@dataclass(frozen=True)
class NewTokens:
    """The tokens that a context adds to every row, row after row without padding.

    Args:
        tokens_N: the tokens.
        features_NF: the states that predicted them.
        slots: slot of every entry (N), or the slot of a batch of one.
        rows: the slots of the rows (B), or a slice if they are consecutive.
        places: position of every entry in its row, as indices (N) or, for a batch of one, as a slice.
        roots: index of every row's root among the entries (B), or a slice for a batch of one.
        last_B1: position of every row's root.
        span: S, one more than the last position of any row.
        mask_B1S: the committed entries of every row, including the root; None if all rows have all entries.
    """

    tokens_N: Tensor
    features_NF: Tensor
    slots: Tensor | int
    rows: Tensor | slice
    places: Tensor | slice
    roots: Tensor | slice
    last_B1: Tensor
    span: int
    mask_B1S: Tensor | None


class RowCache:
    """Storage for the rows of one call to the engine.

    Args:
        sizes: of the layer whose keys and values are stored.
        like: the engine's cache; this one has the same slots and capacity.
        weight: one of the drafter's weights; gives the device, and the dtype unless another is faster.
        native: whether the native operator uses the storage; it only reads the dtype of its weights.
    """

    def __init__(self, sizes: LayerSizes, like: KVCache, weight: Tensor, native: bool = False) -> None:
        self.dtype = RowCache.dtype_for(weight, native)
        heads, width = sizes.num_key_value_heads, sizes.head_dim
        self.sizes = (like.slots, like.capacity)
        storage = KVCache([(heads, width, heads, width)], like.slots, like.capacity, self.dtype, weight.device)
        self.keys_RCGW, self.values_RCGW = storage.keys_NEHD[0], storage.values_NEHD[0]
        self._slot_of: dict[int, int] = {}
        self._padded = False
        self._seen: tuple[Tensor, Tensor | None] | None = None
        self._rows: slice | Tensor = slice(0, 0)
        self._longest = 0

    @staticmethod
    def dtype_for(weight: Tensor, native: bool) -> torch.dtype:
        """Return the dtype of the storage."""
        # On a CPU, whole trees of one text are drafted faster in fp32.
        slow = weight.device.type == "cpu" and weight.dtype in (torch.bfloat16, torch.float16)
        return torch.float32 if slow and not native else weight.dtype

    def suits(self, sizes: LayerSizes, like: KVCache, weight: Tensor, native: bool = False) -> bool:
        """Return whether it can serve, emptied, where these arguments ask for storage.

        Recordings of drafts know where it lies. A CPU has none, and there new storage costs nothing until it is used.
        """
        if weight.device.type == "cpu":
            return False
        other = RowCache.dtype_for(weight, native), weight.device, (like.slots, like.capacity)
        held, heads = self.keys_RCGW, (sizes.num_key_value_heads, sizes.head_dim)
        return other == (self.dtype, held.device, self.sizes) and held.shape[2:] == heads

    def empty(self) -> None:
        """Forget all rows, those of an engine that was dropped halfway included."""
        self.keys_RCGW.zero_()
        self.values_RCGW.zero_()
        self._slot_of, self._seen, self._longest = {}, None, 0

    def forget(self, rows: list[int]) -> None:
        """Forget rows that ended, and clear their memory: NaN left there would reach later rows through a mask."""
        slots = [self._slot_of.pop(row) for row in rows if row in self._slot_of]
        for storage_RCGW in (self.keys_RCGW, self.values_RCGW):
            storage_RCGW[slots, : self._longest] = 0
        self._seen = None

    def _note(self, rows_B: Tensor, slots_B: Tensor | None) -> None:
        """Note which row has which slot."""
        # The engine passes the same tensors until rows come or go; comparing objects avoids waiting for the device.
        if self._seen is not None and self._seen[0] is rows_B and self._seen[1] is slots_B:
            return
        rows = rows_B.tolist()
        slots = list(range(len(rows))) if slots_B is None else slots_B.tolist()
        if max(slots) >= len(self.keys_RCGW):
            raise DraftsmithError(
                f"{max(slots) + 1} rows are drafted for at once, but there is room for {len(self.keys_RCGW)}; raise "
                "max_batch."
            )
        self._slot_of |= {row: slot for row, slot in zip(rows, slots, strict=True) if row >= 0}
        self._padded = min(rows) < 0
        first, last = slots[0], slots[0] + len(slots)
        if slots_B is None or slots == list(range(first, last)):
            self._rows = slice(first, last)
        else:
            self._rows = slots_B
        self._seen = (rows_B, slots_B)

    def _starts(self, context: Context) -> Tensor:
        """Return how many entries each row held before those that the context adds (B)."""
        starts_B = context.lengths_B - 1 - context.counts_B
        if self._padded:
            # The lengths of padding rows keep growing, and mean nothing.
            starts_B = starts_B.masked_fill(context.rows_B < 0, 0)
        return starts_B

    def settle(self, context: Context) -> Tensor:
        """Note the rows of a context; return how many entries each held before those that the context adds (B)."""
        self._note(context.rows_B, context.slots_B)
        starts_B = self._starts(context)
        self._longest = max(self._longest, 1, int((starts_B + context.counts_B).max()))
        return starts_B

    def _note_rows(self, context: Context, span: int) -> None:
        """Do the host's part of `lay_out` for a context with a span."""
        self._note(context.rows_B, context.slots_B)
        self._longest = max(self._longest, min(span, self.sizes[1]))

    @staticmethod
    def ready(memory: "RowCache | None", context: Context) -> "RowCache | None":
        """Do the host's part of a draft and return the storage, see `Drafter.ready`; None where no span is told."""
        if memory is None or context.span is None:
            return None
        memory._note_rows(context, context.span)
        return memory

    def _lay_out_all(self, context: Context, span: int) -> NewTokens:
        """Determine the place of every column of the context; columns behind a row's root repeat the root."""
        tokens_BT, device = context.tokens_BT, context.tokens_BT.device
        batch, width = tokens_BT.shape
        slots_B = torch.arange(batch, device=device) if context.slots_B is None else context.slots_B
        # The lengths of padding rows mean nothing.
        starts_B = (context.lengths_B - 1 - context.counts_B).masked_fill(context.rows_B < 0, 0)
        root_B1 = (context.counts_B - 1).unsqueeze(1)
        column_BT = torch.minimum(torch.arange(width, device=device), root_B1)
        first_B1 = torch.arange(batch, device=device).unsqueeze(1) * width
        index_N = (first_B1 + column_BT).flatten()
        last_B1 = starts_B.unsqueeze(1) + root_B1
        return NewTokens(
            tokens_BT.flatten()[index_N], context.features_BTF.flatten(0, 1)[index_N],
            slots_B.repeat_interleave(width), slots_B, (starts_B.unsqueeze(1) + column_BT).flatten(),
            (first_B1 + root_B1).flatten(), last_B1, span,
            (torch.arange(span, device=device) <= last_B1).unsqueeze(1),
        )

    def lay_out(self, context: Context) -> NewTokens:
        """Determine the place of every token that the context adds."""
        if context.span is not None:
            return self._lay_out_all(context, min(context.span, self.sizes[1]))
        self._note(context.rows_B, context.slots_B)
        # n committed tokens give n - 1 entries, because no state predicted the first token of a text.
        if self._padded:
            end = int(context.lengths_B[context.rows_B >= 0].max()) - 1
        else:
            end = max(context.lengths_B.tolist()) - 1
        self._longest = max(self._longest, end, 1)
        rows = self._rows
        if isinstance(rows, slice) and len(context.lengths_B) == 1:
            count = int(context.counts_B)
            return NewTokens(
                context.tokens_BT[0, :count], context.features_BTF[0, :count], rows.start, rows,
                slice(end - count, end), slice(count - 1, count), context.lengths_B.unsqueeze(1) - 2, end, None,
            )
        counts_B, starts_B = context.counts_B, self._starts(context)
        columns_T = torch.arange(context.tokens_BT.shape[1], device=counts_B.device)
        rows_N, columns_N = (columns_T < counts_B.unsqueeze(1)).nonzero(as_tuple=True)
        slots_N = rows_N + rows.start if isinstance(rows, slice) else rows[rows_N]
        last_B1 = (starts_B + counts_B - 1).unsqueeze(1)
        mask_B1S = (torch.arange(end, device=counts_B.device) <= last_B1).unsqueeze(1)
        return NewTokens(
            context.tokens_BT[rows_N, columns_N], context.features_BTF[rows_N, columns_N], slots_N, rows,
            starts_B[rows_N] + columns_N, counts_B.cumsum(0) - 1, last_B1, end, mask_B1S,
        )

    def store(
        self, new: NewTokens, attention: Attention, rotary: Rotary, inputs_NE: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Store the keys and values of the new entries, made from these inputs of the layer's attention.

        Returns:
            the queries of the entries (N, H, W); all keys and values of the rows (B, S, G, W), as views.
        """
        heads = attention.project(inputs_NE).to(self.dtype)
        cos_PW, sin_PW = rotary.tables(new.span, heads.dtype, heads.device)
        slots, places = new.slots, new.places
        q_NHW, k_NGW, v_NGW = attention.turn(heads, cos_PW[places].unsqueeze(1), sin_PW[places].unsqueeze(1))
        self.keys_RCGW[slots, places], self.values_RCGW[slots, places] = k_NGW, v_NGW
        keys_RSGW, values_RSGW = self.keys_RCGW[:, : new.span], self.values_RCGW[:, : new.span]
        return q_NHW, keys_RSGW[new.rows], values_RSGW[new.rows]


def attached(memory: RowCache | None) -> RowCache:
    """Return the storage that `attach` made; DraftsmithError if the drafter is not attached."""
    if memory is None:
        raise DraftsmithError("the drafter does not know where rows are kept; call attach(cache, plan) first.")
    return memory
