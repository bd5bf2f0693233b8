"""What becomes of the options about drafts."""

import pytest
import torch

from draftsmith.cli.plans import check_drafter, read_drafts
from draftsmith.drafters.base import Drafter
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.types import Context, Draft, DraftsmithError

RANKED = Plan((3, 2), paths=4)
CONFIDENT = Plan((4, 4), beam=4, nodes=8)


@pytest.mark.parametrize(
    ("shape", "candidates", "default", "rules", "expected"),
    [
        (None, None, RANKED, NO_DRAFT, None),
        ("4,1", None, RANKED, NO_DRAFT, Plan((4, 1))),
        (None, 2, RANKED, NO_DRAFT, Plan((3, 2), paths=2)),
        ("4,4,4", None, RANKED, Plan(beam=4, nodes=9), Plan((4, 4, 4), beam=4, nodes=9)),
        (None, None, RANKED, Plan(nodes=5), Plan((3, 2), nodes=5)),
        (None, None, CONFIDENT, Plan(nodes=5), Plan((4, 4), beam=4, nodes=5)),
        (None, None, RANKED, Plan(acceptance="typical"), Plan((3, 2), paths=4, acceptance="typical")),
        (None, None, CONFIDENT, Plan(acceptance="typical"), Plan((4, 4), beam=4, nodes=8, acceptance="typical")),
        (None, None, RANKED, Plan(sampled=True), Plan((1, 1), sampled=True)),
        ("2,2", None, RANKED, Plan(sampled=True), Plan((2, 2), sampled=True)),
        (None, 2, RANKED, Plan(sampled=True), Plan((2, 1), sampled=True)),
    ],
)
def test_options_become_a_plan(
    shape: str | None, candidates: int | None, default: Plan, rules: Plan, expected: Plan | None
) -> None:
    assert read_drafts(shape, candidates, rules).plan(default) == expected


class OneGuess(Drafter):
    """Always guesses token 0 and has no q."""

    def propose(self, context: Context, plan: Plan) -> Draft:
        zeros_B1 = torch.zeros_like(context.counts_B).unsqueeze(1)
        return Draft(zeros_B1, zeros_B1 - 1, 1)

    def default_plan(self) -> Plan:
        return Plan((1,))


def test_sampled_drafts_of_a_drafter_without_q_are_refused() -> None:
    with pytest.raises(DraftsmithError, match="--sampled needs a drafter that can draw its guesses"):
        check_drafter(OneGuess(), Plan(sampled=True))
    check_drafter(OneGuess(), Plan(acceptance="typical"))
