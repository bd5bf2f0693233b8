"""What is wrong with the files of a target is one sentence that names it and says what to do."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.targets import Target
from draftsmith.types import DraftsmithError
from tests.helpers.tiny import save_tiny_target, tiny_model

ROPE = {"rope_type": "spiral", "rope_theta": 10000.0}
OWN_CODE = {"AutoConfig": "configuration_odd.OddConfig", "AutoModelForCausalLM": "modeling_odd.OddModel"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def changed(saved: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return what makes a copy with another object in one of its JSON files."""

    def change(name: str = "config.json", **fields: Any) -> Path:
        folder = tmp_path / "changed"
        shutil.copytree(saved, folder)
        config = json.loads((folder / name).read_text()) | fields
        (folder / name).write_text(json.dumps(config))
        return folder

    return change


def refused(folder: Path) -> str:
    """Return the one sentence that loading a target ends with."""
    with pytest.raises(DraftsmithError) as error:
        Target.from_pretrained(folder, dtype="fp32", device="cpu")
    sentence = str(error.value)
    assert "\n" not in sentence and sentence.endswith(".") and ".)" not in sentence
    return sentence


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"eos_token_id": "</s>"}, ["config.json", "'eos_token_id' with value '</s>'", "correct it"]),
        ({"hidden_size": "64"}, ["'hidden_size' expected int", "'64'"]),
        ({"num_attention_heads": 5}, ["hidden size (32) is not a multiple", "heads (5)"]),
        ({"dtype": "float31"}, ["could not be read", "float31"]),
        ({"hidden_act": "wiggle"}, ["config.json", "hidden_act is 'wiggle'", "not know"]),
        ({"rope_parameters": ROPE}, ["config.json", "rope_parameters.rope_type is 'spiral'", "not know"]),
        ({"num_key_value_heads": 0}, ["config.json", "cannot be built", "zero"]),
    ],
)
def test_a_field_of_the_config_that_is_wrong_is_named(
    changed: Callable[..., Path], fields: dict[str, Any], parts: list[str]
):
    sentence = refused(changed(**fields))
    assert all(part in sentence for part in parts), sentence
    assert "safetensors" not in sentence


def test_a_tensor_of_another_shape_is_named_with_both(changed: Callable[..., Path]):
    sentence = refused(changed(intermediate_size=50))
    assert "model.layers.0.mlp.down_proj.weight is 32 x 48 in the files, and 32 x 50 by config.json" in sentence
    assert "6 tensors" in sentence and "safetensors" not in sentence


def test_tensors_that_are_not_there_are_counted(changed: Callable[..., Path]):
    assert "lack 9 tensors, model.layers.2." in refused(changed(num_hidden_layers=3))


@pytest.mark.parametrize(
    ("quantisation", "kind"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "of-tomorrow"}, "of-tomorrow"),
    ],
)
def test_a_quantised_checkpoint_is_refused_by_its_config(
    changed: Callable[..., Path], quantisation: dict[str, Any], kind: str
):
    folder = changed(quantization_config=quantisation)
    (folder / "model.safetensors").unlink()  # so nothing has been loaded
    sentence = refused(folder)
    assert f"is quantised ({kind})" in sentence and "not supported" in sentence
    assert "give the unquantised one, with --quantize int4 or int8" in sentence


@pytest.mark.parametrize("model_type", ["odd", "llama"])
def test_code_of_the_targets_own_is_asked_for_by_name(changed: Callable[..., Path], model_type: str):
    folder = changed(model_type=model_type, auto_map=OWN_CODE)
    if model_type == "llama":  # which transformers reads with its own code: only the tokenizer needs to be asked for
        Target.from_pretrained(folder, dtype="fp32", device="cpu")
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        mapped = {"tokenizer_class": "OddTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_odd.Odd", None]}}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | mapped))
    sentence = refused(folder)
    assert "code of its own" in sentence and str(folder) in sentence
    assert "--trust-remote-code (trust_remote_code=True)" in sentence and "runs here" in sentence


def test_damaged_weights_are_to_be_fetched_again(saved: Path, tmp_path: Path):
    folder = Path(shutil.copytree(saved, tmp_path / "damaged"))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "fetch the files again, as safetensors" in refused(folder)


def test_tensors_that_have_no_place_are_told_once(changed: Callable[..., Path], caplog: pytest.LogCaptureFixture):
    folder = changed(num_hidden_layers=1)
    with caplog.at_level(logging.WARNING, logger="draftsmith"):
        assert Target.from_pretrained(folder, dtype="fp32", device="cpu").layers == 1
    (told,) = [record.getMessage() for record in caplog.records if record.name.startswith("draftsmith")]
    assert "9 tensors" in told and "model.layers.1.input_layernorm.weight" in told and str(folder) in told


def test_a_head_beside_a_tied_embedding_is_not_spoken_of(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    model = tiny_model("gpt2", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = {"lm_head.weight": tensors["transformer.wte.weight"].clone()}
    save_file(tensors | head, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING, logger="draftsmith"):
        Target.from_pretrained(tmp_path, dtype="fp32", device="cpu")
    assert not [record for record in caplog.records if record.name.startswith("draftsmith")]


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"{", "line 1"),
        (b"\xff", "utf-8"),
        (b"[]", "no JSON object"),
        (b'{"eos_token_id": "</s>"}', "eos_token_id '</s>'"),
        (b'{"eos_token_id": [1, "</s>"]}', "eos_token_id [1, '</s>']"),
    ],
)
def test_a_generation_config_that_cannot_be_read_is_not_passed_over(
    changed: Callable[..., Path], content: bytes, part: str
):
    folder = changed()
    (folder / "generation_config.json").write_bytes(content)
    sentence = refused(folder)
    assert "generation_config.json" in sentence and part in sentence, sentence
    (folder / "generation_config.json").unlink()
    assert Target.from_pretrained(folder, dtype="fp32", device="cpu").eos_token_ids == {256}


def test_end_tokens_of_a_model_in_memory_are_whole_numbers():
    model = tiny_model()
    model.generation_config.eos_token_id = "</s>"
    with pytest.raises(DraftsmithError, match="eos_token_id '</s>'"):
        Target(model)
