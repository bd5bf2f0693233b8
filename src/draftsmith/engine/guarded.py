"""A drafter whose failures cost its guesses and nothing else: for servers, whose clients did not choose the drafter."""

import logging
import weakref
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from draftsmith.drafters.base import Drafter
from draftsmith.plan import Plan
from draftsmith.targets import KVCache
from draftsmith.types import UNUSED, Context, Draft, empty_draft

log = logging.getLogger(__name__)


class Guarded(Drafter):
    """Drafts as another drafter does; where that raises, or returns a draft that does not fit, it guesses nothing.

    Guesses never change a text, so decoding goes on without them. After a failure, a drafter with a memory may guess
    worse.

    Args:
        inner: the drafter that guesses.
        name: what to call it in the log.
        vocab_size: of the target; a guess outside its vocabulary would fail the step of all rows. Not checked on a GPU,
            because that would wait for the device.
    """

    def __init__(self, inner: Drafter, name: str, vocab_size: int) -> None:
        # The engine also calls the parts of a drafter directly, and they may fail there.
        self._guarded = [Guarded(part, name, vocab_size) for part in inner.parts]
        self.inner = inner.with_parts(self._guarded) if self._guarded else inner
        self.name, self._vocab_size, self.parts = name, vocab_size, tuple(self._guarded)
        self.part_names, self._failures = inner.part_names, 0
        self.taps, self.reads_prompt, self.borrows_layers = inner.taps, inner.reads_prompt, inner.borrows_layers
        self.can_sample, self.observes, self.follows_cheaply = inner.can_sample, inner.observes, inner.follows_cheaply
        self.factors, self.longest, self.confidences = inner.factors, inner.longest, inner.confidences
        self.in_python, self.sure_behind = inner.in_python, inner.sure_behind

    def __eq__(self, other: object) -> bool:
        """Whether it guards the same drafter, so that an engine works with that drafter only once."""
        return isinstance(other, Guarded) and self.inner is other.inner

    def __hash__(self) -> int:
        return id(self.inner)

    @property
    def failures(self) -> int:
        return self._failures + sum(part.failures for part in self._guarded)

    def propose(self, context: Context, plan: Plan) -> Draft:
        """Return the inner drafter's draft if it fits this plan, and an empty one otherwise."""
        try:
            draft = self.inner.propose(context, plan)
            _check_shape(draft, len(context.rows_B), plan)
            # With a span, the draft is made on the device alone, and nothing may look at it.
            if draft.tokens_BN.numel() and draft.tokens_BN.device.type == "cpu" and context.span is None:
                _check_guesses(draft, self._vocab_size)
        except Exception as error:  # whatever failed, the text does not depend on it
            self._note(error)
            return empty_draft(context)
        return draft

    def ready(self, context: Context) -> Hashable | None:
        try:
            return self.inner.ready(context)
        except Exception as error:  # as above
            self._note(error)
            return None

    @property
    def unguarded(self) -> Drafter:
        return self.inner.unguarded

    @property
    def owner(self) -> "weakref.ref[object] | None":
        """Whose rows the inner drafter remembers, whoever guards it."""
        return self.inner.owner

    @owner.setter
    def owner(self, owner: "weakref.ref[object] | None") -> None:
        self.inner.owner = owner

    def default_plan(self) -> Plan:
        return self.inner.default_plan()

    @property
    def max_depth(self) -> int | None:
        return self.inner.max_depth

    def parameter_count(self) -> int:
        return self.inner.parameter_count()

    def memory_bytes(self) -> int:
        return self.inner.memory_bytes()

    def note_for_user(self, texts: Sequence[str]) -> str | None:
        return self.inner.note_for_user(texts)

    def attach(self, cache: KVCache, plan: Plan) -> None:
        self._try(lambda: self.inner.attach(cache, plan))

    def follow(self, context: Context) -> None:
        self._try(lambda: self.inner.follow(context))

    def follow_prompts(self, context: Context) -> None:
        self._try(lambda: self.inner.follow_prompts(context))

    def observe(self, context: Context, draft: Draft, choice_BM: Tensor) -> None:
        self._try(lambda: self.inner.observe(context, draft, choice_BM))

    def reset_rows(self, rows: list[int]) -> None:
        self._try(lambda: self.inner.reset_rows(rows))

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # as above
            self._note(error)

    def _note(self, error: Exception) -> None:
        self._failures += 1
        if self._failures & (self._failures - 1) == 0:  # 1, 2, 4, 8 …: a broken one fails at every step
            log.error("the drafter %s failed for the %d. time: %s", self.name, self._failures, error, exc_info=error)


def _check_shape(draft: Draft, rows: int, plan: Plan) -> None:
    shape = tuple(draft.tokens_BN.shape)
    fits = len(shape) == 2 and shape[0] == rows and shape[1] <= plan.max_nodes and draft.depth <= plan.depth
    if not fits or tuple(draft.parents_BN.shape) != shape:
        raise ValueError(f"a draft of shape {shape}, {draft.depth} deep, for {rows} rows and {plan}")


def _check_guesses(draft: Draft, vocab_size: int) -> None:
    lowest, highest = map(int, draft.tokens_BN.aminmax())
    if lowest < 0 or highest >= vocab_size:
        raise ValueError(f"guesses from {lowest} to {highest}, but tokens go from 0 to {vocab_size - 1}")
    nodes_N = torch.arange(draft.tokens_BN.shape[1])
    if int(draft.parents_BN.min()) < UNUSED or (draft.parents_BN >= nodes_N).any():
        raise ValueError(f"parents {draft.parents_BN.tolist()}, but each has to come before its node")
    if draft.is_chain and ((draft.parents_BN != UNUSED) & (draft.parents_BN != nodes_N - 1)).any():
        raise ValueError(f"parents {draft.parents_BN.tolist()}, but the draft says that all its rows are chains")
