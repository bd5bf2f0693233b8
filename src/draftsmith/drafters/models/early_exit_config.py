"""The options of early exit, and what the registry knows of it."""

from typing import Annotated

from pydantic import Field

from draftsmith.drafters.config import Config, Size
from draftsmith.drafters.family import Family, later
from draftsmith.drafters.models.depth import MAX_DEPTH


class EarlyExitConfig(Config):
    """The options of early exit."""

    layers: Size = Field(
        default=0, description="how many of the target's first layers draft; 0 takes a quarter of them"
    )
    guesses: Annotated[int, Field(ge=1, le=MAX_DEPTH)] = Field(
        default=4, description="tokens that are drafted, as a chain"
    )


FAMILY = Family(
    "early-exit", "the target's own first layers, sharing its cache (arXiv:2404.16710)", EarlyExitConfig,
    later("draftsmith.drafters.models.early_exit:make_early_exit"),
)
