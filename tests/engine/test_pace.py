"""What steps take now: each is told by a clock that the test turns, so nothing depends on the machine."""

from draftsmith.engine.pace import FIRST_RATE, MOST_SLOWER, SETTLES, SHARED, STALE, Pace
from draftsmith.engine.policy import Load, RowHistory

SECONDS = [1.0, 2.0, 3.0]
"""That every plan was measured to take, for each row."""
WHOSE = [-1, 0, 0]
"""Nobody's, and two of one drafter."""


class Rows:
    """Rows of an engine, and its time."""

    def __init__(self, clocked: bool = True) -> None:
        self.time = 0.0
        self.pace = Pace(WHOSE, (lambda: self.time) if clocked else None)
        self.histories = [RowHistory(False, 5) for _ in range(16)]

    def step(self, count: int, plan: int, took: float, reading: int = 0) -> list[float]:
        """Let a step of so many rows take so many times as long as measured; return what is asked behind it.

        Before it come some that take far longer: the first of a drafter, or without one, tell nothing.
        """
        self.pace.pause()
        self.ask(count, plan, reading)
        for times, steps in ((9.0, SETTLES), (took, 1)):
            self.time += times * steps * SECONDS[plan] * count
            found = self.ask(count, plan, reading, steps)
        return found

    def ask(self, count: int, plan: int, reading: int = 0, steps: int = 1) -> list[float]:
        load = Load(decoding=count, reading=reading, waiting=0, max_batch=16)
        return list(self.pace.slower(load, self.histories[:count], count, plan, SECONDS[plan], steps))


def test_a_plan_that_was_never_taken_counts_as_slowed_as_the_last_that_was():
    rows = Rows()
    for _ in range(200):
        found = rows.step(4, 0, 1.4)
    assert all(abs(times - 1.4) < 0.01 for times in found), "a busy machine spares no plan"
    found = rows.step(4, 1, 1.0)
    assert found[1] < found[0] and found[2] == found[1]
    assert abs(found[0] - 1.4 * (found[1] / 1.4) ** SHARED) < 0.01, "what was taken is moved by a part of that"


def test_slow_drafts_make_plain_decoding_look_less_slow():
    rows = Rows()
    for _ in range(200):
        found = rows.step(4, 1, 2.0)
    assert found[2] == found[1] > 1.9 and abs(found[0] - found[1] ** SHARED) < 1e-9


def test_the_first_steps_of_a_plan_tell_most_and_none_tells_all():
    rows = Rows()
    assert abs(rows.step(4, 0, 1.2)[0] - (1 + 0.2 * FIRST_RATE)) < 1e-9
    for _ in range(300):
        settled = rows.step(4, 0, 1.2)[0]
    assert abs(settled - 1.2) < 1e-3
    assert rows.step(4, 0, 50.0)[0] - settled < 0.06 * settled * (MOST_SLOWER - 1), "that was something else"


def test_what_is_read_beside_a_step_and_other_rows_tell_nothing():
    rows = Rows()
    assert rows.step(4, 0, 3.0, reading=1) == [1.0] * 3
    rows.ask(4, 0)
    rows.time += 100
    assert rows.ask(3, 0) == [1.0] * 3, "a row ended meanwhile"
    rows.pace.pause()
    rows.time += 100
    assert rows.ask(3, 0) == [1.0] * 3


def test_crowds_of_about_one_size_learn_together_and_others_apart():
    rows = Rows()
    for _ in range(50):
        rows.step(9, 0, 1.3)
    assert rows.ask(15, 0)[0] > 1.2 and rows.ask(16, 0) == [1.0] * 3


def test_several_steps_at_once_tell_what_one_takes():
    rows, pace = Rows(), Pace(WHOSE, None)
    assert pace.slower(Load(4, 0, 0, 16), rows.histories[:4], 4, 0, 1.0, 8) == [1.0] * 3
    for _ in range(100):
        rows.ask(4, 0, steps=8)
        rows.time += 8 * 4 * 1.2
    assert abs(rows.ask(4, 0, steps=8)[0] - 1.2) < 0.01


def test_what_was_learnt_long_ago_is_soon_forgotten():
    rows = Rows()
    for _ in range(100):
        rows.step(4, 0, 1.6)
    for _ in range(STALE + 1):
        rows.step(4, 1, 1.0)
    before = rows.step(4, 1, 1.0)[0]
    for _ in range(4):
        after = rows.step(4, 0, 1.0)[0]
    assert 1.2 < before < 1.3 and after < 1.1, "four steps suffice"


def test_without_a_clock_nothing_is_learnt():
    rows = Rows(clocked=False)
    assert rows.step(4, 0, 3.0) == [1.0] * 3
