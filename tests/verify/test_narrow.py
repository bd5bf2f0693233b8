"""Top-k over the kept tokens alone is top-k over the vocabulary: the same distribution to the last bit, the same
text.
"""

import pytest
import torch

from draftsmith.types import ROOT, Draft, SamplingParams
from draftsmith.verify import SamplingBatch, accept_deterministic, accept_sampled, narrow, probabilities

VOCABULARY = 3000
B, N = 40, 4
PARENTS = torch.tensor([[ROOT, ROOT, 0, 1]]).expand(B, -1)


def logits(seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn((B, N + 1, VOCABULARY), generator=generator)).to(dtype)


def batch(**more: float) -> SamplingBatch:
    params = [SamplingParams(temperature=0.7 + 0.1 * (b % 5), top_k=1 + b % 7, **more) for b in range(B)]
    return SamplingBatch.build(params, VOCABULARY, "cpu")


def sampled_draft(logits_BMV: torch.Tensor) -> Draft:
    """Draw two siblings and a child each from a q near p, so that guesses are inside and outside what is kept."""
    q_BMV = (0.8 * logits_BMV.double()).softmax(-1)
    generator = torch.Generator().manual_seed(1)
    siblings_B2 = torch.multinomial(q_BMV[:, 0], 2, generator=generator)
    children = [torch.multinomial(q_BMV[:, n + 1], 1, generator=generator) for n in (0, 1)]
    return Draft(torch.cat([siblings_B2, *children], 1), PARENTS, 2, q_BMV, (2, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_distribution_is_that_over_the_vocabulary_to_the_last_bit(dtype: torch.dtype):
    for seed in range(5):
        logits_BMV = logits(seed, dtype)
        draft = sampled_draft(logits_BMV)
        narrowed = narrow(logits_BMV, batch(), draft)
        assert narrowed is not None and narrowed.p_BMU.shape[2] < 100
        whole_BMV = torch.zeros((B, N + 1, VOCABULARY + 1), dtype=torch.float64)
        index_BMU = narrowed.alphabet_BU.unsqueeze(1).expand_as(narrowed.p_BMU)
        whole_BMV.scatter_add_(2, index_BMU, narrowed.p_BMU)
        right_BMV = probabilities(logits_BMV, batch())
        if dtype == torch.float32:
            assert torch.equal(whole_BMV[..., :-1], right_BMV)
        torch.testing.assert_close(whole_BMV[..., :-1], right_BMV, rtol=1e-15, atol=0)
        assert bool((narrowed.p_BMU[..., -1] == 0).all())
        assert torch.equal(narrowed.alphabet_BU.gather(1, narrowed.draft.tokens_BN), draft.tokens_BN)


@pytest.mark.parametrize("accept", [accept_deterministic, accept_sampled])
def test_the_same_seeds_give_the_same_text(accept):  # type: ignore[no-untyped-def]
    accepted = 0
    for seed in range(12):
        logits_BMV = logits(seed, torch.float32)
        draft, seeds_B, positions_B = sampled_draft(logits_BMV), torch.arange(B) + 1000 * seed, torch.arange(B)
        narrowed = narrow(logits_BMV, batch(), draft)
        assert narrowed is not None
        mine = narrowed.restore(accept(narrowed.p_BMU, narrowed.draft, seeds_B, positions_B, narrowed.alphabet_BU))
        right = accept(probabilities(logits_BMV, batch()), draft, seeds_B, positions_B)
        assert torch.equal(mine.next_B, right.next_B) and torch.equal(mine.counts_B, right.counts_B)
        used_BD = torch.arange(draft.depth) < right.counts_B.unsqueeze(1)
        assert torch.equal(mine.path_BD[used_BD], right.path_BD[used_BD])
        accepted += int(right.counts_B.sum())
    assert accepted > 20


def test_ties_within_the_spare_tokens_are_kept_and_more_of_them_need_the_vocabulary():
    draft = Draft(torch.zeros((B, N), dtype=torch.long), PARENTS, 2, branching=(2, 1))
    logits_BMV = logits(0, torch.float32)
    for ties, narrows in ((4, True), (20, False)):
        tied_BMV = logits_BMV.clone()
        tied_BMV[..., 100 : 100 + ties] = tied_BMV.amax(-1, keepdim=True) + 1
        narrowed = narrow(tied_BMV, batch(), draft)
        assert (narrowed is not None) == narrows
        if narrowed is not None:
            assert torch.equal(narrowed.p_BMU.amax(-1), probabilities(tied_BMV, batch()).amax(-1))


def test_what_needs_the_vocabulary_is_left_to_it():
    draft = Draft(torch.zeros((B, N), dtype=torch.long), PARENTS, 2, branching=(2, 1))
    logits_BMV = logits(0, torch.float32)
    assert narrow(logits_BMV, batch(top_p=0.9), draft) is None
    assert narrow(logits_BMV, batch(min_p=0.1), draft) is None
    assert narrow(logits_BMV[..., :200], batch(), draft) is None
    params = [SamplingParams(temperature=1.0, top_k=2)] * (B - 1) + [SamplingParams(temperature=1.0)]
    assert narrow(logits_BMV, SamplingBatch.build(params, VOCABULARY, "cpu"), draft) is None
