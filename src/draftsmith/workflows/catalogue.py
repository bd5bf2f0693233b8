"""The families that exist, and the options of each: `draftsmith families`, from Python."""

from typing import Any

from pydantic import BaseModel, ConfigDict

from draftsmith.drafters.family import Family
from draftsmith.drafters.registry import families, family_named


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OptionFacts(_Record):
    """An option of a family; `default` is None if the user has to give it, see `required`."""

    name: str
    default: Any
    required: bool
    what: str


class FamilyFacts(_Record):
    """A family; `trained`: whether a recipe trains it; `tree`: whether `--plan NAME` knows a tree of its own."""

    name: str
    summary: str
    trained: bool
    tree: bool
    options: list[OptionFacts]


def catalogue(*names: str) -> list[FamilyFacts]:
    """Return the facts of these families, or of all if none is named; DraftsmithError for unknown names."""
    chosen = [family_named(name) for name in names] if names else list(families().values())
    return [facts_of(family) for family in chosen]


def facts_of(family: Family) -> FamilyFacts:
    """Return the facts of one family."""
    options = [
        OptionFacts(
            name=name, required=field.is_required(), what=field.description or "",
            default=None if field.is_required() else field.get_default(call_default_factory=True),
        )
        for name, field in family.config.options().items()
    ]
    return FamilyFacts(
        name=family.name, summary=family.summary, trained=family.trainable, tree=bool(family.tree), options=options
    )
