"""What the commands let their users say about drafts: shape, choice of guesses, and the rule that judges them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftsmith.cli.common import numbers
from draftsmith.plan import NO_DRAFT, AcceptanceRule, Plan
from draftsmith.types import DraftsmithError

if TYPE_CHECKING:
    from draftsmith.drafters.base import Drafter

DRAFTS = "Drafts"

ShapeOption = Annotated[
    str | None,
    typer.Option(
        "--plan",
        help="Children of every node, depth by depth, such as 4,2,1; or a published tree: eagle, medusa; or FILE.json "
        "with a tree as a list of lists of ranks, such as [[0], [0, 0], [1]]. The drafter's own by default.",
        rich_help_panel=DRAFTS,
    ),
]
SampledOption = Annotated[
    bool,
    typer.Option(
        "--sampled", help="Draw guesses instead of taking the best; without --plan, one chain.", rich_help_panel=DRAFTS
    ),
]
BeamOption = Annotated[
    int | None, typer.Option(help="Expand only this many nodes a depth, the likeliest.", rich_help_panel=DRAFTS)
]
NodesOption = Annotated[
    int | None, typer.Option(help="Verify at most this many nodes, the likeliest.", rich_help_panel=DRAFTS)
]
AcceptanceOption = Annotated[
    AcceptanceRule,
    typer.Option(
        help="exact; block, which judges a sampled chain as a whole and is exact too; or typical, which is lossy.",
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


def read_rules(
    acceptance: AcceptanceRule,
    epsilon: float | None,
    delta: float | None,
    sampled: bool,
    beam: int | None,
    nodes: int | None,
    temperature: float,
) -> Plan:
    """Return a plan without branching that holds everything else the user asked for; DraftsmithError for what clashes.

    A rule that could not show at this temperature is refused rather than ignored.
    """
    for name, value in (("--epsilon", epsilon), ("--delta", delta)):
        if value is not None and acceptance != "typical":
            raise DraftsmithError(f"{name} is {value}, but only typical acceptance reads it; add --acceptance typical.")
    if acceptance == "block" and not sampled:
        raise DraftsmithError("--acceptance block judges a sampled chain as a whole; add --sampled.")
    if acceptance != "exact" and temperature == 0:
        raise DraftsmithError(
            f"--acceptance {acceptance} changes nothing at temperature 0, where the likeliest tokens alone stay; "
            "give a --temperature above 0, or leave it out."
        )
    return Plan(
        nodes=nodes,
        beam=beam,
        sampled=sampled,
        acceptance=acceptance,
        epsilon=NO_DRAFT.epsilon if epsilon is None else epsilon,
        delta=NO_DRAFT.delta if delta is None else delta,
    )


def read_shape(shape: str) -> Plan:
    """Read "4,2,1", the name of a published tree, or a JSON file with a list of lists of ranks."""
    from draftsmith.drafters.static_tree import PUBLISHED, read_choices

    if shape in PUBLISHED:
        return Plan(choices=PUBLISHED[shape])
    if shape.endswith(".json"):
        try:
            values = json.loads(Path(shape).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DraftsmithError(f"--plan {shape} cannot be read as JSON ({error}); mend the file.") from error
        return read_choices(values, f"--plan {shape}")
    if not set(shape) <= set("0123456789, "):
        raise DraftsmithError(
            f"--plan is {shape!r}; give numbers of children such as 4,2,1, a published tree ({', '.join(PUBLISHED)}), "
            "or a .json file with a list of lists of ranks."
        )
    return Plan(numbers(shape, "--plan"))


def parse_plan(shape: str | None, candidates: int | None, default: Plan, rules: Plan = NO_DRAFT) -> Plan | None:
    """Build a plan from --plan, --candidates K and the rules; None leaves the drafter's own.

    Without --plan the drafter's own tree is taken; sampled, one chain as deep; with --beam or --nodes, all its paths,
    of a static tree those that a beam finds within its widths.
    """
    from draftsmith.evaluation.bench import plan_for

    if candidates is not None and candidates < 0:
        raise DraftsmithError(f"--candidates is {candidates}; give 0 (no drafting) or a positive number.")
    given = read_shape(shape) if shape is not None else None
    if candidates is not None:
        if given is not None:
            check_prunable(given, shape)
        return plan_for(default, candidates, given.branching if given is not None else None, rules)
    if given is not None:
        return replace(rules, branching=given.branching, choices=given.choices)
    if rules == NO_DRAFT:
        return None
    if rules.sampled:
        return replace(rules, branching=(1,) * default.depth)
    bounded = rules.beam is not None or rules.nodes is not None
    if bounded:
        default = default.ranked()
    return replace(
        default,
        paths=None if bounded else default.paths,
        nodes=default.nodes if rules.nodes is None else rules.nodes,
        beam=default.beam if rules.beam is None else rules.beam,
        acceptance=rules.acceptance,
        epsilon=rules.epsilon,
        delta=rules.delta,
    )


def check_prunable(given: Plan, shape: str | None) -> None:
    """Raise DraftsmithError where the likeliest paths are to be chosen of a tree that names every node."""
    if given.choices:
        raise DraftsmithError(
            f"--candidates keeps the likeliest paths of a tree, but --plan {shape} names every node; give numbers of "
            "children such as 4,2,1."
        )


def check_drafter(drafter: "Drafter", rules: Plan) -> None:
    """Raise DraftsmithError where sampled drafts are asked of a drafter that takes its best guesses only."""
    if rules.sampled and not drafter.can_sample:
        raise DraftsmithError("--sampled needs a drafter that can draw its guesses, and this one cannot; leave it out.")
