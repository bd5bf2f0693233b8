"""The options of a cascade, and what the registry knows of it."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from draftsmith.drafters.config import Config, Size
from draftsmith.drafters.family import Family, later
from draftsmith.drafters.models.depth import MAX_DEPTH
from draftsmith.drafters.models.quantised_self_config import Calibrate
from draftsmith.types import DraftsmithError

NAME = "cascade"
OPTION = re.compile(r"\w+=")
"""The start of a part that belongs to the word before it."""


class CascadeConfig(Config):
    """The options of a cascade."""

    inner: Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        default=("ngram",),
        description="who guesses for the copy, a word or a trained drafter's folder; of several, in brackets, in turn",
    )
    quantize: Literal["int8", "int4"] = Field(default="int4", description="weights of the copy of the target")
    calibrate: Calibrate = 0
    guesses: Annotated[int, Field(ge=1, le=MAX_DEPTH)] = Field(
        default=8, description="tokens that are drafted, as a chain"
    )
    ahead: Size = Field(
        default=0, description="guesses that the copy reads at once, at most; 0 takes 5 of a lookup and 2 of others"
    )
    tail: Size = Field(
        default=2, description="guesses at the end of a chain, at most a quarter of it, that the copy does not read"
    )

    @field_validator("inner", mode="before")
    @classmethod
    def _words(cls, value: Any) -> Any:
        """Make a tuple of one word; join `[ngram:min_length=1,max_length=3,suffix]`, three parts, to two words."""
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list | tuple) or not all(isinstance(part, str) for part in value):
            return value
        words: list[str] = []
        for part in value:
            if words and ":" in words[-1] and OPTION.match(part):
                words[-1] += f",{part}"
            else:
                words.append(part)
        return tuple(words)

    @field_validator("inner")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """Refuse at once a value that is no drafter."""
        from draftsmith.drafters.registry import meant

        for word in value:
            try:
                found = meant(word)
            except DraftsmithError as error:
                raise DraftsmithError(f"{NAME}:inner is {word!r}: {error}") from error
            if found is not None and found[0].name == NAME:
                raise DraftsmithError(
                    f"{NAME}:inner is {word!r}, but a {NAME} has none inside; use ngram, suffix or a trained drafter."
                )
        return value

    @model_validator(mode="after")
    def _in_four_bits(self) -> "CascadeConfig":
        """Refuse a calibration that would change nothing."""
        if self.calibrate and self.quantize != "int4":
            raise DraftsmithError(
                f"{NAME}:calibrate is {self.calibrate}, but only weights in 4 bits are rounded by a text; leave it out."
            )
        return self


FAMILY = Family(
    NAME, "a quantised copy of the target drafts, and a cheap drafter guesses for the copy (arXiv:2503.13565)",
    CascadeConfig, later("draftsmith.drafters.models.cascade:make_cascade"),
)
