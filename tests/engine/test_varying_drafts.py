"""What a fitted policy learns of drafts that are as long as their drafter is sure."""

import pytest

from draftsmith.engine.arm import Arm
from draftsmith.engine.fitted import Fitted
from draftsmith.engine.known import Known
from draftsmith.engine.policy import RowHistory
from draftsmith.engine.profile import Profile
from draftsmith.plan import NO_DRAFT, Plan
from tests.helpers.profiles import load

SURE = Plan((1,) * 4, confidence=0.2)
ARM = Arm(SURE, (0.7, 0.4, 0.1, 0.0), (1.6,), full=(4.0,), made=1.5)
"""One guess and a half at a step, 1.2 of which stay: 2.2 tokens in the time of 1.6 plain steps."""


def policy() -> Fitted:
    return Fitted(Known(Profile((1,), (Arm(NO_DRAFT, (), (1.0,)), ARM))))


def decode(fitted: Fitted, row: RowHistory, steps: int, made: int, stay: int) -> list[int]:
    """Let every draft have so many guesses, and so many of them stay; return how deep the plans were."""
    depths = []
    for _ in range(steps):
        (choice,) = fitted.choose(load(1), [row])
        depths.append(choice.plan.depth)
        drafted = made if choice.plan.depth else 0
        row.note(min(stay, drafted), drafted, choice.plan)
    return depths


def test_guesses_that_are_as_many_as_usual_and_stay_go_on():
    assert decode(policy(), RowHistory(False, 5), 200, 2, 1)[-50:] == [4] * 50


def test_more_guesses_cost_more_than_those_that_stay_are_worth():
    """At each step all four guesses are likely enough, and one stays as usual: two tokens in the time of four."""
    assert decode(policy(), RowHistory(False, 5), 200, 4, 1)[-50:].count(4) < 10


def test_what_a_drafter_costs_that_is_sure_of_nothing_is_learnt():
    """A step without guesses takes a fifth longer than a plain one, because it was asked."""
    row = RowHistory(False, 5)
    fitted = Fitted(Known(Profile((1,), (Arm(NO_DRAFT, (), (1.0,)), ARM))), learns_times=True)

    def go_on(steps: int, made: int, stay: int) -> list[int]:
        depths = []
        for _ in range(steps):
            depths += decode(fitted, row, 1, made, stay)
            fitted.timed(1.0 if not depths[-1] else 1.2 + 0.3 * made)
        return depths

    assert go_on(600, 0, 0)[-200:].count(4) < 60
    assert go_on(1200, 2, 1)[-50:].count(4) > 40, "and it is tried again"


@pytest.mark.parametrize("constrained", [False, True])
def test_of_a_sampled_or_constrained_row_only_what_stayed_is_learnt(constrained: bool):
    """Four guesses a step are told as one: the row goes on as if they were as many as usual."""
    row = RowHistory(not constrained, 5, constrained=constrained)
    assert decode(policy(), row, 200, 4, 1)[-50:] == [4] * 50
    assert set(row.drafted) == {1}
