"""On a CUDA device: the report's grid on the demo target, and the cost of one step of a 7B target against its floor.

    python benchmarks/gpu_step_cost.py

First batch × candidates in bf16 as `draftsmith bench` measures it. Then a Llama of 7B's sizes with random weights, and
a random speculator of three stages: milliseconds a step for several numbers of candidates and batch sizes, recorded (as
CUDA graphs, which is the default) and with every kernel launched by Python, in turns. Random weights accept nothing, so
this says what a step costs, not what it brings. The floor of a plain step is the time to read every weight once at the
bandwidth measured by summing a large tensor; lookups in the embedding are left out.
Shapes: K candidates.
"""

import os
from typing import Any

import numpy as np
import torch
from common import (
    GEOMETRIES,
    PLAIN,
    arguments,
    as_json,
    bootstrap,
    finish,
    main,
    make_plan,
    make_prompts,
    open_drafter,
    print_table,
    random_speculator,
    say,
    start,
)

from draftsmith import assets
from draftsmith.drafters.heads.mlp import MLPSpeculator
from draftsmith.dtypes import resolve_dtype
from draftsmith.engine import Engine
from draftsmith.evaluation.bench import prepare_grid, run_engine, run_grid
from draftsmith.evaluation.grid import Grid
from draftsmith.evaluation.prompts import embedded_prompts
from draftsmith.plan import Plan
from draftsmith.replays import SWITCH
from draftsmith.targets import Target
from draftsmith.types import DraftsmithError

GIB = 2**30
WAYS = {"recorded": "1", "each by Python": "0"}


def read_bandwidth(device: torch.device, size: int = 4 * GIB, repeats: int = 20) -> float:
    """Return bytes a second of reading memory, the best of some sums over a tensor far larger than the caches."""
    block = torch.ones(size // 4, dtype=torch.float32, device=device)
    block.sum()
    best = float("inf")
    for _ in range(repeats):
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record()
        block.sum()
        ended.record()
        torch.cuda.synchronize()
        best = min(best, begun.elapsed_time(ended) / 1000)
    return size / best


def target_bytes(target: Target) -> int:
    """Bytes of the weights that one forward reads, the embedding left out."""
    whole = sum(p.numel() * p.element_size() for p in target.model.parameters())
    embedding = target.embedding_weight_VF
    tied = target.head_weight_VF.data_ptr() == embedding.data_ptr()
    return whole - (0 if tied else embedding.numel() * embedding.element_size())


def drafter_bytes(drafter: MLPSpeculator, depth: int) -> int:
    """Bytes of the weights that drafting so deep reads; shared stages are read once a depth."""
    total = 0
    for modules in (drafter.proj, drafter.ln, drafter.head):
        for module in list(modules)[:depth]:
            total += sum(p.numel() * p.element_size() for p in module.parameters())
    return total


def step_costs(
    target: Target,
    drafter: MLPSpeculator,
    plans: dict[str, Plan],
    batches: list[int],
    level: str,
    bandwidth: float,
    prompt_tokens: int,
    new_tokens: int,
    rounds: int,
    seed: int,
) -> list[dict[str, Any]]:
    """Measure milliseconds a step for every plan and batch size, rounds interleaved."""
    rng = np.random.default_rng(seed)
    cells = []
    before = os.environ.get(SWITCH)
    for batch in batches:
        length = prompt_tokens + new_tokens
        engines = {}
        for way, switch in WAYS.items():
            os.environ[SWITCH] = switch  # read when an engine is made
            engines[way] = Engine(
                target, drafter, max_batch=batch, max_length=length, share_prefixes=False, compile=level
            )
            for text, plan in plans.items():
                say(f"batch {batch}, plan {text}, {way}: ready after {engines[way].prepare(batch, plan):.1f} s")
        cases = [(way, text) for way in WAYS for text in plans]
        times: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
        split: dict[tuple[str, str], list[tuple[float, float, float]]] = {case: [] for case in cases}
        for index in range(rounds + 1):
            prompts = make_prompts(target, None, prompt_tokens, batch, seed + index)
            for at in rng.permutation(len(cases)).tolist():
                way, text = cases[at]
                run = run_engine(engines[way], prompts, plans[text], new_tokens)
                if index == 0 or run.measurement is None:
                    continue
                total = run.measurement.statistics
                steps = max(c.statistics.steps for c in run.measurement.completions)
                times[way, text].append(1000 * total.decode_s / steps)
                split[way, text].append(
                    tuple(1000 * s / steps for s in (total.target_s, total.drafter_s, total.rest_s))
                )
        plain_floor = 1000 * target_bytes(target) / bandwidth
        for way, text in cases:
            plan, ms = plans[text], np.array(times[way, text])
            floor = plain_floor + 1000 * drafter_bytes(drafter, plan.depth) / bandwidth
            mean = bootstrap(len(ms), lambda t, m=ms: float(m[t].mean()), seed)
            parts = np.array(split[way, text]).mean(axis=0)
            cells.append(
                {
                    "batch": batch,
                    "launches": way,
                    "plan": text,
                    "nodes": plan.max_nodes,
                    "step_ms": as_json(mean),
                    "target_ms": float(parts[0]),
                    "drafter_ms": float(parts[1]),
                    "rest_ms": float(parts[2]),
                    "floor_ms": floor,
                    "times_the_floor": mean.value / floor,
                    "times_the_plain_step": float(ms.mean() / np.mean(times[way, PLAIN])),
                }
            )
    if before is None:
        del os.environ[SWITCH]
    else:
        os.environ[SWITCH] = before
    return cells


def run() -> None:
    """Measure and write; refuse without CUDA."""
    parser = arguments(__doc__, "gpu_step_cost")
    parser.set_defaults(device="cuda")
    parser.add_argument("--geometry", default="7b", choices=list(GEOMETRIES))
    parser.add_argument("--compile", default="off", help="level of the engine")
    parser.add_argument("--plans", nargs="+", default=["1,1,1", "4,1,1", "8,2,1/16", "16,2,1/32"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--candidates", type=int, nargs="+", default=[0, 1, 2, 4, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=100)
    parser.add_argument("--step-tokens", type=int, default=40, help="new tokens a run of the 7B part")
    parser.add_argument("--skip-grid", action="store_true", help="only the 7B part")
    args = start(parser)
    if args.device.partition(":")[0] != "cuda" or not torch.cuda.is_available():
        raise DraftsmithError("this benchmark needs a CUDA device and PyTorch built for it, and there is none here.")
    dtype = resolve_dtype(args.dtype, torch.device(args.device))
    grid_cells: list[dict[str, Any]] = []
    if not args.skip_grid:
        target = Target.from_pretrained(args.target or assets.demo_target(), dtype=dtype, device=args.device)
        drafter = open_drafter(args.drafter, target)
        grid = Grid(
            batches=tuple(args.batches),
            candidates=tuple(args.candidates),
            prompt_tokens=(args.prompt_tokens,),
            new_tokens=args.new_tokens,
            trials=args.rounds,
            warmups=2,
            seed=args.seed,
        )
        length = args.prompt_tokens + args.new_tokens
        engine = Engine(
            target, drafter, max_batch=max(args.batches), max_length=length, share_prefixes=False, compile=args.compile
        )
        prepare_grid(engine, drafter.default_plan(), grid)
        grid_cells = run_grid(engine, drafter.default_plan(), embedded_prompts("code"), grid)
        print_table(
            f"{target.name}, {args.dtype}, code, prompt {args.prompt_tokens}, {args.new_tokens} new tokens",
            ["batch", "candidates", "ms/token", "×", "τ"],
            [
                [str(c["batch"]), str(c["candidates"]), f"{c['ms_per_token']:.3f}", f"{c['speedup']:.2f}",
                 f"{c['tokens_per_step']:.2f}"]
                for c in grid_cells
            ],
        )
    bandwidth = read_bandwidth(torch.device(args.device))
    say(f"memory is read at {bandwidth / 1e9:.0f} GB/s")
    large = Target(GEOMETRIES[args.geometry].build(dtype, args.device, args.seed), None, GEOMETRIES[args.geometry].name)
    speculator = random_speculator(large, stages=3, tie_weights=False)
    plans = {text: make_plan(text) for text in [PLAIN, *args.plans]}
    cells = step_costs(
        large, speculator, plans, args.batches, args.compile, bandwidth, args.prompt_tokens, args.step_tokens,
        args.rounds, args.seed,
    )
    print_table(
        f"One step, {large.name}, {args.dtype}, level {args.compile}, reading at {bandwidth / 1e9:.0f} GB/s",
        ["batch", "plan", "launches", "nodes", "ms a step", "floor", "× floor", "× plain step"],
        [
            [str(c["batch"]), c["plan"], c["launches"], str(c["nodes"]), f"{c['step_ms']['value']:.3f}",
             f"{c['floor_ms']:.3f}", f"{c['times_the_floor']:.2f}", f"{c['times_the_plain_step']:.2f}"]
            for c in cells
        ],
    )
    finish(
        args,
        {
            "read_bandwidth_bytes_per_s": bandwidth,
            "weights": sum(p.numel() for p in large.model.parameters()),
            "speculator_weights": sum(p.numel() for p in speculator.parameters()),
            "grid": grid_cells,
            "steps": cells,
        },
        dtype=args.dtype,
    )


if __name__ == "__main__":
    main(run)
