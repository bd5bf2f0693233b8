"""How long a target takes to load from disk with native packing, and without any: alone, and until the first new token.

    python benchmarks/loading.py

Both ways take turns in one process, in random order; the first turn is thrown away. "Unpacked" leaves out oneDNN's
packing as well. "Warm" is with the files in the page cache, where the unpacked load maps them and copies nothing;
"cold" is after the system was asked to drop them from it, as after a restart.

"Loaded" is the time until the target is there. Both ways have then read the model once, by its own code, to learn its
shapes; packed, they have also compared the native forward with it. "First token" is the time from the same start until
one new token behind a prompt is known, greedily, without drafts and uncompiled: the engine is made and the prompt is
read. Both sides read the same prompt and give one token.
"""

import gc
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from common import (
    GEOMETRIES,
    arguments,
    as_json,
    finish,
    main,
    model_folder,
    ratio_of,
    say,
    show_table,
    span,
    start,
)
from transformers import AutoConfig

from draftsmith.engine import Engine
from draftsmith.evaluation.bench import run_engine
from draftsmith.evaluation.measuring.interleaving import interleaved
from draftsmith.native import why_missing
from draftsmith.plan import NO_DRAFT
from draftsmith.targets import Target
from draftsmith.targets import backend as backend_module
from draftsmith.types import DraftsmithError

FILES = ("warm", "cold")
WAYS = ("packed", "unpacked")
MOMENTS = {"loaded": "loaded", "first_token": "first token"}

Seconds = dict[str, dict[str, list[float]]]
"""Of every timed load, by moment and way."""


def forget(folder: str) -> None:
    """Ask the system to drop a model's weights from the page cache."""
    for path in Path(folder).glob("*.safetensors"):
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load_times(folder: str, prompt: list[int], loads: int, seed: int, cold: bool) -> Seconds:
    """Load in turns, and decode one token each time."""
    rng = random.Random(seed)
    seconds: Seconds = {moment: {way: [] for way in WAYS} for moment in MOMENTS}
    for _, way, timed in interleaved(WAYS, loads, rng, warmups=1):
        gc.collect()
        if cold:
            forget(folder)
        with patch.object(backend_module, "can_prepack", lambda *_: False):
            begun = time.perf_counter()
            target = Target.from_pretrained(folder, dtype="bf16", device="cpu", native=way == "packed")
            loaded = time.perf_counter() - begun
        if target.backend.native != (way == "packed"):
            raise DraftsmithError(f"{target.name} is not packed; {why_missing()}.")
        engine = Engine(target, max_batch=1, max_length=len(prompt) + 1, compile="off")
        run_engine(engine, [prompt], NO_DRAFT, 1)
        first = time.perf_counter() - begun
        del target, engine
        if timed:
            seconds["loaded"][way].append(loaded)
            seconds["first_token"][way].append(first)
    return seconds


def measure_model(model: str, args: Any) -> list[dict[str, Any]]:
    """Measure one model with warm and with cold files."""
    cells = []
    with model_folder(model, args.target, torch.bfloat16) as folder:
        name = Path(folder).name
        rng = random.Random(args.seed)
        vocabulary = AutoConfig.from_pretrained(folder).vocab_size
        prompt = [rng.randrange(vocabulary) for _ in range(args.prompt_tokens)]
        for files in FILES:
            seconds = load_times(folder, prompt, args.loads, args.seed, files == "cold")
            say(f"{name}, {files}: {args.loads} loads each way")
            for moment, found in seconds.items():
                tops, bottoms = ([[s] for s in found[way]] for way in WAYS)
                ratio = ratio_of(tops, bottoms, args.seed)
                cells.append(
                    {"model": model, "name": name, "files": files, "until": moment, "ratio": ratio, "seconds": found}
                )
    return cells


def run() -> None:
    """Measure and write."""
    parser = arguments(__doc__, "loading")
    parser.set_defaults(threads=2)
    parser.add_argument("--models", nargs="+", default=["demo", "134m"], choices=["demo", *GEOMETRIES])
    parser.add_argument("--loads", type=int, default=9, help="timed loads of each kind")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    args = start(parser)
    if args.device != "cpu" or args.dtype != "bf16":
        raise DraftsmithError("this benchmark is about bf16 on a CPU; --device and --dtype cannot be changed.")
    if args.loads < 1 or args.prompt_tokens < 1:
        raise DraftsmithError("--loads and --prompt-tokens have to be at least 1.")
    cells = [cell for model in args.models for cell in measure_model(model, args)]
    rows = [
        [
            cell["name"], cell["files"], MOMENTS[cell["until"]],
            *(f"{statistics.median(cell['seconds'][way]):.3f}" for way in WAYS), span(cell["ratio"]),
        ]
        for cell in cells
    ]
    show_table(
        f"Loading a target, bf16, {torch.get_num_threads()} threads, medians of {args.loads} (ratio of medians, 95 % "
        f"intervals paired by round); the first token is behind {args.prompt_tokens} of a prompt",
        ["model", "files", "until", "packed, s", "unpacked, s", "packed / unpacked"],
        rows,
    )
    for cell in cells:
        cell["ratio"] = as_json(cell["ratio"])
    finish(args, {"cells": cells}, dtype=args.dtype)


if __name__ == "__main__":
    main(run)
