"""Throughput by batch size: plain, always drafting, and drafting only while few rows run.

    python benchmarks/load_switch.py

All three ways run on the same prompts in random order within every round, after a warm-up. Ratios are of wall-clock of
whole calls, prefill included, paired by round, with 95 % intervals. The switch is worth its place if it is level with
the better of the two others at every batch.
"""

import random
from typing import Any

from common import (
    arguments,
    as_json,
    finish,
    main,
    make_plan,
    make_prompts,
    open_drafter,
    print_table,
    say,
    span,
    start,
)

from draftsmith import assets
from draftsmith.engine import Engine
from draftsmith.evaluation.measuring.interleaving import interleaved
from draftsmith.evaluation.measuring.intervals import ratio_interval
from draftsmith.evaluation.measuring.measure import Measurement, measure
from draftsmith.plan import NO_DRAFT
from draftsmith.targets import Target
from draftsmith.types import SamplingParams


def run() -> None:
    """Measure every batch size."""
    parser = arguments(__doc__, "load_switch")
    parser.add_argument("--task", default="prose")
    parser.add_argument("--batches", default="1,2,4,8,16")
    parser.add_argument("--plan", default="1,1,1")
    parser.add_argument("--draft-rows", type=int, default=1, help="the switch: most rows that still draft")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    args = start(parser)
    target = Target.from_pretrained(args.target or assets.demo_target(), dtype=args.dtype, device=args.device)
    drafter = open_drafter(args.drafter, target)
    plan = make_plan(args.plan)
    params = SamplingParams(max_tokens=args.new_tokens, ignore_eos=True)
    rng = random.Random(args.seed)
    cells: list[dict[str, Any]] = []
    rows = []
    for batch in map(int, args.batches.split(",")):
        length = args.prompt_tokens + args.new_tokens
        engine = Engine(target, drafter, max_batch=batch, max_length=length)
        switching = Engine(
            target, drafter, plan=plan, max_batch=batch, max_length=length, draft_rows=args.draft_rows
        )
        ways = {"plain": (engine, NO_DRAFT), "always": (engine, plan), "switched": (switching, None)}
        found: dict[str, list[Measurement]] = {name: [] for name in ways}
        prompts = make_prompts(target, args.task, args.prompt_tokens, batch * (args.rounds + 1), args.seed)
        for number, name, timed in interleaved(ways, args.rounds, rng, warmups=1):
            chosen = prompts[number * batch : (number + 1) * batch]
            measured = measure(ways[name][0], chosen, params, ways[name][1])
            if timed:
                found[name].append(measured)
        seconds = {name: [m.wall_s for m in several] for name, several in found.items()}
        texts = {name: [c.tokens for m in several for c in m.completions] for name, several in found.items()}
        ratios = {name: ratio_interval(seconds["plain"], seconds[name], seed=args.seed) for name in ways}
        same = texts["plain"] == texts["always"] == texts["switched"]
        tau = sum(m.tokens_per_step for m in found["always"]) / args.rounds
        cells.append(
            {
                "batch": batch, "tokens_per_step": tau, "identical": same,
                "new_tokens": {name: sum(m.new_tokens for m in several) for name, several in found.items()},
                "speedup": {name: as_json(value) for name, value in ratios.items()},
                "ms_per_step_plain": 1e3 * sum(seconds["plain"]) / args.rounds / args.new_tokens,
            }
        )
        rows.append(
            [str(batch), f"{tau:.2f}", span(ratios["always"]), span(ratios["switched"]), "yes" if same else "no"]
        )
        say(f"batch {batch}: always {span(ratios['always'])}, switched {span(ratios['switched'])}")
    print_table(
        f"Speed over plain decoding, {target.name}, {args.dtype}, chain of {plan.depth}, switch at {args.draft_rows}",
        ["batch", "τ", "always drafting", "drafting up to the switch", "texts equal"],
        rows,
    )
    finish(args, {"cells": cells, "draft_rows": args.draft_rows}, target=target.name, dtype=args.dtype)


if __name__ == "__main__":
    main(run)
