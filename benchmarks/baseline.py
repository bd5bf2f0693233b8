"""Plain decoding without drafts, every level of the engine against transformers' `generate`, batch 1, same dtype.

    python benchmarks/baseline.py
    python benchmarks/baseline.py --geometry 134m --json benchmarks/results/baseline-134m.json

One process, rounds interleaved in random order on the same prompts, exactly as many tokens on every side. The
wall-clock of the whole call counts, prefill included. Seconds of compilation come from two child processes, the first
with an empty compiler cache and the second with what the first left.
"""

import argparse
import subprocess
import sys

import numpy as np
import torch
from common import (
    GEOMETRIES,
    NATIVE,
    TRANSFORMERS,
    Setting,
    arguments,
    as_json,
    cache_folder,
    compile_level,
    finish,
    interleave,
    main,
    make_prompts,
    model_folder,
    print_table,
    say,
    span,
    split_levels,
    start,
    tokens_of,
    walls,
    with_engine,
    with_peer,
)

from draftsmith.dtypes import resolve_dtype
from draftsmith.engine import Engine
from draftsmith.evaluation.measuring.intervals import mean_interval, ratio_interval
from draftsmith.evaluation.measuring.losslessness import first_divergence
from draftsmith.evaluation.measuring.peers import transformers_peer
from draftsmith.plan import NO_DRAFT
from draftsmith.targets import Target


def compile_seconds(level: str, folder: str, args: argparse.Namespace) -> dict[str, float]:
    """Seconds until one shape is ready, in fresh processes: with an empty compiler cache, then with a filled one."""
    command = [sys.executable, __file__, "--prepare-only", level, "--target", folder, "--dtype", args.dtype]
    command += ["--device", args.device, "--new-tokens", str(args.new_tokens)]
    command += ["--prompt-tokens", str(args.prompt_tokens)]
    if args.threads is not None:
        command += ["--threads", str(args.threads)]
    seconds = {}
    with cache_folder() as environment:
        for name in ("cold", "warm"):
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"preparing level {level} failed: {done.stderr.strip().splitlines()[-1:]}")
            seconds[name] = float(done.stdout.strip().splitlines()[-1])
            say(f"level {level}, {name} cache: ready after {seconds[name]:.1f} s")
    return seconds


def make_engine(folder: str, level: str, args: argparse.Namespace) -> Engine:
    """Load a target of its own for the level, so that no level has the memory of another."""
    target = Target.from_pretrained(folder, dtype=args.dtype, device=args.device, native=level == NATIVE)
    return Engine(
        target, max_batch=1, max_length=args.prompt_tokens + args.new_tokens, share_prefixes=False,
        compile=compile_level(level),
    )


def run() -> None:
    """Measure and write."""
    parser = arguments(__doc__, "baseline")
    parser.add_argument("--geometry", default="demo", choices=["demo", *GEOMETRIES])
    parser.add_argument("--levels", default="native,off,trace,full")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--warmups", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=100)
    parser.add_argument("--compile-times", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--prepare-only", metavar="LEVEL", help=argparse.SUPPRESS)
    args = start(parser)
    if args.prepare_only:
        print(make_engine(args.target, args.prepare_only, args).prepare(1, NO_DRAFT))
        return
    levels = split_levels(args.levels)
    with model_folder(args.geometry, args.target, resolve_dtype(args.dtype, torch.device("cpu"))) as folder:
        compiled = [level for level in levels if compile_level(level) != "off"] if args.compile_times else []
        seconds = {level: compile_seconds(level, folder, args) for level in compiled}
        engines = {level: make_engine(folder, level, args) for level in levels}
        for level, engine in engines.items():
            say(f"level {level}: ready after {engine.prepare(1, NO_DRAFT):.1f} s in this process")
        target = next(iter(engines.values())).target
        settings: dict[str, Setting] = {TRANSFORMERS: with_peer(transformers_peer(folder, target), args.new_tokens)}
        settings |= {level: with_engine(engine, NO_DRAFT, args.new_tokens) for level, engine in engines.items()}
        prompts = make_prompts(target, None, args.prompt_tokens, args.rounds, args.seed)
        runs = interleave(settings, prompts, args.warmups, args.seed)
    theirs = 1000 * walls(runs[TRANSFORMERS]) / args.new_tokens
    cells, rows = [], []
    for name, mine in runs.items():
        ms = 1000 * walls(mine) / args.new_tokens
        latency, ratio = mean_interval(ms, seed=args.seed), ratio_interval(theirs, ms, seed=args.seed)
        same = sum(
            first_divergence(0, left.tokens[0], right.tokens[0]) is None
            for left, right in zip(mine, runs[TRANSFORMERS], strict=True)
        )
        cell = {
            "setting": name,
            "ms_per_token": as_json(latency),
            "median_ms_per_token": float(np.median(ms)),
            "times_faster_than_transformers": as_json(ratio),
            "generated_tokens": tokens_of(mine),
            "texts_identical_to_transformers": same,
            "compile_seconds": seconds.get(name),
            "ms_per_token_rounds": ms.tolist(),
        }
        cells.append(cell)
        compiling = f"{seconds[name]['cold']:.0f} / {seconds[name]['warm']:.0f}" if name in seconds else ""
        rows.append([name, span(latency), span(ratio), f"{same} of {len(mine)}", str(tokens_of(mine)), compiling])
    print_table(
        f"Plain decoding, {target.name}, {args.dtype}, batch 1, prompt {args.prompt_tokens}, {args.new_tokens} new "
        f"tokens, {args.rounds} rounds (95 % intervals; ratio paired by round)",
        ["", "ms/token", "times faster than transformers", "same text", "tokens", "compile s, cold / warm"],
        rows,
    )
    finish(args, {"cells": cells}, target=target.name, dtype=str(target.dtype).removeprefix("torch."))


if __name__ == "__main__":
    main(run)
