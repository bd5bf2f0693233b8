"""A tiny run for training tests: a byte-level Llama, a few documents, generation and evaluation that are functions of
their input, and a way to kill a child process at a chosen moment.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from draftsmith.drafters.trainable.model import TrainableModel
from draftsmith.targets import Target
from draftsmith.training.recipe import Recipe, build_recipe
from draftsmith.training.result import TrainingResult
from draftsmith.training.train import train
from tests.helpers.tiny import TOKENIZER_EOS, TOKENIZER_SIZE, tiny_model, tiny_tokenizer

WORDS = ("draft", "verify", "accept", "token", "tree", "root", "target", "stage", "state", "plan")


@cache
def target() -> Target:
    model = tiny_model(dtype=torch.float32, vocabulary=TOKENIZER_SIZE, eos_token_id=TOKENIZER_EOS)
    return Target(model, tiny_tokenizer(), name="toy")


def write_data(folder: Path, documents: int = 40) -> Path:
    path = folder / "text.jsonl"
    lines = [f'{{"text": "{i} ' + " ".join(WORDS[(i * j) % 10] for j in range(1, 30)) + '"}' for i in range(documents)]
    path.write_text("\n".join(lines) + '\n{"text": ""}\n')
    return path


def recipe(folder: Path, data: Path, *overrides: str) -> Recipe:
    return build_recipe(
        {
            "drafter": {"n_predict": 2, "inner_dim": 16, "top_k_tokens_per_head": [2, 1]},
            "data": {"sources": [{"path": str(data)}], "shuffle_documents": 8, "shuffle_windows": 4},
            "stage1": {"steps": 6, "batch": 2, "length": 32, "rate": 0.01, "final_rate": 0.001},
            "stage2": {"steps": 4, "batch": 2, "prompt_tokens": 6, "new_tokens": 10, "epochs": 2, "generate_batch": 2},
            "optimizer": {"precision": "fp32"},
            "output": {"folder": str(folder), "save_every": 2, "log_every": 1, "dtype": "fp32"},
        },
        list(overrides),
    )


def generate(prompts: list[list[int]], max_tokens: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed % 2**62)
    return torch.randint(0, 256, (len(prompts), max_tokens), generator=generator).tolist()


def evaluate(trained_model: TrainableModel) -> dict[str, float]:
    return {
        "tokens_per_step": 1.0 + float(sum(p.float().abs().sum() for p in trained_model.parameters() if p.ndim == 1))
    }


def run(folder: Path, data: Path, *overrides: str, resume: bool = False) -> TrainingResult:
    return train(recipe(folder, data, *overrides), target=target(), generate=generate, evaluate=evaluate, resume=resume)


def records(folder: Path, key: str) -> list[dict[str, Any]]:
    """Return the records of a run's metrics that have a key."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if key in record]


def outcome(folder: Path) -> dict[str, bytes]:
    """Every file of a run but run.json, and where its links point: what kills must not change."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_symlink() or path.is_file()}
    del found["run.json"]
    return {
        name: os.fsencode(path.readlink()) if path.is_symlink()
        # The recipe tells where the run is kept.
        else path.read_bytes().replace(os.fsencode(folder), b"") for name, path in found.items()
    }


def dies(task: Callable[[], object], at_call: int | None = None, after_s: float | None = None) -> bool:
    """Run a task in a forked child that dies, as by kill -9, at its n-th filesystem call or after some seconds.

    Returns whether it was killed; False means that it finished before. An exception in the child fails the test.
    """
    child = os.fork()
    if child == 0:
        status = 3
        try:
            if at_call is not None:
                sys.setprofile(_death_at(at_call))
            task()
            status = 0
        except BaseException:
            sys.setprofile(None)
            traceback.print_exc()
        finally:
            os._exit(status)
    if after_s is not None:
        time.sleep(after_s)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0, "the child raised, see above"
    return False


def together(*tasks: Callable[[], object]) -> None:
    """Run tasks in forked children at the same time; an exception in one fails the test."""
    children = []
    for task in tasks:
        children.append(os.fork())
        if children[-1] == 0:
            try:
                task()
                os._exit(0)
            finally:
                traceback.print_exc()
                os._exit(3)
    assert {os.waitpid(child, 0)[1] for child in children} == {0}, "a child raised, see above"


FILE_CALLS = frozenset(
    ("open", "write", "flush", "fsync", "close", "mkdir", "rename", "replace", "symlink", "unlink", "rmdir", "truncate")
)


def _death_at(call: int) -> Callable[[FrameType, str, object], None]:
    count = 0

    def hook(_: FrameType, event: str, function: object) -> None:
        nonlocal count
        if event == "c_call" and getattr(function, "__name__", "") in FILE_CALLS:
            count += 1
            if count == call:
                os.kill(os.getpid(), signal.SIGKILL)

    return hook
