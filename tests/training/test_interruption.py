"""What Ctrl-C leaves before the first checkpoint, and what is said of it."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from draftsmith.training.interruption import TrainingInterrupted
from draftsmith.workflows.held_out import Evaluation
from draftsmith.workflows.training import TrainResult, train
from tests.helpers.tiny import save_tiny_target


class Stopping(io.StringIO):
    """A terminal at which the user presses Ctrl-C as soon as a word is shown."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.word = word

    def write(self, text: str) -> int:
        if self.word in text:
            raise KeyboardInterrupt
        return super().write(text)


def start(place: Path, word: str, **more: bool) -> TrainResult:
    return train(
        None, "stage1.steps=1", "stage2.steps=1", target=place / "model", data=place / "text.jsonl", out=place / "run",
        evaluation=Evaluation(prompts_a_task=2, new_tokens=8, prompt_tokens=8),
        console=Console(file=Stopping(word), width=400), **more,
    )


@pytest.fixture
def place(tmp_path: Path) -> Path:
    save_tiny_target(tmp_path / "model")
    lines = [json.dumps({"text": f"{i} draft verify accept {i * i} " * 4}) for i in range(20)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    return tmp_path


@pytest.mark.parametrize("word", ["chosen:", "assumption"])
def test_before_anything_is_written_a_run_says_that_it_wrote_nothing(place: Path, word: str):
    with pytest.raises(TrainingInterrupted, match=r"before the first checkpoint: nothing was written to .*/run; give"):
        start(place, word)
    assert TrainingInterrupted.exit_code == 130 and not (place / "run").exists()


def test_before_its_first_checkpoint_a_run_says_that_it_cannot_be_resumed(place: Path):
    with pytest.raises(TrainingInterrupted, match=r"what is in .*/run is no run that .*; give the same command again"):
        start(place, "estimate:")
    assert (place / "run" / "recipe.yaml").exists()
    assert start(place, "nothing").training.step == 2, "the same command starts from the beginning"
    with pytest.raises(KeyboardInterrupt):  # for the command line, which says that nothing is lost
        start(place, "resuming", resume=True)
