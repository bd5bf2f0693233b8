"""Self-speculation: a part of the target's layers under its norm and head, or a copy of it in fewer bits, drafts.

They share the target's cache. The text is there already, but for the root, which the drafter reads first; of all
committed text it reads what the whole target wrote. What it writes for the root and its guesses, in the layers that
attend, lies behind the committed tokens, where the verification writes the same root and the draft's nodes anew, and
nobody looks further back.
"""

from typing import TYPE_CHECKING

from draftsmith.drafters.models.model_drafter import ModelDrafter
from draftsmith.drafters.models.path_reader import SCRATCH, PathReader
from draftsmith.plan import Plan
from draftsmith.types import Context

if TYPE_CHECKING:
    from draftsmith.targets import KVCache, Target


class SelfDrafter(ModelDrafter):
    """Drafts with a view of the target whose keys and values are of the same shapes (B rows)."""

    borrows_layers = True

    def __init__(self, target: "Target", view: "Target", guesses: int) -> None:
        super().__init__(view, target.vocab_size, guesses)

    def parameter_count(self) -> int:
        """All weights are the target's."""
        return 0

    def memory_bytes(self) -> int:
        """All weights are the target's."""
        return 0

    def attach(self, cache: "KVCache", plan: Plan) -> None:
        """Read and write the target's own cache."""
        self._reader = PathReader(self.model, cache)

    def take_in(self, context: Context) -> tuple[list[int], list[list[int]]]:
        """Find all but the root in the cache; padding rows read over whatever they hold."""
        roots, lengths, rows = context.root()[0].tolist(), context.lengths_B.tolist(), context.rows_B.tolist()
        held = [0 if row == SCRATCH else length - 1 for length, row in zip(lengths, rows, strict=True)]
        return held, [[root] for root in roots]
