"""What the data hold, counted before a run begins."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from draftsmith.training.data.census import account_lines, census_lines, take_census
from draftsmith.training.data.sources import names_of
from draftsmith.training.data.split import is_held_out
from draftsmith.training.sections import DataSection
from draftsmith.training.train import train
from draftsmith.types import DraftsmithError
from tests.helpers import training_toy as toy

QUIET = Console(quiet=True)


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def data(*sources: dict[str, str], every: int = 5) -> DataSection:
    return DataSection.model_validate({"sources": list(sources), "held_out_every": every})


def test_every_document_is_used_or_left_out_for_a_reason(tmp_path: Path):
    texts = [f"text {i} " + "word " * i for i in range(60)]
    path = write(tmp_path / "a.jsonl", [*texts, "", " "])
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "one.txt").write_text("a text of its own")
    (folder / "two.txt").write_text("and another one")
    (folder / ".hidden").write_text("x")
    (folder / "binary").write_bytes(b"\0")
    first, second = take_census(data({"path": str(path)}, {"path": str(folder)}), QUIET)
    held_out = sum(is_held_out(text.strip(), 5) for text in texts)
    assert first == {
        "source": str(path), "whole": True, "documents": 62, "used": 60 - held_out,
        "left_out": {"held out": held_out, "empty": 2}, "files": 1, "files_left_out": {},
    }
    assert second["documents"] == 2 and second["used"] == 2 and second["files_left_out"] == {
        "hidden": 1, "binary": 1
    }
    lines = census_lines([first, second])
    assert lines[0] == f"data: {path}: 62 documents, {60 - held_out} used; left out: {held_out} held out, 2 empty"
    assert "2 documents in 2 files, 2 used; left out: 1 hidden, 1 binary" in lines[1], "of a few texts the ends are"


def test_what_is_not_counted_whole_is_said_to_be_so(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", [f"text {i}" for i in range(9)])
    much, hub = take_census(data({"path": str(path)}, {"name": "somebody/texts"}), QUIET, seconds=0.0)
    assert not much["whole"] and 0 < much["documents"] < 9 and not hub["whole"] and hub["documents"] == 0
    lines = census_lines([much, hub])
    assert "so far; it is too large to be counted first" in lines[0]
    assert lines[1] == "data: somebody/texts: not counted first; its documents are counted as they are read"
    account = {"sources": [much, {**hub, "documents": 1200, "used": 1190}], "pieces": 7, "unusable": {"too odd": 2}}
    assert account_lines(account, "stage 1", [str(path)]) == [
        "data: somebody/texts: 1,200 documents, 1,190 used; left out: nothing, in the last pass over it",
        "data: 2 of 7 pieces drawn for stage 1 cannot be used: too odd",
    ]


def test_a_broken_record_at_the_end_is_found_before_anything_is_written(tmp_path: Path):
    path = toy.write_data(tmp_path)
    with path.open("a") as lines:
        lines.write('{"text": "cut sho')
    options = ("data.shuffle_documents=2", "data.shuffle_windows=2", "data.held_out_every=2")
    with pytest.raises(DraftsmithError, match=r"text\.jsonl, line 42, is no JSON"):
        toy.run(tmp_path / "run", path, *options)
    assert not (tmp_path / "run").exists()


def test_the_count_is_printed_and_kept(tmp_path: Path):
    told = Console(file=io.StringIO(), width=300)
    path = toy.write_data(tmp_path)
    recipe = toy.recipe(tmp_path / "run", path)
    train(recipe, target=toy.target(), generate=toy.generate, evaluate=toy.evaluate, console=told)
    kept = json.loads((tmp_path / "run" / "run.json").read_text())["runs"][0]["data"]
    (counted,) = kept["documents"]["sources"]
    assert counted["documents"] == 41 and counted["whole"]
    assert counted["used"] + sum(counted["left_out"].values()) == 41
    assert census_lines([counted])[0] in told.file.getvalue()
    assert set(kept) == {"documents", "stage1", "prompts"}


def test_sources_have_short_names_that_differ():
    sources = data(
        {"path": "a/code.jsonl.xz"}, {"path": "b/prose.txt"}, {"path": "c/prose.jsonl"}, {"name": "some/texts"},
        {"name": "some/texts", "split": "test"},
    ).sources
    assert names_of(sources) == ["code", "b/prose.txt", "c/prose.jsonl", "some/texts train", "some/texts test"]
