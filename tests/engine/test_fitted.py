"""The policy that drafts what pays: by a profile of the machine, and by how often guesses stayed so far."""

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
from draftsmith.engine.reminders import REMINDERS
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
