"""Rows that draft each in its own way: what they gain together, how a call and a text end, and who is asked when."""

import random
from collections.abc import Sequence

import pytest

from draftsmith.engine.arm import Arm
from draftsmith.engine.fitted import Fitted
from draftsmith.engine.known import Known
from draftsmith.engine.policy import RowHistory
from draftsmith.engine.profile import Profile
from draftsmith.engine.trials import HELD
from draftsmith.plan import NO_DRAFT, Plan
from tests.helpers.profiles import load

ROWS = (1, 8)
PLAIN = Arm(NO_DRAFT, (), (1.0, 1.0))


def chain(depth: int, stay: float, seconds: float) -> Arm:
    """A chain whose drafter reads weights of its own: it takes as long for one row as for eight."""
    return Arm(Plan((1,) * depth), (stay,) * depth, (seconds, seconds))


def rows_of(calls: Sequence[object], most: float) -> list[RowHistory]:
    return [RowHistory(False, 5, most=most, call=call) for call in calls]


def test_rows_stop_that_gain_each_beside_the_others_and_nothing_together():
    """Half of the guesses stay, so a step and a half brings one and a half tokens."""
    policy, rng = Fitted(Known(Profile(ROWS, (PLAIN, chain(1, 0.6, 1.5))))), random.Random(0)
    rows, drafting = [RowHistory(False, 5) for _ in range(8)], list[int]()
    for _ in range(400):
        choices = policy.choose(load(8), rows)
        drafting.append(sum(choice.plan.depth for choice in choices))
        for row, choice in zip(rows, choices, strict=True):
            row.note(choice.plan.depth * int(rng.random() < 0.5), choice.plan.depth, choice.plan)
    assert drafting[0] == 8
    assert sum(drafting[100:]) < 0.2 * 8 * 300, "but for trials"


@pytest.mark.parametrize(("gain", "closing", "drafts"), [(1.12, False, 1), (1.12, True, 0), (1.6, True, 1)])
def test_rows_of_one_call_draft_where_its_end_comes_sooner(gain: float, closing: bool, drafts: int):
    call = object()
    rows = rows_of([call if closing else object() for _ in range(8)], 64)
    policy = Fitted(Known(Profile(ROWS, (PLAIN, chain(3, 0.8, (1 + 3 * 0.8) / gain)))))
    assert [min(1, choice.plan.depth) for choice in policy.choose(load(8), rows)] == [drafts] * 8


@pytest.mark.parametrize("count", [1, 8])
def test_a_row_at_its_end_makes_no_guesses_for_which_it_has_no_room(count: int):
    arms = PLAIN, chain(1, 0.9, 1.2), chain(8, 0.9, 2.0)
    for left, depth in ((100, 8), (2, 1), (1, 0)):
        policy, rows = Fitted(Known(Profile(ROWS, arms))), rows_of([None] * count, left)
        choices = policy.choose(load(count), rows)
        assert [choice.plan.depth for choice in choices] == [depth] * count, left


class Text:
    """Eight rows in which no guess stays, asked as the engine asks: not while the last answer holds."""

    def __init__(self) -> None:
        self.policy = Fitted(Known(Profile(ROWS, (PLAIN, chain(1, 0.9, 1.5)))), learns_times=True)
        self.rows, self.asked = [RowHistory(False, 5) for _ in range(8)], 0
        self.drafting = list[int]()

    def run(self, steps: int) -> None:
        held = 0
        choices = [choice for _ in self.rows for choice in self.policy.choices[:1]]
        for _ in range(steps):
            if held:
                held -= 1
            else:
                choices = list(self.policy.choose(load(8), self.rows))
                held, self.asked = self.policy.holds, self.asked + 1
                assert not held or not any(choice.plan.depth for choice in choices)
            self.drafting.append(sum(choice.plan.depth > 0 for choice in choices))
            self.policy.timed(1.5 if self.drafting[-1] else 1.0)
            for row, choice in zip(self.rows, choices, strict=True):
                row.note(0, choice.plan.depth, choice.plan)


def test_rows_that_all_decode_plainly_are_asked_about_only_when_something_is_due():
    text = Text()
    text.run(1000)
    assert text.drafting[0] == 8 and sum(text.drafting[100:]) > 0, "tried again"
    assert text.asked < 300
    quiet = [step for step, drafting in enumerate(text.drafting) if not drafting]
    assert len(quiet) > 900


def test_every_step_is_counted_although_nobody_asked():
    text = Text()
    text.run(700)
    plain, drafted = text.policy.steps
    assert drafted == sum(text.drafting)
    assert plain == 8 * 700 - drafted


def test_what_plain_steps_take_is_learnt_from_those_nobody_asked_about():
    """They take three times as long as measured; then a guess pays that did not, though only 40 in 100 stay."""
    arms = PLAIN, chain(1, 0.4, 1.6)
    policy = Fitted(Known(Profile(ROWS, arms), hope=2.0), learns_times=True)
    rows, held, drafted = [RowHistory(False, 5) for _ in range(8)], 0, 0
    choices = list(policy.choose(load(8), rows))
    for step in range(400):
        if held:
            held -= 1
        else:
            choices, held = list(policy.choose(load(8), rows)), policy.holds
            assert held <= HELD
        policy.timed(3.0 + 0.6 * sum(choice.plan.depth for choice in choices) / 8)
        for at, (row, choice) in enumerate(zip(rows, choices, strict=True)):
            row.note(choice.plan.depth * int((at + step) % 5 < 2), choice.plan.depth, choice.plan)
        drafted += sum(choice.plan.depth for choice in choices) if step >= 200 else 0
    assert drafted > 0.8 * 8 * 200
