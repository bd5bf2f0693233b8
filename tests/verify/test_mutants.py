"""The distribution test has teeth: it passes the right rule and fails every broken one."""

import pytest
import torch

from draftsmith.plan import Plan
from draftsmith.verify import accept_block, accept_sampled
from tests.helpers.block_mutants import BLOCK, BLOCK_MUTANTS, block_rule
from tests.helpers.mutants import CHAIN, MUTANTS, chain_rule
from tests.helpers.toy import LENGTH, Accept, decode, p_value_of_texts, world

ALPHA = 1e-6
DRAWS = 1_000_000
"""The most that a mutant may need; most show in a tenth, which is tried first."""


ALL_MUTANTS = MUTANTS | BLOCK_MUTANTS


@pytest.mark.parametrize(
    ("plan", "rule", "written_out"), [(CHAIN, accept_sampled, chain_rule), (BLOCK, accept_block, block_rule)]
)
def test_the_written_out_rule_is_ours_token_for_token(plan: Plan, rule: Accept, written_out: Accept) -> None:
    seeds_B = torch.arange(20_000)
    ours = decode(world(0), plan, rule, seeds_B)
    assert ours.shape == (20_000, LENGTH)
    assert torch.equal(ours, decode(world(0), plan, written_out, seeds_B))


@pytest.mark.parametrize("name", ALL_MUTANTS)
def test_a_broken_rule_fails(name: str) -> None:
    mutant = ALL_MUTANTS[name]
    # Mistakes between two steps show where chains are often cut.
    toy = world(3, spread=1.5, error=1.5) if name in BLOCK_MUTANTS else world(0)
    quick = p_value_of_texts(toy, mutant.plan, mutant.accept, DRAWS // 10, mutant.grow)
    assert quick < ALPHA or p_value_of_texts(toy, mutant.plan, mutant.accept, DRAWS, mutant.grow) < ALPHA
