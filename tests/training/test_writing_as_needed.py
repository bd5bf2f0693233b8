"""A run that begins with stage 2 has the target write texts as they are learnt, and goes on exactly where it was."""

import json
import os
import signal
from pathlib import Path

import pytest

from draftsmith.drafters.trainable.model import TrainableModel
from draftsmith.training.train import train
from draftsmith.training.trainer import TrainingInterrupted
from tests.helpers import training_toy as toy

# The first 8 texts are learnt before another is needed.
SIZES = ("stage1.steps=0", "stage2.steps=40", "stage2.batch=1", "stage2.epochs=1", "stage2.generate_batch=8")


def written(folder: Path) -> int:
    lines = (folder / "generated.jsonl").read_text().splitlines()
    return sum(len(json.loads(line)["sequences"]) for line in lines)


@pytest.mark.parametrize(("call", "step", "texts"), [(2, 3, 8), (4, 39, 40)])
def test_a_run_that_is_stopped_between_steps_goes_on_exactly(tmp_path: Path, call: int, step: int, texts: int):
    data = toy.write_data(tmp_path)
    every = f"evaluation.every={step if call == 2 else 13}"
    toy.run(tmp_path / "calm", data, *SIZES, every)
    seen = 0

    def stopping(drafter: TrainableModel) -> dict[str, float]:
        nonlocal seen
        seen += 1
        if seen == call:
            os.kill(os.getpid(), signal.SIGINT)
        return toy.evaluate(drafter)

    recipe = toy.recipe(tmp_path / "twice", data, *SIZES, every)
    with pytest.raises(TrainingInterrupted, match=f"stopped at step {step} of 40"):
        train(recipe, target=toy.target(), generate=toy.generate, evaluate=stopping)
    assert written(tmp_path / "twice") == texts
    train(recipe, target=toy.target(), generate=toy.generate, evaluate=toy.evaluate, resume=True)
    same(tmp_path)


def test_a_run_that_is_stopped_while_the_target_writes_goes_on_exactly(tmp_path: Path):
    data = toy.write_data(tmp_path)
    sizes = (*SIZES, "stage2.generate_batch=4", "output.save_every=50")
    toy.run(tmp_path / "calm", data, *sizes)
    calls = 0

    def stopping(prompts: list[list[int]], max_tokens: int, seed: int) -> list[list[int]]:
        nonlocal calls
        calls += 1
        if calls == 9:
            os.kill(os.getpid(), signal.SIGINT)
        return toy.generate(prompts, max_tokens, seed)

    recipe = toy.recipe(tmp_path / "twice", data, *sizes)
    with pytest.raises(TrainingInterrupted, match="stopped at step 32 of 40"):
        train(recipe, target=toy.target(), generate=stopping, evaluate=toy.evaluate)
    assert (tmp_path / "twice" / "latest").resolve().name == "step-00000032"
    train(recipe, target=toy.target(), generate=toy.generate, evaluate=toy.evaluate, resume=True)
    same(tmp_path)


def same(folder: Path) -> None:
    for name in ("latest/model.safetensors", "latest/optimizer.safetensors", "generated.jsonl"):
        assert (folder / "calm" / name).read_bytes() == (folder / "twice" / name).read_bytes()
    assert written(folder / "calm") == 40
