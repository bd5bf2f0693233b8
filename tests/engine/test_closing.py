"""A batch of one call: it is over when its last row is, so drafts have to gain more there than in a full batch."""

import time
from collections.abc import Sequence

import pytest

from draftsmith.engine import Choice, Engine
from draftsmith.engine.arm import Arm
from draftsmith.engine.closing import is_closing, seconds_left
from draftsmith.engine.fitted import Fitted
from draftsmith.engine.known import Known
from draftsmith.engine.policy import Load, Policy, RowHistory
from draftsmith.engine.profile import Profile
from draftsmith.engine.reasons import Weighed
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.types import SamplingParams
from tests.helpers.tiny import prompts, tiny_target

ROWS = 4


def rows_of(calls: list[object], most: float = 64) -> list[RowHistory]:
    return [RowHistory(False, 5, most=most, call=call) for call in calls]


def gaining(gain: float) -> Profile:
    """Drafting four rows brings so many times as many tokens a second; fewer rows are hardly cheaper.

    Steps are so short that all rows take the same plan.
    """
    rows, plain = (1, 2, 4), (0.008, 0.009, 0.01)
    drafted = tuple(1.5 * took / gain for took in plain)
    return Profile(rows, (Arm(NO_DRAFT, (), plain), Arm(Plan((1,)), (0.5,), drafted)))


def depth_of(profile: Profile, rows: list[RowHistory], load: Load) -> int:
    return max(choice.plan.depth for choice in Fitted(Known(profile)).choose(load, rows))


def test_rows_that_end_together_take_as_many_steps_as_the_last_of_them():
    assert seconds_left([10, 10, 10], [1, 1, 1], 2.0, lambda rows: 99.0) == 20.0
    assert seconds_left([8, 12, 20], [1, 1, 1], 3.0, {2: 2.0, 1: 1.0}.__getitem__) == 8 * 3 + 4 * 2 + 8 * 1
    # The first row ends after two steps; the second then has four tokens left, and the third twelve.
    assert seconds_left([8, 8, 16], [4, 2, 2], 3.0, {2: 2.0, 1: 1.0}.__getitem__) == 2 * 3 + 4 * 2 + 8 * 1


def test_only_the_rows_of_one_call_that_nobody_waits_for_are_closing():
    call = object()
    alone = Load(ROWS, 0, 0, ROWS)
    assert is_closing(alone, rows_of([call] * ROWS))
    assert not is_closing(alone, rows_of([object() for _ in range(ROWS)])), "others may follow each of them"
    assert not is_closing(alone, rows_of([None] * ROWS))
    assert not is_closing(Load(ROWS, 0, 1, ROWS), rows_of([call] * ROWS)), "one waits for a place"
    assert not is_closing(Load(ROWS, 1, 0, ROWS), rows_of([call] * ROWS)), "one reads its prompt"
    assert not is_closing(Load(ROWS + 1, 0, 0, 8), rows_of([call] * ROWS)), "one drafts by a plan of its own"
    assert not is_closing(Load(1, 0, 0, 1), rows_of([call]))


@pytest.mark.parametrize(("gain", "closing", "drafts"), [(1.09, False, 1), (1.05, True, 0), (1.4, True, 1)])
def test_rows_of_one_call_draft_where_that_gains_clearly(gain: float, closing: bool, drafts: int):
    call = object()
    rows = rows_of([call if closing else object() for _ in range(ROWS)])
    assert depth_of(gaining(gain), rows, Load(ROWS, 0, 0, ROWS)) == drafts


def test_calls_whose_rows_are_far_apart_have_less_to_gain():
    """A guess always stays in every second text and never in the others, or in each of them about half of the time."""
    drafted = dict[bool, int]()
    for apart in (True, False):
        policy = Fitted(Known(gaining(1.2)))
        for _ in range(12):
            call, depths = object(), list[int]()
            rows = rows_of([call] * ROWS)
            for step in range(40):
                choices = policy.choose(Load(ROWS, 0, 0, ROWS), rows)
                depths.append(choices[0].plan.depth)
                for at, (row, choice) in enumerate(zip(rows, choices, strict=True)):
                    row.note(choice.plan.depth * ((at if apart else at + step) % 2), choice.plan.depth, choice.plan)
            drafted[apart] = sum(depths)
    assert drafted[True] < 10 and drafted[False] == 40, drafted


def test_a_call_does_not_begin_with_what_the_last_row_of_another_drafted():
    """One row gains by a guess, four together lose."""
    arms = Arm(NO_DRAFT, (), (0.001, 0.001)), Arm(Plan((1,)), (0.9,), (0.0011, 0.0025))
    policy, (row,) = Fitted(Known(Profile((1, ROWS), arms))), rows_of([object()])
    for _ in range(2):
        (choice,) = policy.choose(Load(1, 0, 0, ROWS), [row])
        assert choice.plan.depth == 1
        row.note(1, 1, choice.plan)
    assert not any(choice.plan.depth for choice in policy.choose(Load(ROWS, 0, 0, ROWS), rows_of([object()] * ROWS)))


@pytest.mark.parametrize("sampled", [(False, True, False, True), (True,) * ROWS])
def test_a_call_may_have_sampled_rows(sampled: tuple[bool, ...]):
    """The tree of the likeliest guesses does not suit sampled texts, and gains much in the others."""
    tree = Arm(Plan((2, 2), beam=2, nodes=4), (1.0, 1.0), (0.0011, 0.0012), suits_draws=False)
    arms = Arm(NO_DRAFT, (), (0.001, 0.001)), Arm(Plan((1,)), (0.9,), (0.0011, 0.0012)), tree
    policy, call = Fitted(Known(Profile((1, ROWS), arms))), object()
    rows = [RowHistory(drawn, 5, most=64, call=call) for drawn in sampled]
    for _ in range(20):
        choices = policy.choose(Load(ROWS, 0, 0, ROWS), rows)
        assert [choice.plan.depth for choice in choices] == [1] * ROWS
        for row, choice in zip(rows, choices, strict=True):
            row.note(1, 1, choice.plan)
            row.written += 2


def test_the_last_row_decides_what_drafts_bring_a_call():
    """Each guess stays in all rows but one. Those that end sooner gain nothing by it, and so soon none is made."""
    arms = Arm(NO_DRAFT, (), (0.01, 0.01)), Arm(Plan((1,)), (0.7,), (0.012, 0.012))
    drafted = dict[bool, int]()
    for closing in (False, True):
        policy, call = Fitted(Known(Profile((1, ROWS), arms))), object()
        for _ in range(6):
            rows = rows_of([call if closing else object() for _ in range(ROWS)], 1000)
            depths = list[int]()
            for _ in range(60):
                choices = policy.choose(Load(ROWS, 0, 0, ROWS), rows)
                depths.append(choices[0].plan.depth)
                for at, (row, choice) in enumerate(zip(rows, choices, strict=True)):
                    row.note(choice.plan.depth * (at > 0), choice.plan.depth, choice.plan)
                    row.written += 1  # all alike, so that the last one is always as far from its end as the others
            drafted[closing] = sum(depths)
    assert drafted[False] > 55 and drafted[True] < 25, drafted


@pytest.mark.parametrize("gain", [1.05, 1.4])
def test_a_call_says_how_often_guesses_have_to_stay_for_its_end_to_come_sooner(gain: float):
    rows, load = rows_of([object()] * ROWS), Load(ROWS, 0, 0, ROWS)
    policy = Fitted(Known(gaining(gain)))
    drafts = max(choice.plan.depth for choice in policy.choose(load, rows))
    for why in policy.reasons(load, rows):
        assert isinstance(why, Weighed)
        needed = why.would_pay()
        assert (needed is not None and needed <= why.stays) == (drafts > 0), (why.label, needed, why.stays)


def test_nothing_is_tried_where_no_time_is_left_to_gain_by_it():
    for most, tried in ((12, 0), (1000, 4)):
        policy, row = Fitted(Known(gaining(0.9), hope=2.0)), RowHistory(False, 5, most=most)
        depths = []
        for _ in range(9):
            (choice,) = policy.choose(Load(1, 0, 0, 1), [row])
            depths.append(choice.plan.depth)
            row.note(choice.plan.depth, choice.plan.depth, choice.plan)
            row.written += 1
        assert (sum(depths) >= tried) if tried else not any(depths)


class Noting(Policy):
    """Never drafts, takes its time, and notes what it is told."""

    def __init__(self, thinks_s: float = 0.0) -> None:
        self.thinks_s, self.heard = thinks_s, list[float]()
        self.seen: list[tuple[list[object | None], list[float]]] = []

    @property
    def choices(self) -> tuple[Choice, ...]:
        return Choice(NO_DRAFT), Choice(Plan((1,)))

    def choose(self, load: Load, rows: Sequence[RowHistory]) -> Sequence[Choice]:
        time.sleep(self.thinks_s)
        self.seen.append(([row.call for row in rows], [row.left for row in rows]))
        return [Choice(NO_DRAFT)] * len(rows)

    def timed(self, seconds: float) -> None:
        self.heard.append(seconds)


def test_a_policy_knows_whose_rows_it_sees_and_how_much_they_may_still_write():
    policy = Noting()
    engine = Engine(tiny_target(), None, policy=policy, max_batch=4)
    engine.generate(prompts(2), [SamplingParams(max_tokens=most, ignore_eos=True) for most in (3, 5)])
    assert [left for _, left in policy.seen if left] == [[2, 4], [1, 3], [2], [1]], "each prompt has given a token"
    assert len({call for calls, _ in policy.seen for call in calls}) == 1
    policy.seen.clear()
    for question in prompts(2):
        (request,) = engine.admit_call([question], SamplingParams(max_tokens=4, ignore_eos=True))
        engine.core.add(request)
    while engine.core.has_work:
        engine.core.step()
    assert len(set(policy.seen[-1][0])) == len(policy.seen[-1][0]) == 2, "these came by themselves"


def test_a_policy_does_not_hear_its_own_time_and_the_statistics_do():
    policy, params = Noting(thinks_s=0.02), SamplingParams(max_tokens=4, ignore_eos=True)
    [done] = Engine(tiny_target(), None, policy=policy).generate(prompts(1), params)
    spent = done.statistics.target_s + done.statistics.drafter_s + done.statistics.rest_s
    assert len(policy.heard) == 3 and spent - sum(policy.heard) >= 3 * 0.02


@pytest.mark.parametrize(("plain_s", "gain", "left", "count", "pays"), [
    (1e-4, 1.3, 99, 1, True),  # a change costs four of the shortest steps, which a whole text pays back
    (1e-4, 1.3, 12, 1, False),
    (1e-4, 1.1, 99, 1, False),
    (1e-3, 1.3, 12, 1, True),
    (1e-4, 1.17, 99, 4, False),  # each of four rows costs something, and they share the seconds of a step
    (1e-4, 1.6, 99, 4, True),
    (1.5e-3, 1.12, 99, 16, True),  # not within a dozen steps, but within the fifty that are counted
    (1.5e-3, 1.12, 12, 16, False),
])
def test_what_a_change_costs_is_paid_back_by_time_and_not_only_by_steps(
    plain_s: float, gain: float, left: float, count: int, pays: bool
):
    drafted = 1.5 * plain_s / gain  # a row's share, however many there are
    profile = Profile((1, 4), (
        Arm(NO_DRAFT, (), (plain_s, plain_s)), Arm(Plan((1,)), (0.5,), (drafted, drafted)),
    ))
    policy, load = Fitted(Known(profile)), Load(count, 0, 0, count)
    rows = rows_of([object() for _ in range(count)], most=left)  # of calls of their own, which end when they like
    policy.choose(load, rows)
    assert (policy.reasons(load, rows)[0].kind == "pays") == pays  # otherwise it may be on trial
