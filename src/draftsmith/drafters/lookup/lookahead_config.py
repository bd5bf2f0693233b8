"""The options of lookahead decoding, and what the registry knows of it."""

from typing import Annotated

from pydantic import Field

from draftsmith.drafters.config import Config, Count
from draftsmith.drafters.family import Family, later


class LookaheadConfig(Config):
    """The options of lookahead decoding; the paper uses 15, 5 and 15 for a model of 7B on a large GPU."""

    window: Count = Field(default=5, description="columns in which the target makes n-grams (W in the paper)")
    length: Annotated[int, Field(ge=2)] = Field(default=4, description="tokens of an n-gram (N in the paper)")
    guesses: Count = Field(
        default=5, description="the most n-grams to verify, and to keep for every first token (G in the paper)"
    )
    from_text: bool = Field(default=True, description="also keep the n-grams of prompt and output")


FAMILY = Family(
    "lookahead", "lookahead decoding: n-grams that the target makes at later positions while it verifies; no training "
    "(arXiv:2402.02057)",
    LookaheadConfig, later("draftsmith.drafters.lookup.lookahead:make_lookahead"),
)
