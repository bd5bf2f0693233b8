"""The tensors of a group of rows that draft alike: one index a row, in any order of their slots.

Within a group, plain greedy rows come first, so that they take the shortest path through the code whatever the others
ask for.

Shapes: B rows (padded to a bucket in compiled mode), T context tokens, F feature width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.engine.policy import Choice
from draftsmith.engine.requests.request import Request
from draftsmith.engine.steps.allowed import Constrained
from draftsmith.types import Context, Drawn, SamplingParams
from draftsmith.verify import History, SamplingBatch

PREDICTED = "prediction"
"""The name of the drafter that drafts from the predictions of requests."""
# Values of padding rows; all other fields are 0.
FILL = {"counts_B": 1, "lengths_B": 1, "rows_B": -1}

FROM_HOST = ("drawn", "span")
"""The fields of a context that are no tensors; they are set for each draft anew."""


@dataclass
class Rows:
    """Running requests and their device-side state. Row b of every tensor belongs to `requests[b]`.

    Tensors may have more rows than there are requests: the rest is padding, so that compiled code sees few batch sizes.

    Args:
        context: of all rows.
        choice: what they draft.
        simple: how many rows, from the first on, are greedy and change no logits.
        sampling, history: of the other rows, and of padding if there are others; history is None without penalties.

    The following is derived from these once, because it does not change from step to step.

    Args:
        count: rows that are requests.
        size: rows of the tensors.
        simple_rows: rows of the tensors that are simple; padding counts as simple only if all requests are.
        never_drafts: whether no drafter will ever guess for these rows.
        has_logprobs: whether any row asks for log-probabilities or keeps its logits.
        depth, max_nodes: of the plan.
        constrained: the rows with a constraint, none of which is simple; None if there are none.
        drawn: how many rows drafters guess for as for drawn ones, see `Context.drawn`.
    """

    requests: list[Request]
    context: Context
    choice: Choice
    simple: int
    sampling: SamplingBatch
    history: History | None
    count: int = field(init=False)
    size: int = field(init=False)
    simple_rows: int = field(init=False)
    never_drafts: bool = field(init=False)
    has_logprobs: bool = field(init=False)
    depth: int = field(init=False)
    max_nodes: int = field(init=False)
    constrained: Constrained | None = field(init=False)
    drawn: Drawn = field(init=False)

    def __post_init__(self) -> None:
        self.count, self.size = len(self.requests), self.context.rows_B.shape[0]
        self.simple_rows = self.size if self.simple == self.count else self.simple
        self.never_drafts = self.requests[0].never_drafts
        self.has_logprobs = any(request.wants_logits for request in self.requests)
        self.depth, self.max_nodes = self.choice.plan.depth, self.choice.plan.max_nodes
        guides = {b: request.guide for b, request in enumerate(self.requests) if request.guide is not None}
        self.constrained = Constrained(list(guides), list(guides.values())) if guides else None
        drawn = sum(guessing_temperature(request.params) > 0 for request in self.requests)
        self.drawn = "none" if not drawn else "all" if drawn == self.size else "some"

    def under(self, choice: Choice, width: int) -> "Rows":
        """Return the same rows with another choice, their context at least `width` tokens wide."""
        return replace(self, choice=choice, context=join_contexts([self.context], width))

    @property
    def longest(self) -> int:
        """Most committed tokens of any row."""
        return max(request.length for request in self.requests)


def guessing_temperature(params: SamplingParams) -> float:
    """Return the temperature that drafters are told of.

    With only one token to draw from (top-k 1), a drafter does best to guess greedily.
    """
    return 0.0 if params.top_k == 1 else params.temperature


def is_simple(params: SamplingParams) -> bool:
    """Whether a request takes the target's likeliest token, without any change of its logits."""
    return (
        params.temperature == 0 and not params.logit_bias and params.repetition_penalty == 1
        and params.presence_penalty == 0 and params.frequency_penalty == 0 and params.constraint is None
    )


def gather(
    parts: Sequence[tuple[Context, list[int]]], width: int, bucket: int, spare_slots: Sequence[int]
) -> Context:
    """Put rows of several contexts, by their indices, into one.

    Args:
        width: T, at least; a group keeps it, so that compiled code sees one shape.
        bucket: rows, padding included.
        spare_slots: slots for the rows of padding.
    """
    count = sum(len(order) for _, order in parts)
    picked = [pick(part, order) for part, order in parts]
    if bucket > count:
        picked.append(padding_like(picked[0], list(spare_slots[: bucket - count])))
    return join_contexts(picked, width)


def pick(context: Context, order: list[int]) -> Context:
    """Return the rows of a context in this order."""
    if order == list(range(len(context.rows_B))):
        return context
    index_B = torch.tensor(order, device=context.rows_B.device, dtype=torch.long)
    return Context(**{name: tensor[index_B] for name, tensor in tensors_of(context).items()})


def padding_like(context: Context, slots: list[int]) -> Context:
    """Return rows of padding in these slots, as wide as those of a context."""
    rows = {
        name: tensor.new_full((len(slots), *tensor.shape[1:]), FILL.get(name, 0))
        for name, tensor in tensors_of(context).items()
    }
    return Context(**rows | {"slots_B": torch.tensor(slots, device=context.rows_B.device)})


def join_contexts(contexts: Sequence[Context], width: int = 0) -> Context:
    """Put contexts in one, row after row, at least `width` tokens wide; narrower ones get zeros after their tokens."""
    width = max(width, *(context.tokens_BT.shape[1] for context in contexts))
    if len(contexts) == 1 and contexts[0].tokens_BT.shape[1] == width:
        return contexts[0]
    several = [tensors_of(context) for context in contexts]
    joined: dict[str, Any] = {
        name: torch.cat([widened(each[name], width) for each in several]) if len(several) > 1
        else widened(tensor, width)
        for name, tensor in several[0].items()
    }
    return Context(**joined)


def widened(tensor: Tensor, width: int) -> Tensor:
    """Add zeros after the tokens of a tensor (B, T, …) up to a width; a tensor (B) stays as it is."""
    if tensor.ndim == 1 or tensor.shape[1] == width:
        return tensor
    return torch.cat([tensor, tensor.new_zeros((len(tensor), width - tensor.shape[1], *tensor.shape[2:]))], dim=1)


def tensors_of(context: Context) -> dict[str, Any]:
    """Return the tensors of a context, all of which the engine fills."""
    return {field.name: getattr(context, field.name) for field in fields(Context) if field.name not in FROM_HOST}


class Penalties:
    """What penalties remember about every slot; made when first needed, and written only for slots with a new row."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._slots, self._vocab_size, self._device = slots, vocab_size, device
        self._whole: History | None = None
        self._known: dict[int, int] = {}

    def of(self, requests: Sequence[Request], slots_B: Tensor) -> History:
        """Return the history of these rows, entering those that are new (and padding, by its slot)."""
        if self._whole is None:
            self._whole = History.empty(self._slots, self._vocab_size, self._device)
        for request in requests:
            if self._known.get(request.slot) != request.id:
                self._whole.enter(request.slot, request.prompt, request.tokens)
                self._known[request.slot] = request.id
        return self._whole.at(slots_B)

    def restore(self, request: Request) -> None:
        """Reset a row's history to the tokens of its request, after a step that was taken back."""
        if self._whole is not None:
            self._whole.enter(request.slot, request.prompt, request.tokens)


def make_rows(
    requests: list[Request], context: Context, choice: Choice, vocab_size: int, penalties: Penalties
) -> Rows:
    """Make a group of requests, which must be in order: the simple ones first."""
    device = context.tokens_BT.device
    slots_B = slots_of(context)
    simple = next((b for b, request in enumerate(requests) if not is_simple(request.params)), len(requests))
    others = requests[simple:]
    params = [request.params for request in others]
    if others:
        params += params[:1] * (len(context.rows_B) - len(requests))
    sampling = SamplingBatch.build(params, vocab_size, device)
    history = penalties.of(others, slots_B[simple:]) if sampling.needs_history else None
    return Rows(requests, context, choice, simple, sampling, history)


def slots_of(context: Context) -> Tensor:
    """Return the slots of a context's rows, which the engine always gives (B)."""
    assert context.slots_B is not None
    return context.slots_B
