"""A lookup drafts if it finds something, and another drafter if it does not.

Each row uses one of the two at every step: in text that repeats itself, looked-up guesses are accepted more often than
those of a small network; in other text there are none.

Shapes: B rows, N drafted nodes.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.lookup.lookup_first_config import NAME, LookupFirstConfig
from draftsmith.plan import NEVER_SURE, NO_COPY, Plan
from draftsmith.types import UNUSED, Context, Draft, DraftsmithError

if TYPE_CHECKING:
    from draftsmith.targets import KVCache, Target


LOOKUP, THEN = 0, 1
"""Numbers of its parts, chosen so that a row's number also says whether the lookup missed."""


class LookupFirst(Drafter):
    """Guesses by a lookup, and by another drafter in the rows in which the lookup finds nothing.

    Args:
        lookup: a drafter that makes no guesses if it finds none, and reads no states of the target.
        then: the drafter that guesses in the other rows.
        names: of both.

    Raises:
        DraftsmithError: the first always has guesses, or reads states.
    """

    def __init__(self, lookup: Drafter, then: Drafter, names: tuple[str, ...] = ("lookup", "then")) -> None:
        if not lookup.factors or lookup.taps:
            raise DraftsmithError(
                f"{NAME} begins with what finds its guesses in the text, or finds none: use ngram or suffix."
            )
        if then.parts or then.observes:
            raise DraftsmithError(f"{NAME} cannot hand on to a {type(then).__name__}; use another drafter.")
        self.lookup, self.then = lookup, then
        self.parts, self.part_names, self.taps = (lookup, then), names, then.taps
        self.factors, self.longest = lookup.factors, lookup.longest
        self.confidences = () if then.sure_behind is None else (then.sure_behind,)
        # For code between this drafter and an engine; the engine works with the parts themselves.
        self.reads_prompt = lookup.reads_prompt or then.reads_prompt
        self.can_sample, self.in_python = then.can_sample, lookup.in_python or then.in_python

    def propose(self, context: Context, plan: Plan) -> Draft:
        """Let the lookup draft, and the other drafter where it made no guesses, unless no guess is likely enough.

        For sampled plans, and where a plan looks nothing up, only the other drafter drafts.
        """
        if plan.sampled or plan.factor == NO_COPY:
            self.lookup.follow(context)
            return self._guessed(context, plan)
        looked_up = self.lookup.propose(context, plan if plan.is_chain else chain_of(plan))
        looked_up.parts = LOOKUP
        if plan.confidence == NEVER_SURE:
            if self.then.reads_prompt:
                self.then.follow(context)
            return looked_up
        if not looked_up.tokens_BN.shape[1]:
            return self._guessed(context, plan)
        # If a row has any node, it has the first. Rows that only fill up a batch need no guesses.
        missed_B = looked_up.parents_BN[:, 0] == UNUSED
        parts = (missed_B & (context.rows_B >= 0)).long().tolist()  # the only wait for the device
        left, found = ([row for row, part in enumerate(parts) if part == number] for number in (THEN, LOOKUP))
        if not left:
            if self.then.reads_prompt:
                self.then.follow(context)
            return looked_up
        if not found:
            return self._guessed(context, plan)
        left_R, found_R = (torch.tensor(rows, device=missed_B.device) for rows in (left, found))
        if self.then.reads_prompt:
            self.then.follow(context.some(found_R))
        guessed = self._guessed(context.some(left_R), plan)
        nodes = max(looked_up.tokens_BN.shape[1], guessed.tokens_BN.shape[1])
        return Draft(
            widened(looked_up.tokens_BN, nodes, 0).index_copy(0, left_R, widened(guessed.tokens_BN, nodes, 0)),
            widened(looked_up.parents_BN, nodes, UNUSED).index_copy(
                0, left_R, widened(guessed.parents_BN, nodes, UNUSED)
            ),
            max(looked_up.depth, guessed.depth),
            branching=(1,) * nodes if looked_up.is_chain and guessed.is_chain else None,
            parts=parts,
        )

    def _guessed(self, context: Context, plan: Plan) -> Draft:
        """Let the other drafter guess in all rows, as deep as it can."""
        draft = self.then.propose(context, self._of_other(plan))
        draft.parts = THEN
        return draft

    def _of_other(self, plan: Plan) -> Plan:
        """Return the other drafter's part of a plan that may be deeper than it can draft."""
        deepest = self.then.max_depth
        return plan if deepest is None else shortened(plan, deepest)

    def attach(self, cache: "KVCache", plan: Plan) -> None:
        """Attach both drafters."""
        self.lookup.attach(cache, plan)
        self.then.attach(cache, self._of_other(plan))

    def follow(self, context: Context) -> None:
        """Let the drafters that read the prompt follow."""
        for part in self.parts:
            if part.reads_prompt:
                part.follow(context)

    def follow_prompts(self, context: Context) -> None:
        """Do the same with pieces of prompts."""
        for part in self.parts:
            if part.reads_prompt:
                part.follow_prompts(context)

    def reset_rows(self, rows: list[int]) -> None:
        """Let both forget the rows."""
        for part in self.parts:
            part.reset_rows(rows)

    def default_plan(self) -> Plan:
        """Return a chain as deep as either drafter goes, which ends where guesses become unlikely."""
        depth = max(self.longest, self.lookup.default_plan().depth, self.then.default_plan().depth)
        return Plan((1,) * depth, factor=self.factors[0], confidence=next(iter(self.confidences), None))

    def with_parts(self, parts: Sequence[Drafter]) -> "LookupFirst":
        """Return a drafter made of another lookup and another drafter behind it."""
        lookup, then = parts
        return LookupFirst(lookup, then, self.part_names)

    def parameter_count(self) -> int:
        """Return the count of the other drafter."""
        return self.then.parameter_count()

    def memory_bytes(self) -> int:
        """Return the memory of the other drafter."""
        return self.then.memory_bytes()

    def note_for_user(self, texts: Sequence[str]) -> str | None:
        """Return the note of the other drafter."""
        return self.then.note_for_user(texts)


def short_name(drafter: str) -> str:
    """Return the last part of a drafter's folder, or the word from which it is made."""
    return Path(drafter).name if Path(drafter).exists() else drafter.partition(":")[0]


@lru_cache(maxsize=64)
def shortened(plan: Plan, depth: int) -> Plan:
    """Return a plan limited to this depth; cached, because it is needed at every step."""
    return plan.shortened(depth)


@lru_cache(maxsize=64)
def chain_of(plan: Plan) -> Plan:
    """Return a chain as deep as a tree, with no more nodes and the same bounds."""
    return Plan((1,) * min(plan.depth, plan.max_nodes), factor=plan.factor, confidence=plan.confidence)


def widened(nodes_BN: Tensor, nodes: int, unused: int) -> Tensor:
    """Return the nodes' values, extended to `nodes` columns."""
    return pad(nodes_BN, (0, nodes - nodes_BN.shape[1]), value=unused)


def make_lookup_first(config: LookupFirstConfig, target: "Target", draft_tokens: Tensor | None) -> LookupFirst:
    """Make a drafter that is ready."""
    from draftsmith.drafters.registry import load_drafter

    names = (short_name(config.lookup), short_name(config.then))
    return LookupFirst(load_drafter(config.lookup, target), load_drafter(config.then, target), names)
