"""Typical acceptance: what exactly stays, that it is lossy when sampling and exact when greedy, and that it says so."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from draftsmith.engine import Engine
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.types import LOSSY, UNUSED, Draft, SamplingParams, Statistics
from draftsmith.verify import (
    SamplingBatch,
    Stream,
    accept_deterministic,
    accept_greedy,
    accept_typical,
    probabilities,
    race,
)
from tests.helpers.oracle import oracle_for
from tests.helpers.tiny import greedy_reference, prompts, tiny_model, tiny_target
from tests.helpers.toy import p_value_of_texts, world

ALPHA = 1e-6
PAPER = partial(accept_typical, epsilon=0.09, delta=0.3)
TYPICAL = Plan((2, 2), acceptance="typical")


def one_node(p: list[float], guess: int) -> tuple[Tensor, Draft, Tensor, Tensor]:
    p_BMV = torch.tensor([[p, [1.0] + [0.0] * (len(p) - 1)]], dtype=torch.float64)
    zero_B = torch.zeros(1, dtype=torch.int64)
    return p_BMV, Draft(torch.tensor([[guess]]), torch.tensor([[-1]]), 1), zero_B, zero_B


@pytest.mark.parametrize(
    ("p", "guess", "stays"),
    [
        # Certain target, H = 0.325: 0.3 exp(-H) is 0.217, so epsilon = 0.09 rules.
        ([0.9, 0.1], 1, True),
        ([0.92, 0.08], 1, False),
        # Flat over 8 tokens, H = ln 8: the threshold is 0.3 / 8 = 0.0375, and 1/8 passes.
        ([0.125] * 8, 3, True),
        # H is about 2: the threshold is 0.3 exp(-H), about 0.04, and no longer 0.09.
        ([0.05, *[0.95 / 7] * 7], 0, True),
        ([0.03, *[0.97 / 7] * 7], 0, False),
        # Never what the target cannot say.
        ([0.5, 0.5, 0.0], 2, False),
    ],
)
def test_the_threshold(p: list[float], guess: int, stays: bool) -> None:
    entropy = -sum(x * math.log(x) for x in p if x)
    assert stays == (p[guess] > min(0.09, 0.3 * math.exp(-entropy)))
    assert PAPER(*one_node(p, guess)).counts_B.tolist() == [int(stays)]


def test_a_guess_at_the_threshold_does_not_stay() -> None:
    arguments = one_node([0.75, 0.25], 1)
    assert accept_typical(*arguments, epsilon=0.25, delta=1.0).counts_B.tolist() == [0]
    assert accept_typical(*arguments, epsilon=0.2499, delta=1.0).counts_B.tolist() == [1]


def test_the_longest_path_stays_and_the_first_among_equals() -> None:
    """Root → 0 → {1, 2}, 1 → 3, 4 → 5 → 6; everything is likely but what the row says."""
    parents_N = torch.tensor([-1, 0, 0, -1, 3, -1, 5, 6])
    tokens_N = torch.tensor([0, 1, 2, 1, 3, 4, 5, 6])
    p_BMV = torch.full((3, 9, 8), 1 / 8, dtype=torch.float64)
    refused = torch.tensor([0.0, *[1 / 7] * 7], dtype=torch.float64)
    p_BMV[1, 7] = refused.roll(6)  # node 6 (token 5) no longer has token 6 after it
    p_BMV[2, 0] = refused  # nor the root token 0
    p_BMV[2, 7] = refused.roll(6)
    parents_BN = parents_N.repeat(3, 1)
    seeds_B = torch.arange(3)
    found = PAPER(p_BMV, Draft(tokens_N.repeat(3, 1), parents_BN, 3), seeds_B, seeds_B)
    assert found.counts_B.tolist() == [3, 2, 2]
    assert [found.path_BD[row, :2].tolist() for row in range(3)] == [[6, 7], [1, 2], [4, 5]]
    parents_BN[:, 3:] = UNUSED
    padded = PAPER(p_BMV, Draft(tokens_N.repeat(3, 1), parents_BN, 3), seeds_B, seeds_B)
    assert padded.counts_B.tolist() == [2, 2, 0]


def guesses(rows: int) -> Tensor:
    return torch.randint(0, 6, (rows, 3), generator=torch.Generator().manual_seed(rows))


def test_the_last_token_is_the_targets_own_draw() -> None:
    p_BMV = torch.rand((500, 4, 6), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p_BMV = p_BMV / p_BMV.sum(-1, keepdim=True)
    draft = Draft(guesses(500), torch.tensor([[-1, 0, 1]]).expand(500, -1), 3)
    seeds_B = torch.arange(500)
    found = accept_typical(p_BMV, draft, seeds_B, 5 + seeds_B, epsilon=0.2, delta=1.0)
    own_B = race(p_BMV[seeds_B, found.counts_B], seeds_B, 5 + seeds_B + found.counts_B, Stream.TARGET)
    assert torch.equal(found.next_B, own_B) and found.counts_B.unique().tolist() == [0, 1, 2, 3]


def test_the_distribution_is_not_the_targets() -> None:
    """The point of the name: a tenth of the draws that exact rules pass with is plenty to tell."""
    assert p_value_of_texts(world(0), TYPICAL, PAPER, 100_000) < ALPHA
    assert p_value_of_texts(world(0), TYPICAL, accept_deterministic, 100_000) > ALPHA


def test_greedy_rows_are_exact_whatever_the_thresholds() -> None:
    logits_BMV = torch.randn((400, 4, 6), generator=torch.Generator().manual_seed(1))
    p_BMV = probabilities(logits_BMV, SamplingBatch.build([SamplingParams()] * 400, 6, "cpu"))
    draft = Draft(guesses(400), torch.tensor([[-1, 0, -1]]).expand(400, -1), 2)
    draft.tokens_BN[::2, 0] = logits_BMV[::2, 0].argmax(-1)
    seeds_B, greedy = torch.arange(400), accept_greedy(logits_BMV.argmax(-1), draft)
    for epsilon, delta in ((1e-9, 1e-9), (0.09, 0.3), (0.999, 1.0)):
        found = accept_typical(p_BMV, draft, seeds_B, seeds_B, epsilon, delta)
        assert torch.equal(found.counts_B, greedy.counts_B) and torch.equal(found.next_B, greedy.next_B)


def test_the_engine_keeps_more_says_lossy_and_leaves_greedy_rows_alone() -> None:
    questions = prompts(4)
    oracle = oracle_for(tiny_model(), questions, error_rate=0.1)
    engine = Engine(tiny_target(), oracle)
    params = [SamplingParams(max_tokens=30, temperature=0.0 if row == 0 else 1.0, seed=row) for row in range(4)]
    exact = engine.generate(questions, params, Plan((2, 2)))
    typical = engine.generate(questions, params, TYPICAL)
    assert typical[0].tokens == greedy_reference(tiny_model(), questions[0], 30)
    assert [c.statistics.lossless for c in typical] == [True, False, False, False]
    assert all(c.statistics.lossless for c in exact)
    assert [c.tokens for c in typical[1:]] != [c.tokens for c in exact[1:]]
    assert sum(c.statistics.accepted for c in typical[1:]) > sum(c.statistics.accepted for c in exact[1:])
    total = Statistics()
    for completion in typical:
        total += completion.statistics
    assert (total.fidelity, exact[1].statistics.fidelity) == (LOSSY, "lossless")
    plain = engine.generate(questions, params, NO_DRAFT)
    assert [c.tokens for c in exact] == [c.tokens for c in plain]


def test_the_thresholds_of_the_plan_are_those_in_force() -> None:
    [question] = prompts(1)
    engine = Engine(tiny_target(), oracle_for(tiny_model(), [question], error_rate=0.0))
    params = SamplingParams(max_tokens=40, temperature=1.5, seed=2)
    kept = [
        engine.generate([question], params, Plan((2, 2), acceptance="typical", epsilon=epsilon, delta=delta))[0]
        .statistics.accepted
        for epsilon, delta in ((0.99, 1.0), (0.01, 1.0), (0.99, 0.01))
    ]
    assert kept[0] < min(kept[1:])
