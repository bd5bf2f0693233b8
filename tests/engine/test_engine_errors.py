"""What the engine refuses, in one sentence that names the value, before it has touched any state."""

from collections.abc import Callable

import pytest
import torch

from draftsmith.engine import Engine
from draftsmith.plan import Plan
from draftsmith.types import DraftsmithError, SamplingParams
from tests.helpers.tiny import CONTEXT, VOCABULARY, prompts, tiny_target

ONE = SamplingParams(max_tokens=2)


@pytest.mark.parametrize(
    ("given", "params", "message"),
    [
        ([], ONE, "empty"),
        ("a text", ONE, "list of prompts"),
        ([[]], ONE, "prompt 0 is empty"),
        ([[1], []], ONE, "prompt 1 is empty"),
        ([[1, VOCABULARY]], ONE, f"prompt 0.*{VOCABULARY}"),
        ([[-1]], ONE, "prompt 0.*-1"),
        ([[1] * CONTEXT], ONE, f"{CONTEXT} tokens"),
        ([[1]], SamplingParams(max_tokens=CONTEXT), f"{CONTEXT - 1}"),
        ([[1]], [ONE, ONE], "2 sampling parameters for 1 prompts"),
        (["a text"], ONE, "tokenizer"),
        ([[1]], SamplingParams(max_tokens=2, stop=("x",)), "tokenizer"),
        ([[1]], SamplingParams(max_tokens=2, logit_bias={VOCABULARY: 1.0}), f"{VOCABULARY}"),
        ([[1]], SamplingParams(max_tokens=2, logit_bias={-1: 1.0}), "-1"),
        ([[1]], SamplingParams(max_tokens=2, logprobs=VOCABULARY + 1), f"{VOCABULARY + 1}"),
    ],
)
def test_a_bad_request_is_one_sentence_and_the_next_works(given, params, message: str):
    engine = Engine(tiny_target())
    with pytest.raises(DraftsmithError, match=message) as error:
        engine.generate(given, params)
    assert "\n" not in str(error.value)
    assert len(engine.generate([[1]], ONE)[0].tokens) == 2


def test_a_bad_stream_fails_like_a_bad_call():
    with pytest.raises(DraftsmithError, match="empty"):
        list(Engine(tiny_target()).stream([], ONE))


def test_a_plan_with_too_many_nodes_is_refused():
    with pytest.raises(DraftsmithError, match="1110 nodes"):
        Engine(tiny_target()).generate([[1]], ONE, plan=Plan((10, 10, 10)))


def test_no_threads_are_refused_and_a_number_of_them_is_set(threads: Callable[[int], None]):
    with pytest.raises(DraftsmithError, match="threads is 0; use at least 1"):
        Engine(tiny_target(), threads=0)
    texts = []
    for count in (3, 1):
        engine = Engine(tiny_target(), threads=count)
        assert torch.get_num_threads() == count
        texts.append(engine.generate([[1, 2, 3]], ONE)[0].tokens)
    threads(2)
    Engine(tiny_target())
    assert torch.get_num_threads() == 2 and texts[0] == texts[1]


def test_a_batch_of_none_is_refused():
    with pytest.raises(DraftsmithError, match="max_batch is 0"):
        Engine(tiny_target(), max_batch=0)


def test_a_call_while_another_streams_changes_neither():
    engine = Engine(tiny_target(), max_batch=2)
    params = SamplingParams(max_tokens=9)
    expected = [completion.tokens for completion in engine.generate(prompts(3), params)]
    stream = engine.stream(prompts(2), params)
    streamed: list[list[int]] = [[], []]
    for _ in range(3):
        chunk = next(stream)
        streamed[chunk.index] += chunk.tokens
    assert engine.generate(prompts(3)[2:], params)[0].tokens == expected[2]
    for chunk in stream:
        streamed[chunk.index] += chunk.tokens
    assert streamed == expected[:2]
    assert not engine.core.has_work


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", float("nan")),
        ("repetition_penalty", 0.0),
        ("presence_penalty", float("inf")),
        ("frequency_penalty", float("nan")),
        ("logit_bias", {3: float("nan")}),
        ("max_tokens", 0),
        ("stop", ("",)),
        ("seed", -1),
        ("seed", 2**63),
        ("n", 0),
        ("logprobs", -1),
    ],
)
def test_sampling_parameters_are_checked_and_named(field: str, value):
    with pytest.raises(DraftsmithError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("fields", [
    {"branching": (2,), "paths": 0}, {"nodes": -1}, {"beam": 0}, {"factor": -0.1}, {"factor": float("nan")},
    {"factor": float("inf")},
])
def test_plans_are_checked(fields: dict):
    with pytest.raises(DraftsmithError, match=list(fields)[-1]):
        Plan(**fields)


def test_a_depth_without_children_is_told_as_it_is_typed():
    with pytest.raises(DraftsmithError, match="the plan 2,0 has a depth without children"):
        Plan((2, 0))


def test_a_sampled_plan_cannot_be_pruned():
    with pytest.raises(DraftsmithError, match="sampled"):
        Plan((2, 2), paths=2, sampled=True)
