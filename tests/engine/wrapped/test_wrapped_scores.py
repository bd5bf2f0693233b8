"""A wrapped model returns the scores that transformers returns, and samples by them."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import (
    LogitNormalization,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import GenerateDecoderOnlyOutput

import draftsmith
from draftsmith.plan import NO_DRAFT
from draftsmith.types import SamplingParams
from tests.engine.wrapped.wrapped_toy import PAD, padded, pair, same
from tests.helpers.tiny import VOCABULARY, prompts, tiny_model

# ---- scores and logits


def check_outputs(own: Any, expected: Any, lengths: Sequence[int]) -> None:
    """Assert that two outputs have the same ids, and the same scores and logits as long as rows go on."""
    assert isinstance(own, GenerateDecoderOnlyOutput) and isinstance(expected, GenerateDecoderOnlyOutput)
    assert own.sequences.tolist() == expected.sequences.tolist()
    for mine, theirs in ((own.scores, expected.scores), (own.logits, expected.logits)):
        assert (mine is None) == (theirs is None)
        if mine is None:
            continue
        assert isinstance(mine, tuple) and len(mine) == len(theirs) == max(lengths)
        for n, (one_BV, other_BV) in enumerate(zip(mine, theirs, strict=True)):
            assert one_BV.shape == other_BV.shape and one_BV.dtype == other_BV.dtype
            for b, length in enumerate(lengths):
                if n < length:
                    torch.testing.assert_close(one_BV[b], other_BV[b], rtol=1e-5, atol=1e-5)
                else:
                    assert not one_BV[b].any()


@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.3}, {"renormalize_logits": True}])
@pytest.mark.parametrize("wanted", [("scores",), ("logits",), ("scores", "logits"), ()])
def test_greedy_scores_and_logits_are_those_of_transformers(settings: dict[str, Any], wanted: tuple[str, ...]):
    questions = prompts(4)
    model, fast = pair(questions)
    flags = {f"output_{name}": True for name in wanted} | {"return_dict_in_generate": True}
    plain = model.generate(**padded(questions), max_new_tokens=16, pad_token_id=PAD, **settings)
    end = plain[1, -8].item()
    rest = {"max_new_tokens": 16, "eos_token_id": end, "pad_token_id": PAD, **settings, **flags}
    own, expected = fast.generate(**padded(questions), **rest), model.generate(**padded(questions), **rest)
    new = expected.sequences[:, padded(questions)["input_ids"].shape[1] :].tolist()
    check_outputs(own, expected, [row.index(end) + 1 if end in row else len(row) for row in new])


def test_transition_scores_are_those_of_transformers():
    questions = prompts(3)
    model, fast = pair(questions)
    settings = {"max_new_tokens": 10, "return_dict_in_generate": True, "output_scores": True}
    found = []
    for one in (fast, model):
        out = one.generate(**padded(questions), **settings)
        assert isinstance(out, GenerateDecoderOnlyOutput)
        found.append(fast.model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)


def test_in_bf16_the_logits_are_those_that_chose_the_tokens():
    questions = prompts(3)
    fast = draftsmith.wrap(tiny_model(dtype=torch.bfloat16), "ngram:min_length=1")
    out = fast.generate(
        **padded(questions), max_new_tokens=20, return_dict_in_generate=True, output_scores=True, output_logits=True
    )
    assert isinstance(out, GenerateDecoderOnlyOutput) and out.scores is not None and out.logits is not None
    logits_BNV = torch.stack(out.logits, dim=1)
    assert logits_BNV.dtype == torch.float32 and fast.statistics.drafted > 0
    assert logits_BNV.argmax(dim=-1).tolist() == out.sequences[:, -20:].tolist()
    assert torch.equal(torch.stack(out.scores, dim=1), logits_BNV)


def test_scores_are_left_out_where_no_dictionary_is_returned():
    model, fast = pair(prompts(1))
    same(fast, model, torch.tensor(prompts(1)), max_new_tokens=4, output_scores=True, output_logits=True)


SAMPLED: list[tuple[dict[str, Any], list[Any]]] = [
    ({}, [TopKLogitsWarper(50)]),
    ({"top_k": 0}, []),
    ({"temperature": 0.7, "top_k": None}, [TemperatureLogitsWarper(0.7)]),
    ({"top_k": 0, "top_p": 0.8}, [TopPLogitsWarper(0.8)]),
    (
        {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2},
        [
            RepetitionPenaltyLogitsProcessor(1.2), TemperatureLogitsWarper(1.3), TopKLogitsWarper(12),
            TopPLogitsWarper(0.9), MinPLogitsWarper(0.02),
        ],
    ),
    ({"top_k": 0, "min_p": 0.1, "renormalize_logits": True}, [MinPLogitsWarper(0.1), LogitNormalization()]),
]


@pytest.mark.parametrize(("settings", "processors"), SAMPLED)
def test_sampled_scores_are_what_transformers_processors_give_along_the_text(
    settings: dict[str, Any], processors: list[Any]
):
    questions = prompts(2)
    model, fast = pair(questions)
    out = fast.generate(
        **padded(questions), do_sample=True, num_return_sequences=2, max_new_tokens=10, seed=3,
        return_dict_in_generate=True, output_scores=True, output_logits=True, **settings,
    )
    assert isinstance(out, GenerateDecoderOnlyOutput) and out.scores is not None and out.logits is not None
    width = padded(questions)["input_ids"].shape[1]
    for b, row in enumerate(out.sequences.tolist()):
        text = row[width - len(questions[b // 2]) :]
        logits_TV = model(torch.tensor([text])).logits[0].float()
        for n in range(10):
            ids_1T = torch.tensor([text[: n - 10]])
            raw_1V = logits_TV[n - 11].unsqueeze(0)
            scores_1V = LogitsProcessorList(processors)(ids_1T, raw_1V.clone())
            torch.testing.assert_close(out.logits[n][b : b + 1], raw_1V, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(out.scores[n][b : b + 1], scores_1V, rtol=1e-5, atol=1e-5)
            assert scores_1V[0, text[n - 10]].isfinite()


# ---- sampling


@pytest.mark.parametrize(("settings", "_"), SAMPLED)
def test_settings_reach_the_engine_as_they_are(settings: dict[str, Any], _: list[Any]):
    question = prompts(1)[0]
    _, fast = pair([question])
    out = fast.generate(torch.tensor([question]), do_sample=True, max_new_tokens=20, seed=11, **settings)
    rules = {"temperature": 1.0, "top_k": 50, **settings}
    rules.pop("renormalize_logits", None)
    params = SamplingParams(**rules | {"top_k": rules["top_k"] or 0}, max_tokens=20, seed=11)
    assert out[0, len(question) :].tolist() == fast.engine.generate([question], params, NO_DRAFT)[0].tokens


def test_draws_follow_torch_or_a_seed_and_rows_differ():
    question = torch.tensor(prompts(1))
    _, fast = pair(prompts(1))

    def draw(**settings: Any) -> list[list[int]]:
        settings = {"do_sample": True, "max_new_tokens": 12, "top_k": 0, "num_return_sequences": 3, **settings}
        return fast.generate(question, **settings).tolist()

    torch.manual_seed(5)
    first, second = draw(), draw()
    torch.manual_seed(5)
    assert draw() == first != second
    assert len({tuple(row) for row in first}) == 3
    assert draw(seed=9) == draw(seed=9) != draw(seed=10)
    # Equal prompts of one batch are continued each in its own way, too.
    twice = fast.generate(question.repeat(2, 1), do_sample=True, max_new_tokens=12, top_k=0, seed=1).tolist()
    assert twice[0] != twice[1]


def test_greedy_calls_leave_the_random_state_alone():
    _, fast = pair(prompts(1))
    before = torch.random.get_rng_state()
    fast.generate(torch.tensor(prompts(1)), max_new_tokens=5)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_copies_stand_beside_each_other_in_the_order_of_the_prompts():
    questions = prompts(2)
    _, fast = pair(questions)
    out = fast.generate(**padded(questions), do_sample=True, num_return_sequences=3, max_new_tokens=4)
    width = padded(questions)["input_ids"].shape[1]
    assert out.shape == (6, width + 4)
    assert out[:, :width].tolist() == padded(questions)["input_ids"].repeat_interleave(3, dim=0).tolist()


def test_sampled_tokens_come_as_often_as_transformers_scores_say():
    fast = draftsmith.wrap(tiny_model(), None, max_batch=64)
    out = fast.generate(
        torch.tensor(prompts(1)), do_sample=True, temperature=2.5, top_k=6, num_return_sequences=3000,
        max_new_tokens=1, seed=0, return_dict_in_generate=True, output_scores=True,
    )
    assert isinstance(out, GenerateDecoderOnlyOutput) and out.scores is not None
    p_V = out.scores[0][0].softmax(-1)
    seen_V = torch.bincount(out.sequences[:, -1], minlength=VOCABULARY)
    kept_V = p_V > 0
    assert int(kept_V.sum()) == 6 and int(seen_V[~kept_V].sum()) == 0
    # Chi-square with 5 degrees of freedom exceeds 20.5 once in a thousand times.
    expected_V = 3000 * p_V[kept_V]
    assert float(((seen_V[kept_V] - expected_V) ** 2 / expected_V).sum()) < 20.5
