"""Guesses drawn by the native operator: from the very q that is handed over, which is the drafter's own.

B rows, F nodes of a level, C children, N drafted nodes, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftsmith.drafters.draws import Draws, arriving, arriving_written_out, shares_noise, temperature_of
from draftsmith.native import LIBRARY, why_missing
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.types import Context, Draft, DraftsmithError, SamplingParams
from draftsmith.verify import SamplingBatch, Stream, accept_deterministic, categorical, probabilities, uniform
from draftsmith.verify.noise import arrivals

if not LIBRARY:
    pytest.skip(why_missing(), allow_module_level=True)

ops = torch.ops.draftsmith


def context_of(batch: int, temperature: float = 0.8) -> Context:
    zeros_B = torch.zeros(batch, dtype=torch.int64)
    temperature_B = torch.full((batch,), temperature, dtype=torch.float64)
    temperature_B[::3] = 0
    return Context(
        zeros_B.unsqueeze(1), torch.zeros((batch, 1, 1)), zeros_B + 1, torch.arange(batch) + 5, zeros_B, temperature_B,
        torch.arange(batch) * 7919,
    )


def levels_of(context: Context, plan: Plan, scores: list[Tensor]) -> tuple[list[Tensor], Draws]:
    draws, start, frontier, tokens = Draws(context, plan), 0, 1, []
    for depth, (children, scores_RV) in enumerate(zip(plan.branching, scores, strict=True)):
        tokens.append(draws.draw(scores_RV, depth, children, start))
        start, frontier = start + frontier * children, frontier * children
    return tokens, draws


@pytest.mark.parametrize("acceptance", ["exact", "block"])
@pytest.mark.parametrize("branching", [(1, 1, 1), (3, 2), (2, 1, 4)], ids=str)
@pytest.mark.parametrize(("vocabulary", "batch"), [(5, 300), (700, 12), (33_001, 2)])
def test_guesses_are_what_q_and_the_noise_say(
    vocabulary: int, batch: int, branching: tuple[int, ...], acceptance: str, instructions: str,
    threads: Callable[[int], None],
) -> None:
    if acceptance == "block" and max(branching) > 1:
        return
    plan = Plan(branching, sampled=True, acceptance=acceptance)  # type: ignore[arg-type]
    context, generator = context_of(batch), torch.Generator().manual_seed(vocabulary)
    scores, frontier = [], 1
    for children in branching:
        scores.append(3 * torch.randn((batch * frontier, vocabulary), generator=generator))
        frontier *= children
    tokens, draws = levels_of(context, plan, scores)
    q_BMV = draws.q_BMV
    threads(2)
    again, draws = levels_of(context, plan, scores)
    q_again_BMV = draws.q_BMV
    assert all(map(torch.equal, tokens, again)) and torch.equal(q_BMV, q_again_BMV)
    assert q_BMV.shape == (batch, 1 + plan.max_nodes - frontier, vocabulary) and q_BMV.dtype == torch.float32
    torch.testing.assert_close(q_BMV.double().sum(-1), torch.ones(q_BMV.shape[:2]).double(), rtol=0, atol=1e-6)
    stream = Stream.BLOCK_DRAFT if acceptance == "block" else Stream.DRAFT
    is_drawn_B = context.temperature_B > 0
    temperature_B = torch.where(is_drawn_B, context.temperature_B, 0.1)
    begin, slot, frontier, beside = 0, 0, 1, 0
    for depth, children in enumerate(branching):
        q_BFV = q_BMV[:, begin : begin + frontier].double()
        expected = scores[depth].view(batch, frontier, -1).double() / temperature_B[:, None, None]
        q_compared = q_BFV
        if plan.is_chain:  # a greedy row accepts the likeliest token alone, and a chain has nothing beside it
            greedy_GV, q_GV = scores[depth][~is_drawn_B], q_BFV[~is_drawn_B, 0]
            likeliest_G1 = greedy_GV.argmax(-1, keepdim=True)
            assert torch.equal(tokens[depth][~is_drawn_B], likeliest_G1)
            leads_G = greedy_GV.topk(2).values.diff(dim=-1).neg().flatten()
            assert (q_GV.gather(1, likeliest_G1)[leads_G > 0.01] > 1 - 1e-6).all()
            q_compared, expected = q_BFV[is_drawn_B], expected[is_drawn_B]
        torch.testing.assert_close(q_compared, expected.softmax(-1), rtol=3e-5, atol=1e-30)
        left_BFV = q_BFV.clone()
        for child in range(children):
            slots_F = slot + torch.arange(frontier) * children + child
            u_BF = uniform(
                context.seeds_B.unsqueeze(1), (context.lengths_B + depth).unsqueeze(1), stream, slots_F
            )
            drawn_BF = tokens[depth].view(batch, frontier, children)[:, :, child]
            beside += int((categorical(left_BFV, u_BF) != drawn_BF).sum())
            left_BFV.scatter_(2, drawn_BF.unsqueeze(2), 0.0)
        begin, slot, frontier = begin + frontier, slot + frontier * children, frontier * children
    assert beside == 0


@pytest.mark.parametrize(("vocabulary", "batch"), [(5, 300), (700, 12), (33_001, 3)])
def test_shared_noise_guesses_what_the_target_would_draw(
    vocabulary: int, batch: int, instructions: str, threads: Callable[[int], None]
) -> None:
    """From scores that are the target's own, at every level; greedy rows guess the best token."""
    plan, context = Plan((1, 1)), context_of(batch)
    assert shares_noise(plan, context) and not shares_noise(replace(plan, sampled=True), context)
    assert shares_noise(Plan((2, 1)), context) and not shares_noise(NO_DRAFT, context)
    assert not shares_noise(replace(plan, acceptance="typical"), context), "whose last token is drawn by that noise"
    assert not shares_noise(plan, replace(context, temperature_B=torch.zeros(batch)))
    generator = torch.Generator().manual_seed(vocabulary)
    scores = [3 * torch.randn((batch, vocabulary), generator=generator) for _ in range(2)]
    tokens, _ = levels_of(context, plan, scores)
    threads(2)
    assert all(map(torch.equal, tokens, levels_of(context, plan, scores)[0]))
    params = [SamplingParams(temperature=float(one)) for one in context.temperature_B]
    for level, (scores_BV, tokens_B1) in enumerate(zip(scores, tokens, strict=True)):
        p_BMV = probabilities(scores_BV.unsqueeze(1), SamplingBatch.build(params, vocabulary, "cpu"))
        nothing_BN = torch.empty((batch, 0), dtype=torch.int64)
        target = accept_deterministic(
            p_BMV, Draft(nothing_BN, nothing_BN, 0), context.seeds_B, context.lengths_B + level
        )
        assert torch.equal(tokens_B1.flatten(), target.next_B)


@pytest.mark.parametrize(("seed", "token"), [(4_400_933, 1_188), (7_352_519, 36_177)])
def test_a_guess_that_comes_late_in_its_race_is_found_all_the_same(seed: int, token: int, instructions: str) -> None:
    """Later than 25 times the mean, as `test_sampling` has it of the target's own draw."""
    context = context_of(2, temperature=1.0)
    context.seeds_B[1], context.lengths_B[1] = seed, 0
    scores_RV = torch.full((2, 40_000), -torch.inf)
    scores_RV[:, token] = 3.0
    assert Draws(context, Plan((1,))).draw(scores_RV, 0, 1, 0).tolist() == [[token], [token]]


def test_what_cannot_be_drawn_is_not() -> None:
    """Minus infinity has no share; where no score is finite, or one is infinite, nothing has, and any token comes."""
    scores_RV = torch.full((4, 600), -torch.inf)
    scores_RV[0, [3, 599]] = 2.0
    scores_RV[1, 5], scores_RV[1, 400] = torch.inf, 1.0
    scores_RV[3, 7], scores_RV[3, 300] = 1.0, torch.nan
    (tokens_B,), draws = levels_of(context_of(4), Plan((1,), sampled=True), [scores_RV])
    q_BMV = draws.q_BMV
    assert q_BMV[0, 0].nonzero().flatten().tolist() == [3, 599] and q_BMV[0, 0, 3] == q_BMV[0, 0, 599] == 0.5
    assert tokens_B[0].item() in (3, 599)
    assert not q_BMV[1:3].any() and ((tokens_B >= 0) & (tokens_B < 600)).all()
    assert not q_BMV[3].isnan().any()


def test_more_children_than_q_has_tokens_get_no_share_twice() -> None:
    scores_RV = torch.full((1, 6), -torch.inf)
    scores_RV[0, [1, 4]] = 0.0
    (tokens_BW,), _ = levels_of(context_of(1), Plan((4,), sampled=True), [scores_RV])
    assert sorted(tokens_BW[0, :2].tolist()) == [1, 4]


@pytest.mark.parametrize("children", [1, 2, 5, 12])
@pytest.mark.parametrize(("vocabulary", "batch"), [(12, 100), (700, 12), (33_001, 3)])
def test_children_come_in_the_order_in_which_the_noise_lets_them_arrive(
    vocabulary: int, batch: int, children: int, instructions: str, threads: Callable[[int], None]
) -> None:
    """Two nodes a row: the first of each is what a chain draws there; greedy rows have their likeliest tokens."""
    context, generator = context_of(batch), torch.Generator().manual_seed(vocabulary)
    scores_RV = (3 * torch.randn((2 * batch, vocabulary), generator=generator)).log_softmax(-1)
    hot_B = temperature_of(context, Plan((2, 2)))
    logarithms_RC, tokens_RC = arriving(scores_RV, hot_B, context.seeds_B, context.lengths_B, children)
    threads(2)
    again = arriving(scores_RV, hot_B, context.seeds_B, context.lengths_B, children)
    assert torch.equal(again[0], logarithms_RC) and torch.equal(again[1], tokens_RC)
    drawn_R = (context.temperature_B > 0).repeat_interleave(2)
    expected, known_RC = arriving_written_out(scores_RV, hot_B, context.seeds_B, context.lengths_B, children)
    assert torch.equal(tokens_RC[drawn_R], known_RC[drawn_R])
    torch.testing.assert_close(logarithms_RC[drawn_R], expected[drawn_R], rtol=1e-4, atol=1e-4)
    best = scores_RV[~drawn_R].topk(children)
    assert torch.equal(tokens_RC[~drawn_R], best.indices) and torch.equal(logarithms_RC[~drawn_R], best.values)
    for node in (0, 1):
        drawn_B1 = Draws(context, Plan((1,))).draw(scores_RV[node::2], 0, 1, 0)
        assert torch.equal(drawn_B1, tokens_RC[node::2, :1])


def test_what_never_arrives_comes_last_and_once() -> None:
    scores_RV, rows_B = torch.full((1, 6), -torch.inf), torch.tensor([3])
    scores_RV[0, [1, 4]] = 0.0
    for found in (arriving, arriving_written_out):
        logarithms_RC, tokens_RC = found(scores_RV, torch.ones(1), rows_B, rows_B, 4)
        assert sorted(tokens_RC[0, :2].tolist()) == [1, 4] and len(set(tokens_RC[0].tolist())) == 4
        assert logarithms_RC[0, :2].exp().sum() == pytest.approx(1.0) and (logarithms_RC[0, 2:] == -1e4).all()


def test_the_second_to_arrive_is_drawn_by_others_as_often_as_is_told() -> None:
    """Of scores that differ from the drafter's by noise of the same kind, each draws a token as often as is told."""
    generator, rows = torch.Generator().manual_seed(1), 4000
    scores_RV = 2 * torch.randn((rows, 20), generator=generator)
    seeds_R, zeros_R = torch.arange(rows), torch.zeros(rows, dtype=torch.int64)
    logarithms_RC, tokens_RC = arriving(scores_RV, torch.ones(rows), seeds_R, zeros_R, 2, mixed=False)
    times_RV = arrivals(torch.arange(20), seeds_R, zeros_R, Stream.TARGET)
    others_RV = scores_RV.double() - torch.empty((rows, 20)).exponential_(generator=generator).log()
    drawn_R1 = (others_RV.softmax(-1) / times_RV).argmax(-1, keepdim=True)
    for child in (0, 1):
        told = logarithms_RC[:, child].exp().double()
        seen = (tokens_RC[:, child : child + 1] == drawn_R1).double().mean()
        assert abs(seen - told.mean()) < 4 * (told * (1 - told)).sum().sqrt() / rows + 0.02, "eight are compared"


def test_what_does_not_belong_together_is_refused() -> None:
    rows_B, q_BMV = torch.tensor([1, 2]), torch.empty((2, 3, 9))
    scores_RV, hot_B = torch.zeros((4, 9)), torch.ones(2)
    assert ops.draw(scores_RV, hot_B, rows_B, rows_B, 3, 2, 1, q_BMV, 1).shape == (4, 2)
    for wrong in (scores_RV.double(), scores_RV[:3]):
        with pytest.raises(RuntimeError, match="draftsmith: scores have to be fp32"):
            ops.draw(wrong, hot_B, rows_B, rows_B, 3, 2, 1, q_BMV, 1)
    with pytest.raises(RuntimeError, match="draftsmith: a node cannot have 10 children"):
        ops.arrive(scores_RV, hot_B, rows_B, rows_B, 10)
    with pytest.raises(DraftsmithError, match="asks for the 10 best guesses, but the drafter scores 9 tokens"):
        arriving(scores_RV, hot_B, rows_B, rows_B, 10)
    with pytest.raises(RuntimeError, match="draftsmith: there is no room for what the guesses are drawn from"):
        ops.draw(scores_RV, hot_B, rows_B, rows_B, 3, 2, 1, q_BMV, 2)
