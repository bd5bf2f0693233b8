"""Rows that draft each in its own way: what they gain together, how a call and a text end, and who is asked when."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from draftsmith.engine.arm import Arm
from draftsmith.engine.evidence import TRIAL
from draftsmith.engine.fitted import HELD_EACH, ROOM_EACH, Fitted
from draftsmith.engine.known import Known
from draftsmith.engine.mixed_pace import LONG_WAIT
from draftsmith.engine.policy import Load, RowHistory
from draftsmith.engine.profile import Profile
from draftsmith.engine.trials import HELD
from draftsmith.plan import NO_DRAFT, Plan
from tests.helpers.profiles import load, tokens_found

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


def test_one_easy_row_among_eight_does_not_end_a_call_sooner():
    """It gains much and the others nothing, but for each of its steps they wait a tenth longer."""
    call, arms = object(), (PLAIN, Arm(Plan((1, 1)), (1.0, 1.0), (1.1, 1.8)))
    for calls, drafts in (([object() for _ in range(8)], True), ([call] * 8, False)):
        policy, rows = Fitted(Known(Profile(ROWS, arms))), rows_of(calls, 1000)
        drafting = list[bool]()
        for _ in range(200):
            choices = policy.choose(load(8), rows)
            for at, (row, choice) in enumerate(zip(rows, choices, strict=True)):
                row.note(0 if at else choice.plan.depth, choice.plan.depth, choice.plan)
                row.written += 1  # all alike, so that it is as far from its end as the others
            drafting.append(choices[0].plan.depth > 0)
        assert (sum(drafting[100:]) > 80) == drafts


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
                assert held <= (HELD_EACH if any(choice.plan.depth for choice in choices) else HELD)
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


def test_what_plain_steps_take_is_learnt_while_they_are_all_there_are():
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


class Drafting:
    """Rows whose guesses all stay, at steps that take what was measured."""

    def __init__(self, rows: int = 8) -> None:
        self.policy = Fitted(Known(Profile(ROWS, (PLAIN, chain(2, 0.9, 1.5)))), learns_times=True)
        self.rows = [RowHistory(False, 5) for _ in range(rows)]

    def step(self, now: Load, count: int = 8) -> int:
        """Return how many rows draft."""
        rows = self.rows[:count]
        choices = self.policy.choose(now, rows)
        drafting = sum(choice.plan.depth > 0 for choice in choices)
        self.policy.timed(1.5 if drafting else 1.0)
        for row, choice in zip(rows, choices, strict=True):
            row.note(choice.plan.depth, choice.plan.depth, choice.plan)
        return drafting


def test_drafts_go_on_after_plain_steps_that_came_only_to_be_timed():
    world = Drafting()
    drafting, labels = list[int](), dict[int, set[str]]()
    for _ in range(600):
        drafting.append(world.step(load(8)))
        labels.setdefault(drafting[-1], set()).update(why.label for why in world.policy.reasons(load(8), world.rows))
    assert labels[0] == {"probing"}, "such a step is not said to pay"
    reminders = [step for step, rows in enumerate(drafting) if not rows]
    assert reminders and len(reminders) < 0.04 * len(drafting)
    assert all(rows in (0, 8) for rows in drafting) and drafting[reminders[-1] + 1] == 8
    assert world.policy.steps[0] == 8 * len(reminders)


@pytest.mark.parametrize("count", [1, 8])
def test_rows_that_draft_are_asked_about_at_every_second_step(count: int):
    world, asked, depths = Drafting(count), list[int](), list[int]()
    while len(depths) < 600:
        asked.append(len(depths))
        plan = world.policy.choose(load(count), world.rows)[0].plan
        for _ in range(1 + world.policy.holds):
            depths.append(plan.depth)
            world.policy.timed(1.5 if plan.depth else 1.0)
            for row in world.rows:
                row.note(plan.depth, plan.depth, plan)
    plain = [step for step, depth in enumerate(depths) if not depth]
    apart = [later - before for before, later in pairwise(asked)]
    assert max(apart) == 1 + HELD_EACH and len(asked) < 0.6 * 600
    assert sum(world.policy.steps) == len(depths) * count and world.policy.steps[0] == len(plain) * count
    if count > 1:
        assert {later - before for before, later in pairwise(plain)} == {LONG_WAIT + 1}, "timed as often as ever"
    else:
        assert not plain


def test_what_one_of_two_steps_finds_is_no_surprise_in_the_other():
    """A lookup finds four guesses, which all stay, at every second step, and steps take what was measured."""
    arm = Arm(Plan((1,) * 4), (1.0,) * 4, (1.2, 1.2), tokens_found(0.5, 4.0), (1.4, 1.4), 4.0)
    policy, rows = Fitted(Known(Profile(ROWS, (PLAIN, arm))), learns_times=True), [RowHistory(False, 5) for _ in "ab"]
    finds, depths = 0, list[int]()
    while len(depths) < 900:
        plan = policy.choose(load(2), rows)[0].plan
        for _ in range(1 + policy.holds):
            depths.append(plan.depth)
            finds = 4 - finds
            found = finds if plan.depth else 0
            policy.timed(1.0 + 0.1 * found)
            for row in rows:
                row.note(found, found, plan)
    plain = [step for step, depth in enumerate(depths) if not depth]
    assert min(later - before for before, later in pairwise(plain[1:])) >= LONG_WAIT


@pytest.mark.parametrize("count", [1, 8])
def test_short_texts_teach_what_their_last_steps_showed(count: int):
    """Nothing stays in texts of ten steps each; trials are paid for from all tokens, whoever was asked about them."""
    drafted = list[int]()
    for asks in (True, False):
        policy = Fitted(Known(Profile(ROWS, (PLAIN, chain(1, 0.5, 1.45))), hope=2.0))
        for _ in range(150):
            rows, held = [RowHistory(False, 5, most=200) for _ in range(count)], 0
            for _ in range(10):
                if asks or not held:
                    choices, held = policy.choose(load(count), rows), policy.holds
                else:
                    held -= 1
                for row, choice in zip(rows, choices, strict=True):
                    row.note(0, choice.plan.depth, choice.plan)
        policy.choose(load(0), [])
        assert sum(policy.steps) == 1500 * count
        drafted.append(policy.steps[1])
    assert drafted[1] == pytest.approx(drafted[0], rel=0.3), "as much is tried"


def test_rows_that_end_soon_are_asked_about_at_every_step():
    for most, holds in ((100, HELD_EACH), (ROOM_EACH, HELD_EACH), (ROOM_EACH - 1, 0)):
        rows = [RowHistory(False, 5, most=90 + at) for at in range(7)] + [RowHistory(False, 5, most=most)]
        world = Drafting()
        for _ in range(1 + TRIAL):
            assert all(choice.plan.depth for choice in world.policy.choose(load(8), rows))
            for row in rows:
                row.note(2, 2, Plan((1, 1)))
        assert world.policy.holds == holds


@pytest.mark.parametrize("now", [Load(9, 0, 0, 9), Load(8, 1, 0, 8)], ids=["beside a row of its own plan", "a prompt"])
def test_no_step_is_given_up_to_be_timed_where_it_could_not_be(now: Load):
    world = Drafting()
    for _ in range(10):
        world.step(load(8))
    assert [world.step(now) for _ in range(300)] == [8] * 300


def test_rows_that_become_too_few_to_draft_apart_teach_nothing_of_more_rows():
    """Steps of one row are so short that all rows would take one plan."""
    short = Arm(NO_DRAFT, (), (0.001, 0.03)), Arm(Plan((1, 1)), (0.9, 0.9), (0.0015, 0.04))
    policy, rows = Fitted(Known(Profile(ROWS, short)), learns_times=True), [RowHistory(False, 5) for _ in range(8)]

    def run(count: int, steps: int, times: float) -> list[bool]:
        drafting = list[bool]()
        for _ in range(steps):
            choices = policy.choose(load(count), rows[:count])
            drafts = any(choice.plan.depth for choice in choices)
            policy.timed(times * (0.04 if drafts else 0.03))
            for row, choice in zip(rows[:count], choices, strict=True):
                row.note(choice.plan.depth, choice.plan.depth, choice.plan)
            drafting.append(drafts)
        return drafting

    run(8, 40, 1.0)
    before = policy.reasons(load(8), rows)[0].cost
    run(1, 500, 50.0)
    assert run(8, 1, 1.0) == [True]
    assert policy.reasons(load(8), rows)[0].cost == pytest.approx(before, rel=0.05)
