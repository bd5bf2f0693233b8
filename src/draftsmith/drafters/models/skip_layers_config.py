"""The options of skipped layers, and what the registry knows of them."""

from typing import Annotated

from pydantic import Field

from draftsmith.drafters.config import Config, Size
from draftsmith.drafters.family import Family, later, of_type
from draftsmith.drafters.models.depth import MAX_DEPTH

MODEL_TYPE = "skip_layers"


class SkipLayersConfig(Config):
    """The options of skipped layers."""

    skip_attention: tuple[Size, ...] = Field(
        description="numbers of the layers whose attention is left out, such as [3,5]; the first layer is 0"
    )
    skip_mlp: tuple[Size, ...] = Field(description="numbers of the layers whose feed-forward is left out")
    guesses: Annotated[int, Field(ge=1, le=MAX_DEPTH)] = Field(
        default=4, description="tokens that are drafted, as a chain"
    )


MODULE = "draftsmith.drafters.models.skip_layers"
FAMILY = Family(
    "skip-layers", "the target without some of its attentions and feed-forwards, sharing its cache (arXiv:2309.08168)",
    SkipLayersConfig, later(f"{MODULE}:make_skip_layers"), later(f"{MODULE}:load_skip_layers"), of_type(MODEL_TYPE),
)
