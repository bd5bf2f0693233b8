"""The distribution test has teeth: it passes the right rule and fails every broken one."""

import pytest
import torch

from draftsmith.verify import accept_sampled
from mutants import CHAIN, MUTANTS, chain_rule
from toy import LENGTH, decode, law_p_value, world

ALPHA = 1e-6
DRAWS = 1_000_000
"""The most that a mutant may need; most show in a tenth, which is tried first."""


def test_the_written_out_rule_is_ours_token_for_token() -> None:
    seeds_B = torch.arange(20_000)
    ours = decode(world(0), CHAIN, accept_sampled, seeds_B)
    assert ours.shape == (20_000, LENGTH)
    assert torch.equal(ours, decode(world(0), CHAIN, chain_rule, seeds_B))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_rule_fails(name: str) -> None:
    mutant = MUTANTS[name]
    quick = law_p_value(world(0), mutant.plan, mutant.accept, DRAWS // 10, mutant.grow)
    assert quick < ALPHA or law_p_value(world(0), mutant.plan, mutant.accept, DRAWS, mutant.grow) < ALPHA
