"""A save that is killed anywhere, and checkpoints that are cut, flipped, deleted or do not fit."""

import errno
import os
import random
import resource
import shutil
import warnings
from pathlib import Path

import pytest
import torch

from draftsmith.drafters.heads.mlp import MLPSpeculator
from draftsmith.drafters.trainable import storage
from draftsmith.training.checkpoint import BEST, LATEST, Checkpoints
from draftsmith.types import DraftsmithError, TargetFacts
from tests.helpers import training_toy as toy

FILES = ("config.json", "model.safetensors", "optimizer.safetensors", "progress.json", "manifest.json")
FACTS = TargetFacts(8, 16, None, "toy")


def save(run: Path, step: int, keep: int = 2) -> None:
    """Save a checkpoint whose tensor and progress both tell the step."""

    def fill(folder: Path) -> None:
        storage.write_json(folder / "config.json", {"step": step})
        storage.write_tensors(folder / "model.safetensors", {"weight": torch.full((64,), float(step))})

    Checkpoints(run, keep).save(step, fill, {"value": step}, {"0.0.exp_avg": torch.full((64,), float(step))})


def loaded_step(run: Path) -> int:
    checkpoint = Checkpoints(run, 2).load()
    step = checkpoint.progress["step"]
    assert checkpoint.progress["value"] == step and (checkpoint.optimizer["0.0.exp_avg"] == step).all()
    assert (storage.read_tensors(checkpoint.folder)["weight"] == step).all()
    return int(step)


@pytest.mark.parametrize(
    ("again", "stride"),
    [(False, 1), (True, 4), pytest.param(True, 1, marks=pytest.mark.slow)],
    ids=["next-step", "same-step", "same-step at every call"],
)
def test_save_killed_at_every_file_call(tmp_path: Path, again: bool, stride: int):
    """A step that is there already is saved by the same calls, and killed at every fourth of them unless slowly."""
    call, killed, outcomes = 0, True, []
    while killed:
        call += stride
        run = tmp_path / str(call)
        save(run, 1)
        save(run, 2)
        step = 2 if again else 3
        killed = toy.dies(lambda run=run, step=step: save(run, step), at_call=call)
        outcomes.append(loaded_step(run))
        save(run, step)
        assert loaded_step(run) == step
        assert (run / LATEST).resolve() == Checkpoints(run, 2).at(step)
        assert sorted(p.name for p in (run / "checkpoints").iterdir()) == [
            f"step-{s:08d}" for s in ((1, 2) if again else (2, 3))
        ]
        shutil.rmtree(run)
    assert call > 30, "the kills must meet every file call of a save"
    assert set(outcomes) == {2} if again else set(outcomes) == {2, 3}


def test_drafter_folder_replaced_under_kills(tmp_path: Path):
    """An export over an older one leaves the old or the new, whole, whatever call it dies at."""
    old, new = (MLPSpeculator(toy_config()) for _ in range(2))
    call, killed = 0, True
    while killed:
        call += 1
        folder = tmp_path / str(call) / "drafter"
        old.save_pretrained(folder, FACTS)
        killed = toy.dies(lambda folder=folder: new.save_pretrained(folder, FACTS), at_call=call)
        found = MLPSpeculator.from_pretrained(folder).head[0].weight
        assert torch.equal(found, old.head[0].weight) or torch.equal(found, new.head[0].weight)
        new.save_pretrained(folder, FACTS)
        assert torch.equal(MLPSpeculator.from_pretrained(folder).head[0].weight, new.head[0].weight)
    assert call > 20


def test_a_link_stays_and_what_it_points_at_is_replaced_under_kills(tmp_path: Path):
    """Whatever call an export through a link dies at, the link stays, and behind it is the old or the new, whole."""
    old, new = (MLPSpeculator(toy_config()) for _ in range(2))
    call, killed = 0, True
    while killed:
        call += 3
        own, link = tmp_path / str(call) / "own" / "drafter", tmp_path / str(call) / "link"
        old.save_pretrained(own, FACTS)
        link.symlink_to(own)
        killed = toy.dies(lambda link=link: new.save_pretrained(link, FACTS), at_call=call)
        found = MLPSpeculator.from_pretrained(link).head[0].weight
        assert torch.equal(found, old.head[0].weight) or torch.equal(found, new.head[0].weight)
        new.save_pretrained(link, FACTS)
        assert link.readlink() == own and [path.name for path in own.parent.iterdir()] == ["drafter"]
        assert sorted(path.name for path in link.parent.iterdir()) == ["link", "own"]
        assert torch.equal(MLPSpeculator.from_pretrained(own).head[0].weight, new.head[0].weight)
    assert call > 20


def test_a_link_to_nothing_is_filled(tmp_path: Path):
    (tmp_path / "link").symlink_to("later")
    MLPSpeculator(toy_config()).save_pretrained(tmp_path / "link", FACTS)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "later" / "config.json").is_file()


@pytest.mark.parametrize("leftover", [".drafter.old", ".drafter.0a1b2c3d.tmp"])
def test_links_left_over_are_unlinked_and_not_walked(tmp_path: Path, leftover: str):
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "text").write_text("theirs")
    drafter = MLPSpeculator(toy_config())
    drafter.save_pretrained(tmp_path / "drafter", FACTS)
    (tmp_path / leftover).symlink_to("others")
    drafter.save_pretrained(tmp_path / "drafter", FACTS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter", "others"]
    assert (tmp_path / "others" / "text").read_text() == "theirs"


def test_a_checkpoint_that_was_moved_behind_a_link_is_pruned_by_its_link(tmp_path: Path):
    save(tmp_path, 1)
    first = Checkpoints(tmp_path, 2).at(1)
    shutil.move(first, tmp_path / "elsewhere")
    first.symlink_to(tmp_path / "elsewhere")
    for step in (2, 3):
        save(tmp_path, step)
    assert sorted(path.name for path in first.parent.iterdir()) == ["step-00000002", "step-00000003"]
    assert (tmp_path / "elsewhere" / "config.json").is_file()


def toy_config():
    from draftsmith.drafters.heads.mlp_config import MLPConfig

    return MLPConfig(hidden_size=8, vocab_size=16, n_predict=2)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [truncate, flip_a_bit, Path.unlink], ids=["truncated", "flipped", "deleted"])
def test_damage_is_named_and_the_one_before_is_used(tmp_path: Path, name: str, damage):
    save(tmp_path, 1)
    save(tmp_path, 2)
    damage(Checkpoints(tmp_path, 2).at(2) / name)
    named = r"step-00000002" if name == "manifest.json" else rf"step-00000002/{name}"
    with pytest.warns(RuntimeWarning, match=rf"{named}.*; the run goes on from its checkpoint of step 1 instead\."):
        assert loaded_step(tmp_path) == 1
    save(tmp_path, 2)
    assert loaded_step(tmp_path) == 2


def test_no_whole_checkpoint_is_never_a_silent_start(tmp_path: Path):
    save(tmp_path, 1)
    truncate(Checkpoints(tmp_path, 2).at(1) / "model.safetensors")
    with pytest.raises(DraftsmithError, match="no checkpoint in .* is whole; the first one: .* restore it from a good"):
        Checkpoints(tmp_path, 2).load()
    with pytest.raises(DraftsmithError, match="no checkpoint to resume from"):
        Checkpoints(tmp_path / "empty", 2).load()


def test_pruning_keeps_the_last_and_the_best(tmp_path: Path):
    for step in range(1, 7):
        save(tmp_path, step)
        if step == 2:
            Checkpoints(tmp_path, 2).link(BEST, step)
    assert Checkpoints(tmp_path, 2).steps() == [2, 5, 6]
    assert os.readlink(tmp_path / BEST) == "checkpoints/step-00000002", "relative, so that a run can be moved"


def test_pruning_spares_what_the_run_goes_on_from_though_a_damaged_one_is_later(tmp_path: Path):
    for step in (1, 2, 5):
        save(tmp_path, step, keep=1)
    save(tmp_path, 6, keep=2)
    truncate(Checkpoints(tmp_path, 1).at(6) / "model.safetensors")
    with pytest.warns(RuntimeWarning):
        assert loaded_step(tmp_path) == 5
    Checkpoints(tmp_path, 1).settle(5, None)
    assert Checkpoints(tmp_path, 1).steps() == [5, 6] and Checkpoints(tmp_path, 1).linked(LATEST) == 5
    save(tmp_path, 7, keep=1)
    assert Checkpoints(tmp_path, 1).steps() == [7]


def test_full_disk_leaves_the_last_good_one(tmp_path: Path):
    """A limit on file size makes the kernel refuse the write, as a full disk does."""
    save(tmp_path, 1)

    def fill_the_disk() -> None:
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
        with pytest.raises(DraftsmithError, match=r"cannot write .*step-00000002"):
            save(tmp_path, 2)

    assert not toy.dies(fill_the_disk)
    assert loaded_step(tmp_path) == 1
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_no_space_is_said_in_words(tmp_path: Path):
    def fill(_: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(DraftsmithError, match="no space is left on the disk for"):
        storage.write_folder(tmp_path / "x", fill)
    assert list(tmp_path.iterdir()) == []


def test_what_could_not_be_filled_leaves_nothing(tmp_path: Path):
    def fill(aside: Path) -> None:
        (aside / "half").write_text("written")
        raise DraftsmithError("this drafter cannot be saved.")

    with pytest.raises(DraftsmithError, match="cannot be saved"):
        storage.write_folder(tmp_path / "x", fill)
    assert list(tmp_path.iterdir()) == []


def test_unwritable_place_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DraftsmithError, match=r"cannot write .*file/x .*choose a folder"):
        storage.write_folder(tmp_path / "file" / "x", lambda _: None)


@pytest.mark.parametrize("times", [8, pytest.param(50, marks=pytest.mark.slow)])
def test_training_killed_again_and_again_ends_with_the_same_weights(times: int, tmp_path: Path):
    """Kills at random file calls and random moments, each resumed, against one run that nobody disturbed."""
    data = toy.write_data(tmp_path)
    toy.run(tmp_path / "calm", data)
    rng, folder, kills, finished = random.Random(7), tmp_path / "killed", 0, False
    while not finished:
        resume = bool(Checkpoints(folder, 2).steps())
        by_call = kills % 2 == 0
        killed = toy.dies(
            lambda resume=resume: toy.run(folder, data, resume=resume),
            at_call=rng.randint(1, 250) if by_call and kills < times else None,
            after_s=rng.uniform(0.05, 0.6) if not by_call and kills < times else None,
        )
        kills += killed
        finished = not killed and kills >= times
        if not killed and not finished:
            # Done before so many kills: the finished run must survive them too.
            assert toy.outcome(folder) == toy.outcome(tmp_path / "calm")
            shutil.rmtree(folder)
    assert toy.outcome(folder) == toy.outcome(tmp_path / "calm")


def test_what_a_kill_left_undone_behind_the_last_save_is_done_by_who_goes_on(tmp_path: Path):
    """The last checkpoint was in place already, but no link to it, and nothing was pruned yet."""
    data = toy.write_data(tmp_path)
    toy.run(tmp_path / "calm", data)
    run, checkpoints = tmp_path / "killed", Checkpoints(tmp_path / "killed", 2)
    toy.run(run, data)
    last = checkpoints.steps()[-1]
    best = checkpoints.linked(BEST)
    for name in (LATEST, BEST):
        checkpoints.link(name, last - 2)
    shutil.copytree(checkpoints.at(last), checkpoints.at(1))
    for step in (1, last):
        shutil.copytree(checkpoints.at(last), checkpoints.folder / f".step-{step:08d}.0a1b2c3d.tmp")
    (checkpoints.folder / f".step-{last:08d}.lock").touch()
    shutil.rmtree(run / "drafter")
    for name in [path.name for path in run.iterdir() if path.is_file()]:
        (run / f".{name}.ab12{Path(name).suffix}").touch()  # what a kill leaves of a file that is written aside
    (run / ".lock").touch()
    toy.run(run, data, resume=True)
    assert toy.outcome(run) == toy.outcome(tmp_path / "calm")
    assert checkpoints.linked(LATEST) == last and checkpoints.linked(BEST) == best


def test_resume_after_damage_goes_on_from_the_one_before(tmp_path: Path):
    data = toy.write_data(tmp_path)
    toy.run(tmp_path / "calm", data)
    toy.run(tmp_path / "hurt", data)
    truncate(Checkpoints(tmp_path / "hurt", 2).at(10) / "model.safetensors")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        toy.run(tmp_path / "hurt", data, resume=True)
    assert any("step-00000010/model.safetensors" in str(w.message) for w in caught)
    assert toy.outcome(tmp_path / "hurt") == toy.outcome(tmp_path / "calm")
