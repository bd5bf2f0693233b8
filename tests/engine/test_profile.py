"""What a profile of the machine says: what steps cost, what plans bring, which of them are worth measuring."""

import json
import math
from dataclasses import replace

import pytest

from draftsmith.engine.arm import Arm, Behind
from draftsmith.engine.evidence import Tally
from draftsmith.engine.profile import Profile, Sampled, candidates
from draftsmith.plan import NEVER_SURE, NO_COPY, NO_DRAFT, Plan
from tests.helpers.profiles import CHAINS, growth, lookup, profile, tokens_found


def test_steps_are_timed_by_straight_lines_between_what_was_measured():
    found = profile(rows=(1, 4, 8))
    arm = replace(found.arms[2], seconds=(1.0, 4.0, 6.0))
    assert [found.seconds(arm, rows) for rows in (1, 2, 4, 6, 8, 12)] == [1, 2, 4, 5, 6, 8]
    assert profile(rows=(1,)).seconds(found.arms[1], 7) == found.arms[1].seconds[0]


def test_the_best_plan_is_that_of_the_most_tokens_a_second():
    dear, cheap = profile(cost=0.3), profile(cost=0.01)
    assert dear.best(1).plan.depth == 2, "2.0 tokens for 1.6, against 1.6 for 1.3 and 2.2 for 1.9"
    assert cheap.best(1).plan.depth == 4
    assert dear.best(4).plan.depth == 0 and cheap.best(4).plan.depth == 4
    assert cheap.best(1, odds=0.1).plan.depth == 1 and dear.best(1, odds=0.1).plan == NO_DRAFT
    assert dear.gain(dear.arms[2], 1) == pytest.approx(2.0 / 1.6)


def test_deeper_guesses_suffer_more_and_none_stays_oftener_than_always():
    arm = profile().arms[4]
    assert arm.accepted(0.5) == pytest.approx(0.6 / 2 + 0.4 / 4 + 0.2 / 8 + 0.1 / 16)
    assert arm.accepted(10.0) == 4
    seldom = Arm(CHAINS[2], (0.1, 0.09, 0.08), (1.0,))
    assert seldom.accepted(3.0) == pytest.approx(3 * 0.3), "no guess stays oftener than the one before it"


def test_what_a_lookup_brings_and_costs_goes_with_how_often_it_finds_guesses():
    found = lookup(2.0)
    plain, arm = found.arms
    assert arm.accepted() == pytest.approx(0.8) and arm.kept() == pytest.approx(3.2)
    oftener = growth(tokens_found(0.5, 3.2), tokens_found(0.25, 3.2))
    assert arm.accepted(growth=oftener) == pytest.approx(1.6), "found in twice as many steps, and as often right"
    farther = (0.25 * 4.2 / 5) / (0.25 * 4.2 / 5 + 0.75)
    assert arm.accepted(odds=2.0, growth=1.0) == pytest.approx(4 * farther), "all stay, so fewer steps find them"
    assert arm.accepted(odds=99.0) == arm.kept(2.0) == 4, "found at every step, all of them right"
    assert found.seconds(arm, 1) == pytest.approx(2.0) and found.seconds(plain, 1, odds=3.0) == 1.0
    assert found.costs(found.arms, 1).of(1, (2.0, 1.0)) == pytest.approx(3.0), "in half of the steps, third of the way"
    assert found.seconds(arm, 1, odds=100.0) == pytest.approx(5.0), "no oftener than always"
    assert found.speed(arm, 1, odds=100.0) == pytest.approx(5 / 5.0)
    assert 1.0 < found.seconds(arm, 1, odds=0.2) < 2.0
    always = replace(arm, found=None)
    assert always.share(0.5) == always.share(2.0) == 1.0
    assert arm.share(99.0) == arm.share(1e9) == arm.share(math.inf) == 1.0 > arm.share(9.0) > arm.share(0.0) == 0.0
    everywhere = replace(arm, found=1.0)
    assert everywhere.share(0.5) < everywhere.share(1.0) == everywhere.share(math.inf) == 1.0
    cheap = replace(arm, full=(0.9,))
    assert found.seconds(cheap, 1, odds=100.0) == 2.0, "what seemed to take less takes no less"
    told = replace(found, sampled=Sampled(0.5, 0.25, 2.0, 0.75))
    assert Profile.from_json(json.loads(json.dumps(told.to_json()))) == told != found


def test_a_text_of_which_all_is_found_stays_one_however_long_it_is():
    always = Tally(prior=16.0)
    for _ in range(50_000):
        always.learn([(5.0, 0.0)], 0.98)
    assert always.ratio(1.0) > 1e6 and Tally(prior=2.0).ratio(0.75) == 0.75
    always.doubt(16.0)
    always.learn([(0.0, 64.0)], 1.0)
    assert always.ratio(1.0) == pytest.approx(0.25), "what was found long ago counts little on trial"


def test_the_farther_a_plan_goes_where_nothing_is_found_the_more_of_its_steps_find_something():
    """Half of the tokens of a text come from steps that find all four guesses right, whoever guesses elsewhere."""
    alone = Arm(Plan((1,) * 4, factor=1.0, confidence=1.0), (1.0,) * 4, (1.0,), 0.5, (2.0,), 4.0)
    helped = replace(alone, behind=Behind((1.0, 1.0, 1.0, 1.0), 4.0, (0.1,)))
    assert alone.usual_share == pytest.approx(1 / 6), "five tokens by one step, five by five"
    assert helped.usual_share == pytest.approx(1 / 2), "all steps bring five"
    assert 1 + alone.accepted() == pytest.approx(10 / 6) and 1 + helped.accepted() == pytest.approx(5)
    assert helped.accepted(behind=0.0) == pytest.approx(alone.accepted()), "where nothing stays that is guessed there"


@pytest.mark.parametrize("wrong", [-0.1, float("nan"), float("inf")])
def test_a_share_that_has_no_meaning_is_refused(wrong: float):
    with pytest.raises(ValueError, match="found is .* for sampled texts"):
        Sampled(found=wrong)


def test_what_matches_bound_may_make_more_guesses_than_measured():
    """Two of four guesses in a quarter of the steps, and three of these four stay."""
    found = lookup(2.0)
    arm = Arm(Plan((1,) * 4, factor=0.5), (1.0, 0.5), (2.0,), tokens_found(0.25, 1.5), (5.0,), 2.0)
    assert (arm.usual, arm.most_length) == (pytest.approx(0.5), 2.0)
    assert arm.kept() == pytest.approx(1.5) and arm.kept(9.0) == 2.0, "no more than are made"
    oftener = growth(tokens_found(0.5, 1.5), tokens_found(0.25, 1.5))
    assert arm.accepted(growth=oftener) == pytest.approx(0.75)
    longer = growth(tokens_found(0.5, 3.0), tokens_found(0.25, 1.5))
    assert arm.accepted(growth=longer, length=2.0) == pytest.approx(1.5)
    assert arm.accepted(9.0, 99.0, 9.0) == 4, "all four, at every step"
    assert arm.made_times(0.5, 0.5) == pytest.approx((1.0, 1.0))
    assert arm.made_times(1.0, 9.0) == pytest.approx((8.0, 1.0))
    loose = replace(arm, plan=Plan((1,) * 4))
    assert loose.stretched(3.0, 1.5) == loose.stretched(0.3, 1.5) == 1.5, "no match bounds it"
    assert loose.most_length == 1.0
    unaided = Arm(Plan((1,) * 4, factor=NO_COPY), (0.9, 0.6, 0.4, 0.2), (2.0,))
    assert unaided.stretched(0.3, 2.1) == 2.1 and unaided.made_times(1.0, 0.3) == (1.0, 1.0), "nothing is looked up"
    tree = replace(arm, plan=Plan((2, 2)), made=5.0, survival=(1.0, 1.0))
    assert tree.accepted(9.0, 99.0, 9.0) == 2, "no more than its depth, whatever its nodes"
    seconds = Profile((1,), (found.arms[0], arm)).costs((found.arms[0], arm), 1)
    assert seconds.of(1, (1.0, 1.0)) == 2.0 and seconds.of(1, (8.0, 1.0)) == pytest.approx(5.0)
    assert seconds.of(1, (4.5, 1.0)) == pytest.approx(3.5), "half way"


def test_what_is_guessed_behind_a_lookup_is_paid_for_where_it_finds_nothing():
    """A lookup makes two guesses in a quarter of the steps; two more in each of the others, of which one stays."""
    behind = Behind((0.6, 0.4), 2.0, (0.4,))
    share = tokens_found(0.25, 1.5, 1.0)
    arm = Arm(Plan((1,) * 4, factor=0.5, confidence=0.3), (1.0, 0.5), (2.0,), share, (5.0,), 2.0, behind)
    assert not arm.varies and arm.kept_behind() == pytest.approx(1.0) and arm.kept_behind(0.0) == 0.0
    assert (arm.usual, arm.usual_behind, arm.most_behind) == (pytest.approx(0.5), pytest.approx(1.5), 2.0)
    assert arm.accepted() == pytest.approx(0.25 * 1.5 + 0.75 * 1.0)
    assert arm.accepted(growth=0.0) == pytest.approx(1.0), "all is guessed behind it"
    assert arm.accepted(growth=1e9, behind=0.0) == pytest.approx(1.5), "nothing is"
    found = Profile((1,), (Arm(NO_DRAFT, (), (1.0,)), arm))
    costs = found.costs(found.arms, 1)
    assert costs.of(1, (1.0, 1.0)) == pytest.approx(2.0), "as measured"
    assert costs.of(1, arm.made_times(0.0, 1.0)) == pytest.approx(2.0 - 0.5 * (5.0 - 2.0 + 0.6) / 3.5 + 0.5 * 0.4)
    assert costs.of(1, arm.made_times(1.0, 2.0)) == pytest.approx(5.0), "four are looked up, in each"
    assert costs.slowed([1.0, 3.0]).of(1, (1.0, 1.0)) == pytest.approx(6.0)
    value = json.loads(json.dumps(found.to_json()))
    assert Profile.from_json(value) == found
    kept = value["arms"][1]["behind"]
    for damage in ({"each": []}, {"made": 0}, {"made": float("nan")}):
        with pytest.raises(ValueError):
            Profile.from_json({**value, "arms": [value["arms"][0], {**value["arms"][1], "behind": {**kept, **damage}}]})


def test_what_a_drafter_is_sure_of_costs_by_its_number_and_brings_what_stays():
    """Two of four guesses at a step on average, one of which stays; all four take as long as five plain steps."""
    arm = Arm(Plan((1,) * 4, confidence=0.2), (0.6, 0.3, 0.1, 0.0), (2.0,), full=(5.0,), made=2.0)
    found = Profile((1,), (Arm(NO_DRAFT, (), (1.0,)), arm))
    assert arm.varies and (arm.usual, arm.most_length) == (2.0, 2.0)
    assert arm.accepted() == pytest.approx(1.0)
    assert arm.accepted(length=2.0) == arm.accepted(), "more guesses that are hardly likely enough bring no more"
    assert arm.accepted(1.5) > 1.5 and arm.accepted(9.0) == pytest.approx(3.0), "those that were seen to stay once"
    assert arm.made_times(1.0, 1.5) == (1.5, 1.0) and arm.made_times(1.0, 9.0) == (2.0, 1.0)
    costs = found.costs(found.arms, 1)
    assert costs.of(1, (2.0, 1.0)) == pytest.approx(5.0) and costs.of(1, (1.5, 1.0)) == pytest.approx(3.5)
    assert costs.of(1, (0.5, 1.0)) == 1.0 == costs.plain
    assert found.seconds(arm, 1, odds=0.5) == 1.0 and found.seconds(arm, 1, odds=1.5) == pytest.approx(3.5)
    value = json.loads(json.dumps(found.to_json()))
    assert Profile.from_json(value) == found
    with pytest.raises(ValueError, match="as many times as there are rows"):
        Profile.from_json({**value, "arms": [value["arms"][0], {**value["arms"][1], "full": []}]})


def test_a_profile_is_kept_as_json_and_refused_when_it_is_none():
    found = Profile((1, 4), (*profile().arms, Arm(Plan(choices=((0,), (1,), (0, 0))), (0.5, 0.2), (1.0, 2.0))))
    value = json.loads(json.dumps(found.to_json()))
    assert Profile.from_json(value) == found
    drafting = value["arms"][1]["plan"]
    bounded = {**value, "arms": [value["arms"][0], {**value["arms"][1], "plan": {**drafting, "factor": 0.5}}]}
    assert Profile.from_json(bounded).arms[1].plan == Plan((1,), factor=0.5)
    for wrong in ({}, {**value, "arms": []}, {**value, "arms": value["arms"][1:]}, {**value, "rows": [1]},
                  {**value, "arms": [{**value["arms"][0], "found": "some"}]},
                  {**value, "arms": [value["arms"][0], {**value["arms"][1], "found": 0.5}]},
                  {**value, "arms": [{**value["arms"][0], "plan": {**value["arms"][0]["plan"], "match": 8}}]},
                  *({**value, "arms": [value["arms"][0], {**value["arms"][1], **damage}]} for damage in (
                      {"plan": {**drafting, "factor": -1}}, {"made": 0}, {"made": 2}, {"made": float("nan")},
                      {"found": 0.0, "full": [1.0, 1.0]}, {"found": 2.0, "full": [1.0, 1.0]},
                  ))):
        with pytest.raises((KeyError, TypeError, ValueError)):
            Profile.from_json(wrong)


def test_candidates_are_chains_and_trees_up_to_the_room():
    chains = candidates(Plan((1,) * 6), prunable=False, room=64, longest=6)
    assert [plan.branching for plan in chains] == [(1,) * depth for depth in range(1, 7)]
    own = Plan((4, 2, 1), paths=4)
    trees = candidates(own, prunable=True, room=64, longest=3)
    assert own in trees and {4, 6, 9, 13} <= {plan.max_nodes for plan in trees}
    assert {(4, 2, 1), (2, 2, 2)} == {plan.branching for plan in trees if not plan.is_chain}
    assert all(plan.nodes is None or plan.beam for plan in trees), "no wide tree is grown whole and cut then"
    static = Plan(choices=((0,), (1,), (0, 0)))
    assert static in candidates(static, prunable=True, room=64, longest=2)
    small = candidates(Plan((8, 8)), prunable=True, room=10, longest=2)
    assert small and all(plan.max_nodes <= 10 for plan in small)
    assert candidates(NO_DRAFT, prunable=True, room=64, longest=3, factors=(1.0,)) == []
    lookup = candidates(Plan((1,) * 6), prunable=False, room=64, longest=6, factors=(1.0, 0.5))
    bounded = [Plan((1,) * depth, factor=factor) for factor in (1.0, 0.5) for depth in (4, 6)]
    assert lookup == [*(Plan((1,) * depth) for depth in (1, 4, 6)), *bounded]
    short = candidates(Plan((1,) * 3), prunable=False, room=2, longest=3, factors=(0.5,))
    assert short == [Plan((1,)), Plan((1, 1)), Plan((1, 1), factor=0.5)]
    sure = candidates(Plan((1,) * 3), prunable=False, room=64, longest=5, confidences=(0.1, 0.3))
    assert sure[-2:] == [Plan((1,) * 5, confidence=least) for least in (0.1, 0.3)] and len(sure) == 5
    far = candidates(Plan((1,) * 4), prunable=False, room=64, longest=128, confidences=(0.5, 0.7))
    assert far[-4:] == [Plan((1,) * deep, confidence=least) for deep in (8, 13) for least in (0.5, 0.7)]
    both = candidates(Plan((1,) * 8), prunable=False, room=6, longest=8, factors=(1.0, 0.5), confidences=(0.1,))
    assert both == [
        Plan((1,) * 6, factor=factor, confidence=least) for factor in (1.0, 0.5) for least in (0.1, NEVER_SURE)
    ], "the last of each without the drafter behind"
    behind = candidates(
        Plan((1,) * 16), prunable=True, room=64, longest=16, factors=(1.0,), confidences=(0.1,), deepest_behind=5
    )
    trees = [plan for plan in behind if not plan.is_chain]
    assert {(plan.branching, plan.max_nodes) for plan in trees} == {
        ((2,) * 5 + (1,) * 11, 13), ((2,) * 5, 6), ((2,) * 5, 9), ((2,) * 5, 13),
    }, "a lookup goes on as a chain where the drafter behind it ends, and that drafter also has trees by itself"
    assert [plan.factor for plan in trees] == [1.0, NO_COPY, NO_COPY, NO_COPY]
    wide = candidates(Plan((1,) * 100), prunable=False, room=64, longest=100, factors=(0.5,))
    assert [plan.depth for plan in wide] == [1, 4, 64, 4, 64]
    longer = candidates(Plan((1,) * 8), False, 64, 8, factors=(1.0,), longest_copy=16)
    assert [(plan.depth, plan.factor) for plan in longer] == [(1, None), (4, None), (8, None), (4, 1.0), (16, 1.0)]
    alone = candidates(Plan((1,) * 8), False, 64, 8, factors=(1.0,), confidences=(0.1,), longest_copy=16)
    assert [plan.depth for plan in alone] == [16, 16]
    unaided = candidates(Plan((1,) * 8), False, 64, 8, factors=(1.0,), confidences=(0.1,), deepest_behind=5)[2:]
    assert unaided == [Plan((1,) * deep, factor=NO_COPY) for deep in (1, 2, 3, 5)], "it may draft by itself, too"
    endless = candidates(Plan((1,) * 8), False, 64, 8, factors=(1.0,), confidences=(0.1,), deepest_behind=128)[2:]
    assert [plan.depth for plan in endless] == [1, 2, 3, 13]
