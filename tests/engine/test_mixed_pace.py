"""Where rows draft each in its own way, what steps cost now is learnt from the steps, plain ones and others apart."""

import random
from collections.abc import Callable, Sequence

import pytest

from draftsmith.engine.arm import Arm
from draftsmith.engine.fitted import Fitted
from draftsmith.engine.known import Known
from draftsmith.engine.mixed_pace import AS_MEASURED, EARLY_WAIT, LONG_WAIT, REMINDERS, WAIT, MixedPace
from draftsmith.engine.policy import RowHistory
from draftsmith.engine.profile import Profile
from draftsmith.plan import NO_DRAFT, Plan
from tests.helpers.profiles import load

ROWS = (1, 8)
PLAIN = Arm(NO_DRAFT, (), (0.025, 0.027))
CHAIN = Arm(Plan((1,) * 3), (0.9, 0.85, 0.75), (0.048, 0.073))
"""A chain of three, measured while plain steps were slow: 1.3 times as fast as plain decoding with eight rows."""


def pace(steps: Sequence[tuple[float, float]], learns: bool = True) -> MixedPace:
    """Steps of eight rows: what their guesses add, as measured, to a plain step of 1 s, and what they took."""
    found = MixedPace(learns)
    for more_s, took_s in steps:
        found.begin(8, 1.0, more_s, 50)
        found.timed(took_s)
        found.learn(0.0)
    return found


def test_plain_steps_and_what_guesses_add_are_learnt_apart():
    rng = random.Random(0)
    steps = [(more, rng.gauss(1.0, 0.05) * (0.7 + 1.2 * more)) for more in [0.0, 0.5, 2.0, 1.7] * 50]
    assert pace(steps).of(8) == pytest.approx((0.7, 1.2), rel=0.05)
    assert pace(steps).of(9) == pytest.approx((0.7, 1.2), rel=0.05), "rows of about the same number"
    assert pace(steps).of(3) == pace(steps).of(8), "nothing is known of three rows but what holds for eight"
    assert pace(steps, learns=False).of(8) == AS_MEASURED


def test_one_kind_of_step_alone_does_not_say_which_of_the_two_has_changed():
    plain, more = pace([(1.5, 2.0)] * 200).of(8)
    assert plain + 1.5 * more == pytest.approx(2.0, rel=0.01) and plain < 1 and more < 1


def test_what_was_learnt_of_plain_steps_stays_known_while_others_are_timed():
    assert pace([(0.0, 0.7)] * 20 + [(1.5, 0.7 + 1.5)] * 300).of(8) == pytest.approx((0.7, 1.0), rel=0.03)
    changed = pace([(0.0, 0.7)] * 20 + [(1.5, 2.2)] * 300 + [(0.0, 1.4)] * 8).of(8)
    assert changed == pytest.approx((1.4, 0.53), rel=0.15), "the time of steps with guesses is still the same"


def test_a_step_during_which_the_machine_did_something_else_teaches_little():
    steady = [(0.0, 1.0), (1.0, 2.0)] * 20
    assert pace([*steady, (0.0, 100.0)]).of(8).plain < 1.05


def test_guesses_really_made_are_what_a_step_is_judged_by():
    found = MixedPace(True)
    for _ in range(100):
        found.begin(8, 1.0, 0.5, 50)  # half of the steps find guesses, and take 2 s
        found.timed(2.0)
        found.learn(0.5)
        found.begin(8, 1.0, 0.5, 50)
        found.timed(1.0)
        found.learn(-0.5)
    assert found.of(8) == pytest.approx((1.0, 1.0), rel=0.01)


def test_steps_soon_behind_a_prompt_and_beside_others_are_not_counted():
    found = MixedPace(True)
    found.begin(8, 1.0, 0.0, 1)
    found.timed(3.0)
    found.learn(0.0)
    found.begin(8, 1.0, 0.0, 50)
    found.pause()
    found.timed(3.0)
    found.learn(0.0)
    assert found.of(8) == AS_MEASURED


def test_plain_steps_come_now_and_then():
    """Early at first, then by what drafts gain; never where nothing is learnt."""
    for gain, wait in ((1.2, WAIT), (2.0, LONG_WAIT)):
        found, plain = MixedPace(True), list[int]()
        for step in range(400):
            reminded = found.reminds(8, gain)
            if reminded:
                plain.append(step)
            found.begin(8, 1.0, 0.0 if reminded else 0.5, step)
            found.timed(1.0 if reminded else 1.5)
            found.learn(0.0)
        assert plain[:REMINDERS] == list(range(EARLY_WAIT, EARLY_WAIT + REMINDERS))
        assert plain[REMINDERS : 2 * REMINDERS] == [EARLY_WAIT + REMINDERS + wait + at for at in range(REMINDERS)]
        assert len(plain) == REMINDERS * (1 + (400 - EARLY_WAIT) // (wait + REMINDERS))
    assert not any(MixedPace(False).reminds(8, 1.1) for _ in range(1000))


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
    assert world.run(1) > 0.88, "while it learns"
    assert world.run(40) > 0.97


def test_drafts_that_were_measured_while_plain_steps_were_fast_are_taken_up():
    """Plain steps now take 50 ms instead of 27, a step with a draft 85: more than twice as fast as plain decoding."""
    world = World(0.050, 0.085)
    world.run(3)
    assert world.run(40) > 0.95 * 3.5 * 0.050 / 0.085


def test_on_a_machine_as_measured_next_to_nothing_is_lost():
    assert World(0.027, 0.073).run(40) > 0.985 * 3.5 * 0.027 / 0.073
