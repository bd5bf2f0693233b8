"""Block verification: the joint distribution, the number of tokens it keeps, greedy rows, padding, and what a plan may
ask.
"""

import pytest
import torch
from torch import Tensor

from draftsmith.plan import Plan
from draftsmith.types import ROOT, UNUSED, Draft, DraftsmithError, SamplingParams
from draftsmith.verify import (
    SamplingBatch,
    Stream,
    accept_block,
    accept_deterministic,
    accept_greedy,
    accept_sampled,
    probabilities,
    uniform,
)
from tests.helpers.toy import World, p_value_of_texts, world

ALPHA = 1e-6
DRAWS = 1_000_000
CUT = world(3, spread=1.5, error=1.5)
"""A drafter that is often wrong, so that texts take one, two and three steps."""


def block_plan(depth: int) -> Plan:
    return Plan((1,) * depth, sampled=True, acceptance="block")


@pytest.mark.parametrize(("depth", "toy"), [(1, CUT), (2, world(0)), (3, CUT), (4, world(0, depth=4))])
def test_the_distribution_of_three_tokens(depth: int, toy: World) -> None:
    assert p_value_of_texts(toy, block_plan(depth), accept_block, DRAWS) > ALPHA


def drawn_chains(q_BMV: Tensor, depth: int, seed: int) -> Draft:
    """Draw guess d of every row from q_BMV[:, d] with torch's own sampler."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.multinomial(q_BMV[:, d], 1, generator=generator) for d in range(depth)]
    parents_BN = torch.arange(ROOT, depth - 1).expand(len(q_BMV), -1)
    return Draft(torch.cat(tokens, 1), parents_BN, depth, q_BMV, (1,) * depth)


def random_distributions(rows: int, depth: int, vocabulary: int, error: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return p and q (B, M, V) of which q errs more or less."""
    generator = torch.Generator().manual_seed(seed)
    logits, errors = torch.randn((2, rows, depth + 1, vocabulary), generator=generator, dtype=torch.float64)
    return logits.softmax(-1), (logits + error * errors).softmax(-1)


def test_the_papers_own_example() -> None:
    """p = (1/3, 2/3), q = (2/3, 1/3), chains of two: 10/9 guesses stay one by one, 11/9 as a block (section 2)."""
    rows = 200_000
    p_BMV = torch.tensor([1.0, 2.0], dtype=torch.float64).div(3).expand(rows, 3, 2)
    draft = drawn_chains(p_BMV.flip(2), 2, seed=0)
    seeds_B = torch.arange(rows)
    one_by_one = accept_sampled(p_BMV, draft, seeds_B, 0 * seeds_B).counts_B.double()
    block = accept_block(p_BMV, draft, seeds_B, 0 * seeds_B).counts_B.double()
    # Five standard errors: a count between 0 and 2 deviates by at most 1.
    assert abs(one_by_one.mean() - 10 / 9) < 5 / rows**0.5
    assert abs(block.mean() - 11 / 9) < 5 / rows**0.5


@pytest.mark.parametrize("depth", [1, 2, 4, 6])
@pytest.mark.parametrize("error", [0.3, 1.0, 3.0])
def test_a_block_keeps_what_the_paper_promises_and_no_fewer_than_one_by_one(depth: int, error: float) -> None:
    """On average the sum of r_i, which no product of single minima exceeds; five standard errors of paired counts."""
    rows = 40_000
    p_BMV, q_BMV = random_distributions(rows, depth, 6, error)
    draft = drawn_chains(q_BMV, depth, seed=1)
    seeds_B = torch.arange(rows)
    one_by_one = accept_sampled(p_BMV, draft, seeds_B, 3 + 0 * seeds_B).counts_B
    block = accept_block(p_BMV, draft, seeds_B, 3 + 0 * seeds_B).counts_B
    ratio_BN = (p_BMV / q_BMV)[:, :-1].gather(2, draft.tokens_BN.unsqueeze(2)).squeeze(2)
    joint_B, promised_B = torch.ones(rows, dtype=torch.float64), torch.zeros(rows, dtype=torch.float64)
    for ratio_B in ratio_BN.unbind(1):
        joint_B = (joint_B * ratio_B).clamp(max=1)
        promised_B = promised_B + joint_B
    surprise_B = block - promised_B
    assert abs(surprise_B.mean()) < 5 * surprise_B.std() / rows**0.5 + 1e-9
    gain_B = (block - one_by_one).double()
    assert gain_B.mean() > -5 * gain_B.std() / rows**0.5 - 1e-9
    if depth == 1:
        # One guess has no block around it: the same test, by a number of its own.
        assert torch.equal(block == 1, uniform(seeds_B, 3 + 0 * seeds_B, Stream.BLOCK_ACCEPT, 0) < promised_B)
    elif error >= 1:
        assert gain_B.mean() > 5 * gain_B.std() / rows**0.5, "a block keeps clearly more here"


def test_greedy_rows_of_a_sampled_batch_come_out_greedy() -> None:
    logits_BMV = torch.randn((500, 4, 6), generator=torch.Generator().manual_seed(1))
    rules = [SamplingParams(temperature=0.0 if row % 2 else 1.0) for row in range(500)]
    p_BMV = probabilities(logits_BMV, SamplingBatch.build(rules, 6, "cpu"))
    # Flat for some rows, a point mass for others: any q is exact for a greedy row.
    q_BMV = (logits_BMV.double() * torch.tensor([0.0, 0.0, 1.0, 1.0, 9.0]).repeat(100)[:, None, None]).softmax(-1)
    q_BMV[7::10] = torch.nn.functional.one_hot(logits_BMV[7::10].argmax(-1), 6).double()
    draft = drawn_chains(q_BMV, 3, seed=2)
    seeds_B = torch.arange(500)
    block, greedy = accept_block(p_BMV, draft, seeds_B, seeds_B), accept_greedy(logits_BMV.argmax(-1), draft)
    assert torch.equal(block.counts_B[1::2], greedy.counts_B[1::2])
    assert torch.equal(block.next_B[1::2], greedy.next_B[1::2])
    assert block.counts_B[7::10].tolist() == [3] * 50
    assert block.counts_B[1::2].unique().tolist() == [0, 1, 2, 3]
    assert not torch.equal(block.next_B, greedy.next_B)


@pytest.mark.parametrize("length", [0, 1, 2])
def test_padding_ends_the_chain(length: int) -> None:
    """What comes behind padding, or behind a guess that q cannot have drawn, has no say; nothing left is plain."""
    p_BMV, q_BMV = random_distributions(300, 3, 5, error=1.0)
    draft, seeds_B = drawn_chains(q_BMV, 3, seed=3), torch.arange(300)
    short = Draft(draft.tokens_BN[:, :length], draft.parents_BN[:, :length], length, q_BMV[:, : length + 1])
    expected = accept_block(p_BMV[:, : length + 1], short, seeds_B, seeds_B)
    parents_BN, impossible_BMV = draft.parents_BN.clone(), q_BMV.clone()
    parents_BN[:, length:] = UNUSED
    impossible_BMV[:, length].scatter_(1, draft.tokens_BN[:, length : length + 1], 0.0)
    for padded in (
        Draft(draft.tokens_BN, parents_BN, 3, q_BMV, (1, 1, 1)),
        Draft(draft.tokens_BN, draft.parents_BN, 3, impossible_BMV, (1, 1, 1)),
    ):
        found = accept_block(p_BMV, padded, seeds_B, seeds_B)
        assert torch.equal(found.counts_B, expected.counts_B) and torch.equal(found.next_B, expected.next_B)
        assert found.path_BD.shape == (300, 3) and int(found.path_BD.max()) <= 3
    if length == 0:
        empty = Draft(draft.tokens_BN[:, :0], draft.parents_BN[:, :0], 0)
        assert torch.equal(expected.next_B, accept_deterministic(p_BMV[:, :1], empty, seeds_B, seeds_B).next_B)
    else:
        assert expected.counts_B.unique().tolist() == list(range(length + 1))


def test_a_draft_from_the_target_itself_is_always_accepted() -> None:
    _, q_BMV = random_distributions(300, 3, 7, error=1.0)
    seeds_B = torch.arange(300)
    accepted = accept_block(q_BMV.clone(), drawn_chains(q_BMV, 3, seed=0), seeds_B, seeds_B)
    assert accepted.counts_B.tolist() == [3] * 300


def test_tokens_of_probability_zero_never_come_out() -> None:
    logits_BMV = torch.randn((2_000, 3, 6), generator=torch.Generator().manual_seed(1))
    p_BMV = probabilities(logits_BMV, SamplingBatch.build([SamplingParams(temperature=1.0, top_k=2)] * 2_000, 6, "cpu"))
    draft = drawn_chains(torch.full((2_000, 3, 6), 1 / 6, dtype=torch.float64), 2, seed=0)
    rows = torch.arange(2_000)
    found = accept_block(p_BMV, draft, rows, rows)
    for d in range(2):
        assert (p_BMV[rows, d, draft.tokens_BN[:, d]][found.counts_B > d] > 0).all()
    assert (p_BMV[rows, found.counts_B, found.next_B] > 0).all()
    assert found.counts_B.unique().tolist() == [0, 1, 2]


def test_a_row_does_not_notice_its_neighbours() -> None:
    p_BMV, q_BMV = random_distributions(40, 3, 6, error=1.0)
    draft, seeds_B = drawn_chains(q_BMV, 3, seed=0), torch.arange(40)
    together = accept_block(p_BMV, draft, seeds_B, seeds_B)
    for row in range(40):
        one = slice(row, row + 1)
        alone = Draft(draft.tokens_BN[one], draft.parents_BN[one], 3, q_BMV[one], draft.branching)
        found = accept_block(p_BMV[one], alone, seeds_B[one], seeds_B[one])
        assert found.next_B == together.next_B[row] and found.counts_B == together.counts_B[row]


def test_only_sampled_drafts_are_verified_as_blocks() -> None:
    draft = Draft(torch.tensor([[0]]), torch.tensor([[ROOT]]), 1)
    with pytest.raises(ValueError, match="accept_deterministic"):
        accept_block(torch.full((1, 2, 2), 0.5, dtype=torch.float64), draft, torch.tensor([0]), torch.tensor([0]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"acceptance": "block"}, "not sampled; give every depth one child, and sample it"),
        ({"acceptance": "block", "branching": (2, 1), "sampled": True}, r"\(2, 1\), sampled; give every depth"),
        ({"acceptance": "loose"}, "acceptance is 'loose'; use one of exact, block, typical"),
        ({"epsilon": 1.0}, "epsilon is 1.0; it must be above 0 and below 1"),
        ({"epsilon": float("nan")}, "epsilon is nan"),
        ({"delta": 0.0}, "delta is 0.0; it must be above 0 and at most 1"),
    ],
)
def test_impossible_plans_are_refused(options: dict, words: str) -> None:
    with pytest.raises(DraftsmithError, match=words):
        Plan(**{"branching": (1, 1), **options})


def test_plans_say_whether_they_are_lossless() -> None:
    assert Plan((2, 1)).lossless and block_plan(2).lossless
    assert not Plan((2, 1), acceptance="typical").lossless
