"""Packed weights that are kept on disk: found again with the same bits, and nothing lost where that cannot be done."""

import logging
import os
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.drafters.registry import load_drafter
from draftsmith.native import LIBRARY, why_missing
from draftsmith.system import bytes_in_words
from draftsmith.targets import Target
from draftsmith.targets.kept import LAYOUT
from draftsmith.types import DraftsmithError
from draftsmith.user_cache import CACHE, MOST, packed_kept
from tests.helpers.tiny import tiny_model

if not LIBRARY:
    pytest.skip(why_missing(), allow_module_level=True)

VOCABULARY = 20_000
"""So wide that the packed head is kept."""


def target(architecture: str = "llama", seed: int = 0) -> Target:
    return Target(tiny_model(architecture, seed=seed, dtype=torch.bfloat16, vocabulary=VOCABULARY), name="tiny")


def quantised(architecture: str, quantize: str) -> Callable[[], Target]:
    """Return what makes a quantised target, or a copy of a target."""
    if "-self" in quantize:
        return lambda: load_drafter(quantize, target(architecture)).model  # type: ignore[attr-defined, no-any-return]
    model = lambda: tiny_model(architecture, dtype=torch.bfloat16, vocabulary=VOCABULARY)  # noqa: E731
    return lambda: Target(model(), name="tiny", quantize=quantize)  # type: ignore[arg-type]


def bits(made: Target) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in made.model.named_buffers()}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE, str(tmp_path))
    monkeypatch.delenv(MOST, raising=False)
    return tmp_path / "packed"


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """Return what gives the lines about packed weights since it was asked last."""

    def lines() -> list[str]:
        found = [record.getMessage() for record in caplog.records if "packed weights" in record.getMessage()]
        caplog.clear()
        return found

    with caplog.at_level(logging.INFO, "draftsmith.progress"):
        yield lines


def only_file(cache: Path) -> Path:
    (path,) = cache.iterdir()
    return path


@pytest.mark.parametrize("quantize", ["int4", "int8", "int4-self", "int8-self"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral"])
def test_a_second_start_has_the_same_bits_from_the_file(
    architecture: str, quantize: str, cache: Path, said: Callable[[], list[str]]
):
    make = quantised(architecture, quantize)
    first = bits(make())
    path = only_file(cache)
    size = bytes_in_words(sum(tensor.nbytes for tensor in load_file(path).values()))
    assert said() == [f"packed weights: kept in {path} for the next time ({size})"]
    second = bits(make())
    assert said() == [f"packed weights: from {path} ({size})"]
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert only_file(cache) == path and len(load_file(path)) > 2


def test_other_weights_and_other_kinds_have_files_of_their_own(cache: Path):
    for seed in (0, 1):
        for name in ("int4-self", "int8-self"):
            load_drafter(name, target(seed=seed))
    assert len(list(cache.iterdir())) == 4
    changed = tiny_model(dtype=torch.bfloat16, vocabulary=VOCABULARY)
    changed.model.layers[1].mlp.up_proj.weight[7, 5] += 1  # a single one
    load_drafter("int4-self", Target(changed))
    assert len(list(cache.iterdir())) == 5


def test_weights_rounded_by_own_text_have_files_of_their_own_and_no_text_is_written_twice(
    cache: Path, caplog: pytest.LogCaptureFixture
):
    found: dict[str, list[dict[str, Tensor]]] = {}
    with caplog.at_level(logging.INFO, "draftsmith.progress"):
        for name in ("int4-self", "int4-self:calibrate=64", "int4-self:calibrate=96", "int4-self:calibrate=64"):
            found.setdefault(name, []).append(bits(quantised("llama", name)()))
    assert len(list(cache.iterdir())) == 3
    first, second = found["int4-self:calibrate=64"]
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], found["int4-self"][0][name]) for name in first)
    lines = [record.getMessage() for record in caplog.records if "writes" in record.getMessage()]
    assert lines == [
        f"int4-self: tiny writes {tokens} tokens, by which the weights are rounded; that takes up to 86 kB for a while."
        for tokens in (64, 96)
    ]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def flip(path: Path) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[-12345] ^= 1
    path.write_bytes(damaged)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def strange(path: Path) -> None:
    save_file({"weights": torch.zeros(3)}, path)


def misshapen(path: Path) -> None:
    tensors = load_file(path)
    first = min(tensors)
    about = {"format": "draftsmith packed weights", "layout": str(LAYOUT)}
    save_file(tensors | {first: tensors[first].flatten()}, path, about)


@pytest.mark.parametrize(
    ("damage", "why"),
    [(cut, ""), (flip, "it is damaged"), (empty, ""), (strange, "it is none of packed weights"),
     (misshapen, "it is of layers of other sizes")],
)
def test_what_is_wrong_with_a_file_is_told_and_mended(
    damage: Callable[[Path], None], why: str, cache: Path, said: Callable[[], list[str]]
):
    make = quantised("llama", "int4-self")
    first = bits(make())
    whole = only_file(cache).read_bytes()
    said()
    damage(only_file(cache))
    again = bits(make())
    told, kept = said()
    assert told.startswith(f"the packed weights kept in {only_file(cache)} cannot be used ({why}")
    assert told.endswith("they are packed and written anew.") and "\n" not in told
    assert kept.startswith("packed weights: kept")
    assert only_file(cache).read_bytes() == whole
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_folder_that_cannot_be_written_costs_only_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv(CACHE, str(tmp_path / "file"))
    quantised("llama", "int4-self")()
    (told,) = said()
    assert told.startswith("the packed weights (") and "are not kept in" in told and "Not a directory" in told


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser writes everywhere")
def test_a_read_only_folder_costs_only_the_time(cache: Path, said: Callable[[], list[str]]):
    cache.parent.chmod(0o500)
    try:
        quantised("llama", "int4-self")()
    finally:
        cache.parent.chmod(0o700)
    (told,) = said()
    assert "are not kept in" in told


def test_no_more_is_kept_than_is_allowed(cache: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]):
    """What was used longest ago goes first, and what a killed process left of a file that it wrote."""
    for seed, age in ((0, 50), (1, 40), (2, 30)):
        before = set(cache.glob("*"))
        load_drafter("int4-self", target(seed=seed))
        (new,) = set(cache.glob("*")) - before
        stamp = new.stat().st_mtime - age
        os.utime(new, (stamp, stamp))
    size = packed_kept().bytes // 3
    load_drafter("int4-self", target(seed=0))  # found, so used last
    left = cache / ".left.safetensors"
    left.write_bytes(b"half")
    os.utime(left, (0, 0))
    monkeypatch.setenv(MOST, str(3.5 * size / 1e9))
    load_drafter("int4-self", target(seed=3))
    assert packed_kept().files == 3 and packed_kept().bytes <= packed_kept().most_bytes and not left.exists()
    said()
    load_drafter("int4-self", target(seed=0))
    assert said()[0].startswith("packed weights: from")
    load_drafter("int4-self", target(seed=1))
    assert said()[0].startswith("packed weights: kept")


@pytest.mark.parametrize("most", ["0", "0.0003"])
def test_what_is_more_than_allowed_is_not_kept(most: str, cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(MOST, most)
    load_drafter("int4-self", target())
    assert not cache.exists()


@pytest.mark.parametrize("most", ["much", "-1", "nan", "inf"])
def test_a_bound_that_is_none_is_told(most: str, cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(MOST, most)
    with pytest.raises(DraftsmithError, match=f"{MOST} is '{most}'; give a number of GB, such as 8"):
        load_drafter("int4-self", target())


def test_small_models_are_not_kept(cache: Path):
    load_drafter("int4-self", Target(tiny_model(dtype=torch.bfloat16)))
    assert not cache.exists()


def test_the_layout_is_the_one_that_files_are_named_after():
    """Where this fails because packing makes other bits, raise LAYOUT, and write the new bits here."""
    weight_NK = (torch.arange(48 * 96).reshape(48, 96) * 7919 % 251 - 125).bfloat16() / 16
    packed = [torch.ops.draftsmith.pack_int4(weight_NK), *torch.ops.draftsmith.pack_int8(weight_NK)]
    digests = [sha256(part.contiguous().view(torch.uint8).numpy()).hexdigest()[:16] for part in packed]
    assert (LAYOUT, digests) == (2, ["c6799244a75aa95c", "40fb95c8e86782ab", "6bca153d52ce05b5", "ef26d4d7b09558ac"])
