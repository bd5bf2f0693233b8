"""What can be set of the int8 copy, and what the registry knows of it."""

from typing import Annotated

from pydantic import Field

from draftsmith.drafters.config import Config
from draftsmith.drafters.family import Family, later
from draftsmith.drafters.models.depth import MAX_DEPTH


class Int8SelfConfig(Config):
    """The options of the int8 copy."""

    guesses: Annotated[int, Field(ge=1, le=MAX_DEPTH)] = Field(
        default=4, description="tokens that are drafted, as a chain"
    )


FAMILY = Family(
    "int8-self", "an int8 copy of the target, by the native kernels for CPUs", Int8SelfConfig,
    later("draftsmith.drafters.models.int8_self:make_int8_self"),
)
