"""What a dry run says of a run that is to be resumed."""

import io
import os
import signal
from pathlib import Path

import pytest
from rich.console import Console

from draftsmith.drafters.registry import load_drafter
from draftsmith.drafters.trainable.model import TrainableModel
from draftsmith.training.data.generated import Generate
from draftsmith.training.interruption import TrainingInterrupted
from draftsmith.training.progress import Work
from draftsmith.training.train import train
from draftsmith.types import DraftsmithError
from tests.helpers import training_toy as toy


def stopped_run(folder: Path, data: Path, generate: Generate = toy.generate, at: int = 2) -> None:
    """Train, and be stopped during the measurement of that number."""
    seen = 0

    def evaluate(drafter: TrainableModel) -> dict[str, float]:
        nonlocal seen
        seen += 1
        if seen == at:
            os.kill(os.getpid(), signal.SIGINT)
        return toy.evaluate(drafter)

    recipe = toy.recipe(folder, data, "evaluation.every=3")
    with pytest.raises(TrainingInterrupted):
        train(recipe, target=toy.target(), generate=generate, evaluate=evaluate)


def dry_run(folder: Path, data: Path, *overrides: str) -> tuple[str, list[Work]]:
    """Return what a dry run of a run that goes on says, and the work that it has time and memory estimated for."""
    console, work = Console(file=io.StringIO(), width=200), list[Work]()
    result = train(
        toy.recipe(folder, data, "evaluation.every=3", *overrides), target=toy.target(), generate=toy.generate,
        evaluate=toy.evaluate, resume=True, dry_run=True, console=console, foretell=lambda some, _: work.append(some),
    )
    best = (folder / "best").resolve()
    assert result.drafter.resolve() == best and load_drafter(best, toy.target()).max_depth == 2
    return console.file.getvalue(), work


def test_a_dry_run_of_a_run_that_goes_on_says_where_it_stands_and_what_is_left(tmp_path: Path):
    data, run = toy.write_data(tmp_path), tmp_path / "run"
    with pytest.raises(DraftsmithError, match="no checkpoint to resume from"):
        dry_run(run, data)
    assert not run.exists()
    stopped_run(run, data)
    before = toy.outcome(run)
    said, work = dry_run(run, data)
    assert "the run stands at step 3 of 10: --resume would take 3 steps of stage 1 and 4 steps of stage 2." in said
    assert "initialised drafter" not in said
    assert work == [Work(first=3, second=4, texts=4, measurements=3, saves=5)]
    assert toy.outcome(run) == before, "nothing is written"
    with pytest.raises(DraftsmithError, match=r"seed is 5, but the run in .* has 0"):
        dry_run(run, data, "seed=5")
    toy.run(run, data, "evaluation.every=3", resume=True)
    said, work = dry_run(run, data)
    assert "the run is done, after 10 steps" in said and work == []


def test_a_dry_run_within_stage_two_counts_what_was_written(tmp_path: Path):
    data, run = toy.write_data(tmp_path), tmp_path / "run"
    stopped_run(run, data, at=4)
    said, work = dry_run(run, data)
    assert "the run stands at step 9 of 10: --resume would take 1 step of stage 2." in said
    assert [(some.first, some.second, some.texts) for some in work] == [(0, 1, 0)]
