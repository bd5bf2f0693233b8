"""Self-speculation: the target drafts for itself with a part of its layers, or as a copy in fewer bits.

The drafter shares the target's cache. For committed text it uses the keys and values that the whole target wrote; only
the root is missing, so the drafter reads it first. In the layers that attend, its own entries for the root and the
guesses lie behind the committed tokens, where the verification overwrites them with those of the same root and of the
draft's nodes.
"""

from typing import TYPE_CHECKING

from draftsmith.drafters.draws import shares_noise, stream_of, temperature_of
from draftsmith.drafters.grow import as_chain
from draftsmith.drafters.models.model_drafter import ModelDrafter
from draftsmith.drafters.models.path_reader import SCRATCH, PathReader
from draftsmith.native.decoder import Noise
from draftsmith.plan import Plan
from draftsmith.types import Context, Draft

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
        self._reader = PathReader(self.model, cache)

    def take_in(self, context: Context) -> tuple[list[int], list[list[int]]]:
        """Find all but the root in the cache; padding rows overwrite whatever they hold."""
        roots, lengths, rows = context.root()[0].tolist(), context.lengths_B.tolist(), context.rows_B.tolist()
        held = [0 if row == SCRATCH else length - 1 for length, row in zip(lengths, rows, strict=True)]
        return held, [[root] for root in roots]

    def propose(self, context: Context, plan: Plan) -> Draft:
        """Draft a chain by one native operator if there is one, and any other shape as all models do."""
        if not plan.is_chain or plan.confidence is not None or plan.depth > self.max_depth:
            return super().propose(context, plan)
        assert self._reader is not None, "a drafter is attached to a cache before it drafts"
        held_B = (context.lengths_B - 1).masked_fill(context.rows_B == SCRATCH, 0)
        where = (self._reader.cache, context.root()[0], held_B, context.slots_B, plan.depth)
        if plan.sampled or shares_noise(plan, context):
            noise = Noise(temperature_of(context, plan), context.seeds_B, context.lengths_B, stream_of(plan))
            drawn = self.model.backend.draw(*where, noise)
            if drawn is None:
                return super().propose(context, plan)
            return as_chain(drawn[0], drawn[1] if plan.sampled else None)
        tokens_BD = self.model.backend.guess(*where)
        return super().propose(context, plan) if tokens_BD is None else as_chain(tokens_BD)
