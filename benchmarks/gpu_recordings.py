"""On a CUDA device: texts by recorded steps against texts whose kernels Python launches one by one, family by family.

    python benchmarks/gpu_recordings.py

Half of the texts are greedy, half are drawn. Drafters that are trained come untrained, but for the embedded one: they
guess little, yet what a guess costs is theirs. Both ways take turns in random order. In fp32 every text should be the
same token for token; in bf16 sums of other lengths round otherwise, so a text may part at a tie. Without a CUDA device
nothing is recorded, and both ways are the same.
"""

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import (
    PLAIN,
    arguments,
    as_json,
    finish,
    main,
    make_plan,
    make_prompts,
    ratio_of,
    say,
    show_table,
    span,
    start,
)

from draftsmith import assets
from draftsmith.drafters.attention.eagle3 import Eagle3
from draftsmith.drafters.attention.eagle_config import Eagle3Config
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.heads.hydra import make_hydra
from draftsmith.drafters.heads.hydra_config import HydraConfig
from draftsmith.drafters.registry import load_drafter
from draftsmith.engine import Engine
from draftsmith.plan import Plan
from draftsmith.replays import SWITCH
from draftsmith.targets import Target
from draftsmith.types import SamplingParams

WAYS = {"recorded": "1", "each by Python": "0"}


def drafters(target: Target, embedded: str, model: str) -> dict[str, Callable[[], Drafter | None]]:
    """Return what makes a drafter of each kind that is recorded."""
    return {
        "plain": lambda: None,
        "mlp": lambda: load_drafter(embedded, target),
        "eagle3": lambda: Eagle3.new(Eagle3Config(), target, None).for_decoding(target),
        "hydra, prefix attention": lambda: make_hydra(HydraConfig(prefix_attention=True), target, None).for_decoding(
            target
        ),
        "early-exit": lambda: load_drafter("early-exit", target),
        "draft-model, the target itself": lambda: load_drafter(f"draft-model:path={model}", target),
    }


def compare(target: Target, make: Callable[[], Drafter | None], plan: Plan, args: argparse.Namespace) -> dict[str, Any]:
    """Decode the same texts both ways, in turns."""
    params = [
        SamplingParams(max_tokens=args.new_tokens, temperature=0.8 * (row % 2), seed=row) for row in range(args.prompts)
    ]
    prompts = make_prompts(target, "code", 64, args.prompts, args.seed)
    engines = {}
    for way, switch in WAYS.items():
        os.environ[SWITCH] = switch  # read when engine and drafter are made
        torch.manual_seed(args.seed)
        engine = Engine(target, make(), max_batch=args.rows, max_length=64 + args.new_tokens)
        engine.generate(prompts, params, plan)
        engines[way] = engine
    rng, seconds, texts = np.random.default_rng(args.seed), {way: [] for way in WAYS}, {}
    for _ in range(args.rounds):
        for way in rng.permutation(list(WAYS)).tolist():
            begun = time.perf_counter()
            made = engines[way].generate(prompts, params, plan)
            seconds[way].append(time.perf_counter() - begun)
            texts[way] = [one.tokens for one in made]
    first, second = WAYS
    same = sum(a == b for a, b in zip(texts[first], texts[second], strict=True))
    tokens = {way: sum(map(len, found)) for way, found in texts.items()}
    return {
        "same_texts": same, "texts": args.prompts, "tokens": tokens, "seconds": seconds,
        "times": ratio_of(seconds[second], seconds[first], args.seed),
    }


def run() -> None:
    """Measure and write."""
    parser = arguments(__doc__, "gpu_recordings", dtype="fp32")
    parser.set_defaults(device="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=60)
    parser.add_argument("--rows", type=int, default=4, help="texts decoded together")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plans", nargs="+", default=["1,1,1", "2,2"])
    args = start(parser)
    model = args.target or str(assets.demo_target())
    target = Target.from_pretrained(model, dtype=args.dtype, device=args.device, native=False)
    before, cells = os.environ.get(SWITCH), []
    for name, make in drafters(target, args.drafter or str(assets.demo_drafter()), model).items():
        for text in [PLAIN] if name == "plain" else args.plans:
            say(f"{name}, {text}")
            cells.append({"drafter": name, "plan": text, **compare(target, make, make_plan(text), args)})
    if before is None:
        del os.environ[SWITCH]
    else:
        os.environ[SWITCH] = before
    show_table(
        f"Recorded against launched by Python, {target.name}, {args.dtype}, {args.device}, {args.rows} rows",
        ["drafter", "plan", "same texts", "recorded, s", "by Python / recorded"],
        [
            [
                c["drafter"], c["plan"], f"{c['same_texts']} of {c['texts']}",
                f"{np.median(c['seconds']['recorded']):.2f}",
                span(c["times"]),
            ]
            for c in cells
        ],
    )
    finish(args, {"cells": [cell | {"times": as_json(cell["times"])} for cell in cells]}, dtype=args.dtype)


if __name__ == "__main__":
    main(run)
