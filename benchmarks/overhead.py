"""Where the time of a step goes at batch 1: target, drafter and the rest, for every level, plainly and with drafts.

    python benchmarks/overhead.py

For the demo target with its drafter, and for a random Llama of about 134 million weights with a random speculator of
five stages (tied between stages and scoring a draft vocabulary, unless told otherwise). Next to the JSON stands a text
file with the profiler's table of operations for each of them.
"""

import argparse
from typing import Any

import numpy as np
import torch
from common import (
    GEOMETRIES,
    NATIVE,
    PLAIN,
    Setting,
    arguments,
    as_json,
    bootstrap,
    compile_level,
    finish,
    interleave,
    main,
    make_prompts,
    model_folder,
    open_drafter,
    plans_within,
    print_table,
    random_speculator,
    say,
    shown,
    span,
    split_levels,
    start,
    statistics_of,
    with_engine,
)
from torch.profiler import ProfilerActivity, profile

from draftsmith.dtypes import resolve_dtype
from draftsmith.engine import Engine
from draftsmith.evaluation.bench import TimedCall, run_engine
from draftsmith.evaluation.reporting.result_files import write_text
from draftsmith.plan import Plan
from draftsmith.targets import Target

PARTS = ("target", "drafter", "rest")


def shares(runs: list[TimedCall], seed: int) -> dict[str, Any]:
    """Milliseconds of a step and the share of each part, with intervals over prompts."""
    statistics = statistics_of(runs)
    steps = np.array([s.steps for s in statistics])
    whole = np.array([s.decode_s for s in statistics])
    cell = {"step_ms": bootstrap(len(runs), lambda t: 1000 * float(whole[t].sum() / steps[t].sum()), seed)}
    for part in PARTS:
        spent = np.array([getattr(s, f"{part}_s") for s in statistics])
        cell[part] = bootstrap(len(runs), lambda t, p=spent: float(p[t].sum() / whole[t].sum()), seed)
    return cell


def profiled(engine: Engine, prompt: list[int], plan: Plan, new_tokens: int, top: int) -> str:
    """Return the profiler's table for one call."""
    cuda = engine.target.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as record:
        run_engine(engine, [prompt], plan, new_tokens)
    order = "self_cuda_time_total" if cuda else "self_cpu_time_total"
    return str(record.key_averages().table(sort_by=order, row_limit=top, max_name_column_width=60))


def measure_geometry(
    geometry: str, args: argparse.Namespace, tables: list[str]
) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """Measure one target in all levels."""
    engines: dict[str, Engine] = {}
    plans: dict[str, Plan] = {}
    settings: dict[str, Setting] = {}
    with model_folder(geometry, args.target, resolve_dtype(args.dtype, torch.device(args.device))) as folder:
        for level in split_levels(args.levels):
            target = Target.from_pretrained(folder, dtype=args.dtype, device=args.device, native=level == NATIVE)
            if geometry == "demo":
                drafter = open_drafter(args.drafter, target)
            else:
                drafter = random_speculator(target, args.stages, args.tie, min(args.draft_vocab, target.vocab_size))
            plans = plans_within([PLAIN, *args.plans], drafter)
            engine = Engine(
                target,
                drafter,
                max_batch=1,
                max_length=args.prompt_tokens + args.new_tokens,
                share_prefixes=False,
                compile=compile_level(level),
            )
            engines[level] = engine
            for text, plan in plans.items():
                say(f"{geometry}, level {level}, {text}: ready after {engine.prepare(1, plan):.1f} s")
                settings[f"{level} {text}"] = with_engine(engine, plan, args.new_tokens)
    prompts = make_prompts(target, None, args.prompt_tokens, args.rounds, args.seed)
    runs = interleave(settings, prompts, args.warmups, args.seed, geometry)
    cells, rows = [], []
    for level, engine in engines.items():
        for text, plan in plans.items():
            mine = runs[f"{level} {text}"]
            cell = shares(mine, args.seed)
            steps = sum(s.steps for s in statistics_of(mine))
            about = {"geometry": geometry, "model": target.name, "level": level, "plan": text, "steps": steps}
            cells.append(about | {name: as_json(value) for name, value in cell.items()})
            rows.append([geometry, level, text, span(cell["step_ms"]), *(span(cell[part], 3) for part in PARTS)])
            table = profiled(engine, prompts[0], plan, args.profiled_tokens, args.top)
            tables.append(f"{target.name}, level {level}, plan {text}, {args.profiled_tokens} tokens\n\n{table}\n")
    return cells, rows


def run() -> None:
    """Measure and write."""
    parser = arguments(__doc__, "overhead")
    parser.add_argument("--geometries", nargs="+", default=["demo", "134m"], choices=["demo", *GEOMETRIES])
    parser.add_argument("--levels", default="native,off,trace,full")
    parser.add_argument("--plans", nargs="+", default=["1,1,1,1", "3,2,1/4"], help="besides plain decoding")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--warmups", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--stages", type=int, default=5, help="of the random speculator")
    parser.add_argument("--tie", action=argparse.BooleanOptionalAction, default=True, help="its stages share weights")
    parser.add_argument("--draft-vocab", type=int, default=8192, help="tokens it scores; 0 is all")
    parser.add_argument("--profiled-tokens", type=int, default=32)
    parser.add_argument("--top", type=int, default=25, help="rows of the profiler's table")
    args = start(parser)
    cells: list[dict[str, Any]] = []
    rows: list[list[str]] = []
    tables: list[str] = []
    for geometry in args.geometries:
        more_cells, more_rows = measure_geometry(geometry, args, tables)
        cells += more_cells
        rows += more_rows
    print_table(
        f"Shares of a step, {args.dtype}, batch 1, {args.rounds} prompts (95 % intervals)",
        ["target", "level", "plan", "ms a step", *PARTS],
        rows,
    )
    text = args.json.with_suffix(".profile.txt")
    write_text(text, "\n".join(tables))
    print(f"\nwritten: {shown(text)}")
    finish(args, {"cells": cells}, dtype=args.dtype)


if __name__ == "__main__":
    main(run)
