"""The options of quantised copies, and what the registry knows of them."""

from typing import Annotated

from pydantic import Field

from draftsmith.drafters.config import Config
from draftsmith.drafters.family import Family, later
from draftsmith.drafters.models.depth import MAX_DEPTH

MOST_TOKENS = 65_536
Calibrate = Annotated[int, Field(
    ge=0, le=MOST_TOKENS,
    description="tokens that the target writes first, by which the weights in 4 bits are rounded; 0 for none",
)]


class QuantisedSelfConfig(Config):
    """The options of a quantised copy."""

    guesses: Annotated[int, Field(ge=1, le=MAX_DEPTH)] = Field(
        default=4, description="tokens that are drafted, as a chain"
    )


class Int4SelfConfig(QuantisedSelfConfig):
    """The options of a copy in 4 bits."""

    calibrate: Calibrate = 0


MODULE = "draftsmith.drafters.models.quantised_self"
INT8 = Family(
    "int8-self", "an int8 copy of the target, sharing its cache, by the native kernels for CPUs", QuantisedSelfConfig,
    later(f"{MODULE}:make_int8_self"),
)
INT4 = Family(
    "int4-self", "a 4-bit copy of the target, sharing its cache, by the native kernels for CPUs", Int4SelfConfig,
    later(f"{MODULE}:make_int4_self"),
)
