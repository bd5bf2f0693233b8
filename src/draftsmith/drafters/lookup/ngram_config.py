"""The options of prompt lookup, and what the registry knows of it."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from draftsmith.drafters.config import Config, Count
from draftsmith.drafters.family import Compared, Family, later

Match = Literal["recent", "frequent"]


class NgramConfig(Config):
    """The options of prompt lookup."""

    min_length: Count = Field(default=2, description="the fewest newest tokens that have to occur earlier")
    max_length: Count = Field(default=4, description="the most that are looked up; the longest match is tried first")
    guesses: Count = Field(default=16, description="the most tokens to draft")
    match: Match = Field(
        default="recent",
        description="recent goes on as at the latest match, frequent with the token that followed most often",
    )
    factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None, description="at most so many guesses for every token of the match; no such limit by default"
    )
    branches: Count = Field(default=1, description="continuations to draft, which differ in their first token")

    def rules(self) -> Iterator[tuple[bool, str, str]]:
        """Yield the conditions between fields."""
        yield self.min_length <= self.max_length, "min_length", f"at most max_length, which is {self.max_length}"


FAMILY = Family(
    "ngram", "prompt lookup: what followed the newest tokens earlier in prompt or output; no training",
    NgramConfig, later("draftsmith.drafters.lookup.ngram:make_ngram"),
    compared=Compared(looks_up=True, better_on_repeats=("mlp",)),
)
