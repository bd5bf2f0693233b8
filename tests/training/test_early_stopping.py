"""Stages that end early: which weights go on, what is said, and that kills change nothing of it."""

import io
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from draftsmith.drafters.trainable.model import TrainableModel
from draftsmith.training.checkpoint import Checkpoints
from draftsmith.training.progress import DONE, Progress, Work
from draftsmith.training.result import TrainingResult
from draftsmith.training.train import train
from draftsmith.types import DraftsmithError
from tests.helpers import training_toy as toy

LONG = ("stage1.steps=12", "stage2.steps=8", "evaluation.every=2", "output.keep=99", "data.held_out_every=0")
Evaluate = Callable[[TrainableModel], dict[str, float]]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return toy.write_data(tmp_path)


def run(folder: Path, data: Path, evaluate: Evaluate, *overrides: str, resume: bool = False) -> TrainingResult:
    recipe = toy.recipe(folder, data, *LONG, *overrides)
    return train(recipe, target=toy.target(), generate=toy.generate, evaluate=evaluate, resume=resume)


@pytest.fixture(scope="module")
def best_at_four(tmp_path_factory: pytest.TempPathFactory) -> Evaluate:
    """A τ that is a function of the weights, and highest at those of step 4."""
    folder = tmp_path_factory.mktemp("probe")
    found = run(folder / "run", toy.write_data(folder), toy.evaluate, "stage2.steps=0")
    at_four = next(r["evaluation"]["tokens_per_step"] for r in found.evaluations if r["step"] == 4)
    return lambda drafter: {"tokens_per_step": 9.0 - abs(toy.evaluate(drafter)["tokens_per_step"] - at_four)}


def test_a_stage_ends_early_and_the_next_goes_on_from_its_best(tmp_path: Path, data: Path, best_at_four: Evaluate):
    told = Console(file=io.StringIO(), width=300)
    recipe = toy.recipe(tmp_path / "run", data, *LONG, "evaluation.patience=2")
    result = train(recipe, target=toy.target(), generate=toy.generate, evaluate=best_at_four, console=told)
    first, second = result.ended_early
    assert first == {
        "stage": "1", "steps": 8, "planned_steps": 12, "stage_best": 9.0, "stage_loss": None,
        "measurements_since": 2, "goes_on_from_step": 4,
    }
    assert second["stage"] == "2" and second["steps"] == 4 and second["stage_best"] == 9.0
    assert result.step == 12 and (result.best, result.best_step) == (9.0, 4)
    assert [record["step"] for record in result.evaluations] == [0, 2, 4, 6, 8, 10, 12]
    said = " ".join(told.file.getvalue().split())
    assert "stage 1 ended early, after 8 of 12 steps: 2 measurements in a row without a τ above 9.000; stage 2" in said
    at = Checkpoints(result.folder, 99).at
    kept = [(at(step) / "model.safetensors").read_bytes() for step in (4, 8, 6)]
    assert kept[0] == kept[1] != kept[2]
    records = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "ended_early" in record] == [8, 12]
    assert [record["stage"] for record in records if "loss" in record] == ["1"] * 8 + ["2"] * 4


def test_a_stage_that_has_all_its_steps_goes_on_from_its_last_weights(
    tmp_path: Path, data: Path, best_at_four: Evaluate
):
    calm = run(tmp_path / "calm", data, best_at_four)
    patient = run(tmp_path / "patient", data, best_at_four, "evaluation.patience=5")
    assert not calm.ended_early and not patient.ended_early
    name = "latest/model.safetensors"
    assert (calm.folder / name).read_bytes() == (patient.folder / name).read_bytes()


@pytest.mark.slow
def test_a_run_that_ends_early_and_is_killed_behind_a_measurement_is_the_same(
    tmp_path: Path, data: Path, best_at_four: Evaluate
):
    """At the best weights, where stage 1 ends, at the first measurement of stage 2, and where that ends."""
    patience = "evaluation.patience=2"
    calm = run(tmp_path / "calm", data, best_at_four, patience)
    assert [record["step"] for record in calm.evaluations] == [0, 2, 4, 6, 8, 10, 12]
    for number in (3, 5, 6, 7):
        folder, seen = tmp_path / str(number), 0

        def measure_and_die(drafter: TrainableModel, number: int = number) -> dict[str, float]:
            nonlocal seen
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return best_at_four(drafter)

        assert toy.dies(lambda folder=folder, evaluate=measure_and_die: run(folder, data, evaluate, patience))
        again = run(folder, data, best_at_four, patience, resume=bool(Checkpoints(folder, 99).steps()))
        assert toy.outcome(folder) == toy.outcome(calm.folder) and again.ended_early == calm.ended_early


def test_a_run_that_ends_early_and_is_killed_at_file_calls_is_the_same(
    tmp_path: Path, data: Path, best_at_four: Evaluate
):
    options = ("evaluation.patience=2", "output.keep=1")
    calm = run(tmp_path / "calm", data, best_at_four, *options)
    folder, call, killed, saved = tmp_path / "killed", 100, True, set()
    while killed:
        steps = Checkpoints(folder, 1).steps()
        resume = bool(steps)
        killed = toy.dies(lambda resume=resume: run(folder, data, best_at_four, *options, resume=resume), at_call=call)
        saved |= {*steps}
        # Far apart before the first checkpoint and behind the last step, where a picture makes many calls of one kind.
        call += 400 if 12 in saved else 37 if saved else 60
    assert len(saved) >= 4, "the kills must come between the measurements"
    assert toy.outcome(folder) == toy.outcome(calm.folder)
    before = toy.outcome(folder)
    assert run(folder, data, best_at_four, *options, resume=True).step == 12
    assert toy.outcome(folder) == before, "a run that ended early is not gone on with"


def test_patience_that_can_do_nothing_is_refused(tmp_path: Path, data: Path):
    with pytest.raises(DraftsmithError, match=r"evaluation\.patience is 2, but evaluation\.every is 0; set evaluation"):
        run(tmp_path / "run", data, toy.evaluate, "evaluation.every=0", "evaluation.patience=2")
    joint = ("drafter={family: medusa, num_heads: 2}", "joint={}", "evaluation.patience=2")
    with pytest.raises(DraftsmithError, match=r"evaluation\.patience is 2, but in joint training τ chooses nothing"):
        run(tmp_path / "joint", data, toy.evaluate, *joint)
    assert not (tmp_path / "run").exists() and not (tmp_path / "joint").exists()


def test_a_loss_on_held_out_text_that_falls_keeps_a_stage_going(
    tmp_path: Path, data: Path, best_at_four: Evaluate
):
    result = run(tmp_path / "run", data, best_at_four, "evaluation.patience=2", "data.held_out_every=50")
    losses = [record["evaluation"]["held_out_loss"] for record in result.evaluations[:7]]
    assert losses == sorted(losses, reverse=True), "the toy learns in all of stage 1"
    assert not [record for record in result.ended_early if record["stage"] == "1"]
    progress = Progress()
    seen = [(1.0, 5.0), (1.0, 4.0), (1.0, 4.0), (1.0, 4.5), (1.5, 6.0), (1.2, 3.9), (1.4, 3.9)]
    waited = []
    for tau, loss in seen:
        progress.measured(tau, loss)
        waited.append(progress.waited)
    assert waited == [0, 0, 1, 2, 0, 0, 1] and (progress.stage_best, progress.stage_loss) == (1.5, 3.9)


def test_what_is_still_to_be_done(tmp_path: Path, data: Path):
    recipe = toy.recipe(tmp_path, data, *LONG, "output.save_every=5")
    progress = Progress.start(recipe)
    # Saved are the measured steps 0, 2, … 20, and 5 and 15.
    assert progress.rest(recipe, 0) == Work(12, 8, 8, 11, 13)
    progress.step = 9
    assert progress.rest(recipe, 0) == Work(3, 8, 8, 6, 7)
    progress.finish_stage(recipe, 1.0)
    assert (progress.stage, progress.last(recipe)) == (2, 17)
    assert progress.rest(recipe, 3) == Work(0, 8, 5, 5, 6)
    progress.step = 17
    progress.finish_stage(recipe, 1.0)
    assert progress.stage == DONE and progress.rest(recipe, 8) == Work(0, 0, 0, 0, 0)
