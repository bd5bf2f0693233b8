"""The target's first layers draft for it: "LayerSkip" (arXiv:2404.16710), section 4.3.

A target that was not trained to exit early guesses poorly from few layers; `skip_layers` leaves out others.
"""

from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from torch import Tensor

from draftsmith.drafters.config import Config, Size
from draftsmith.drafters.family import Family
from draftsmith.drafters.models.model_drafter import MAX_DEPTH
from draftsmith.drafters.models.self_drafter import SelfDrafter

if TYPE_CHECKING:
    from draftsmith.targets import Target


class EarlyExitConfig(Config):
    """The options of early exit."""

    layers: Size = Field(
        default=0, description="how many of the target's first layers draft; 0 takes a quarter of them"
    )
    guesses: Annotated[int, Field(ge=1, le=MAX_DEPTH)] = Field(
        default=4, description="tokens that are drafted, as a chain"
    )


class EarlyExit(SelfDrafter):
    """Drafts with the first layers of the target."""

    def __init__(self, target: "Target", layers: int, guesses: int) -> None:
        """Take the first `layers` layers; DraftsmithError where the target has fewer."""
        super().__init__(target, target.truncated(layers), guesses)


def make_early_exit(config: EarlyExitConfig, target: "Target", draft_tokens: Tensor | None) -> EarlyExit:
    """Make the drafter that is asked for."""
    return EarlyExit(target, config.layers or max(1, target.layers // 4), config.guesses)


FAMILY = Family(
    "early-exit", "the target's own first layers, sharing its cache (arXiv:2404.16710)", EarlyExitConfig,
    make_early_exit,
)
