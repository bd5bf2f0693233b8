"""The tensors of the rows that are decoding together, one index a row, in the order of the cache's slots.

Shapes: B rows (padded to a bucket in compiled mode), T context tokens, F feature width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.engine.request import Request
from draftsmith.types import Context
from draftsmith.verify import History, SamplingBatch


@dataclass
class Rows:
    """Running requests and their device-side state. Row b of every tensor belongs to `requests[b]`.

    Tensors may have more rows than there are requests: compiled code sees few batch sizes, and the rest is padding.
    """

    requests: list[Request]
    context: Context
    sampling: SamplingBatch
    history: History | None

    @property
    def count(self) -> int:
        """Rows that are requests."""
        return len(self.requests)

    @property
    def longest(self) -> int:
        """Most committed tokens of any row."""
        return max(request.length for request in self.requests)

    def logprobs_wanted(self) -> int | None:
        """The most alternatives that any row asks log-probabilities for, or None."""
        wanted = [r.params.logprobs for r in self.requests if r.params.logprobs is not None]
        return max(wanted) if wanted else None


def join(
    rows: "Rows | None", arrivals: Rows, vocab_size: int, device: torch.device, bucket: int, slots: int
) -> Rows:
    """Put newly prefilled rows behind the running ones, padded to `bucket` rows."""
    parts = [arrivals] if rows is None or rows.count == 0 else [rows, arrivals]
    requests = [r for part in parts for r in part.requests]
    keep = [(part, list(range(part.count))) for part in parts]
    return _assemble(requests, keep, vocab_size, device, bucket, slots)


def leave(
    rows: Rows, order: Sequence[int], vocab_size: int, device: torch.device, bucket: int, slots: int
) -> Rows:
    """Keep only the rows in `order` (indices into the running ones), padded to `bucket` rows."""
    requests = [rows.requests[b] for b in order]
    return _assemble(requests, [(rows, list(order))], vocab_size, device, bucket, slots)


def _assemble(
    requests: list[Request],
    parts: list[tuple[Rows, list[int]]],
    vocab_size: int,
    device: torch.device,
    bucket: int,
    slots: int,
) -> Rows:
    width = max(part.context.tokens_BT.shape[1] for part, _ in parts)
    padding = bucket - len(requests)

    def gather(name: str, fill: float) -> Tensor:
        pieces = []
        for part, order in parts:
            tensor: Tensor = getattr(part.context, name)
            piece = tensor[torch.tensor(order, device=device, dtype=torch.long)]
            if piece.ndim > 1 and piece.shape[1] < width:
                pad = piece.new_zeros((piece.shape[0], width - piece.shape[1], *piece.shape[2:]))
                piece = torch.cat([piece, pad], dim=1)
            pieces.append(piece)
        if padding:
            pieces.append(pieces[0].new_full((padding, *pieces[0].shape[1:]), fill))
        return torch.cat(pieces)

    context = Context(
        tokens_BT=gather("tokens_BT", 0),
        features_BTF=gather("features_BTF", 0.0),
        counts_B=gather("counts_B", 1),
        lengths_B=gather("lengths_B", 1),
        rows_B=gather("rows_B", -1),
        temperature_B=gather("temperature_B", 0.0),
        seeds_B=gather("seeds_B", 0),
        first_B=gather("first_B", 0),
        slots_B=_slots(parts, padding, slots),
    )
    params = [r.params for r in requests]
    sampling = SamplingBatch.build([*params, *params[:1] * padding], vocab_size, device)
    history = History.of(
        [r.prompt for r in requests] + [[]] * padding,
        [r.tokens for r in requests] + [[]] * padding,
        vocab_size,
        device,
    ) if sampling.needs_history else None
    return Rows(requests, context, sampling, history)


def _slots(parts: list[tuple[Rows, list[int]]], padding: int, slots: int) -> Tensor:
    """Keep the slots of the rows, and give padding free ones."""
    kept: list[int] = []
    for part, order in parts:
        held = part.context.slots_B
        assert held is not None
        kept += [held.tolist()[b] for b in order]
    free = [slot for slot in range(slots) if slot not in kept]
    return torch.tensor(kept + free[:padding], device=parts[0][0].context.tokens_BT.device)
