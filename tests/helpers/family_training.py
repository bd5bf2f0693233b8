"""What every trained family must pass in a tiny training run: the loss falls, and a resumed run ends as a calm one."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.drafters.registry import load_drafter
from draftsmith.drafters.trainable.drafter import TrainableDrafter
from draftsmith.training.recipe import Recipe, build_recipe
from draftsmith.training.train import train
from draftsmith.training.trainer import TrainingInterrupted
from tests.helpers import training_toy as toy


def family_recipe(folder: Path, data: Path, drafter: dict[str, Any], *overrides: str) -> Recipe:
    """Return the toy recipe with another drafter."""
    values = toy.recipe(folder, data).model_dump(mode="json")
    return build_recipe(values | {"drafter": drafter}, list(overrides))


def evaluate(drafter: TrainableDrafter) -> dict[str, float]:
    """Stand in for decoding by a number that is a function of the weights."""
    return {"tokens_per_step": 1.0 + sum(float(p.float().abs().mean()) for p in drafter.parameters())}


def check_training(tmp_path: Path, drafter: dict[str, Any], *overrides: str) -> TrainableDrafter:
    """Train calmly, and again with an interruption; return the drafter as it is loaded from the calm run."""
    data = toy.write_data(tmp_path)
    short = ("stage1.steps=24", "stage2.steps=2", *overrides)
    arguments = {"target": toy.target(), "generate": toy.generate}
    calm = train(family_recipe(tmp_path / "calm", data, drafter, *short), evaluate=evaluate, **arguments)
    lines = (calm.folder / "metrics.jsonl").read_text().splitlines()
    losses = [record["loss"] for record in map(json.loads, lines) if "loss" in record]
    assert sum(losses[20:24]) < 0.9 * sum(losses[:4])
    seen = 0

    def stop_in_the_middle(served: TrainableDrafter) -> dict[str, float]:
        nonlocal seen
        seen += 1
        if seen == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return evaluate(served)

    stops = (*short, "evaluation.every=11")
    twice = family_recipe(tmp_path / "twice", data, drafter, *stops)
    with pytest.raises(TrainingInterrupted, match=r"stopped at step 11 of 26"):
        train(twice, evaluate=stop_in_the_middle, **arguments)
    train(twice, evaluate=evaluate, resume=True, **arguments)
    for name in ("latest/model.safetensors", "latest/optimizer.safetensors"):
        assert (calm.folder / name).read_bytes() == (tmp_path / "twice" / name).read_bytes()
    loaded = load_drafter(calm.drafter, toy.target())
    assert isinstance(loaded, TrainableDrafter)
    assert all(torch.isfinite(p).all() for p in loaded.parameters())
    return loaded
