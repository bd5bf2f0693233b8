"""Where rows draft each in its own way, what steps cost now is learnt from the steps, plain ones and others apart."""

import random
from collections.abc import Callable, Sequence

import pytest

from draftsmith.engine.arm import Arm
from draftsmith.engine.fitted import Fitted
from draftsmith.engine.known import Known
from draftsmith.engine.mixed_pace import (
    AS_MEASURED,
    EARLY_WAIT,
    FIRST_WAIT,
    LONG_WAIT,
    PUT_OFF,
    WAIT,
    Coming,
    MixedPace,
)
from draftsmith.engine.policy import RowHistory
from draftsmith.engine.profile import Profile
from draftsmith.plan import NO_DRAFT, Plan
from tests.helpers.profiles import load

ROWS = (1, 8)
PLAIN = Arm(NO_DRAFT, (), (0.025, 0.027))
CHAIN = Arm(Plan((1,) * 3), (0.9, 0.85, 0.75), (0.048, 0.073))
"""A chain of three, measured while plain steps were slow: 1.3 times as fast as plain decoding with eight rows."""


def take(pace: MixedPace, more_s: float, *took_s: float, rows: int = 8, youngest: int = 50) -> None:
    """Take steps whose guesses add so much, as measured, to a plain step of 1 s."""
    pace.begin(Coming(rows, 1.0, more_s, more_s > 0), youngest)
    for seconds in took_s:
        pace.timed(seconds)
    pace.learn(0.0)


def pace(steps: Sequence[tuple[float, float]], learns: bool = True) -> MixedPace:
    """Steps of eight rows: what their guesses add, as measured, to a plain step of 1 s, and what they took."""
    found = MixedPace(learns)
    for more_s, took_s in steps:
        take(found, more_s, took_s)
    return found


def says(found: MixedPace, more_s: float, rows: int = 8) -> float:
    """What a step is expected to take."""
    plain, more, once = found.of(rows)
    return plain + more * more_s + (once if more_s else 0.0)


def test_plain_steps_and_what_guesses_add_are_learnt_apart():
    rng = random.Random(0)
    steps = [(more, rng.gauss(1.0, 0.03) * (0.7 + 1.2 * more)) for more in [0.0, 0.5, 2.0, 1.7] * 50]
    found = pace(steps)
    for more in (0.0, 0.5, 1.0, 2.0):
        assert says(found, more) == pytest.approx(0.7 + 1.2 * more, rel=0.05)
    assert found.of(9) == found.of(8), "rows of about the same number"
    assert found.of(3) == found.of(8), "nothing is known of three rows but what holds for eight"
    assert pace(steps, learns=False).of(8) == AS_MEASURED


def test_until_plain_steps_were_timed_all_steps_are_slower_alike():
    assert pace([(1.5, 2.0)] * 200).of(8) == pytest.approx((0.8, 0.8, 0.0), rel=0.01)
    found = pace([(0.0, 0.7), (1.5, 2.5)] * 50)
    before = found.of(8)
    for _ in range(30):
        take(found, 1.5, 3.0, rows=16)
    assert found.of(16) == pytest.approx(tuple(1.2 * one for one in before), rel=0.03), "as eight rows, and slower"


def test_what_was_learnt_of_plain_steps_stays_known_while_others_are_timed():
    found = pace([(0.0, 0.7)] * 20 + [(1.5, 2.2)] * 300)
    assert (says(found, 0.0), says(found, 1.5)) == pytest.approx((0.7, 2.2), rel=0.03)
    take(found, 0.0, 1.0)
    assert says(found, 0.0) > 0.9, "and the first plain step after them counts for much"
    assert says(found, 1.5) == pytest.approx(2.2, rel=0.03), "a step with guesses takes as long as before"


def test_steps_that_take_longer_by_the_same_are_not_taken_to_have_dearer_guesses():
    """A lookup's few guesses, and a quarter of a plain step that was not measured."""
    found = pace([(0.0, 1.0), (0.05, 1.3)] * 60)
    assert says(found, 0.05) == pytest.approx(1.3, rel=0.02)
    assert says(found, 1.0) == pytest.approx(2.25, rel=0.05)


def test_all_steps_of_a_rest_are_learnt_from():
    found = MixedPace(True)
    take(found, 0.0, *[0.7] * 30)
    assert found.of(8).plain == pytest.approx(0.7, rel=0.01)
    found.pause()
    found.timed(5.0)
    take(found, 0.0, 0.7)
    assert found.of(8).plain == pytest.approx(0.7, rel=0.01), "the step in between belonged to nobody"


def test_a_step_during_which_the_machine_did_something_else_teaches_little():
    steady = [(0.0, 1.0), (1.0, 2.0)] * 20
    assert pace([*steady, (0.0, 100.0)]).of(8).plain < 1.07


def test_one_plain_step_that_is_slow_by_chance_does_not_decide_alone():
    found = pace([(0.0, 1.0), *[(0.5, 1.5)] * 32] * 6)
    take(found, 0.0, 1.5)
    assert says(found, 0.0) < 1.3


def test_guesses_really_made_are_what_a_step_is_judged_by():
    found = MixedPace(True)
    for _ in range(100):
        take(found, 0.0, 1.0)
        for took, unexpected in ((2.0, 0.5), (1.0, -0.5)):  # half of the steps find guesses, and take 2 s
            found.begin(Coming(8, 1.0, 0.5, True), 50)
            found.timed(took)
            found.learn(unexpected)
    assert found.of(8) == pytest.approx((1.0, 1.0, 0.0), abs=0.01)


def test_steps_with_guesses_that_cost_nothing_are_not_plain_ones():
    found = MixedPace(True)
    for _ in range(50):
        found.begin(Coming(8, 1.0, 0.0, True), 50)
        found.timed(1.4)
        found.learn(0.0)
        take(found, 0.0, 1.0)
    assert found.of(8).plain == pytest.approx(1.0)
    assert says(found, 1.0) > 2.3


def test_steps_soon_behind_a_prompt_and_beside_others_are_not_counted():
    found = MixedPace(True)
    take(found, 0.0, 3.0, youngest=1)
    found.begin(Coming(8, 1.0, 0.0, False), 50)
    found.pause()
    found.timed(3.0)
    found.learn(0.0)
    assert found.of(8) == AS_MEASURED


def reminders(gain: float, steps: int, took: Callable[[int], float] = lambda _: 1.0, trials: bool = False) -> list[int]:
    """Return which of the steps were plain ones that came only to be timed."""
    found, plain = MixedPace(True), list[int]()
    for step in range(steps):
        reminded = found.reminds(8, gain, trials)
        if reminded:
            plain.append(step)
        take(found, 0.0 if reminded else 0.5, took(step) if reminded else 1.5)
    return plain


def test_plain_steps_come_now_and_then():
    """Soon at first, then by what drafts gain; never where nothing is learnt."""
    for gain, wait in ((1.2, WAIT), (2.0, LONG_WAIT)):
        assert reminders(gain, FIRST_WAIT + wait + 2) == [FIRST_WAIT, FIRST_WAIT + 1 + wait]
    assert not any(MixedPace(False).reminds(8, 1.1, False) for _ in range(1000))


def test_they_come_sooner_where_the_last_ones_took_another_time():
    for gain, wait in ((1.2, EARLY_WAIT), (2.0, LONG_WAIT)):  # where drafts gain much, no such change matters
        plain = reminders(gain, 300, lambda step: 1.0 if step < 100 else 0.7)
        changed = next(step for step in plain if step > 100)
        assert plain[plain.index(changed) + 1] == changed + 1 + wait


def test_they_come_sooner_where_steps_with_guesses_take_another_time():
    """Other programs have stopped reading the memory, so plain steps, too, will take another time."""
    found, plain = MixedPace(True), list[int]()
    for step in range(120):
        reminded = found.reminds(8, 2.0, False)
        if reminded:
            plain.append(step)
        now = 1.0 if step < 60 else 0.7
        take(found, 0.0 if reminded else 0.5, now if reminded else 1.5 * now)
    assert plain[0] == FIRST_WAIT and 60 < plain[1] < 70
    assert says(found, 0.0) == pytest.approx(0.7, rel=0.05)


def test_rows_on_trial_are_interrupted_only_after_twice_the_time():
    assert reminders(1.2, 200, trials=True)[0] == PUT_OFF * FIRST_WAIT


class World:
    """Eight rows that accept as was measured, on a machine whose steps take other times than were measured."""

    def __init__(self, plain_s: float, chain_s: float) -> None:
        self.policy = Fitted(Known(Profile(ROWS, (PLAIN, CHAIN))), learns_times=True)
        self.seconds: Callable[[int], float] = lambda drafting: plain_s + (chain_s - plain_s) * drafting / 8
        self.plain_s, self.rng = plain_s, random.Random(1)

    def run(self, texts: int, steps: int = 40) -> float:
        """Write texts; return how many times as fast as plain decoding."""
        tokens, took = 0, 0.0
        for _ in range(texts):
            rows = [RowHistory(False, 64) for _ in range(8)]
            for _ in range(steps):
                choices = self.policy.choose(load(8), rows)
                seconds = self.seconds(sum(choice.plan.depth > 0 for choice in choices))
                self.policy.timed(seconds * self.rng.gauss(1.0, 0.03))
                for row, choice in zip(rows, choices, strict=True):
                    drawn = self.rng.random()
                    stayed = sum(drawn < share for share in CHAIN.survival) if choice.plan.depth else 0
                    row.note(stayed, choice.plan.depth, choice.plan)
                    tokens += 1 + stayed
                took += seconds
        return tokens / took * self.plain_s / 8


def test_drafts_that_were_measured_while_plain_steps_were_slow_are_given_up():
    """Plain steps now take 18 ms instead of 27, and a step with a draft still 75: 0.85 of plain decoding."""
    world = World(0.018, 0.075)
    assert 0.88 < world.run(1) < 0.97, "it drafts while it learns"
    assert world.run(40) > 0.97


def test_drafts_that_were_measured_while_plain_steps_were_fast_are_taken_up():
    """Plain steps now take 50 ms instead of 27, a step with a draft 85: more than twice as fast as plain decoding."""
    world = World(0.050, 0.085)
    world.run(3)
    assert world.run(40) > 0.95 * 3.5 * 0.050 / 0.085


def test_on_a_machine_as_measured_next_to_nothing_is_lost():
    assert World(0.027, 0.073).run(40) > 0.985 * 3.5 * 0.027 / 0.073
