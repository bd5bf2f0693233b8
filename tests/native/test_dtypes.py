"""Which number format "auto" is, by the kernels that multiply it."""

from pathlib import Path

import pytest
import torch

from draftsmith.dtypes import resolve_dtype
from draftsmith.native import LIBRARY, why_missing
from draftsmith.targets import Target
from tests.helpers.tiny import save_tiny_target

if not LIBRARY:
    pytest.skip(why_missing(), allow_module_level=True)

CPU = torch.device("cpu")


def test_auto_is_bf16_where_the_native_kernels_are_fast_if_they_may_be_used(
    instructions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    chosen = torch.float32 if instructions == "portable" else torch.bfloat16
    assert resolve_dtype("auto", CPU) == chosen
    assert resolve_dtype("auto", CPU, native=False) == torch.float32
    folder = save_tiny_target(tmp_path / "target", dtype=torch.bfloat16)
    assert Target.from_pretrained(folder).dtype == chosen
    assert Target.from_pretrained(folder, native=False).dtype == torch.float32


def test_auto_is_bf16_where_the_processor_multiplies_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert resolve_dtype("auto", CPU, native=False) == torch.bfloat16
