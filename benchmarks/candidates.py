"""τ by the number of candidates that are verified, with the gain of each doubling, paired by prompt.

    python benchmarks/candidates.py

The tree is that of the report (6,3,2), pruned to its best K paths. Greedy; nothing is timed, so prompts are decoded
together. Intervals come from resampling prompts.
"""

from itertools import pairwise
from typing import Any

import numpy as np
from common import (
    arguments,
    as_json,
    bootstrap,
    finish,
    main,
    make_plan,
    make_prompts,
    open_drafter,
    pooled_tau,
    print_table,
    say,
    span,
    start,
)

from draftsmith import assets
from draftsmith.engine import Engine
from draftsmith.evaluation.grid import plan_for
from draftsmith.evaluation.measuring.measure import measure
from draftsmith.targets import Target
from draftsmith.types import SamplingParams


def run() -> None:
    """Measure every K on the same prompts."""
    parser = arguments(__doc__, "candidates")
    parser.add_argument("--tasks", default="code,prose")
    parser.add_argument("--candidates", default="1,2,4,8,16,32")
    parser.add_argument("--plan", default="6,3,2")
    parser.add_argument("--prompts", type=int, default=40, help="a task")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8)
    args = start(parser)
    target = Target.from_pretrained(args.target or assets.demo_target(), dtype=args.dtype, device=args.device)
    engine = Engine(
        target, open_drafter(args.drafter, target), max_batch=args.batch,
        max_length=args.prompt_tokens + args.new_tokens, share_prefixes=False,
    )
    tree, counts = make_plan(args.plan), [int(k) for k in args.candidates.split(",")]
    params = SamplingParams(max_tokens=args.new_tokens, ignore_eos=True)
    cells: list[dict[str, Any]] = []
    rows, steps_up = [], []
    for task in args.tasks.split(","):
        prompts = make_prompts(target, task, args.prompt_tokens, args.prompts, args.seed)
        taus = {}
        for k in counts:
            found = measure(engine, prompts, params, plan_for(tree, k)).completions
            accepted = np.array([c.statistics.accepted for c in found])
            steps = np.array([c.statistics.steps for c in found])
            taus[k] = pooled_tau(accepted, steps)
            value = bootstrap(len(prompts), taus[k], args.seed)
            cells.append({"task": task, "candidates": k, "tau": as_json(value)})
            rows.append([task, str(k), span(value)])
            say(f"{task}, K = {k}: τ {span(value)}")
        for fewer, more in pairwise(counts):
            gain = bootstrap(len(prompts), lambda t, a=taus[more], b=taus[fewer]: a(t) - b(t), args.seed)
            cells.append({"task": task, "from": fewer, "to": more, "gain": as_json(gain)})
            steps_up.append([task, f"{fewer} → {more}", span(gain)])
    print_table(f"τ by candidates, greedy, {target.name}, tree {args.plan}", ["task", "K", "τ"], rows)
    print_table("Gain of more candidates, paired by prompt", ["task", "K", "gain in τ"], steps_up)
    finish(args, {"cells": cells}, target=target.name, dtype=args.dtype)


if __name__ == "__main__":
    main(run)
