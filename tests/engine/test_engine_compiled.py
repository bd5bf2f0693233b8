"""The engine with its step recorded: rows padded to powers of two, one graph a shape, the same text."""

import pytest
import torch

from draftsmith.drafters.heads.mlp import MLPSpeculator
from draftsmith.drafters.heads.mlp_config import MLPConfig
from draftsmith.engine import Engine
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.targets import Target
from draftsmith.types import SamplingParams
from tests.helpers.tiny import VOCABULARY, WIDTH, greedy_reference, prompts, tiny_model, tiny_target


def test_a_recorded_step_gives_the_same_text():
    questions = prompts(5)
    config = MLPConfig(hidden_size=WIDTH, vocab_size=VOCABULARY, inner_dim=16, top_k_tokens_per_head=(3, 2, 2))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drafter = MLPSpeculator(config).eval()
    engine = Engine(tiny_target("mistral"), drafter, max_batch=3, compile="trace")
    lengths = (20, 7, 20, 12, 3)
    found = engine.generate(questions, [SamplingParams(max_tokens=n) for n in lengths])
    for question, completion, length in zip(questions, found, lengths, strict=True):
        assert completion.tokens == greedy_reference(tiny_model("mistral"), question, length)
    params = [SamplingParams(max_tokens=9, temperature=0.9, top_p=0.9, presence_penalty=1, seed=i) for i in range(5)]
    plain = Engine(tiny_target("mistral")).generate(questions, params)
    assert [c.tokens for c in engine.generate(questions, params)] == [c.tokens for c in plain]


@pytest.mark.filterwarnings("ignore")  # what PyTorch's compiler says to itself
def test_generated_code_gives_the_same_text():
    """Level full, plainly and with a chain, at the one batch size that keeps this test short."""
    config = MLPConfig(hidden_size=WIDTH, vocab_size=VOCABULARY, n_predict=2, inner_dim=16)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drafter = MLPSpeculator(config).eval()
    engine = Engine(tiny_target(), drafter, max_batch=1, compile="full")
    assert engine.compiled == "full"
    [question] = prompts(1)
    expected = greedy_reference(tiny_model(), question, 16)
    for plan in (NO_DRAFT, Plan((1, 1))):
        [found] = engine.generate([question], SamplingParams(max_tokens=16), plan)
        assert found.tokens == expected


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("drafting", [False, True], ids=["plain", "drafted"])
def test_native_targets_take_every_level(architecture: str, drafting: bool):
    """Native code has nothing to compile, and what is around it is still compiled."""
    target = Target(tiny_model(architecture, dtype=torch.bfloat16))
    config = MLPConfig(hidden_size=WIDTH, vocab_size=VOCABULARY, n_predict=2, inner_dim=16)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drafter = MLPSpeculator(config).bfloat16().eval() if drafting else None
    questions = prompts(3)
    expected = [c.tokens for c in Engine(target).generate(questions, SamplingParams(max_tokens=9))]
    engine = Engine(target, drafter, compile="trace", plan=Plan((2, 1)) if drafting else None)
    assert [c.tokens for c in engine.generate(questions, SamplingParams(max_tokens=9))] == expected
