"""The options of suffix drafting, and what the registry knows of it."""

from typing import Annotated

from pydantic import Field

from draftsmith.drafters.config import Config, Count
from draftsmith.drafters.family import Compared, Family, later


class SuffixConfig(Config):
    """The options of suffix drafting.

    With `remember`, speed depends on other requests, so decoding a prompt twice does not measure it.
    """

    max_length: Count = Field(default=24, description="the longest match looked for; longer ones count as this long")
    factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default=1.0, description="guesses for every token of the match"
    )
    min_probability: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.2, description="leave out guesses that followed in a smaller share of the matches"
    )
    nodes: Count = Field(default=12, description="the most guesses of a draft")
    depth: Count = Field(default=12, description="the most guesses one after another")
    branches: Count = Field(default=2, description="the most alternatives after the same tokens")
    remember: bool = Field(
        default=False, description="look into earlier outputs too; others can then tell from the speed"
    )
    memory_tokens: Count = Field(
        default=50_000, description="forget the oldest outputs beyond so many tokens; a token takes about a kilobyte"
    )


FAMILY = Family(
    "suffix", "suffix drafting: what followed the newest tokens in this request and in earlier outputs, by how often; "
    "no training (arXiv:2411.04975)",
    SuffixConfig, later("draftsmith.drafters.lookup.suffix:make_suffix"),
    compared=Compared(looks_up=True, better_on_repeats=("mlp",)),
)
