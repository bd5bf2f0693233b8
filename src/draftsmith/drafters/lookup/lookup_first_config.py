"""The options of a lookup with another drafter behind it, and what the registry knows of it."""

from pydantic import Field, field_validator

from draftsmith.drafters.config import Config
from draftsmith.drafters.family import Compared, Family, later
from draftsmith.types import DraftsmithError

NAME = "lookup-first"


class LookupFirstConfig(Config):
    """The options of a lookup with another drafter behind it."""

    lookup: str = Field(default="ngram", description="who guesses where it finds something: ngram or suffix")
    then: str = Field(description="who guesses where it does not: a trained drafter's folder, or a word")

    @field_validator("lookup", "then")
    @classmethod
    def _known(cls, value: str) -> str:
        """Refuse at once a value that is no drafter."""
        from draftsmith.drafters.registry import meant

        try:
            found = meant(value)
        except DraftsmithError as error:
            raise DraftsmithError(f"{NAME}: {value!r}: {error}") from error
        if found is not None and found[0].name == NAME:
            raise DraftsmithError(f"{NAME}: {value!r} has two drafters already; name one.")
        return value


FAMILY = Family(
    NAME, "a lookup where it finds something, and another drafter where it does not; no training of its own",
    LookupFirstConfig, later("draftsmith.drafters.lookup.lookup_first:make_lookup_first"),
    compared=Compared(looks_up=True),
)
