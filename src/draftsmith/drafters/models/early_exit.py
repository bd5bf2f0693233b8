"""Self-speculation: the first layers of the target, under its own norm and head, draft for the whole.

"Draft & Verify" (arXiv:2309.08168), section 3, and "LayerSkip" (arXiv:2404.16710), section 4.3. A target that was not
trained to exit early guesses poorly from few layers.

The first layers share the target's cache. The text is there already, but for the root, which the drafter reads first.
What it writes for the root and its guesses lies behind the committed tokens, where the verification writes the same
root and the draft's nodes anew, and nobody looks further back.
"""

from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from torch import Tensor

from draftsmith.drafters.config import Config, Size
from draftsmith.drafters.family import Family
from draftsmith.drafters.models.model_drafter import MAX_DEPTH, ModelDrafter
from draftsmith.drafters.models.path_reader import SCRATCH, PathReader
from draftsmith.plan import Plan
from draftsmith.types import Context

if TYPE_CHECKING:
    from draftsmith.targets import KVCache, Target


class EarlyExitConfig(Config):
    """The options of early exit."""

    layers: Size = Field(
        default=0, description="how many of the target's first layers draft; 0 takes a quarter of them"
    )
    guesses: Annotated[int, Field(ge=1, le=MAX_DEPTH)] = Field(
        default=4, description="tokens that are drafted, as a chain"
    )


class EarlyExit(ModelDrafter):
    """Drafts with the first layers of the target (B rows)."""

    borrows_layers = True

    def __init__(self, target: "Target", layers: int, guesses: int) -> None:
        """Take the first `layers` layers; DraftsmithError where the target has fewer."""
        super().__init__(target.truncated(layers), target.vocab_size, guesses)

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


def make_early_exit(config: EarlyExitConfig, target: "Target", draft_tokens: Tensor | None) -> EarlyExit:
    """Make the drafter that is asked for."""
    return EarlyExit(target, config.layers or max(1, target.layers // 4), config.guesses)


FAMILY = Family(
    "early-exit", "the target's own first layers, sharing its cache (arXiv:2309.08168, arXiv:2404.16710)",
    EarlyExitConfig, make_early_exit,
)
