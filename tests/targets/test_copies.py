"""What a quantised copy takes is known before it is made, and refused where there is no room or no way to pack."""

import io
import logging
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import JetMoeConfig, JetMoeForCausalLM

from draftsmith import system
from draftsmith.drafters.models.model_drafter import ModelDrafter
from draftsmith.drafters.registry import load_drafter
from draftsmith.native import LIBRARY, why_missing
from draftsmith.targets import Target
from draftsmith.targets.copies import bytes_by_place
from draftsmith.types import DraftsmithError
from draftsmith.user_cache import CACHE
from draftsmith.workflows.models import load_engine
from tests.helpers.tiny import ARCHITECTURES, tiny_model

if not LIBRARY:
    pytest.skip(why_missing(), allow_module_level=True)

MEMORY = re.compile(r"(\S+): a copy of (\S+) weights in (\d) bits takes (\S+) kB beside the target's (\S+) kB\.")


@pytest.mark.parametrize("name", ["int4-self", "int8-self"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_memory_that_is_told_is_what_the_copy_takes(
    architecture: str, dtype: torch.dtype, name: str, caplog: pytest.LogCaptureFixture
):
    target = Target(tiny_model(architecture, dtype=dtype, vocabulary=1000))
    with caplog.at_level(logging.INFO, "draftsmith.progress"):
        drafter = load_drafter(name, target)
    assert isinstance(drafter, ModelDrafter)
    found = [MEMORY.fullmatch(record.getMessage()) for record in caplog.records]
    (told,) = [match for match in found if match]
    called, weights, bits, beside, _ = told.groups()
    assert (called, int(weights.replace(",", "")), bits) == (name, target.weights, name[3])
    held = bytes_by_place(target.model)
    taken = sum(size for place, size in bytes_by_place(drafter.model.model).items() if place not in held)
    assert abs(1000 * float(beside.replace(",", "")) - taken) < 0.01 * taken + 500


def little_memory(root: Path, free: int) -> Path:
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text(f"MemTotal: 1000000 kB\nMemAvailable: {free} kB\n")
    return root


def test_a_copy_that_there_is_no_room_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = Target(tiny_model(dtype=torch.bfloat16, vocabulary=80_000), name="tiny")
    monkeypatch.setattr(system, "ROOT", little_memory(tmp_path, free=1000))
    with pytest.raises(DraftsmithError, match=r"int4-self: a copy of .* takes .*, and 1,024 kB are free; end other"):
        load_drafter("int4-self", target)


def test_what_a_copy_takes_and_where_it_is_from_is_told_on_the_console(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(CACHE, str(tmp_path))
    target = Target(tiny_model(dtype=torch.bfloat16, vocabulary=20_000), name="tiny")
    for packed in ("kept in", "from"):
        said = io.StringIO()
        load_engine(Console(file=said, width=60), target=target, drafter="int4-self")
        first, second = said.getvalue().splitlines()
        assert first.startswith("int4-self: a copy of") and second.startswith(f"packed weights: {packed} {tmp_path}")


def jetmoe() -> JetMoeForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_key_value_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8, "num_attention_heads": 4}
    config = JetMoeConfig(vocab_size=96, max_position_embeddings=64, **sizes, **experts)
    return JetMoeForCausalLM(config).to(torch.bfloat16)


@pytest.mark.parametrize("asked", ["int4-self", "int8-self", "int4", "int8"])
def test_a_model_whose_weights_are_elsewhere_than_in_linear_layers_is_refused_by_name(asked: str):
    target = Target(jetmoe(), name="small") if asked.endswith("-self") else None
    with pytest.raises(DraftsmithError) as told:
        if target is not None:
            load_drafter(asked, target)
        else:
            Target(jetmoe(), name="small", quantize=asked)  # type: ignore[arg-type]
    share = r"\d\d% of its layers' weights in JetMoeParallelExperts, which cannot be packed; leave it out\."
    assert re.fullmatch(re.escape(f"{asked}: small (jetmoe) has ") + share, str(told.value))
