"""`draftsmith families`: what families of drafters there are, and what can be set of each."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from draftsmith.cli.common import JsonOption, check_outputs

if TYPE_CHECKING:
    from draftsmith.workflows.catalogue import FamilyFacts


def families(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Show these in full; a line for each by default.")
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """List the families of drafters: what they are, whether they are trained, and their options with defaults.

    Options are set as NAME:key=value in --family and --drafter, and as drafter.key=value in a recipe. Which family
    suits whom: docs/which-family.md. Adding one: docs/new-family.md.

    Example: `draftsmith families ngram`
    """
    check_outputs(json_path)
    from draftsmith.evaluation.reporting.result_files import write_json
    from draftsmith.workflows.catalogue import catalogue

    found = catalogue(*names or ())
    console = Console()
    if names:
        for facts in found:
            show_one(console, facts)
    else:
        console.print(overview(found))
    if json_path is not None:
        write_json(json_path, {"families": [facts.model_dump(mode="json") for facts in found]})


def overview(found: "list[FamilyFacts]") -> Table:
    """Lay out a line for each family."""
    table = Table(title="Families of drafters", title_justify="left", show_lines=True)
    table.add_column("family", no_wrap=True)
    table.add_column("trained", no_wrap=True)
    table.add_column("what it is, and its options")
    for facts in found:
        options = ", ".join(f"{o.name}={'…' if o.required else value(o.default)}" for o in facts.options)
        table.add_row(facts.name, "yes" if facts.trained else "no", f"{facts.summary}\n[dim]{escape(options)}[/dim]")
    return table


def show_one(console: Console, facts: "FamilyFacts") -> None:
    """Print one family with all that is known of its options."""
    console.print(f"[bold]{facts.name}[/bold]: {escape(facts.summary)}")
    how = "trained by `draftsmith train`" if facts.trained else "needs no training"
    console.print(f"{how}{f'; --plan {facts.name} takes its published tree' if facts.tree else ''}")
    if not facts.options:
        return
    table = Table(show_header=True)
    table.add_column("option", no_wrap=True)
    table.add_column("default", no_wrap=True)
    table.add_column("what it sets")
    for option in facts.options:
        default = "to be given" if option.required else value(option.default)
        table.add_row(option.name, escape(default), escape(option.what))
    console.print(table)


def value(default: Any) -> str:
    """Write a default as a user would type it."""
    return default if isinstance(default, str) else json.dumps(default)


def escape(text: str) -> str:
    """Keep brackets from being taken for markup."""
    return text.replace("[", r"\[")
