"""The policy that drafts what pays, with several rows: who drafts, when all begin, when plain steps are tried."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from draftsmith.engine.arm import Arm
from draftsmith.engine.evidence import LONGEST_WAIT, TRIAL
from draftsmith.engine.fitted import Fitted
from draftsmith.engine.known import Known
from draftsmith.engine.policy import RowHistory
from draftsmith.engine.profile import Profile
from draftsmith.engine.reminders import NARROW_WAIT, REMINDERS
from draftsmith.engine.settling import LAID_ASIDE
from draftsmith.plan import NO_DRAFT
from tests.helpers.profiles import CHAINS, go, load, profile


def test_rows_that_begin_later_profit_from_what_others_met():
    policy = Fitted(Known(profile(cost=0.3)))
    for _ in range(5):
        go(policy, RowHistory(False, 5), 60, 0)
    assert sum(depth > 0 for depth in go(policy, RowHistory(False, 5), 10, 0)) <= 3
    assert sum(depth > 0 for depth in go(policy, RowHistory(True, 5), 10, 0)) >= 3, "sampled rows are another kind"
    assert sum(depth > 0 for depth in go(Fitted(Known(profile(cost=0.3))), RowHistory(False, 5), 10, 0)) >= 3


def test_a_crowd_drafts_less():
    policy = Fitted(Known(profile(cost=0.3)))
    rows = [RowHistory(False, 5) for _ in range(4)]
    assert [choice.plan.depth for choice in policy.choose(load(4), rows)] == [0] * 4
    assert [choice.plan.depth for choice in policy.choose(load(1), rows[:1])] == [2]


def test_in_a_crowd_those_draft_whose_guesses_stay():
    policy = Fitted(Known(profile(cost=0.2)))
    rows, stays = [RowHistory(False, 5) for _ in range(4)], (4, 0, 4, 1)
    depths: list[list[int]] = []
    for _ in range(200):
        choices = policy.choose(load(4), rows)
        depths.append([choice.plan.depth for choice in choices])
        for history, deep, stay in zip(rows, depths[-1], stays, strict=True):
            history.note(min(stay, deep), deep, NO_DRAFT)
    # The last one now and then joins the others, whose drafter works anyway, and they a plan that suits it, too.
    for row, (least, most, times) in enumerate(((4, 4, 80), (0, 0, 90), (4, 4, 80), (0, 2, 80))):
        late = [depth[row] for depth in depths[-100:]]
        assert sum(least <= deep <= most for deep in late) >= times, (row, late)


def test_where_steps_are_short_all_rows_do_the_same():
    long = profile(cost=0.2)
    arms = tuple(replace(arm, seconds=tuple(0.002 * took for took in arm.seconds)) for arm in long.arms)
    policy, rows = Fitted(Known(Profile(long.rows, arms))), [RowHistory(False, 5) for _ in range(4)]

    def go_on(rows: list[RowHistory], stays: tuple[int, ...], steps: int) -> list[int]:
        found = []
        for _ in range(steps):
            depths = [choice.plan.depth for choice in policy.choose(load(len(rows)), rows)]
            assert len(set(depths)) == 1
            found.append(depths[0])
            for history, stay in zip(rows, stays, strict=True):
                history.note(min(stay, depths[0]), depths[0], NO_DRAFT)
        return found

    assert go_on(rows, (4, 4, 4, 4), 100)[-1] >= 3, "all guesses stay"
    depths = go_on(rows, (0, 0, 0, 0), 500)
    pauses = [b - a - 1 for a, b in pairwise(at for at, depth in enumerate(depths) if depth) if b - a > 1]
    assert pauses[0] == LAID_ASIDE < pauses[-1]
    assert all(one <= following <= 2 * one for one, following in pairwise(pauses))
    assert sum(policy.steps) == 4 * 600
    assert go_on([RowHistory(False, 5)], (4,), 1000)[-1] == 4, "a later text"
    half = [RowHistory(False, 5) for _ in range(4)]
    assert go_on(half, (4, 4, 0, 0), 200)[-1] == 4, "three tokens of a text, on average, for 2.6 steps"


def test_what_some_rows_show_counts_for_the_others_at_once():
    """All guesses stay: of eight rows a step says as much as eight steps of one."""
    long = profile(cost=0.15, rows=(1, 8))
    arms = tuple(replace(arm, seconds=(0.001 * arm.seconds[0],) * 2) for arm in long.arms)
    first = [alike(Fitted(Known(Profile((1, 8), arms))), some(count), 60, 4).index(4) for count in (1, 8)]
    assert first[1] < first[0]


def alike(policy: Fitted, rows: Sequence[RowHistory], steps: int, stays: int = 1) -> list[int]:
    """Ask about rows of a small target and answer, all alike; return how deep the drafts were."""
    found = []
    for _ in range(steps):
        (choice, *_) = policy.choose(load(len(rows)), rows)
        found.append(choice.plan.depth)
        for row in rows:
            row.note(min(stays, choice.plan.depth), choice.plan.depth, NO_DRAFT)
    return found


def pair(gain: float) -> Fitted:
    """A guess that always stays brings a second token, which is so many times as fast as plain decoding."""
    arms = (Arm(NO_DRAFT, (), (0.001,)), Arm(CHAINS[0], (1.0,), (0.002 / gain,)))
    return Fitted(Known(Profile((1,), arms), rows=None))


def some(count: int) -> list[RowHistory]:
    return [RowHistory(False, 5) for _ in range(count)]


def test_what_is_begun_is_not_given_up_for_a_guess_or_two():
    """A guess stays in every third step; two that fail in a row say little."""
    policy, history = pair(1.2), some(1)
    depths = []
    for stays in [1, 0, 0] * 3:
        depths += alike(policy, history, 1, stays)
    assert depths[:TRIAL] == [1] * TRIAL
    assert alike(pair(1.2), some(1), 60, 0)[6:10] == [0] * 4, "none of six"


def test_several_rows_begin_to_draft_only_where_that_pays_clearly():
    assert sum(alike(pair(1.04), some(1), 400)) > 360
    crowded, rows = pair(1.04), some(4)
    assert sum(alike(crowded, rows, 400)) == 0, "not even if all guesses stayed, so none is tried"
    crowded.choose(load(4), rows)
    assert crowded.reasons(load(4), rows)[0].label == "batch_too_large"
    assert sum(alike(pair(1.2), some(4), 400)) > 360


def test_several_rows_go_on_where_drafts_pay_at_all_until_others_join():
    """Costs of steps are learnt: what was measured as a gain of 1.15 becomes one of 1.04 while they draft."""
    plain, drafted = 0.001, 0.002 / 1.15
    arms = (Arm(NO_DRAFT, (), (plain,)), Arm(CHAINS[0], (1.0,), (drafted,)))
    policy, rows = Fitted(Known(Profile((1,), arms), rows=None), learns_times=True), some(4)

    def go_on(rows: Sequence[RowHistory], steps: int) -> list[int]:
        found = []
        for _ in range(steps):
            found += alike(policy, rows, 1)
            policy.timed(drafted if found[-1] else plain)
            labels[found[-1]].add(policy.reasons(load(len(rows)), rows)[0].label)
        return found

    labels = defaultdict[int, set[str]](set)
    assert sum(go_on(rows, 100)) == 100 - REMINDERS, "plain steps are timed once"
    assert labels == {0: {"probing"}, 1: {"pays"}}, "and are not said to pay"
    drafted = 0.002 / 1.04
    depths = go_on(rows, 1200)
    reminders = 1200 // (NARROW_WAIT + REMINDERS)
    assert depths.count(0) in (reminders * REMINDERS, (reminders + 1) * REMINDERS), "they are reminded, and go on"
    assert sum(go_on([*rows, *some(2)], 20)) < 10
    assert sum(go_on(some(1), 100)) >= 100 - REMINDERS and sum(go_on(some(4), 20)) < 10, "whoever drafted last"


@pytest.mark.parametrize(("gain", "wait"), [(1.15, NARROW_WAIT), (1.35, LONGEST_WAIT), (1.8, 2 * LONGEST_WAIT)])
def test_the_more_drafts_gain_the_later_plain_steps_are_looked_at(gain: float, wait: int):
    plain, drafted = 0.001, 0.002 / gain
    arms = (Arm(NO_DRAFT, (), (plain,)), Arm(CHAINS[0], (1.0,), (drafted,)))
    policy, rows, depths = Fitted(Known(Profile((1,), arms), rows=None), learns_times=True), some(4), list[int]()
    while len(depths) < 3000:
        depths += alike(policy, rows, 1)
        policy.timed(drafted if depths[-1] else plain)
    begins = [at for at, depth in enumerate(depths) if not depth and depths[at - 1]]
    assert {second - first for first, second in pairwise(begins[1:])} == {wait + REMINDERS}


@pytest.mark.parametrize(("slow_texts", "seen_after"), [(0, 4), (12, 26)])
def test_a_machine_that_was_slow_when_all_was_measured_is_found_out(slow_texts: int, seen_after: int):
    """Then drafts cost 1.1 plain steps and bring 1.5 tokens; later, as it is fast, they cost 1.8.

    Texts are written for four rows, of which two end sooner than the others, and it is fast when two begin. So what
    plain steps cost has to be found out for each number of rows, in a few steps at a time.
    """
    slow, fast, drafted = (0.0020, 0.0022), (0.0010, 0.0018), list[int]()
    arms = Arm(NO_DRAFT, (), slow[:1]), Arm(CHAINS[0], (0.5,), slow[1:])
    policy = Fitted(Known(Profile((1,), arms), rows=None), learns_times=True)

    def go_on(rows: Sequence[RowHistory], steps: int, took: tuple[float, float]) -> int:
        found = []
        for at in range(steps):
            found += alike(policy, rows, 1, at % 2)
            policy.timed(took[found[-1]])
        return sum(found)

    go_on(some(2), 600, fast)
    for text in range(slow_texts + 24):
        rows = some(4)
        drafted.append(go_on(rows, 40, slow if text < slow_texts else fast))
        drafted[-1] += go_on(rows[:2], 20, fast)
    assert not slow_texts or sum(drafted[:slow_texts]) > 30 * slow_texts, "it pays at first"
    assert sum(drafted[seen_after:]) < 0.1 * 60 * len(drafted[seen_after:]), "and it is seen that it does not any more"


def test_nobody_need_ask_about_drafts_that_go_on_and_nothing_is_lost_by_that():
    """What was drafted in steps that were not asked about is learnt at the next question."""
    asked, held = pair(1.5), pair(1.5)
    each, some_steps = some(2), some(2)
    for _ in range(400):
        alike(asked, each, 1)
    steps = questions = 0
    while steps < 400:
        (choice, *_) = held.choose(load(2), some_steps)
        together = 1 + held.holds
        for row in some_steps:
            for _ in range(together):
                row.note(choice.plan.depth, choice.plan.depth, NO_DRAFT)
        steps, questions = steps + together, questions + 1
    held.choose(load(2), some_steps)
    assert questions < 0.3 * steps
    assert sum(held.steps) == 2 * (steps + 1) and held.steps[0] <= 2 * 8, "all steps are counted, few without a draft"
    for row in some_steps:
        for _ in range(32):
            row.note(0, 1, NO_DRAFT)
    assert held.choose(load(2), some_steps)[0].plan == NO_DRAFT, "guesses that failed, learnt together"
