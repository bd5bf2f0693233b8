"""Text of targets on the native kernels is the same whatever the batch, the draft and the neighbours."""

import pytest
import torch

from draftsmith.drafters.heads.mlp import MLPSpeculator
from draftsmith.drafters.heads.mlp_config import MLPConfig
from draftsmith.engine import Engine
from draftsmith.native import LIBRARY, why_missing
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.targets.backend import NativeForward
from draftsmith.types import SamplingParams
from tests.helpers.native_text import CHAIN, NEW_TOKENS, assert_text_keeps, decode, tokens_of
from tests.helpers.native_toy import native
from tests.helpers.tiny import VOCABULARY, WIDTH, packer, prompts

if not LIBRARY:
    pytest.skip(why_missing(), allow_module_level=True)


def random_speculator() -> MLPSpeculator:
    torch.manual_seed(3)
    config = MLPConfig(hidden_size=WIDTH, vocab_size=VOCABULARY, n_predict=4)
    made = MLPSpeculator(config).bfloat16().requires_grad_(False)
    made.pack(packer())
    return made


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "qwen2 with windows above", "llama with biases"])
def test_greedy_text_is_that_of_plain_decoding_whatever_the_batch_and_draft(name: str):
    assert isinstance(native(name).backend, NativeForward)
    assert_text_keeps(native(name))


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_sampled_text_of_a_seed_is_that_of_plain_decoding(name: str):
    assert_text_keeps(native(name), temperature=0.9)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_a_native_speculator_changes_nothing(name: str):
    target, questions, speculator = native(name), prompts(8, seed=11), random_speculator()
    alone = [decode(target, None, NO_DRAFT, [question])[0].tokens for question in questions]
    for size in (1, 3, 8):
        for plan in (CHAIN, Plan((4, 2, 1), paths=4), Plan((3, 2)), Plan((3, 3, 2), paths=6, beam=2),
                     Plan((2, 2), sampled=True)):
            assert tokens_of(decode(target, speculator, plan, questions[:size])) == alone[:size]


def test_rows_join_and_leave_without_touching_each_other():
    target, questions = native("mistral"), prompts(9, seed=5)
    params = [SamplingParams(max_tokens=1 + (7 * i) % NEW_TOKENS) for i in range(9)]
    alone = [
        Engine(target).generate([question], rules)[0].tokens for question, rules in zip(questions, params, strict=True)
    ]
    speculator = random_speculator()
    for max_batch in (2, 5):
        engine = Engine(target, speculator, plan=Plan((4, 2, 1), paths=4), max_batch=max_batch)
        assert tokens_of(engine.generate(questions, params)) == alone
