"""Two processes at one folder: readers beside a writer, two writers, two runs, and what killed ones left."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from draftsmith.drafters.heads.mlp import MLPSpeculator
from draftsmith.drafters.heads.mlp_config import MLPConfig
from draftsmith.drafters.trainable import storage
from draftsmith.training.checkpoint import Checkpoints
from draftsmith.training.train import train
from draftsmith.training.trainer import TrainingRun
from draftsmith.types import DraftsmithError, TargetFacts
from draftsmith.workflows.comparison import fingerprint
from tests.helpers import training_toy as toy


def write(folder: Path, value: int) -> None:
    storage.write_folder(folder, lambda aside: storage.write_json(aside / "config.json", {"value": value}))


def value(folder: Path) -> int:
    storage.verify_folder(folder)
    return int(storage.read_config(folder)["value"])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_readers_of_a_folder_that_is_being_replaced_move_nothing(tmp_path: Path):
    folder, old = tmp_path / "drafter", tmp_path / ".drafter.old"
    drafter = MLPSpeculator(MLPConfig(hidden_size=8, vocab_size=16, n_predict=2))
    drafter.save_pretrained(folder, TargetFacts(8, 16, None, "toy"))
    digest = fingerprint(folder)
    os.rename(folder, old)  # the first of the two renames
    storage.require_folder(folder)
    assert torch.equal(MLPSpeculator.from_pretrained(folder).head[0].weight, drafter.head[0].weight)
    assert fingerprint(folder) == digest
    assert names(tmp_path) == [".drafter.old"]
    drafter.save_pretrained(folder, TargetFacts(8, 16, None, "toy"))
    assert names(tmp_path) == ["drafter"]


def test_readers_of_checkpoints_move_nothing(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, 2)
    for step in (1, 2):
        checkpoints.save(step, lambda folder: storage.write_json(folder / "config.json", {}), {}, {})
    os.rename(checkpoints.at(2), checkpoints.folder / ".step-00000002.old")
    assert checkpoints.steps() == [1, 2] and checkpoints.load().progress["step"] == 2
    assert names(checkpoints.folder) == [".step-00000002.old", "step-00000001"]
    checkpoints.settle(2, None)
    assert names(checkpoints.folder) == ["step-00000001", "step-00000002"]


def test_what_cannot_be_put_in_place_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Somebody without locks, such as an earlier version that reads, puts the old one back between the renames."""
    folder = tmp_path / "drafter"
    write(folder, 1)
    rename = os.rename

    def rename_and_back(source: Path, to: Path) -> None:
        rename(source, to)
        rename(to, source)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename_and_back)
        with pytest.raises(DraftsmithError, match=r"cannot put .*/\.drafter\.\w{8}\.tmp in place of .*/drafter \("):
            write(folder, 2)
    assert value(folder) == 1
    (kept,) = tmp_path.glob(".*")
    assert value(kept) == 2, "nothing that is whole is deleted"
    write(folder, 3)
    assert value(folder) == 3 and names(tmp_path) == ["drafter"]


def test_the_old_one_gets_its_name_back_if_the_new_one_cannot_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "drafter"
    write(folder, 1)
    rename = os.rename

    def fail_once(source: Path, to: Path) -> None:
        if source.suffix == ".tmp":
            raise OSError(5, "Input/output error")
        rename(source, to)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail_once)
        with pytest.raises(DraftsmithError, match="Input/output error"):
            write(folder, 2)
    assert value(folder) == 1
    (kept,) = tmp_path.glob(".*")
    assert value(kept) == 2


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path):
    folder = tmp_path / "drafter"
    assert toy.dies(lambda: storage.write_folder(folder, lambda _: os.kill(os.getpid(), signal.SIGKILL)))
    assert len(names(tmp_path)) == 2, "a lock file and what was begun"
    write(folder, 1)
    assert names(tmp_path) == ["drafter"]


def test_a_folder_whose_name_goes_on_behind_a_dot_is_another(tmp_path: Path):
    def fill(aside: Path) -> None:
        write(tmp_path / "drafter", 1)
        storage.write_json(aside / "config.json", {"value": 2})

    storage.write_folder(tmp_path / "drafter.0a1b2c3d", fill)
    assert value(tmp_path / "drafter.0a1b2c3d") == 2 and value(tmp_path / "drafter") == 1


def test_two_writers_of_a_folder_wait_for_each_other(tmp_path: Path):
    folder = tmp_path / "drafter"

    def fill(aside: Path) -> None:
        for i in range(3):
            storage.write_json(aside / f"{i}.json", {"process": os.getpid()})

    def writes() -> None:
        for _ in range(40):
            storage.write_folder(folder, fill)

    toy.together(writes, writes)
    storage.verify_folder(folder)
    assert len({storage.read_json(folder / f"{i}.json")["process"] for i in range(3)}) == 1
    assert names(tmp_path) == ["drafter"]


def test_pruning_spares_what_another_is_saving(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, 2)

    def fill(folder: Path) -> None:
        storage.write_json(folder / "config.json", {})

    def slow(folder: Path) -> None:
        fill(folder)
        checkpoints.settle(1, None)
        fill(folder)

    checkpoints.save(1, fill, {}, {})
    checkpoints.save(2, slow, {}, {})
    assert checkpoints.load().progress["step"] == 2
    assert names(checkpoints.folder) == ["step-00000001", "step-00000002"]


def test_a_run_in_progress_has_no_second_process(tmp_path: Path):
    data, folder, refusals = toy.write_data(tmp_path), tmp_path / "run", []

    def evaluate(trained_model) -> dict[str, float]:
        for resume in (False, True):
            with pytest.raises(DraftsmithError, match=r"another process trains in .*/run; wait for its end, or choose"):
                toy.run(folder, data, resume=resume)
            refusals.append(resume)
        return toy.evaluate(trained_model)

    train(toy.recipe(folder, data), target=toy.target(), generate=toy.generate, evaluate=evaluate)
    toy.run(tmp_path / "calm", data)
    assert refusals and toy.outcome(folder) == toy.outcome(tmp_path / "calm")


def test_a_run_that_another_trained_meanwhile_is_not_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data, folder, build = toy.write_data(tmp_path), tmp_path / "run", TrainingRun._build
    toy.run(tmp_path / "calm", data)

    def slowly(run: TrainingRun, resume: bool) -> None:
        build(run, resume)
        shutil.copytree(tmp_path / "calm", folder, symlinks=True)

    monkeypatch.setattr(TrainingRun, "_build", slowly)
    with pytest.raises(DraftsmithError, match="already holds a run, at step 10"):
        toy.run(folder, data)
    assert (folder / "recipe.yaml").read_bytes() == (tmp_path / "calm" / "recipe.yaml").read_bytes(), "as it was"
