"""Targets made larger: what they say, and what a speculator guesses for them, stays as it was."""

import json
import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.drafters.heads.mlp import MLPSpeculator
from draftsmith.drafters.heads.mlp_config import MLPConfig
from draftsmith.drafters.heads.mlp_padding import pad_speculator
from draftsmith.drafters.lookup.ngram import NgramDrafter
from draftsmith.drafters.lookup.ngram_config import NgramConfig
from draftsmith.drafters.registry import load_drafter
from draftsmith.engine import Engine
from draftsmith.evaluation.measuring.fastest import fastest_plan
from draftsmith.evaluation.padding import Padding, pad_target, padded_target
from draftsmith.native import LIBRARY
from draftsmith.plan import Plan
from draftsmith.targets import Target
from draftsmith.types import Context, Draft, DraftsmithError, SamplingParams
from tests.helpers.tiny import TOKENIZER_EOS, TOKENIZER_SIZE, prompts, save_tiny_target, tiny_tokenizer

LARGER = Padding(times=4, inner=96, layers=5)
CHAIN = Plan((1, 1, 1))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the folders of a small target and of the larger one, each with a speculator inside."""
    folder = tmp_path_factory.mktemp("padded")
    small, large = folder / "small", folder / "large"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=TOKENIZER_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.4,
                tie_word_embeddings=True, bos_token_id=None, eos_token_id=TOKENIZER_EOS, pad_token_id=None,
            )
        )
        model.model.norm.weight.data.normal_(1, 0.2)
        model.bfloat16().save_pretrained(small)
    tiny_tokenizer().save_pretrained(small)
    target = Target.from_pretrained(small, dtype="bf16")
    torch.manual_seed(0)
    config = MLPConfig(hidden_size=32, vocab_size=TOKENIZER_SIZE, n_predict=3, tie_weights=True, inner_dim=48)
    MLPSpeculator(config).bfloat16().save_pretrained(small / "speculator", target.facts())
    pad_target(small, large, LARGER)
    pad_speculator(small / "speculator", large / "speculator", LARGER.times)
    return small, large


def both(folders: tuple[Path, Path], dtype: str) -> list[Target]:
    return [Target.from_pretrained(folder, dtype=dtype) for folder in folders]


QUESTIONS = prompts(6, below=TOKENIZER_SIZE)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_padded_target_has_the_logits_and_states_of_the_small_one(folders: tuple[Path, Path], dtype: str):
    small, large = both(folders, dtype)
    assert (large.hidden_size, large.layers, large.vocab_size) == (128, 5, small.vocab_size)
    assert large.weights > 10 * small.weights and large.eos_token_ids == small.eos_token_ids
    for question in QUESTIONS:
        tokens_1T = torch.tensor([question])
        (states, logits), (wide, others) = (target.encode(tokens_1T, logits=True) for target in (small, large))
        assert logits is not None and others is not None and not wide[..., 32:].any() and states.any()
        if dtype == "bf16" and LIBRARY:  # every sum meets the same numbers in the same order, and then zeros
            assert torch.equal(logits, others) and torch.equal(states, wide[..., :32])
        else:
            torch.testing.assert_close(others, logits, atol=1e-4 if dtype == "fp32" else 0.1, rtol=1e-2)


@pytest.mark.skipif(not LIBRARY, reason="bf16 text has ties without the native kernels")
@pytest.mark.parametrize("drafter", ["speculator", "int4-self", "int8-self", "early-exit"])
def test_a_padded_target_writes_the_same_and_accepts_as_much(folders: tuple[Path, Path], drafter: str):
    """Plain and drafted; of copies in fewer bits too, whose rows and groups are rounded as the small ones."""
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    found = []
    for folder, target in zip(folders, both(folders, "bf16"), strict=True):
        half = (target.layers + 1) // 2
        names = {"speculator": str(folder / "speculator"), "early-exit": f"early-exit:layers={half}"}
        engine = Engine(target, load_drafter(names.get(drafter, drafter), target), max_batch=4)
        plain, drafted = engine.generate(QUESTIONS, params, Plan()), engine.generate(QUESTIONS, params, CHAIN)
        assert [one.tokens for one in drafted] == [one.tokens for one in plain]
        found.append(([one.tokens for one in plain], [one.accepted_lengths for one in drafted]))
    assert found[0] == found[1]
    assert drafter == "speculator" or sum(map(sum, found[0][1])) > 0


def test_a_speculator_that_normalises_what_it_reads_is_padded_too(tmp_path: Path):
    config = MLPConfig(hidden_size=32, vocab_size=96, n_predict=2, scale_input=True)
    torch.manual_seed(0)
    speculator = MLPSpeculator(config)
    small = Target.from_pretrained(save_tiny_target(tmp_path / "small"), native=False)
    speculator.save_pretrained(tmp_path / "from", small.facts())
    pad_speculator(tmp_path / "from", tmp_path / "to", 4)
    padded = MLPSpeculator.from_pretrained(tmp_path / "to")
    assert padded.config.width == 32 and padded.config.hidden_size == 128
    state_RF = torch.randn(5, 32)
    wide_RF = torch.nn.functional.pad(state_RF, (0, 96))
    tokens_R = torch.arange(5)
    expected = speculator.stage(0, speculator.start(state_RF), tokens_R)
    torch.testing.assert_close(padded.stage(0, padded.start(wide_RF), tokens_R), expected, atol=1e-4, rtol=1e-4)


def test_what_cannot_be_padded_is_refused_and_nothing_is_written(folders: tuple[Path, Path], tmp_path: Path):
    small, _ = folders
    for padding, said in (
        (Padding(2, 96, 5), "2 times as wide exactly; choose 1, 4"),
        (Padding(4, 40, 5), "intermediate_size 64, more than 40"),
        (Padding(4, 96, 1), "num_hidden_layers 2, more than 1"),
    ):
        with pytest.raises(DraftsmithError, match=said):
            pad_target(small, tmp_path / "new", padding)
    other = save_tiny_target(tmp_path / "other", "qwen3")
    with pytest.raises(DraftsmithError, match="is no Llama without biases"):
        pad_target(other, tmp_path / "new", LARGER)
    with pytest.raises(DraftsmithError, match="is no MLP speculator with tables of its own"):
        pad_speculator(small, tmp_path / "new", 4)
    with pytest.raises(DraftsmithError, match="is there already"):
        pad_target(small, other, LARGER)
    assert not (tmp_path / "new").exists() and json.loads((other / "config.json").read_text())["model_type"] == "qwen3"


def test_a_padded_target_in_memory_is_the_one_that_is_written(folders: tuple[Path, Path]):
    written, held = Target.from_pretrained(folders[1], dtype="bf16"), padded_target(folders[0], LARGER, "held")
    tokens_BT = torch.arange(3, 15).view(1, -1)
    assert held.weights_hash == written.weights_hash and held.name == "held"
    for one, other in zip(held.encode(tokens_BT, logits=True), written.encode(tokens_BT, logits=True), strict=True):
        assert one is not None and other is not None and torch.equal(one, other)


class SlowWithThree(NgramDrafter):
    """Takes long over chains of three."""

    def propose(self, context: Context, plan: Plan) -> Draft:
        time.sleep(0.06 if plan.depth == 3 else 0)
        return super().propose(context, plan)


def test_the_plan_that_takes_least_time_is_found(folders: tuple[Path, Path]):
    target = Target.from_pretrained(folders[0], dtype="fp32")
    engine = Engine(target, SlowWithThree(NgramConfig()), max_batch=1)
    plans = [Plan((1,) * length) for length in (3, 1)]
    assert fastest_plan(engine, plans, QUESTIONS[:2], 8) == plans[1]
