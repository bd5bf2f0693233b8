"""Self-speculation: the target drafts for itself with a part of its layers, or as a copy in fewer bits.

The drafter shares the target's cache. For committed text it uses the keys and values that the whole target wrote; only
the root is missing, so the drafter reads it first. In the layers that attend, its own entries for the root and the
guesses lie behind the committed tokens, where the verification overwrites them with those of the same root and of the
draft's nodes.

Shapes: B rows, D depth of the plan, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from draftsmith.drafters.draws import shares_noise, stream_of, temperature_of
from draftsmith.drafters.grow import as_chain
from draftsmith.drafters.lookup.python_drafter import DraftTree, to_draft
from draftsmith.drafters.models.agreement import NO_TOKEN
from draftsmith.drafters.models.model_drafter import ModelDrafter
from draftsmith.drafters.models.path_reader import SCRATCH, PathReader
from draftsmith.native.decoder import NO_BOUND, Bound, Noise
from draftsmith.plan import Plan
from draftsmith.types import ROOT, Context, Draft

if TYPE_CHECKING:
    from draftsmith.targets import KVCache, Target


class SelfDrafter(ModelDrafter):
    """Drafts with a view of the target whose keys and values are of the same shapes (B rows)."""

    borrows_layers = True

    def __init__(self, target: "Target", view: "Target", guesses: int) -> None:
        super().__init__(view, target.vocab_size, guesses)

    def parameter_count(self) -> int:
        """Return 0, because all weights are the target's."""
        return 0

    def memory_bytes(self) -> int:
        """Return 0, because all weights are the target's."""
        return 0

    def attach(self, cache: "KVCache", plan: Plan) -> None:
        """Read and write the target's own cache."""
        if self._reader is None or self._reader.cache is not cache:
            self._reader = PathReader(self.model, cache)

    def take_in(self, context: Context) -> tuple[list[int], list[list[int]]]:
        """Find all but the root in the cache; padding rows overwrite whatever they hold."""
        roots, lengths, rows = context.root()[0].tolist(), context.lengths_B.tolist(), context.rows_B.tolist()
        held = [0 if row == SCRATCH else length - 1 for length, row in zip(lengths, rows, strict=True)]
        return held, [[root] for root in roots]

    def propose(self, context: Context, plan: Plan) -> Draft:
        """Draft a chain by one native operator if there is one, and any other shape as all models do."""
        draft = None
        if plan.is_chain and plan.confidence is None and plan.depth <= self.max_depth:
            draft = self.by_operator(context, plan, NO_BOUND)
        return super().propose(context, plan) if draft is None else draft

    def by_operator(self, context: Context, plan: Plan, bound: Bound) -> Draft | None:
        """Draft a chain by one native operator; None if there is none."""
        assert self._reader is not None, "a drafter is attached to a cache before it drafts"
        held_B = (context.lengths_B - 1).masked_fill(context.rows_B == SCRATCH, 0)
        where = (self._reader.cache, context.root()[0], held_B, context.slots_B, plan.depth)
        q_BDV = None
        if plan.sampled or shares_noise(plan, context):
            noise = Noise(temperature_of(context, plan), context.seeds_B, context.lengths_B, stream_of(plan))
            drawn = self.model.backend.draw(*where, noise, bound)
            if drawn is None:
                return None
            tokens_BD, others_BD, q_BDV = drawn
        else:
            chosen = self.model.backend.guess(*where, bound)
            if chosen is None:
                return None
            tokens_BD, others_BD = chosen
        if bound.least:
            return with_others(tokens_BD.tolist(), others_BD.tolist(), context, plan)
        return as_chain(tokens_BD, q_BDV if plan.sampled else None)


def with_others(
    chains: Sequence[Sequence[int]], others: Sequence[Sequence[int]], context: Context, plan: Plan
) -> Draft:
    """Return the chains of all rows as a draft, with other tokens beside theirs as far as the plan has room.

    Args:
        chains: the tokens of each; from where it ends, `NO_TOKEN`.
        others: what else may stand in the place of each token; `NO_TOKEN` for nothing.
    """
    trees = []
    for tokens, beside in zip(chains, others, strict=True):
        tree = DraftTree((2,) * plan.depth, plan.max_nodes)
        tree.add_path(ROOT, [token for token in tokens if token != NO_TOKEN])
        for at in reversed(range(len(beside))):  # the last one is the likeliest to be needed
            if beside[at] != NO_TOKEN:
                tree.add(at - 1 if at else ROOT, beside[at])
        trees.append(tree)
    draft = to_draft(trees, context, plan)
    is_chain = all(tree.depth == len(tree.tokens) for tree in trees)
    return replace(draft, branching=(1 if is_chain else 2,) * draft.depth)
