"""What measuring plans finds out about guesses: nothing is cut off, and nothing counts as impossible."""

from itertools import pairwise

from draftsmith.engine import Engine
from draftsmith.engine.profile import Arm
from draftsmith.evaluation.measuring.profiling import Sampler
from draftsmith.plan import Plan
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
