"""Sampling rules against transformers' own processors, and penalties of a tree against one path at a time."""

import random

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftsmith.types import UNUSED, DraftsmithError, SamplingParams
from draftsmith.verify import History, SamplingBatch, probabilities, shape_logits, tree_tables

V = 40
RULES = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1.7, top_k=5),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=0.8, top_k=1000),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=2.0, top_p=0.5),
    SamplingParams(temperature=1.0, top_p=1e-6),
    SamplingParams(temperature=1.0, min_p=0.1),
    SamplingParams(temperature=0.7, min_p=1.0),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.8, min_p=0.05),
    SamplingParams(temperature=1.3, top_k=10, top_p=0.95),
]


def theirs(logits_MV: Tensor, rule: SamplingParams) -> Tensor:
    """What transformers samples from, with the processors in the order in which it applies them."""
    processors: list[LogitsProcessor] = [TemperatureLogitsWarper(rule.temperature)]
    if rule.top_k:
        processors.append(TopKLogitsWarper(rule.top_k))
    if rule.top_p < 1:
        processors.append(TopPLogitsWarper(rule.top_p))
    if rule.min_p > 0:
        processors.append(MinPLogitsWarper(rule.min_p))
    for processor in processors:
        logits_MV = processor(torch.zeros((len(logits_MV), 1), dtype=torch.int64), logits_MV)
    return logits_MV.softmax(-1)


def random_logits(rows: int, nodes: int, dtype: torch.dtype, spread: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return (spread * torch.randn((rows, nodes, V), generator=generator, dtype=torch.float64)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_filters_are_those_of_transformers(dtype: torch.dtype) -> None:
    """All rules in one batch, each row with its own; the same tokens survive, and with the same probability."""
    logits_BMV = random_logits(len(RULES), 50, dtype)
    p_BMV = probabilities(logits_BMV, SamplingBatch.build(RULES, V, "cpu"))
    assert p_BMV.dtype == torch.float64
    for row, rule in enumerate(RULES):
        expected_MV = theirs(logits_BMV[row], rule)
        assert torch.equal(p_BMV[row] > 0, expected_MV > 0), rule
        torch.testing.assert_close(p_BMV[row], expected_MV.double(), rtol=2e-6 if dtype == torch.float32 else 1e-12,
                                   atol=0)
        alone_MV = probabilities(logits_BMV[row : row + 1], SamplingBatch.build([rule], V, "cpu"))[0]
        torch.testing.assert_close(p_BMV[row], alone_MV, rtol=1e-12, atol=0)


def test_probabilities_of_bf16_logits_sum_to_one() -> None:
    logits_BMV = random_logits(len(RULES), 20, torch.bfloat16)
    p_BMV = probabilities(logits_BMV, SamplingBatch.build(RULES, V, "cpu"))
    torch.testing.assert_close(p_BMV.sum(-1), torch.ones((len(RULES), 20), dtype=torch.float64), rtol=0, atol=1e-14)


def test_top_k_keeps_every_token_equal_to_the_last() -> None:
    logits = torch.tensor([[[3.0, 2.0, 2.0, 2.0, 1.0]]])
    rule = SamplingParams(temperature=1.0, top_k=2)
    p = probabilities(logits, SamplingBatch.build([rule], 5, "cpu"))[0]
    assert (p > 0).tolist() == [[True, True, True, True, False]]
    torch.testing.assert_close(p, theirs(logits[0], rule).double(), rtol=1e-6, atol=0)


def test_greedy_rows_are_one_hot_at_the_lowest_best_token() -> None:
    logits = torch.tensor([[[1.0, 5.0, 5.0, 0.0]], [[1.0, 5.0, 5.0, 0.0]]])
    greedy = SamplingParams(top_k=2, top_p=0.1, min_p=0.9)
    alone = SamplingBatch.build([greedy, greedy], 4, "cpu")
    assert alone.all_greedy
    assert probabilities(logits, alone).tolist() == [[[0, 1, 0, 0]]] * 2
    mixed = SamplingBatch.build([greedy, SamplingParams(temperature=1.0)], 4, "cpu")
    p_BMV = probabilities(logits, mixed)
    assert p_BMV[0].tolist() == [[0, 1, 0, 0]]
    torch.testing.assert_close(p_BMV[1], logits[1].double().softmax(-1), rtol=1e-6, atol=0)


def test_flags_say_what_a_batch_needs() -> None:
    plain = SamplingBatch.build([SamplingParams()], V, "cpu")
    assert plain.all_greedy and not (plain.needs_history or plain.needs_shaping)
    both = SamplingBatch.build([SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9, frequency_penalty=1)], V,
                               "cpu")
    assert not both.all_greedy and both.needs_history and both.needs_shaping
    biased = SamplingBatch.build([SamplingParams(logit_bias={3: 1.0})], V, "cpu")
    assert biased.needs_shaping and not biased.needs_history


@pytest.mark.parametrize("token", [-1, V])
def test_a_bias_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(DraftsmithError, match=f"logit_bias names token {token}, but .* 0 to {V - 1}"):
        SamplingBatch.build([SamplingParams(), SamplingParams(logit_bias={token: 1.0})], V, "cpu")


def path_of(parents: list[int], node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def one_path(logits_V: Tensor, rule: SamplingParams, prompt: list[int], output: list[int]) -> Tensor:
    """The rules of one node in plain Python, repetition by transformers."""
    logits_V = logits_V.clone()
    for token, value in rule.logit_bias.items():
        logits_V[token] += value
    read = torch.tensor([prompt + output])
    logits_V = RepetitionPenaltyLogitsProcessor(float(rule.repetition_penalty))(read, logits_V.unsqueeze(0))[0]
    for token in range(V):
        count = output.count(token)
        logits_V[token] -= rule.frequency_penalty * count + rule.presence_penalty * (count > 0)
    return logits_V


def test_every_node_sees_the_penalties_of_its_own_path() -> None:
    rules = [
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(repetition_penalty=0.7, presence_penalty=-0.5),
        SamplingParams(presence_penalty=0.9),
        SamplingParams(frequency_penalty=0.4, logit_bias={0: 5.0, 7: -3.5}),
        SamplingParams(repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.3, logit_bias={V - 1: 1.0}),
        SamplingParams(),
    ]
    generator = random.Random(0)
    trees = [
        [-1, 0, 1, 0, -1, 4, 4, UNUSED],
        [-1, -1, -1, 0, 1, 2, 3, 6],
        [-1, 0, 1, 2, 3, 4, 5, 6],
        [-1, 0, -1, 2, UNUSED, UNUSED, UNUSED, UNUSED],
        [-1, 0, 0, 0, 1, 1, 4, 6],
        [-1, -1, 0, 1, 2, 3, 4, 5],
    ]
    # Few ids, so that tokens repeat within paths and between prompt, output and draft.
    prompts = [[generator.randrange(12) for _ in range(4)] for _ in rules]
    outputs = [[generator.randrange(12) for _ in range(1 + row)] for row in range(len(rules))]
    tokens = [[generator.randrange(12) for _ in range(8)] for _ in rules]
    logits_BMV = random_logits(len(rules), 9, torch.float32)
    visible_BMM, _ = tree_tables(torch.tensor(trees), 8)
    batch = SamplingBatch.build(rules, V, "cpu")
    history = History.of(prompts, outputs, V, "cpu")
    shaped_BMV = shape_logits(logits_BMV, batch, history, torch.tensor(tokens), visible_BMM)
    for row, rule in enumerate(rules):
        for node in range(-1, 8):
            if node >= 0 and trees[row][node] == UNUSED:
                continue
            written = outputs[row] + [tokens[row][n] for n in path_of(trees[row], node)]
            expected_V = one_path(logits_BMV[row, node + 1], rule, prompts[row], written)
            torch.testing.assert_close(shaped_BMV[row, node + 1], expected_V, rtol=1e-5, atol=1e-6)
    assert torch.equal(shaped_BMV[5], logits_BMV[5])


def test_without_rules_the_logits_pass_untouched() -> None:
    logits_BMV = random_logits(1, 2, torch.bfloat16)
    batch = SamplingBatch.build([SamplingParams()], V, "cpu")
    nothing = torch.zeros((1, 1), dtype=torch.int64)
    assert shape_logits(logits_BMV, batch, None, nothing, torch.ones((1, 2, 2), dtype=torch.bool)) is logits_BMV


def test_committed_tokens_count_up_to_each_rows_length() -> None:
    history = History.of([[1, 2, 99], []], [[3], []], 5, "cpu")
    history.commit(torch.tensor([[3, 4, 1], [0, 2, 2]]), torch.tensor([2, 3]))
    assert history.prompt_seen_RV.int().tolist() == [[0, 1, 1, 0, 0], [0, 0, 0, 0, 0]]
    assert history.output_counts_RV.tolist() == [[0, 0, 0, 2, 1], [1, 0, 2, 0, 0]]
    history.commit(torch.tensor([[7, -1], [4, 9]]), torch.tensor([0, 1]))
    assert history.output_counts_RV.tolist() == [[0, 0, 0, 2, 1], [1, 0, 2, 0, 1]]
