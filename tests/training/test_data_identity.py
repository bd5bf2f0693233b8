"""A run is resumed only over the data that it began with."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from draftsmith.training.data import identity
from draftsmith.training.data.identity import BLOCK, first_change, identify
from draftsmith.types import DraftsmithError
from tests.helpers import training_toy as toy


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder of data and a run on it."""
    (tmp_path / "data" / "sub").mkdir(parents=True)
    toy.write_data(tmp_path / "data")
    (tmp_path / "data" / "sub" / "a.txt").write_text("draft verify accept " * 50)
    toy.run(tmp_path / "run", tmp_path / "data")
    return tmp_path


def add(data: Path) -> None:
    (data / "new.txt").write_text("token tree root " * 50)


def change(data: Path) -> None:
    text = (data / "text.jsonl").read_text()
    (data / "text.jsonl").write_text(text.replace("draft", "drift"))  # of the same length


def remove(data: Path) -> None:
    (data / "sub" / "a.txt").unlink()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (change, r"data/text\.jsonl has changed since the run in .*/run began; restore the data as they"),
        (add, r"data/new\.txt was added to the data since"), (remove, r"sub/a\.txt is no longer among the data since"),
    ],
)
def test_changed_data_are_refused_by_the_name_of_the_file(place: Path, what: Callable[[Path], None], words: str):
    before = toy.outcome(place / "run")
    kept = shutil.copytree(place / "data", place / "kept")
    what(place / "data")
    with pytest.raises(DraftsmithError, match=words):
        toy.run(place / "run", place / "data", resume=True)
    assert toy.outcome(place / "run") == before, "and nothing is touched"
    shutil.rmtree(place / "data")
    shutil.copytree(kept, place / "data", copy_function=shutil.copyfile)  # the same bytes, written at another time
    (place / "data" / ".hidden").write_text("nobody reads this")
    assert toy.run(place / "run", place / "data", resume=True).step == 10


def test_a_run_of_an_earlier_version_resumes_and_is_held_to_its_data_from_then_on(place: Path):
    (place / "run" / "sources.json").unlink()
    add(place / "data")
    assert toy.run(place / "run", place / "data", resume=True).step == 10
    remove(place / "data")
    with pytest.raises(DraftsmithError, match=r"sub/a\.txt is no longer among the data"):
        toy.run(place / "run", place / "data", resume=True)


def test_texts_of_another_run_are_data_too(place: Path):
    texts = shutil.copy(place / "run" / "generated.jsonl", place / "texts.jsonl")
    words = (f"stage2.texts={texts}", "stage1.steps=0")
    toy.run(place / "second", place / "data", *words)
    with open(texts, "a") as opened:
        opened.write("\n")
    with pytest.raises(DraftsmithError, match=r"texts\.jsonl has changed since the run in .*/second began"):
        toy.run(place / "second", place / "data", *words, resume=True)


def test_a_run_within_its_own_data_resumes(place: Path):
    toy.run(place / "data" / "run", place / "data")
    assert set(json.loads((place / "data" / "run" / "sources.json").read_text())) == {
        str(place / "data" / "text.jsonl"), str(place / "data" / "sub" / "a.txt")
    }
    assert toy.run(place / "data" / "run", place / "data", resume=True).step == 10


def test_of_a_large_file_blocks_all_over_it_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(identity, "READ_BYTES", 5 * BLOCK)
    path, recipe = tmp_path / "large.txt", toy.recipe(tmp_path / "run", tmp_path / "large.txt")
    for blocks in (3, 40):
        content = bytearray(b"draft" * (blocks * BLOCK // 5 + 3))
        path.write_bytes(content)
        whole = identify(recipe)
        seen = []
        for at in (0, len(content) // 2, len(content) - 1, 3 * BLOCK - 1):
            content[at] ^= 1
            path.write_bytes(content)
            seen.append(first_change(whole, identify(recipe)) == f"{path} has changed")
            content[at] ^= 1
        assert all(seen[:3]) and seen[3] == (blocks == 3)
        path.write_bytes(content[:-1])
        assert first_change(whole, identify(recipe)) == f"{path} has changed"
        path.write_bytes(content)
        assert first_change(whole, identify(recipe)) is None


def test_the_file_that_changed_is_named_though_others_are_looked_at_in_another_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(identity, "READ_BYTES", 8 * BLOCK)
    recipe = toy.recipe(tmp_path / "run", tmp_path / "data")
    (tmp_path / "data").mkdir()
    for name, blocks in (("a.txt", 6), ("b.txt", 1)):
        (tmp_path / "data" / name).write_bytes(b"a" * (blocks * BLOCK))
    before = identify(recipe)
    (tmp_path / "data" / "b.txt").write_bytes(b"a" * (3 * BLOCK))
    assert first_change(before, identify(recipe)) == f"{tmp_path / 'data' / 'b.txt'} has changed"
    (tmp_path / "data" / "b.txt").write_bytes(b"a" * BLOCK)
    assert first_change(before, identify(recipe)) is None
    (tmp_path / "data" / "c.txt").write_bytes(b"a" * (3 * BLOCK))
    assert first_change(before, identify(recipe)) == f"{tmp_path / 'data' / 'c.txt'} was added to the data"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    toy.write_data(tmp_path)
    recipe = toy.recipe(tmp_path / "run", tmp_path / "text.jsonl", f"stage2.texts={tmp_path / 'absent'}")
    with pytest.raises(DraftsmithError, match=r"absent cannot be read \(No such file or directory\); check"):
        identify(recipe)
