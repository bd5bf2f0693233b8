"""Targets quantised to int8 and int4 on the native kernels, against what they were made of: tiny random models.

B rows, T tokens, V vocabulary.
"""

import copy

import pytest
import torch

from draftsmith.native import LIBRARY, why_missing
from draftsmith.native.layers import LAYERS, PackedExperts, PackedLinear
from draftsmith.types import Quantization
from tests.helpers.native_reading import read_trees
from tests.helpers.native_text import assert_text_keeps
from tests.helpers.native_toy import EVERYTHING, WHOLE, assert_close, held, model, native, plain, quantised
from tests.helpers.tiny import prompts

if not LIBRARY:
    pytest.skip(why_missing(), allow_module_level=True)


@pytest.mark.parametrize("quantize", WHOLE)
@pytest.mark.parametrize("name", EVERYTHING)
def test_a_quantised_model_says_nearly_what_the_model_says(name: str, quantize: Quantization):
    """Rows and int8 weights are rounded by 1/254 of their largest, 0.01 in the root mean square for one of thrice it.

    Two or three layers of seven products add up to some 0.06, and sharp attention enlarges that. Weights in 4 bits are
    off by 0.074; what the model then says is held against the model with these weights, below.
    """
    target = quantised(name, quantize)
    assert any(isinstance(part, LAYERS[quantize]) for part in target.model.modules())
    for ours, theirs in zip(read_trees(target, (-1, 0)), read_trees(plain(name), (-1, 0)), strict=True):
        assert_close(ours, theirs, bound=0.2 if quantize == "int8" else 0.8)


@pytest.mark.parametrize("quantize", WHOLE)
@pytest.mark.parametrize("name", EVERYTHING)
def test_a_quantised_model_keeps_names_and_shapes(name: str, quantize: Quantization):
    before, after = model(name).state_dict(), quantised(name, quantize).model.state_dict()
    assert {key: (t.shape, t.dtype) for key, t in after.items()} == {
        key: (t.shape, t.dtype) for key, t in before.items()
    }
    for key, tensor in before.items():
        # Half a step of the output's own scale, and the rounding of the step to bf16; in 4 bits a step is 2/15, and
        # ends may be off by more than one.
        steps = 0.5 / 127 if quantize == "int8" else 2 * 2 / 15
        assert ((after[key] - tensor).float().abs() <= tensor.float().abs().max() * (steps + 2**-8)).all(), key


@pytest.mark.parametrize("quantize", WHOLE)
@pytest.mark.parametrize("name", ["llama", "llama, tied", "gpt2", "qwen2"])
def test_a_quantised_model_is_widened_to_what_it_says(name: str, quantize: Quantization):
    wide, tokens_BT = quantised(name, quantize).widened(), torch.tensor(prompts(2, shortest=12, longest=12))
    _, expected_BTV = wide.encode(tokens_BT, logits=True)
    _, logits_BTV = quantised(name, quantize).encode(tokens_BT, logits=True)
    assert expected_BTV is not None and logits_BTV is not None
    assert_close(logits_BTV, expected_BTV.bfloat16(), bound=0.1)


@pytest.mark.parametrize("quantize", WHOLE)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_most_rows_of_a_quantised_mixture_are_what_it_is_widened_to(name: str, quantize: Quantization):
    """Whole numbers may send a row to another expert, so a few may be far off; the median is not."""
    wide, tokens_BT = quantised(name, quantize).widened(), torch.tensor(prompts(2, shortest=12, longest=12))
    _, expected_BTV = wide.encode(tokens_BT, logits=True)
    _, logits_BTV = quantised(name, quantize).encode(tokens_BT, logits=True)
    assert expected_BTV is not None and logits_BTV is not None
    error_BT = (logits_BTV - expected_BTV).float().square().mean(-1).sqrt()
    assert (error_BT.median() / expected_BTV.float().square().mean().sqrt()).item() < 0.06


@pytest.mark.parametrize("quantize", WHOLE)
@pytest.mark.parametrize("name", EVERYTHING)
def test_all_products_of_a_quantised_model_are_in_whole_numbers(name: str, quantize: Quantization):
    """All but a head that is one with an embedding which keeps its table."""
    parts = list(quantised(name, quantize).model.modules())
    in_bf16 = [part for part in parts if isinstance(part, PackedLinear)]
    assert len(in_bf16) == (name == "gemma3")
    assert all(part.quantize == quantize for part in parts if isinstance(part, PackedExperts))
    assert any(isinstance(part, PackedExperts) for part in parts) == (name in ("mixtral", "qwen3_moe"))


@pytest.mark.parametrize("quantize", WHOLE)
@pytest.mark.parametrize("name", ["llama", "llama, tied", "qwen3", "mistral"])
def test_greedy_text_of_a_quantised_model_is_that_of_its_plain_decoding(name: str, quantize: Quantization):
    assert_text_keeps(quantised(name, quantize))


@pytest.mark.parametrize("quantize", WHOLE)
@pytest.mark.parametrize("name", ["llama", "llama, tied", "gpt2", "qwen2", "mixtral"])
def test_a_quantised_model_is_smaller(name: str, quantize: Quantization):
    fresh = model(name)
    before = held(fresh)
    assert held(quantised(name, quantize).model) < before
    assert held(copy.deepcopy(native(name).model)) > held(quantised(name, quantize).model)
