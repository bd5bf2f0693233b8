"""A run is resumed only over the data that it began with."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from draftsmith.training.data import identity
from draftsmith.training.data.identity import BLOCK, first_change, identify
from draftsmith.types import DraftsmithError
from draftsmith.workflows.held_out import Evaluation
from draftsmith.workflows.training import train
from tests.helpers import training_toy as toy
from tests.helpers.tiny import save_tiny_target


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


def test_data_in_the_folder_of_the_run_are_compared(tmp_path: Path):
    data = toy.write_data(tmp_path)
    toy.run(tmp_path, data)
    assert set(json.loads((tmp_path / "sources.json").read_text())) == {str(data)}
    change(tmp_path)
    with pytest.raises(DraftsmithError, match=r"text\.jsonl has changed since the run in .* began"):
        toy.run(tmp_path, data, resume=True)


def test_nothing_that_a_run_writes_is_taken_for_its_data(tmp_path: Path):
    save_tiny_target(tmp_path / "model")
    lines = [json.dumps({"text": f"{i} draft verify accept {i * i} " * 4}) for i in range(60)]
    data, out = tmp_path / "out" / "text.txt", tmp_path / "out"
    out.mkdir()
    data.write_text("\n".join(lines))
    sizes = ("stage1.length=16", "stage2.prompt_tokens=4", "stage2.new_tokens=8", "joint={}")
    for dry_run in (True, False):
        train(
            {"drafter": {"family": "medusa", "num_heads": 1}, "target": {"dtype": "fp32"}}, "stage1.steps=1",
            "stage2.steps=1", *sizes, "stage1.batch=1", "stage2.batch=1", target=tmp_path / "model", data=data, out=out,
            dry_run=dry_run, evaluation=Evaluation(prompts_a_task=1, new_tokens=4, prompt_tokens=4),
        )
    recipe = toy.recipe(out, out, "joint={}")
    assert {"held-out.jsonl", "dry-run", "target", "generated.jsonl"} <= {path.name for path in out.iterdir()}
    assert set(identify(recipe)) == {str(data)}
    (out / "target.jsonl").write_text("")
    (out / "sub").mkdir()
    (out / "sub" / "run.json").write_text("")
    assert set(identify(recipe)) == {str(data), str(out / "target.jsonl"), str(out / "sub" / "run.json")}
    alone = identify(toy.recipe(out, data, f"stage2.texts={out / 'generated.jsonl'}"))
    assert set(alone) == {str(data)}, "and no more so if it is named"
    other = toy.recipe(out, data, f"stage2.texts={out / 'sub' / 'run.json'}")
    assert set(identify(other)) == {str(data), str(out / "sub" / "run.json")}


def test_what_small_files_leave_goes_to_the_large_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(identity, "READ_BYTES", 42 * BLOCK)
    data, recipe = tmp_path / "data", toy.recipe(tmp_path / "run", tmp_path / "data")
    data.mkdir()
    for number in range(20):
        (data / f"{number}.txt").write_text("draft verify accept")
    content = bytearray(b"draft" * (60 * BLOCK // 5))
    (data / "large.txt").write_bytes(content)
    before = identify(recipe)
    for part in range(1, 10):
        begin = part * len(content) // 10
        changed = content[:begin] + b"D" * BLOCK + content[begin + BLOCK :]  # wider than a gap between blocks
        (data / "large.txt").write_bytes(changed)
        assert first_change(before, identify(recipe)) == f"{data / 'large.txt'} has changed", part
    (data / "large.txt").write_bytes(content)
    (data / "7.txt").write_text("draft verify accepT")
    assert first_change(before, identify(recipe)) == f"{data / '7.txt'} has changed"


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
    with pytest.raises(DraftsmithError, match=r"data cannot be read \(Is a directory\); check its permissions"):
        (tmp_path / "data").mkdir()
        identify(toy.recipe(tmp_path / "run", tmp_path / "text.jsonl", f"stage2.texts={tmp_path / 'data'}"))
    with pytest.raises(DraftsmithError, match=r"absent does not exist; check the path"):
        identify(toy.recipe(tmp_path / "run", tmp_path / "text.jsonl", f"stage2.texts={tmp_path / 'absent'}"))


def test_texts_in_the_users_home_are_found(place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(place))
    shutil.copy(place / "run" / "generated.jsonl", place / "texts.jsonl")
    assert toy.run(place / "second", place / "data", "stage1.steps=0", "stage2.texts=~/texts.jsonl").step == 4
    (place / "texts.jsonl").rename(place / "texts2.jsonl")
    with pytest.raises(DraftsmithError, match=rf"{place}/texts\.jsonl does not exist; did you mean .*texts2\.jsonl\?"):
        toy.run(place / "second", place / "data", "stage1.steps=0", "stage2.texts=~/texts.jsonl", resume=True)


def test_texts_that_an_earlier_run_wrote_are_not_thrown_away_by_the_one_that_learns_from_them(place: Path):
    written = place / "run" / "generated.jsonl"
    before = written.read_bytes()
    assert before
    shutil.rmtree(place / "run" / "checkpoints")
    toy.run(place / "run", place / "data", f"stage2.texts={written}")
    assert written.read_bytes() == before
