"""The target's first layers draft for it: "LayerSkip" (arXiv:2404.16710), section 4.3.

A target that was not trained to exit early guesses poorly with few layers; `skip_layers` leaves out other layers.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from draftsmith.drafters.models.early_exit_config import EarlyExitConfig
from draftsmith.drafters.models.self_drafter import SelfDrafter

if TYPE_CHECKING:
    from draftsmith.targets import Target


class EarlyExit(SelfDrafter):
    """Drafts with the first layers of the target."""

    def __init__(self, target: "Target", layers: int, guesses: int) -> None:
        """Take the first `layers` layers; DraftsmithError if the target has fewer."""
        super().__init__(target, target.truncated(layers), guesses)


def make_early_exit(config: EarlyExitConfig, target: "Target", draft_tokens: Tensor | None) -> EarlyExit:
    """Make the drafter that the config describes."""
    return EarlyExit(target, config.layers or max(1, target.layers // 4), config.guesses)
