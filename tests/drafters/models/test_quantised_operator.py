"""A copy in fewer bits that drafts by one operator: the chains and draws are those that levels make.

B rows, N drafted nodes, M nodes with guesses under them (root first), V tokens of the vocabulary.
"""

from dataclasses import replace

import pytest
import torch

from draftsmith.drafters.draws import stream_of, temperature_of
from draftsmith.drafters.lookup.lookup_first import LookupFirst
from draftsmith.drafters.models.agreement import NO_TOKEN
from draftsmith.drafters.models.quantised_self import QuantisedSelf
from draftsmith.drafters.registry import load_drafter
from draftsmith.engine import Engine
from draftsmith.native.decoder import Bound, Noise
from draftsmith.plan import Plan
from draftsmith.types import UNUSED, Context, Draft, Quantization, SamplingParams
from draftsmith.verify import Stream, categorical, uniform
from tests.drafters.models.test_quantised_self import CHAIN, bf16_target
from tests.helpers.tiny import prompts


class Compared(QuantisedSelf):
    """Drafts chains by the operator and level by level, and holds one against the other."""

    drafts = 0

    def propose(self, context: Context, plan: Plan) -> Draft:
        draft = super().propose(context, plan)
        tokens_B, state = self.begin(context)
        for depth in range(plan.depth):
            log_q_BV, state = self.step(depth, state, tokens_B)
            tokens_B = draft.tokens_BN[:, depth]
            # It may be one of several that are likeliest.
            assert torch.equal(log_q_BV.gather(1, tokens_B.unsqueeze(1)), log_q_BV.max(-1, keepdim=True).values)
            assert (draft.parents_BN[:, depth] == depth - 1).all()
            self.drafts += len(tokens_B)
        return draft


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3"])
def test_one_operator_drafts_the_chain_that_levels_make(architecture: str, quantize: Quantization):
    """Rows that join and leave, in blocks and past a window."""
    target = bf16_target(architecture)
    drafter = Compared(target, quantize, guesses=4)
    params = [SamplingParams(max_tokens=length) for length in (20, 7, 18, 12, 20, 1)]
    plain = [c.tokens for c in Engine(target, max_batch=3).generate(prompts(6), params)]
    assert [c.tokens for c in Engine(target, drafter, max_batch=3).generate(prompts(6), params)] == plain
    assert drafter.drafts > 50


class ComparedDraws(QuantisedSelf):
    """Draws chains by the operator, and holds what they were drawn from against the model level by level."""

    drafts = 0

    def propose(self, context: Context, plan: Plan) -> Draft:
        draft = super().propose(context, plan)
        assert draft.q_BMV is not None and draft.q_BMV.shape[1] == plan.depth and draft.is_chain
        tokens_B, state = self.begin(context)
        for depth in range(plan.depth):
            log_q_BV, state = self.step(depth, state, tokens_B)
            expected_BV = (log_q_BV / temperature_of(context, plan).unsqueeze(1)).softmax(-1)
            q_BV = draft.q_BMV[:, depth]
            torch.testing.assert_close(q_BV, expected_BV, rtol=1e-4, atol=1e-30)
            u_B = uniform(context.seeds_B, context.lengths_B + depth, stream_of(plan), depth)
            tokens_B = draft.tokens_BN[:, depth]
            assert torch.equal(tokens_B, categorical(q_BV.double(), u_B)), "the guess is what q and the noise say"
            self.drafts += len(tokens_B)
        return draft


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("plan", [CHAIN, replace(CHAIN, acceptance="block")], ids=str)
def test_one_operator_draws_the_chain_that_levels_make(quantize: Quantization, plan: Plan, instructions: str):
    """Rows that join and leave, in blocks and past a window, greedy ones among sampled ones."""
    target = bf16_target("mistral")
    drafter = ComparedDraws(target, quantize, guesses=3)
    params = [
        SamplingParams(max_tokens=length, temperature=(0.0, 0.7, 1.2)[row % 3], seed=row)
        for row, length in enumerate((20, 7, 18, 12, 20, 1))
    ]
    found = Engine(target, drafter, max_batch=3).generate(prompts(6), params, plan)
    plain = Engine(target, max_batch=3).generate(prompts(6), params)
    assert [c.tokens for c in found[::3]] == [c.tokens for c in plain[::3]], "greedy rows keep their text"
    assert drafter.drafts > 50 and sum(map(sum, (c.accepted_lengths for c in found))) > 0


class ComparedBounds(QuantisedSelf):
    """Drafts chains that end early by the operator and level by level, and holds one against the other."""

    ended = beside = 0

    def propose(self, context: Context, plan: Plan) -> Draft:
        draft = super().propose(context, plan)
        assert plan.confidence is not None
        by_levels = self._while_likely(context, plan, Bound(plan.confidence, self.spread))
        assert torch.equal(draft.tokens_BN, by_levels.tokens_BN) and torch.equal(draft.parents_BN, by_levels.parents_BN)
        assert (draft.depth, draft.branching) == (by_levels.depth, by_levels.branching)
        self.ended += int(((draft.parents_BN != UNUSED).sum(1) < plan.depth).sum())
        self.beside += not draft.is_chain
        return draft


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("confidence", [0.6, 0.9])
def test_one_operator_ends_chains_where_levels_do(quantize: Quantization, confidence: float, instructions: str):
    """Rows that join and leave, past a window, greedy ones alone and among sampled ones; the text is the plain one."""
    target = bf16_target("mistral")
    plan = Plan((1,) * 6, confidence=confidence)
    for heats in ((0.0,), (0.0, 0.7, 1.2)):
        drafter = ComparedBounds(target, quantize, guesses=4)
        drafter.spread = 1.0  # so that some guesses are unsure, and not all
        params = [
            SamplingParams(max_tokens=length, temperature=heats[row % len(heats)], seed=row)
            for row, length in enumerate((20, 7, 18, 12, 20, 1))
        ]
        found = Engine(target, drafter, max_batch=3).generate(prompts(6), params, plan)
        assert [c.tokens for c in found] == [
            c.tokens for c in Engine(target, max_batch=3).generate(prompts(6), params)
        ]
        assert drafter.ended > 5 and drafter.beside > 5


@pytest.mark.parametrize("heat", [0.0, 0.9])
def test_a_lookup_before_a_copy_leaves_its_other_tokens_in_their_places(heat: float):
    """Of rows in one step, some have a chain that was found and some a copy's, with other tokens beside it."""
    target = bf16_target("llama")
    copy = ComparedBounds(target, "int4", guesses=4)
    copy.spread = 1.0
    drafter = LookupFirst(load_drafter("ngram:min_length=1", target), copy)
    plan = Plan((1,) * 6, factor=1.0, confidence=0.9)
    params = [SamplingParams(max_tokens=24, temperature=heat, seed=row) for row in range(6)]
    plain = [c.tokens for c in Engine(target, max_batch=1).generate(prompts(6), params)]
    for batch in (1, 6):
        engine = Engine(target, drafter, max_batch=batch)
        assert [c.tokens for c in engine.generate(prompts(6), params, plan)] == plain
    assert copy.beside > 5


def test_only_the_target_s_noise_may_end_chains():
    """Whether there is a guess must not say what other guesses were drawn."""
    target = bf16_target("llama")
    noise = Noise(torch.ones(1), torch.tensor([1]), torch.tensor([4]), Stream.DRAFT)
    with pytest.raises(RuntimeError, match="only chains by the target's own noise may end early"):
        where = (target.new_cache(1, 16), torch.tensor([1]), torch.tensor([3]), None, 2)
        target.backend.draw(*where, noise, Bound(0.5, 0.1))


def test_the_operator_checks_what_it_is_called_with():
    target = bf16_target("llama")
    cache, (roots_B, held_B) = target.new_cache(2, 16), torch.tensor([[1, 2], [12, 3]])
    guess = target.backend.guess
    chosen = guess(cache, roots_B, held_B, None, 4)
    assert chosen is not None and chosen[0].shape == (2, 4) and bool((chosen[0] >= 0).all())
    assert bool((chosen[1] == NO_TOKEN).all())
    with pytest.raises(IndexError, match="12 cached tokens and 5 nodes do not fit a slot of 16"):
        guess(cache, roots_B, held_B, None, 5)
    with pytest.raises(IndexError, match="there is no token 96"):
        guess(cache, torch.tensor([1, 96]), held_B, None, 2)
    with pytest.raises(RuntimeError, match="at least one guess"):
        guess(cache, roots_B, held_B, None, 0)
    noise = Noise(torch.ones(2), roots_B, held_B, Stream.DRAFT)
    drawn = target.backend.draw(cache, roots_B, held_B, None, 4, noise)
    assert drawn is not None and drawn[0].shape == (2, 4) and drawn[2].shape == (2, 4, target.vocab_size)
    with pytest.raises(IndexError, match="12 cached tokens and 5 nodes do not fit a slot of 16"):
        target.backend.draw(cache, roots_B, held_B, None, 5, noise)
    with pytest.raises(RuntimeError, match="a chain that is drawn takes fp32 temperatures"):
        target.backend.draw(cache, roots_B, held_B, None, 2, replace(noise, temperature_B=torch.ones(2).double()))
