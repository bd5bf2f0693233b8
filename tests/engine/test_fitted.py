"""The policy that drafts what pays: by a profile of the machine, and by how often guesses stayed so far."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from draftsmith.engine import Engine
from draftsmith.engine.arm import Arm
from draftsmith.engine.evidence import FIRST_WAIT, HOPELESS, LONGEST_WAIT, TRIAL
from draftsmith.engine.fitted import Fitted
from draftsmith.engine.known import Known
from draftsmith.engine.pace import SETTLES
from draftsmith.engine.policy import RowHistory
from draftsmith.engine.profile import Profile, Sampled
from draftsmith.engine.reasons import Weighed
from draftsmith.engine.reminders import NARROW_WAIT, REMINDERS
from draftsmith.engine.settling import LAID_ASIDE
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.types import SamplingParams
from tests.helpers.oracle import OracleDrafter
from tests.helpers.profiles import CHAINS, KEPT, go, load, lookup, profile, tokens_found
from tests.helpers.tiny import VOCABULARY, greedy_reference, prompts, tiny_model, tiny_target


def test_a_lookup_is_not_hoped_for_at_the_price_of_few_guesses():
    assert Fitted(Known(lookup(2.0), hope=100.0)).is_fixed, "all five tokens for five steps, at best"
    policy = Fitted(Known(lookup(1.5, full=3.0), hope=100.0))
    assert go(policy, RowHistory(False, 5), 200, 4)[-1] == 4, "five tokens for three steps"


def test_what_is_found_and_wrong_costs_what_is_found():
    """A guess in every step, one of forty of which stays: that it seldom stays does not make it cheap."""
    policy, history = Fitted(Known(lookup(1.5, full=3.0), hope=100.0)), RowHistory(False, 5)
    drafted = []
    for step in range(2000):
        (choice,) = policy.choose(load(1), [history])
        drafted.append(choice.plan.depth)
        history.note(int(step % 10 == 0) if choice.plan.depth else 0, choice.plan.depth, NO_DRAFT)
    assert drafted[-1000:].count(0) > 950


def test_a_sampled_text_begins_by_what_was_measured_of_sampled_ones():
    """The guesses of greedy texts pay, a tenth of them does not; what stays in the text at hand counts in either."""
    found = replace(profile(), sampled=Sampled(stayed=0.1))
    assert go(Fitted(Known(found)), RowHistory(False, 5), 4, 1)[0] > 0
    assert go(Fitted(Known(found)), RowHistory(True, 5), FIRST_WAIT - 1, 1) == [0] * (FIRST_WAIT - 1)
    assert go(Fitted(Known(found)), RowHistory(True, 5), 100, 4)[-1] == 4, "tried, and taken where all of them stay"
    assert go(Fitted(Known(profile())), RowHistory(True, 5), 4, 1)[0] > 0, "nothing of that kind was measured"


def test_trees_of_the_likeliest_guesses_are_not_taken_where_tokens_are_drawn():
    """Not on trial either; and the chain that is best there is kept though the tree is ahead of it in greedy texts."""
    tree = Arm(Plan((2, 2), beam=2, nodes=4), (0.9, 0.8), (1.1, 1.1), suits_draws=False)
    found = profile(cost=0.1)
    both, alone = replace(found, arms=(*found.arms, tree)), Profile((1, 4), (found.arms[0], tree))
    for known in (Known(both, hope=9.0), Known(alone)):
        chosen = {sampled: set[Plan]() for sampled in (False, True)}
        for sampled, rows in ((False, 1), (True, 1), (True, 3)):
            policy = Fitted(known)
            histories = [RowHistory(sampled, 5) for _ in range(rows)]
            for step in range(600):
                for history, choice in zip(histories, policy.choose(load(rows), histories), strict=True):
                    chosen[sampled].add(choice.plan)
                    history.note(choice.plan.depth * (step % 3 > 0), choice.plan.max_nodes, choice.plan)
        assert tree.plan in chosen[False] and tree.plan not in chosen[True]
        assert len(known.profile.arms) == 2 or max(plan.depth for plan in chosen[True]) > 0


def test_a_sampled_text_in_which_nothing_stays_is_tried_less_often():
    def pauses(sampled: bool) -> list[int]:
        depths = go(Fitted(Known(profile(cost=0.55), hope=9.0)), RowHistory(sampled, 5), 400, 0)
        begun = [at for at, (before, now) in enumerate(pairwise(depths)) if now and not before]
        return [later - earlier for earlier, later in pairwise(begun)]

    greedy, sampled = pauses(False), pauses(True)
    assert 2 * greedy[1] < sampled[1] and sum(greedy[:3]) < 0.6 * sum(sampled[:3])


def test_a_trial_waits_for_a_guess_before_it_gives_up():
    policy, history = Fitted(Known(lookup(1.1, full=1.4), hope=100.0)), RowHistory(False, 5)
    lengths, drafting = [], 0
    for _ in range(1500):
        (choice,) = policy.choose(load(1), [history])
        if choice.plan.depth:
            drafting += 1
        elif drafting:
            lengths.append(drafting)
            drafting = 0
        history.note(0, 0, NO_DRAFT)  # nothing is found
    # Not after the three steps in which guesses fail.
    assert max(lengths[1:]) >= TRIAL > HOPELESS and TRIAL > SETTLES


@pytest.mark.parametrize(("drafted", "stayed", "constrained", "tokens", "cost"), [
    (8, 8, False, 9.0, 3.0), (8, 4, False, 5.0, 3.0), (1, 1, False, 2.0, 1.1 + 1.9 / 15),
    (1, 2, True, 3.0, 1.1 + 3 * 1.9 / 15),
])
def test_of_a_lookup_every_guess_counts(drafted: int, stayed: int, constrained: bool, tokens: float, cost: float):
    """It made two in a quarter of the steps, where it was measured; of a constrained row only steps are told.

    Steps take what they took then, for as many guesses, so nothing is learnt of a slower machine.
    """
    found = tokens_found(0.25, 1.2)
    arm = Arm(Plan((1,) * 8, factor=0.5), (0.8, 0.4), (1.1,), found=found, full=(3.0,), made=2.0)
    known = Known(Profile((1,), (Arm(NO_DRAFT, (), (1.0,)), arm)), hope=100.0)
    policy = Fitted(known, learns_times=True)
    history = RowHistory(False, 5, constrained=constrained)
    for _ in range(300):
        (choice,) = policy.choose(load(1), [history])
        policy.timed(cost if choice.plan.depth else 1.0)
        history.note(stayed if choice.plan.depth else 0, drafted if choice.plan.depth else 0, NO_DRAFT)
    (why,) = policy.reasons(load(1), [history])
    assert isinstance(why, Weighed) and why.label == "pays"
    assert why.tokens == pytest.approx(tokens, rel=0.05) and why.cost == pytest.approx(cost, rel=0.05)


def test_it_drafts_as_deep_as_pays_and_no_deeper_where_guesses_fail():
    policy, history = Fitted(Known(profile(cost=0.15))), RowHistory(False, 5)
    assert go(policy, history, 1, 4) == [policy.typical.plan.depth] == [2]
    assert go(policy, history, 40, 4)[-1] == 4, "all of them stay"
    assert go(policy, history, 140, 0)[-40:].count(0) >= 32, "none does; now and then it looks whether one does again"


def test_a_text_begins_as_the_last_ones_ended():
    """Every guess stayed in a long text; then come forty short ones, of another kind, in which none does."""
    policy = Fitted(Known(profile(cost=0.3)))
    go(policy, RowHistory(False, 5), 400, 4)
    assert go(policy, RowHistory(False, 5), 1, 4) != [0]
    for _ in range(40):
        go(policy, RowHistory(False, 5), 40, 0)
    assert go(policy, RowHistory(False, 5), 1, 0) == [0]


def test_what_fails_is_tried_again_after_growing_pauses_and_taken_up_when_it_works():
    policy, history = Fitted(Known(profile(cost=0.3))), RowHistory(False, 5)
    depths = go(policy, history, 3000, 0)
    tries = [at for at, depth in enumerate(depths) if depth]
    pauses = [b - a - 1 for a, b in pairwise(tries) if b - a > 1]
    assert pauses[0] == LAID_ASIDE > pauses[1] == FIRST_WAIT and LONGEST_WAIT > pauses[-1] > 8 * FIRST_WAIT
    assert all(one <= following <= 2 * one for one, following in pairwise(pauses[1:]))
    assert 0 < 0.3 * sum(depths[-2000:]) < 0.025 * 2000, "what trials cost, a fiftieth of all steps"
    assert sum(depth > 0 for depth in go(policy, history, 4000, 4)[-100:]) == 100


def test_rows_that_begin_later_profit_from_what_others_met():
    policy = Fitted(Known(profile(cost=0.3)))
    for _ in range(5):
        go(policy, RowHistory(False, 5), 60, 0)
    assert sum(depth > 0 for depth in go(policy, RowHistory(False, 5), 10, 0)) <= 3
    assert sum(depth > 0 for depth in go(policy, RowHistory(True, 5), 10, 0)) >= 3, "sampled rows are another kind"
    assert sum(depth > 0 for depth in go(Fitted(Known(profile(cost=0.3))), RowHistory(False, 5), 10, 0)) >= 3


def test_of_plans_that_are_alike_one_is_kept():
    """Three chains cost the same, so the longest is best at all odds; and a fourth one costs too much at any."""
    costly = Arm(Plan((1,) * 5), (*KEPT, 0.05), (9.0,))
    arms = tuple(Arm(CHAINS[at], KEPT[: at + 1], (1.1,)) for at in range(3))
    known = Known(Profile((1,), (Arm(NO_DRAFT, (), (1.0,)), *arms, costly)))
    assert [arm.plan for arm in known.useful] == [CHAINS[2]]
    assert [arm.plan for arm in Known(profile(cost=0.3)).useful] == CHAINS, "which is best depends on the text"


def test_a_moment_without_rows_changes_nothing():
    policy = Fitted(Known(profile(cost=0.3)))
    go(policy, RowHistory(False, 5), 120, 4)
    assert policy.choose(load(0), []) == []
    assert go(policy, RowHistory(False, 5), 1, 4) == [4]


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
    # The last one now and then joins the plan of others, whose drafter works anyway.
    for row, (least, most, times) in enumerate(((4, 4, 95), (0, 0, 95), (4, 4, 95), (0, 2, 85))):
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
    assert alike(pair(1.2), some(1), 60, 0)[5:9] == [0] * 4, "none of five"


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


def test_what_steps_cost_now_is_learnt_while_it_runs():
    """Drafted steps take three times as long as was measured: it decodes plainly, until they do no longer."""
    long = profile(cost=0.2)
    arms = tuple(replace(arm, seconds=tuple(0.001 * took for took in arm.seconds)) for arm in long.arms)
    slow, history = 3.0, RowHistory(False, 5)
    policy = Fitted(Known(Profile(long.rows, arms)), learns_times=True)

    def go_on(steps: int) -> list[int]:
        found = []
        for _ in range(steps):
            (choice,) = policy.choose(load(1), [history])
            depth = choice.plan.depth
            policy.timed(0.001 * (1 + 0.2 * depth) * (slow if depth else 1.0))
            found.append(depth)
            history.note(min(2, depth), depth, NO_DRAFT)
        return found

    assert go_on(1000)[-100:].count(0) > 85
    slow = 1.0
    assert go_on(4000)[-100:].count(0) < 20


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


def test_what_the_first_step_with_a_draft_takes_says_nothing_of_the_others():
    """It takes three times as long as those that follow, as where caches were full of other things."""
    before, history = 0, RowHistory(False, 5)
    arms = (Arm(NO_DRAFT, (), (0.001,)), Arm(CHAINS[0], (1.0,), (0.002 / 1.3,)))
    policy = Fitted(Known(Profile((1,), arms), rows=None), learns_times=True)
    depths = []
    for step in range(900):
        (choice,) = policy.choose(load(1), [history])
        depth = choice.plan.depth
        policy.timed(arms[depth].seconds[0] * (3 if depth and not before else 1))
        before = depth
        depths.append(depth)
        history.note(depth if step < 100 or step > 200 else 0, depth, NO_DRAFT)
    assert 0 in depths[100:200] and sum(depths[-200:]) >= 200 - REMINDERS


def test_where_not_even_guesses_that_all_stay_would_pay_none_is_tried():
    policy = Fitted(Known(profile(cost=0.9, survival=(1.0, 1.0, 1.0, 1.0), rows=(1, 4)), rows=None))
    assert not policy.is_fixed, "alone it pays a little"
    rows = [RowHistory(False, 5) for _ in range(4)]
    for _ in range(3 * FIRST_WAIT):
        assert [choice.plan.depth for choice in policy.choose(load(4), rows)] == [0] * 4
        for history in rows:
            history.note(0, 0, NO_DRAFT)


def test_a_row_with_a_plan_of_its_own_teaches_it_nothing():
    model, given = tiny_model("llama"), prompts(2)
    texts = [prompt + greedy_reference(model, prompt, 40) for prompt in given]
    oracle = OracleDrafter(texts, VOCABULARY, error_rate=1.0, place="first", plan=CHAINS[-1])
    policy = Fitted(Known(profile(cost=0.15, rows=(1,))))
    engine = Engine(tiny_target("llama"), oracle, policy=policy, max_batch=2)
    engine.generate(given, SamplingParams(max_tokens=40, ignore_eos=True), plan=CHAINS[-1])
    assert sum(policy.steps) == 0
    assert go(policy, RowHistory(False, 5), 1, 0) == [policy.typical.plan.depth]


def test_of_two_drafters_each_text_gets_the_one_whose_guesses_stay():
    policy = Fitted(Known(profile(cost=0.12), "speculator"), Known(profile(cost=0.1), "lookup"))
    rows, stays = [RowHistory(False, 5), RowHistory(False, 5)], ({"speculator": 3}, {"lookup": 3})
    taken: list[list[str | None]] = [[], []]
    for _ in range(600):
        for history, stay, names, choice in zip(rows, stays, taken, policy.choose(load(2), rows), strict=True):
            depth = choice.plan.depth
            names.append(choice.drafter if depth else None)
            history.note(min(stay.get(str(choice.drafter), 0), depth), depth, NO_DRAFT)
    for names, own, other in zip(taken, ("speculator", "lookup"), ("lookup", "speculator"), strict=True):
        assert names[-300:].count(own) >= 280 and names.count(other) >= 2, "the other is tried now and then"


def test_where_two_drafters_draft_alike_the_cheaper_one_does():
    policy = Fitted(Known(profile(cost=0.2), "dear"), Known(profile(cost=0.1), "cheap"))
    assert {choice.drafter for choice in policy.choose(load(2), [RowHistory(False, 5), RowHistory(False, 5)])} == {
        "cheap"
    }


def test_where_nothing_can_be_gained_it_never_drafts():
    hopeless = Fitted(Known(profile(cost=0.9)))
    assert hopeless.is_fixed and hopeless.choices[0].plan == NO_DRAFT
    assert not Fitted(Known(profile(cost=0.9), hope=2.0)).is_fixed, "other texts may be easier to foresee"
    crowded = profile(cost=0.3)
    assert Fitted(Known(crowded, rows=4)).is_fixed
    assert not Fitted(Known(crowded, rows=1)).is_fixed and not Fitted(Known(crowded)).is_fixed


@pytest.mark.parametrize("error_rate", [0.0, 0.3, 1.0])
def test_the_text_is_the_targets_own_and_drafting_follows_what_stays(error_rate: float):
    model, new_tokens = tiny_model("llama"), 90
    given = prompts(6)
    texts = [prompt + greedy_reference(model, prompt, new_tokens) for prompt in given]
    oracle = OracleDrafter(texts, VOCABULARY, error_rate=error_rate, place="first", plan=CHAINS[-1])
    policy = Fitted(Known(profile(cost=0.15, rows=(1,))))
    engine = Engine(tiny_target("llama"), oracle, policy=policy, max_batch=3)
    done = engine.generate(given, SamplingParams(max_tokens=new_tokens, ignore_eos=True))
    assert [prompt + one.tokens for prompt, one in zip(given, done, strict=True)] == texts
    taken = dict(zip((choice.plan.depth for choice in policy.choices), policy.steps, strict=True))
    if error_rate == 0.0:
        assert max(taken, key=taken.__getitem__) == 4
    if error_rate == 1.0:
        assert max(taken, key=taken.__getitem__) == 0
