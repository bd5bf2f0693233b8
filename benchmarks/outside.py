"""What a step costs outside target and drafter: milliseconds and share, by batch, plan and kind of sampling.

    python benchmarks/outside.py

Outside is the time of `Engine.generate` less what its statistics give to the target's forwards (prompts included) and
to the drafter: scheduling, layout, acceptance under the rules of sampling, keeping of keys and values, bookkeeping of
texts. Every batch decodes prompts of its own behind 64 random tokens. Cells take turns in random order.

    python benchmarks/outside.py --vocabularies 32000 128000 --rows 1 16 --family int4-self \
        --plans plain 1,1,1 sampled:1,1,1 --kinds greedy sampled

Scores of random weights are nearly alike, which leaves no token a share of its own. `--sharpness 8` multiplies the
head, so that they spread as those of a trained model do.

Shapes: B rows.
"""

import argparse
import random
import time
from typing import Any

import torch
from common import (
    GEOMETRIES,
    arguments,
    as_json,
    finish,
    main,
    median_of,
    model_folder,
    open_drafter,
    plans_within,
    random_speculator,
    say,
    show_table,
    span,
    start,
)
from transformers import AutoModelForCausalLM

from draftsmith.drafters.registry import load_drafter
from draftsmith.dtypes import resolve_dtype
from draftsmith.engine import Engine
from draftsmith.plan import Plan
from draftsmith.targets import Target
from draftsmith.types import SamplingParams, require_finished

PROMPT = 64
KINDS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.8, seed=1),
    "sampled, penalties": SamplingParams(
        temperature=0.8, top_k=50, top_p=0.95, repetition_penalty=1.1, frequency_penalty=0.1, seed=1
    ),
    "mixed": SamplingParams(),
}


def rules_of(kind: str, rows: int, new_tokens: int) -> list[SamplingParams]:
    """Return the rules of every row; mixed batches alternate."""
    kinds = ["greedy", "sampled, penalties"] if kind == "mixed" else [kind]
    chosen = [KINDS[kinds[row % len(kinds)]] for row in range(rows)]
    return [SamplingParams(**{**vars(params), "max_tokens": new_tokens, "ignore_eos": True}) for params in chosen]


def measure(engine: Engine, plan: Plan, kind: str, rows: int, new_tokens: int, rng: random.Random) -> dict[str, float]:
    """Return milliseconds of a step and outside target and drafter, and the steps."""
    vocabulary = engine.target.vocab_size
    prompts = [[rng.randrange(vocabulary) for _ in range(PROMPT)] for _ in range(rows)]
    begun = time.perf_counter()
    found = require_finished(engine.generate(prompts, rules_of(kind, rows, new_tokens), plan))
    seconds = time.perf_counter() - begun
    statistics = [completion.statistics for completion in found]
    inside = sum(one.target_s + one.drafter_s + one.prefill_s for one in statistics)
    prefill = sum(one.prefill_s for one in statistics)
    steps = max(one.steps for one in statistics)
    return {
        "step_ms": 1000 * (seconds - prefill) / steps,
        "outside_ms": 1000 * (seconds - inside) / steps,
        "steps": steps,
    }


def run() -> None:
    """Measure and write."""
    parser = arguments(__doc__, "outside")
    parser.add_argument("--geometries", nargs="+", default=["134m"], choices=["demo", *GEOMETRIES])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 64])
    parser.add_argument("--plans", nargs="+", default=["plain", "1,1,1"])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument(
        "--vocabularies", nargs="+", type=int, default=[0], help="of random targets; 0 is the geometry's own"
    )
    parser.add_argument("--sharpness", type=float, default=1.0, help="what the head of random targets is multiplied by")
    parser.add_argument(
        "--family", default="random", help="what drafts for random targets: random (an MLP speculator), int4-self, …"
    )
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    args = start(parser)
    cells: list[dict[str, Any]] = []
    table: list[list[str]] = []
    for geometry, vocabulary in [(geometry, size) for geometry in args.geometries for size in args.vocabularies]:
        target = open_target(geometry, vocabulary, args)
        if geometry == "demo":
            drafter = open_drafter(args.drafter, target)
        elif args.family == "random":
            drafter = random_speculator(target, 3, True, 8192)
        else:
            drafter = load_drafter(args.family, target)
        name = f"{geometry}, {target.vocab_size:,} tokens" if vocabulary else geometry
        cells, table = measure_target(name, target, drafter, args, cells, table)
    show_table(
        f"Outside target and drafter, {args.dtype} ({args.rounds} rounds, 95 % intervals)",
        ["target", "rows", "plan", "kind", "step, ms", "outside, ms", "share of the step"], table,
    )
    finish(args, {"cells": cells}, dtype=args.dtype)


def open_target(geometry: str, vocabulary: int, args: argparse.Namespace) -> Target:
    """Load the target, or make a random one with this vocabulary."""
    dtype = resolve_dtype(args.dtype, torch.device(args.device))
    with model_folder(geometry, args.target, dtype, vocabulary or None) as folder:
        if geometry != "demo" and args.sharpness != 1:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
            with torch.no_grad():
                model.get_output_embeddings().weight.mul_(args.sharpness)
            model.save_pretrained(folder)
        return Target.from_pretrained(folder, dtype=args.dtype, device=args.device)


def measure_target(
    geometry: str, target: Target, drafter: Any, args: argparse.Namespace, cells: list[dict[str, Any]],
    table: list[list[str]],
) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """Measure all cells of one target."""
    plans = plans_within(args.plans, drafter)
    engines = {
        rows: Engine(target, drafter, max_batch=rows, max_length=512, share_prefixes=False) for rows in args.rows
    }
    keys = [(rows, plan, kind) for rows in args.rows for plan in plans for kind in args.kinds]
    found: dict[tuple[int, str, str], list[dict[str, float]]] = {key: [] for key in keys}
    order = random.Random(args.seed)
    for turn in range(args.rounds + 1):
        say(f"{geometry}: round {turn} of {args.rounds}")
        order.shuffle(keys)
        for rows, plan, kind in keys:
            one = measure(engines[rows], plans[plan], kind, rows, args.new_tokens, random.Random(turn))
            if turn:  # the first warms up
                found[rows, plan, kind].append(one)
    for (rows, plan, kind), rounds in sorted(found.items()):
        step = median_of([[one["step_ms"]] for one in rounds], args.seed)
        outside = median_of([[one["outside_ms"]] for one in rounds], args.seed)
        share = outside.value / step.value
        cells.append({
            "geometry": geometry, "rows": rows, "plan": plan, "kind": kind, "step_ms": as_json(step),
            "outside_ms": as_json(outside), "share": share, "steps": sum(one["steps"] for one in rounds),
        })
        table.append([geometry, str(rows), plan, kind, span(step), span(outside, 3), f"{100 * share:.1f} %"])
    return cells, table


if __name__ == "__main__":
    main(run)
