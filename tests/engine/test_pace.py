"""What steps take now: each is told by the test, so nothing depends on the machine."""

from draftsmith.engine.pace import (
    COLD_STEPS,
    HALVED,
    HICCUP,
    MEASURED,
    MOST_SLOWER,
    SETTLES,
    SETTLES_PLAIN,
    SHARED,
    Pace,
)
from draftsmith.engine.policy import Load, RowHistory

SECONDS = [1.0, 2.0, 3.0]
"""That every plan was measured to take, for each row."""
WHOSE = [-1, 0, 0]
"""Nobody's, and two of one drafter."""


class Rows:
    """Rows of an engine, and the steps that they take."""

    def __init__(self, learns: bool = True) -> None:
        self.pace = Pace(WHOSE, learns)
        # Their prompts were read long ago.
        self.histories = [RowHistory(False, 5, accepted=[0] * 1000) for _ in range(16)]

    def step(self, count: int, plan: int, *times: float, reading: int = 0) -> list[float]:
        """Let steps of so many rows take so many times as long as measured; return what is known behind them.

        Before them come some that take far longer: the first of a drafter, or without one, tell nothing.
        """
        self.pace.pause()
        self.pace.begin(Load(count, reading, 0, 16), self.histories[:count])
        for each in (*[9.0] * (SETTLES if plan else SETTLES_PLAIN), *times):
            self.pace.timed(each * SECONDS[plan] * count)
        self.ask(count, plan)
        return list(self.pace.slower(count))

    def ask(self, count: int, plan: int, reading: int = 0) -> None:
        heard = self.pace.heard(plan)
        if heard is not None:
            self.pace.learn(len(heard[0]), plan, heard[1], SECONDS[plan])
        self.pace.begin(Load(count, reading, 0, 16), self.histories[:count])


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


def test_fast_drafts_make_plain_decoding_look_as_fast_until_it_is_timed():
    rows = Rows()
    for _ in range(40):
        found = rows.step(4, 1, 0.6)
    assert found[0] == found[1] < 0.61
    for _ in range(40):
        found = rows.step(4, 0, 0.9)
    for _ in range(40):
        found = rows.step(4, 1, 0.5)
    assert found[0] > 0.7 > 0.52 > found[1], "later it has an estimate of its own"


def test_the_first_steps_of_a_plan_tell_most_and_none_tells_all():
    rows = Rows()
    assert abs(rows.step(4, 0, 1.2)[0] - (1 + 0.2 / (1 + MEASURED))) < 1e-9
    for _ in range(300):
        settled = rows.step(4, 0, 1.2)[0]
    assert abs(settled - 1.2) < 1e-3
    assert rows.step(4, 0, 50.0)[0] - settled < 0.06 * settled * (MOST_SLOWER - 1), "that was something else"


def test_steps_beside_which_prompts_were_read_tell_nothing():
    rows = Rows()
    assert rows.step(4, 0, 3.0, reading=1) == [1.0] * 3
    rows.pace.begin(Load(5, 0, 0, 16), rows.histories[:4])
    assert not rows.pace.is_timing, "a fifth row decodes by a plan of its own"


def test_the_steps_before_a_row_came_or_went_are_those_of_the_rows_that_were():
    rows = Rows()
    for _ in range(100):
        rows.step(4, 0, 1.3)
    rows.pace.timed(2 * 4 * SECONDS[0])
    rows.ask(16, 0)
    assert rows.pace.slower(4)[0] > 1.3 and rows.pace.slower(16) == [1.0] * 3


def test_crowds_of_about_one_size_learn_together_and_others_apart():
    rows = Rows()
    for _ in range(50):
        rows.step(9, 0, 1.3)
    assert rows.pace.slower(15)[0] > 1.2 and rows.pace.slower(16) == [1.0] * 3


def test_only_the_first_steps_after_a_change_are_left_out():
    rows = Rows()
    assert rows.step(4, 0) == [1.0] * 3
    rows.pace.timed(1.2 * 4)
    rows.ask(4, 0)
    assert abs(rows.pace.slower(4)[0] - (1 + 0.2 / (1 + MEASURED))) < 1e-9, "the next one counts"
    assert abs(Rows().step(4, 0, 1.1, 1.2, 1.3)[0] - (1 + 0.2 * 3 / (3 + MEASURED))) < 1e-9, "several do by their mean"


def test_steps_soon_after_a_prompt_are_left_out_whatever_they_draft():
    for plan in (0, 1):
        rows = Rows()
        rows.histories[2] = young = RowHistory(False, 5)
        assert rows.step(4, plan)[plan] == 1.0, "of the first ones, nothing is known"
        young.accepted += [0] * (COLD_STEPS - 2)
        rows.pace.begin(Load(4, 0, 0, 16), rows.histories[:4])
        for took in (9.0, 9.0, 1.2):
            rows.pace.timed(took * 4 * SECONDS[plan])
        rows.ask(4, plan)
        assert rows.pace.slower(4)[plan] > 1.05, "later ones count"


def test_one_step_far_longer_than_the_others_counts_as_twice_as_long():
    rows = Rows()
    assert abs(rows.step(4, 0, 1.0, 1.0, 9.0)[0] - (1 + (HICCUP - 1) / 3 * 3 / (3 + MEASURED))) < 1e-9


def test_what_was_learnt_long_ago_is_soon_forgotten():
    rows = Rows()
    for _ in range(100):
        rows.step(4, 0, 1.6)
    for _ in range(4 * HALVED):
        rows.step(4, 1, 1.0)
    before = rows.step(4, 1, 1.0)[0]
    for _ in range(4):
        after = rows.step(4, 0, 1.0)[0]
    assert 1.2 < before < 1.3 and after < 1.1, "four steps suffice"


def test_who_does_not_learn_times_relies_on_the_measured_ones():
    assert Rows(learns=False).step(4, 0, 3.0) == [1.0] * 3
