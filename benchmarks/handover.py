"""Up to how many rows the native products are ahead of oneDNN's, shape by shape, in bf16 and in int8.

    python benchmarks/handover.py

Four products of the same rows with the same matrix take turns in one process, in a random order within every round,
after a warm-up: ours in bf16; ours in int8; oneDNN as PyTorch calls it, which rearranges the matrix at every call;
and oneDNN on a matrix rearranged beforehand. The shapes are those of four models: attention (queries, output), the
gate and up projections, the down projection, and the head. Ratios are of medians, paired by round, with 95 %
intervals. oneDNN wins at M where ours takes more than 5 % longer and the interval lies above 1. What takes more than
`--most` billion operations is left out; heads are not asked for so many rows anyway, because a prompt wants logits of
its end alone.

Weights are as warm as four products taking turns leave them: in a cache that holds them all, or in memory.

Shapes: M rows, K inputs, N outputs.
"""

import random
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import GEOMETRIES, arguments, as_json, finish, main, print_table, say, start
from torch import Tensor
from transformers import AutoConfig

from draftsmith import assets
from draftsmith.evaluation.measuring.interleaving import interleaved
from draftsmith.evaluation.measuring.intervals import RESAMPLES, Interval
from draftsmith.native import LIBRARY, kernels_in_use, why_missing
from draftsmith.native.layers import Int8Linear, PackedLinear
from draftsmith.types import DraftsmithError

OURS, INT8, CALLED, PREPACKED = "native", "native int8", "oneDNN, called", "oneDNN, prepacked"
RIVALS = (CALLED, PREPACKED)
MARGIN = 1.05
"""How much longer ours has to take for oneDNN to win."""


def shapes_of(model: str) -> dict[str, tuple[int, int]]:
    """Return (K, N) of the products of a model: "demo" or one of `GEOMETRIES`."""
    if model == "demo":
        config = AutoConfig.from_pretrained(assets.demo_target())
        hidden, mlp, vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
    elif model in GEOMETRIES:
        hidden, mlp, vocabulary = GEOMETRIES[model].hidden, GEOMETRIES[model].mlp, GEOMETRIES[model].vocabulary
    else:
        raise DraftsmithError(f"there is no model {model!r}; choose from demo, {', '.join(GEOMETRIES)}.")
    return {
        "attention": (hidden, hidden), "gate, up": (hidden, mlp), "down": (mlp, hidden), "head": (hidden, vocabulary)
    }


def products(inputs: int, outputs: int, seed: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the contestants for one matrix."""
    weight_NK = torch.randn((outputs, inputs), generator=torch.Generator().manual_seed(seed)).bfloat16()
    ready = torch.ops.mkldnn._reorder_linear_weight(weight_NK, 1)
    return {
        OURS: PackedLinear(weight_NK, None),
        INT8: Int8Linear(weight_NK, None),
        CALLED: lambda x_MK: F.linear(x_MK, weight_NK),
        PREPACKED: lambda x_MK: torch.ops.mkldnn._linear_pointwise(x_MK, ready, None, "none", [], ""),
    }


def time_rounds(
    contestants: dict[str, Callable[[Tensor], Tensor]], x_MK: Tensor, args: Namespace, rng: random.Random
) -> dict[str, np.ndarray]:
    """Return seconds by round, of at least `--rounds` rounds and of more while `--seconds` last."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    begun, finished = time.perf_counter(), -2  # two rounds warm up
    while finished < args.rounds or (finished < 200 and time.perf_counter() - begun < args.seconds):
        for _, name, _ in interleaved(contestants, 1, rng):
            before = time.perf_counter()
            contestants[name](x_MK)
            taken = time.perf_counter() - before
            if finished >= 0:
                seconds[name].append(taken)
        finished += 1
    return {name: np.array(values) for name, values in seconds.items()}


def median_ratio(top_T: np.ndarray, bottom_T: np.ndarray, seed: int) -> Interval:
    """Return the ratio of two medians over rounds T, resampling rounds."""
    draws = np.random.default_rng(seed).integers(0, top_T.size, (RESAMPLES, top_T.size))
    ratios = np.median(top_T[draws], axis=1) / np.median(bottom_T[draws], axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return Interval(float(np.median(top_T) / np.median(bottom_T)), float(low), float(high))


def measure(model: str, counts: list[int], args: Namespace) -> list[dict[str, Any]]:
    """Measure every shape of a model at every number of rows."""
    rng = random.Random(args.seed)
    cells = []
    for shape, (inputs, outputs) in shapes_of(model).items():
        contestants = products(inputs, outputs, args.seed)
        for rows in counts:
            if 2 * rows * inputs * outputs > args.most * 1e9:
                continue
            x_MK = torch.randn((rows, inputs), generator=torch.Generator().manual_seed(rows)).bfloat16()
            seconds = time_rounds(contestants, x_MK, args, rng)
            over = {name: median_ratio(seconds[OURS], seconds[name], args.seed) for name in RIVALS}
            cells.append(
                {
                    "model": model, "shape": shape, "inputs": inputs, "outputs": outputs, "rows": rows,
                    "rounds": seconds[OURS].size,
                    "ms": {name: 1e3 * float(np.median(values)) for name, values in seconds.items()},
                    "gflops": 2e-9 * rows * inputs * outputs / float(np.median(seconds[OURS])),
                    "native_over": {name: as_json(value) for name, value in over.items()},
                    "native_over_int8": as_json(median_ratio(seconds[OURS], seconds[INT8], args.seed)),
                    "lost_to": [name for name in RIVALS if over[name].value > MARGIN and over[name].low > 1],
                }
            )
        say(f"{model}, {shape}: done")
    return cells


def lost_from(cells: list[dict[str, Any]], rival: str) -> int | None:
    """Return the number of rows from which oneDNN wins at every number measured, if any."""
    first = None
    for cell in sorted(cells, key=lambda cell: -cell["rows"]):
        if rival not in cell["lost_to"]:
            break
        first = cell["rows"]
    return first


def show(model: str, cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print the tables of a model; return where oneDNN wins."""
    counts = sorted({cell["rows"] for cell in cells})
    found, tables = [], {name: [] for name in (*RIVALS, INT8)}  # type: ignore[var-annotated]
    for shape in dict.fromkeys(cell["shape"] for cell in cells):
        own = {cell["rows"]: cell for cell in cells if cell["shape"] == shape}
        sizes = f"{own[counts[0]]['inputs']} → {own[counts[0]]['outputs']}"
        for rival in RIVALS:
            first = lost_from(list(own.values()), rival)
            lost = [rows for rows, cell in own.items() if rival in cell["lost_to"]]
            found.append({"model": model, "shape": shape, "rival": rival, "from": first, "rows": lost})
            ratios = [f"{own[m]['native_over'][rival]['value']:.2f}" if m in own else "" for m in counts]
            tables[rival].append([f"{shape}, {sizes}", *ratios, "–" if first is None else str(first)])
        ratios = [f"{own[m]['native_over_int8']['value']:.2f}" if m in own else "" for m in counts]
        tables[INT8].append([f"{shape}, {sizes}", *ratios])
    header = ["K → N, M =", *map(str, counts)]
    for rival in RIVALS:
        print_table(f"{model}: time of {OURS} over that of {rival}", [*header, "oneDNN wins from"], tables[rival])
    print_table(f"{model}: time of {OURS} over that of {INT8}", header, tables[INT8])
    return found


def run() -> None:
    """Measure every model."""
    parser = arguments(__doc__, "handover")
    parser.add_argument("--models", nargs="+", default=["demo", "134m", "500m", "7b"], help="demo, 134m, 500m, 7b")
    parser.add_argument("--rows", default="1,4,8,16,32,48,64,128,256,512")
    parser.add_argument("--rounds", type=int, default=5, help="least rounds of a product")
    parser.add_argument("--seconds", type=float, default=0.15, help="more rounds until so much time has passed")
    parser.add_argument("--most", type=float, default=10, help="billions of operations of the largest product")
    args = start(parser)
    if not LIBRARY:
        raise DraftsmithError(f"{why_missing()}; there is nothing to compare.")
    counts = [int(word) for word in args.rows.split(",")]
    cells: list[dict[str, Any]] = []
    verdicts = []
    with torch.inference_mode():
        for model in args.models:
            measured = measure(model, counts, args)
            verdicts += show(model, measured)
            cells += measured
    finish(args, {"kernels": kernels_in_use(), "margin": MARGIN, "oneDNN_wins": verdicts, "cells": cells}, dtype="bf16")


if __name__ == "__main__":
    main(run)
