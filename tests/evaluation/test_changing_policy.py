"""Text under a policy that changes its mind at every step follows the distribution; a policy that looks ahead is found
out.

So are plans that share their noise: shapes B rows, M verified nodes, V alphabet.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from draftsmith.drafters.base import StagewiseDrafter
from draftsmith.drafters.grow import grow
from draftsmith.engine import Choice, Load, Policy, RowHistory
from draftsmith.engine.requests.request import Request
from draftsmith.evaluation.proof.changing_policy import ChangingPolicy, MakePolicy, draw_under_policy
from draftsmith.evaluation.proof.chi_square import fit
from draftsmith.evaluation.proof.exact_distribution import enumerate_distribution, read_plainly
from draftsmith.evaluation.proof.sampling import ALPHA
from draftsmith.evaluation.proof.small_target import PROMPT, TableDrafter, small_target
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.types import Context, Draft, SamplingParams
from draftsmith.verify import Acceptance, Stream, accept_block, accept_sampled
from draftsmith.verify.noise import race
from tests.helpers.block_mutants import block_rule
from tests.helpers.toy import Accept, World, p_value_of_texts, world

DRAWS, DRAWS_OF_A_FAULT = 20_000, 5_000
BLOCK = Plan((1, 1), sampled=True, acceptance="block")
TREE = Plan((2, 1), sampled=True)


def p_value(make_policy: MakePolicy, count: int = DRAWS) -> float:
    target, params = small_target(), SamplingParams(temperature=1.0, max_tokens=3, ignore_eos=True)
    exact = enumerate_distribution(read_plainly(target), target, PROMPT, params, 3)
    draws = draw_under_policy(
        target, TableDrafter(target), PROMPT, params, count, batch=1000, seed=3, make_policy=make_policy
    )
    assert len(draws.texts) == count and draws.accepted_per_step > 0.1
    counts_C, impossible = exact.count(draws.texts)
    return fit(counts_C, impossible, exact.p_C).p_value


class Peeking(Policy):
    """Drafts only if the noise of the token to come would draw one from the end of the alphabet."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self._draft, self._plain = Choice(Plan((1, 1), sampled=True)), Choice(NO_DRAFT)

    @property
    def choices(self) -> tuple[Choice, ...]:
        return self._draft, self._plain

    def choose(self, load: Load, rows: Sequence[RowHistory]) -> Sequence[Choice]:
        known = {id(request.history): request for request in self._requests}
        asked = [known[id(row)] for row in rows]
        seeds_B = torch.tensor([request.seed for request in asked], dtype=torch.long)
        positions_B = torch.tensor([request.length for request in asked], dtype=torch.long)
        # Who would come first if all of eight tokens were as likely.
        equal_BV = torch.ones((len(asked), 8), dtype=torch.float64)
        firsts_B = race(equal_BV, seeds_B, positions_B, Stream.TARGET)
        return [self._draft if first < 4 else self._plain for first in firsts_B.tolist()]


def test_a_policy_that_uses_what_was_known_leaves_the_distribution_as_it_is():
    assert p_value(lambda requests: ChangingPolicy()) > 1e-3


def test_a_policy_that_peeks_is_caught():
    assert p_value(Peeking, DRAWS_OF_A_FAULT) < ALPHA


def first_a_block(drafter: StagewiseDrafter, context: Context, plan: Plan, as_others: bool = False) -> Draft:
    """Draw a block at the start of the text, trees behind it; `as_others` draws it as one that is no block."""
    if int(context.lengths_B[0]):
        return grow(drafter, context, TREE)
    return grow(drafter, context, replace(BLOCK, acceptance="exact") if as_others else BLOCK)


def accept_block_then_trees(
    p_BMV: Tensor, draft: Draft, seeds_B: Tensor, positions_B: Tensor, block: Accept = accept_block
) -> Acceptance:
    rule = accept_sampled if int(positions_B[0]) else block
    return rule(p_BMV, draft, seeds_B, positions_B)


# A drafter that errs much shows shared tests first, one that errs little shares many guesses.
CARELESS, CAREFUL = world(3, spread=1.5, error=3.0), world(0)
as_others = partial(first_a_block, as_others=True)
accepted_as_others = partial(accept_block_then_trees, block=partial(block_rule, accept_stream=Stream.ACCEPT))


@pytest.mark.parametrize(("toy", "draws"), [(CARELESS, 200_000), (CAREFUL, 1_000_000)])
def test_trees_behind_a_block_leave_the_distribution_as_it_is(toy: World, draws: int):
    assert p_value_of_texts(toy, BLOCK, accept_block_then_trees, draws, first_a_block) > ALPHA


def test_a_block_tested_by_the_numbers_of_later_trees_is_caught():
    assert p_value_of_texts(CARELESS, BLOCK, accepted_as_others, 200_000, first_a_block) < ALPHA


def test_a_block_drawn_by_the_numbers_of_later_trees_is_caught():
    assert p_value_of_texts(CAREFUL, BLOCK, accept_block_then_trees, 1_000_000, as_others) < ALPHA
