"""Training runs of heads on the toy target, for the tests of Medusa, Hydra and joint training."""

import json
import os
import signal
from functools import cache
from pathlib import Path

import pytest
import torch

from draftsmith import assets
from draftsmith.drafters.trainable.drafter import TrainableDrafter
from draftsmith.engine import Engine
from draftsmith.plan import Plan
from draftsmith.targets import Target
from draftsmith.training.result import TrainingResult
from draftsmith.training.train import train
from draftsmith.training.trainer import TrainingInterrupted
from draftsmith.types import SamplingParams
from tests.helpers import training_toy as toy


@cache
def demo_target() -> Target:
    """The embedded target as it is used on this machine: bf16 and native where that is there."""
    return Target.from_pretrained(assets.demo_target())


def evaluate(drafter: TrainableDrafter) -> dict[str, float]:
    return {"tokens_per_step": 1.0 + float(sum(p.detach().float().abs().mean() for p in drafter.parameters()))}


def run(folder: Path, data: Path, *overrides: str, resume: bool = False) -> TrainingResult:
    recipe = toy.recipe(folder, data, *overrides)
    return train(recipe, target=toy.target(), generate=toy.generate, evaluate=evaluate, resume=resume)


def losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


def check_training(folder: Path, family: str, weights_file: str) -> TrainingResult:
    """A run of the family lowers its loss; the same run, stopped and resumed, ends with the same weights."""
    data, options = toy.write_data(folder), f"drafter={family}"
    long = run(folder / "long", data, options, "stage1.steps=30", "stage2.steps=0")
    found = losses(long.folder)
    assert found[-1] < 0.8 * found[0]
    calm = run(folder / "calm", data, options, "evaluation.every=3")
    recipe, seen = toy.recipe(folder / "twice", data, options, "evaluation.every=3"), 0

    def stop_in_the_middle(drafter: TrainableDrafter) -> dict[str, float]:
        nonlocal seen
        seen += 1
        if seen == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return evaluate(drafter)

    with pytest.raises(TrainingInterrupted):
        train(recipe, target=toy.target(), generate=toy.generate, evaluate=stop_in_the_middle)
    run(folder / "twice", data, options, "evaluation.every=3", resume=True)
    for name in (f"latest/{weights_file}", "latest/optimizer.safetensors", f"drafter/{weights_file}"):
        assert (calm.folder / name).read_bytes() == (folder / "twice" / name).read_bytes()
    return long


@torch.no_grad()
def check_packed(drafter: TrainableDrafter, target: Target) -> None:
    """Decoding in bf16 on a native target, packed: the text is the target's own."""
    questions = [target.tokenizer(text)["input_ids"] for text in ("def add(a, b):\n    return", "Once upon a time")]
    params = SamplingParams(max_tokens=24)
    plain = Engine(target, None, max_batch=2).generate(questions, params)
    ready = drafter.for_decoding(target)
    for plan in (None, Plan((3, 2), nodes=4)):
        found = Engine(target, ready, plan=plan, max_batch=2).generate(questions, params)
        assert [c.tokens for c in found] == [c.tokens for c in plain]
