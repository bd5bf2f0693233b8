"""Options that say what a text has to be, or is expected to be."""

from pathlib import Path
from typing import Annotated

import typer

from draftsmith.cli.plans import DRAFTS
from draftsmith.types import Constraint, ConstraintKind, DraftsmithError

GUIDANCE = "What the text has to be"

SchemaOption = Annotated[
    Path | None,
    typer.Option(help="Write JSON that fits the JSON schema in this file.", rich_help_panel=GUIDANCE),
]
RegexOption = Annotated[
    str | None,
    typer.Option(help="Write a text that matches this regular expression, all of it.", rich_help_panel=GUIDANCE),
]
GrammarOption = Annotated[
    Path | None,
    typer.Option(help="Write a text of the grammar (EBNF, from rule root on) in this file.", rich_help_panel=GUIDANCE),
]


PredictionOption = Annotated[
    Path | None,
    typer.Option(help="A file with a text that is expected to come for the most part: it is drafted.",
                 rich_help_panel=DRAFTS),
]


def read_constraint(json_schema: Path | None, regex: str | None, grammar: Path | None) -> Constraint | None:
    """Return what the text has to be; DraftsmithError if it is said twice, or cannot be read or kept."""
    from draftsmith.constraints import check_constraint

    files: dict[str, tuple[ConstraintKind, Path | None]] = {
        "--json-schema": ("json_schema", json_schema), "--grammar": ("grammar", grammar),
    }
    given = [name for name, (_, path) in files.items() if path is not None] + ["--regex"] * (regex is not None)
    if len(given) > 1:
        raise DraftsmithError(f"there are {' and '.join(given)}; give one of them.")
    constraint = None if regex is None else Constraint("regex", regex)
    for name, (kind, path) in files.items():
        if path is not None:
            constraint = Constraint(kind, read_text(path, name))
    if constraint is not None:
        check_constraint(constraint)
    return constraint


def read_text(path: Path, option: str) -> str:
    """Return the text of a file; DraftsmithError names the option."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DraftsmithError(f"{option} is {str(path)!r}, which cannot be read as text; check the path.") from error
