"""The drafts that a user asks a job for; the drafter's own plan fills in the rest."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.types import DraftsmithError

if TYPE_CHECKING:
    from draftsmith.drafters.base import Drafter


@dataclass(frozen=True)
class Drafts:
    """The requested drafts.

    Args:
        shape: a tree, of which only branching and choices count. None takes the drafter's own.
        candidates: verify only the best K paths of the tree; 0 drafts nothing.
        rules: a plan without branching that holds all other settings.
    """

    shape: Plan | None = None
    candidates: int | None = None
    rules: Plan = NO_DRAFT

    def plan(self, default: Plan) -> Plan | None:
        """Return the plan; None means the drafter's own plan, `default`.

        Without a shape, the drafter's own tree is taken; a sampled draft is one chain of the same depth, and a beam or
        a number of nodes takes all paths. With a beam, a number of nodes or a confidence, a static tree becomes a beam
        search within its widths; with a confidence it keeps its number of nodes.
        """
        from draftsmith.evaluation.grid import plan_for

        given, rules = self.shape, self.rules
        if self.candidates is not None and self.candidates < 0:
            raise DraftsmithError(f"--candidates is {self.candidates}; give 0 (no drafting) or a positive number.")
        if self.candidates is not None:
            if given is not None:
                check_prunable(given)
            return plan_for(default, self.candidates, given.branching if given is not None else None, rules)
        if given is not None:
            return replace(rules, branching=given.branching, choices=given.choices)
        if rules == NO_DRAFT:
            return None
        if rules.sampled:
            return replace(rules, branching=(1,) * default.depth)
        bounded = rules.beam is not None or rules.nodes is not None
        if bounded:
            default = default.ranked()
        elif rules.confidence is not None and default.choices:
            default = replace(default.ranked(), nodes=default.max_nodes)
        return replace(
            default,
            paths=None if bounded else default.paths,
            nodes=default.nodes if rules.nodes is None else rules.nodes,
            beam=default.beam if rules.beam is None else rules.beam,
            confidence=default.confidence if rules.confidence is None else rules.confidence,
            acceptance=rules.acceptance,
            epsilon=rules.epsilon,
            delta=rules.delta,
        )


def check_prunable(given: Plan, shape: str | None = None) -> None:
    """Raise DraftsmithError for a tree that names every node, because its likeliest paths cannot be selected."""
    if given.choices:
        named = f"--plan {shape}" if shape is not None else "the plan"
        raise DraftsmithError(
            f"--candidates keeps the likeliest paths of a tree, but {named} names every node; give numbers of "
            "children such as 4,2,1."
        )


def check_drafter(drafter: "Drafter", rules: Plan) -> None:
    """Raise DraftsmithError for sampled drafts of a drafter that only takes its best guesses."""
    if rules.sampled and not drafter.can_sample:
        raise DraftsmithError("--sampled needs a drafter that can draw its guesses, and this one cannot; leave it out.")
