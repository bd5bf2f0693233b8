"""Chains and trees of a speculator beside plain decoding: tokens a step, milliseconds of drafter and target, speed.

    python benchmarks/trees.py
    python benchmarks/trees.py --target /tmp/padded-0.5b --drafter /tmp/padded-0.5b/speculator --prompts 8
    python benchmarks/trees.py --temperature 1

One prompt at a time; all plans and plain decoding take turns on the same held-out prompts. Speed is that of whole
calls, paired by prompt, over plain decoding and over the first plan. A sampled text is that of its seed, whatever
drafts.
"""

import numpy as np
from common import (
    PLAIN,
    arguments,
    as_json,
    finish,
    interleave,
    main,
    make_prompts,
    open_drafter,
    plans_within,
    pooled_tau,
    show_table,
    span,
    start,
    statistics_of,
    tokens_of,
    walls,
    with_engine,
)

from draftsmith import assets
from draftsmith.engine import Engine
from draftsmith.evaluation.measuring.intervals import ratio_interval
from draftsmith.targets import Target

PLANS = ["1,1,1,1,1", "1,1,1", "1,1,1,1", "tree:2,2,2,2,2/6", "tree:2,2,2,2,2/9", "tree:2,2,2,2,2/13", "4,2,1,1,1/4"]


def run() -> None:
    """Measure and write."""
    parser = arguments(__doc__, "trees")
    parser.add_argument("--tasks", nargs="+", default=["code", "prose"])
    parser.add_argument("--plans", nargs="+", default=PLANS)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--warmups", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = start(parser)
    target = Target.from_pretrained(args.target or str(assets.demo_target()), dtype=args.dtype, device=args.device)
    drafter, longest = open_drafter(args.drafter, target), args.prompt_tokens + args.new_tokens
    plain, drafting = (
        Engine(target, one, max_batch=1, max_length=longest, share_prefixes=False) for one in (None, drafter)
    )
    plans = plans_within([PLAIN, *args.plans], drafter)
    settings = {
        text: with_engine(plain if text == PLAIN else drafting, plan, args.new_tokens, args.temperature)
        for text, plan in plans.items()
    }
    tasks, rows = {}, []
    for task in args.tasks:
        prompts = make_prompts(target, task, args.prompt_tokens, args.prompts, args.seed)
        runs = interleave(settings, prompts, args.warmups, args.seed, task)
        first = next(text for text in plans if text != PLAIN)
        tasks[task] = cells = {}
        for text, mine in runs.items():
            total = statistics_of(mine)
            steps = sum(one.steps for one in total)
            tau = pooled_tau(np.array([one.accepted for one in total]), np.array([one.steps for one in total]))
            over = {name: ratio_interval(walls(runs[name]), walls(mine), seed=args.seed) for name in (PLAIN, first)}
            same = sum(one.tokens == other.tokens for one, other in zip(mine, runs[PLAIN], strict=True))
            cells[text] = {
                "tau": tau(np.arange(len(mine))),
                "over_plain": as_json(over[PLAIN]), "over_first": as_json(over[first]),
                "guesses": sum(one.drafted for one in total) / steps,
                "drafter_ms": 1000 * sum(one.drafter_s for one in total) / steps,
                "target_ms": 1000 * sum(one.target_s for one in total) / steps,
                "same_texts": same, "generated_tokens": tokens_of(mine), "wall_s": walls(mine).tolist(),
            }
            cell = cells[text]
            rows.append([
                f"{task}, {text}", f"{cell['tau']:.2f}", f"{cell['guesses']:.1f}",
                f"{cell['drafter_ms']:.2f} + {cell['target_ms']:.2f}", span(over[PLAIN]), span(over[first]),
                f"{same} of {len(mine)}",
            ])
    show_table(
        f"{target.name}, {args.dtype}, temperature {args.temperature:g} (95 % intervals)",
        ["task, plan", "τ", "guesses", "drafter + target, ms a step", "× plain", f"× {first}", "same text"], rows,
    )
    finish(args, {"tasks": tasks}, dtype=args.dtype)


if __name__ == "__main__":
    main(run)
