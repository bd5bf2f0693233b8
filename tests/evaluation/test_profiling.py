"""What measuring plans finds out about guesses: nothing is cut off, and nothing counts as impossible."""

from itertools import pairwise

from draftsmith.engine import Engine
from draftsmith.engine.profile import Arm
from draftsmith.evaluation.measuring.profiling import Brought, Contest, Sampler
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.types import Context, Draft
from tests.helpers.oracle import OracleDrafter, oracle_for
from tests.helpers.tiny import prompts, tiny_model, tiny_target

CHAIN = Plan((1,) * 6)
TOKENS = 10


def sampler(drafter: OracleDrafter, asked: list[list[int]]) -> Sampler:
    return Sampler(Engine(tiny_target(), drafter, plan=CHAIN, max_batch=2), asked, TOKENS)


def test_the_step_in_which_a_text_ends_counts_whole():
    asked = prompts(4)
    found = sampler(oracle_for(tiny_model(), asked, 40), asked)
    for rows in (1, 2):
        assert found.seconds(CHAIN, rows) > 0
    assert found.survival(CHAIN) == (1.0,) * 6
    assert found.brought[CHAIN].steps == 3 * 2, "seven tokens each, behind that of the prompt"


class Silent(OracleDrafter):
    """Guesses nothing."""

    def propose(self, context: Context, plan: Plan) -> Draft:
        draft = super().propose(context, plan)
        return Draft(draft.tokens_BN[:, :0], draft.parents_BN[:, :0], depth=0)


def test_what_was_not_seen_is_seldom_and_not_impossible():
    asked = prompts(4)
    found = sampler(oracle_for(tiny_model(), asked, 40, Silent), asked)
    found.seconds(CHAIN, 1)
    assert found.brought[CHAIN].found == 0.5 / (1 + found.brought[CHAIN].steps)
    shares = found.survival(CHAIN)
    assert all(0 < deep < share for share, deep in pairwise(shares))
    wrong = sampler(oracle_for(tiny_model(), asked, 40, error_rate=1.0), asked)
    wrong.seconds(CHAIN, 1)
    steps = wrong.brought[CHAIN].steps
    assert steps == TOKENS - 1 and wrong.survival(CHAIN)[:2] == (0.5 / (1 + steps), 0.25 / (1 + steps))


def test_how_guesses_fare_in_sampled_texts_is_measured():
    """The oracle knows the greedy texts and nothing of others."""
    asked = prompts(4)
    found = sampler(oracle_for(tiny_model(), asked, 40), asked)
    found.seconds(CHAIN, 1)
    always = Arm(CHAIN, found.survival(CHAIN), (1.0,))
    assert always.kept() == 6.0
    fare = found.sampled(always)
    assert 0 < fare.stayed < 0.5 and (fare.found, fare.length) == (1.0, 1.0), "as many guesses at every step"
    assert fare == found.sampled(always), "the same texts, drawn alike"
    seldom = found.sampled(Arm(CHAIN, (0.001,) * 6, (1.0,)))
    assert seldom.stayed > 1.0, "some stay, where next to none did"


def test_plans_with_both_bounds_cost_what_a_line_by_the_number_of_their_guesses_says():
    """One of four was timed while something else ran; the others say what it costs."""
    contest = Contest(sampler(oracle_for(tiny_model(), [], 1), prompts(1)), (1,), lambda _: None)
    contest.taken[NO_DRAFT] = {1: [2.0]}
    plans = [Plan((1,) * 8, factor=1.0, confidence=least) for least in (0.4, 0.3, 0.2, 0.1)]
    for made, (plan, times) in enumerate(zip(plans, (1.1, 1.2, 1.7, 1.4), strict=True), 1):
        contest.taken[plan] = {1: [times]}
        contest.sampler.brought[plan] = Brought([0] * 8, steps=10, guessing=10, drafted=10 * made)
    found = [contest.seconds(plan, 1) for plan in plans]
    assert all(abs(later - before - 2 * 0.14) < 1e-9 for before, later in pairwise(found)), "a straight line"
    assert found[2] < 2 * 1.7, "not what was timed"
    del contest.taken[plans[0]], contest.taken[plans[1]]
    assert contest.seconds(plans[2], 1) == 2 * 1.7, "two points are no line to go by"
