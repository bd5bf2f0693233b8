"""What the commands let their users say about drafts: shape, choice of guesses, and the rule that verifies them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from draftsmith.cli.common import numbers
from draftsmith.plan import NO_DRAFT, AcceptanceRule, Plan
from draftsmith.types import DraftsmithError
from draftsmith.workflows.drafts import Drafts, check_drafter, check_prunable

__all__ = ["check_drafter", "check_prunable"]

DRAFTS = "Drafts"
OWN = "own"
"""The plan that a drafter comes with, as a user names it."""

ShapeOption = Annotated[
    str | None,
    typer.Option(
        "--plan",
        help="Children of every node, depth by depth, such as 4,2,1; or a family's name, for the tree published with "
        "it; or FILE.json with a tree as a list of lists of ranks, such as [[0], [0, 0], [1]]; or own, for what the "
        "drafter was made with.",
        rich_help_panel=DRAFTS,
    ),
]
SampledOption = Annotated[
    bool,
    typer.Option(
        "--sampled", help="Draw guesses by noise of their own; without --plan, one chain.", rich_help_panel=DRAFTS
    ),
]
BeamOption = Annotated[
    int | None, typer.Option(help="Expand only this many nodes a depth, the likeliest.", rich_help_panel=DRAFTS)
]
NodesOption = Annotated[
    int | None, typer.Option(help="Verify at most this many nodes, the likeliest.", rich_help_panel=DRAFTS)
]
ConfidenceOption = Annotated[
    float | None,
    typer.Option(
        help="Leave out guesses that the drafter finds less likely than this, those before them taken into account.",
        rich_help_panel=DRAFTS,
    ),
]
AcceptanceOption = Annotated[
    AcceptanceRule,
    typer.Option(
        help="exact; block, which takes a sampled chain as a whole and is exact too; or typical, which is lossy.",
        rich_help_panel=DRAFTS,
    ),
]
EpsilonOption = Annotated[
    float | None,
    typer.Option(
        help=f"Typical acceptance: guesses this likely stay ({NO_DRAFT.epsilon}).",
        show_default=False, rich_help_panel=DRAFTS,
    ),
]
DeltaOption = Annotated[
    float | None,
    typer.Option(
        help=f"Typical acceptance: and those above this times exp(-entropy) ({NO_DRAFT.delta}).",
        show_default=False, rich_help_panel=DRAFTS,
    ),
]

RemeasureOption = Annotated[
    bool,
    typer.Option(
        "--remeasure", help="Measure anew which drafts pay on this machine, whatever an earlier run has kept.",
        rich_help_panel=DRAFTS,
    ),
]


def read_rules(
    acceptance: AcceptanceRule,
    epsilon: float | None,
    delta: float | None,
    sampled: bool,
    beam: int | None,
    nodes: int | None,
    temperature: float,
    confidence: float | None = None,
) -> Plan:
    """Return a plan without branching that holds everything else the user asked for; DraftsmithError for what clashes.

    A rule that could not show at this temperature is refused rather than ignored.
    """
    for name, value in (("--epsilon", epsilon), ("--delta", delta)):
        if value is not None and acceptance != "typical":
            raise DraftsmithError(f"{name} is {value}, but only typical acceptance reads it; add --acceptance typical.")
    if acceptance == "block" and not sampled:
        raise DraftsmithError("--acceptance block verifies a sampled chain as a whole; add --sampled.")
    if acceptance != "exact" and temperature == 0:
        raise DraftsmithError(
            f"--acceptance {acceptance} changes nothing at temperature 0, where the likeliest tokens alone stay; "
            "give a --temperature above 0, or leave it out."
        )
    return Plan(
        nodes=nodes,
        beam=beam,
        sampled=sampled,
        confidence=confidence,
        acceptance=acceptance,
        epsilon=NO_DRAFT.epsilon if epsilon is None else epsilon,
        delta=NO_DRAFT.delta if delta is None else delta,
    )


def named(options: Mapping[str, Any]) -> str:
    """Name the options that were given; "" for none."""
    return " and ".join(name for name, value in options.items() if value is not None)


def refuse_without_drafter(told: str, target: str | None, has_drafter: bool) -> None:
    """Raise DraftsmithError for options about drafts of a target without a drafter; the embedded one has its own."""
    if told and target is not None and not has_drafter:
        raise DraftsmithError(f"{told} is about drafts, but {target} has no drafter; add --drafter.")


def check_draft_rows(rows: int | None, plan: str | None) -> None:
    """Raise DraftsmithError for a bound without a plan, and for one that is no number of rows."""
    if rows is not None and plan is None:
        raise DraftsmithError("--draft-rows bounds a plan of your own; add --plan, or leave it out.")
    if rows is not None and rows < 0:
        raise DraftsmithError(f"--draft-rows is {rows}; use 0, which never drafts, or a positive number.")


def read_shape(shape: str) -> Plan | None:
    """Read "4,2,1", the name of a published tree, or a JSON file with a list of lists of ranks; "own" is None."""
    from draftsmith.drafters.registry import published_trees
    from draftsmith.drafters.tree_choices import read_choices

    published = published_trees()
    if shape == OWN:
        return None
    if shape in published:
        return Plan(choices=published[shape])
    if shape.endswith(".json"):
        try:
            values = json.loads(Path(shape).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DraftsmithError(f"--plan {shape} cannot be read as JSON ({error}); fix the file.") from error
        return read_choices(values, f"--plan {shape}")
    if not set(shape) <= set("0123456789, "):
        raise DraftsmithError(
            f"--plan is {shape!r}; give numbers of children such as 4,2,1, a published tree "
            f"({', '.join(sorted(published))}), or a .json file with a list of lists of ranks."
        )
    return Plan(numbers(shape, "--plan"))


def read_drafts(shape: str | None, candidates: int | None, rules: Plan) -> Drafts:
    """Read --plan, and put it beside --candidates and the rules; its `plan` tells what they make of a drafter's own."""
    given = read_shape(shape) if shape is not None else None
    if given is not None and candidates is not None:
        check_prunable(given, shape)
    return Drafts(given, candidates, rules)
