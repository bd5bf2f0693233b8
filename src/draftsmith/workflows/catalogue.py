"""What families there are, and what can be set of each: `draftsmith families`, from Python."""

from typing import Any

from pydantic import BaseModel, ConfigDict

from draftsmith.drafters.family import Family
from draftsmith.drafters.registry import families, family_named


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OptionFacts(_Record):
    """An option of a family; `default` is None where it has to be given, see `required`."""

    name: str
    default: Any
    required: bool
    what: str


class FamilyFacts(_Record):
    """A family: `trained` tells whether a recipe trains it, `tree` whether `--plan NAME` knows a tree of its own."""

    name: str
    summary: str
    trained: bool
    tree: bool
    options: list[OptionFacts]


def catalogue(*names: str) -> list[FamilyFacts]:
    """Return what there is to know of these families, of all where none is named; DraftsmithError for unknown ones."""
    chosen = [family_named(name) for name in names] if names else list(families().values())
    return [facts_of(family) for family in chosen]


def facts_of(family: Family) -> FamilyFacts:
    """Return what a family says of itself."""
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
