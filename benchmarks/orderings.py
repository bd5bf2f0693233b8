"""Which drafter guesses better: τ of several drafters on held-out prompts, with paired differences.

    python benchmarks/orderings.py --drafters conditioned=runs/conditioned state-only=runs/state-only

Give drafters trained with equal budgets as NAME=FOLDER; without any, the embedded drafter after its first and its last
stage. All decode the same prompts greedily with the same plan. Intervals come from resampling prompts; differences
resample the same prompts on both sides.
"""

from itertools import combinations
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
from torch import nn

from draftsmith import assets
from draftsmith.engine import Engine
from draftsmith.evaluation.measuring.measure import measure
from draftsmith.native.layers import PackedLinear
from draftsmith.targets import Target
from draftsmith.types import DraftsmithError, SamplingParams


def named_drafters(words: list[str]) -> dict[str, str]:
    """Split NAME=FOLDER."""
    if not words:
        return {"first stage": str(assets.demo_first_stage()), "last stage": str(assets.demo_drafter())}
    named = {}
    for word in words:
        name, equals, path = word.partition("=")
        if not equals:
            raise DraftsmithError(f"the drafter {word!r} has no name; write NAME=FOLDER.")
        named[name] = path
    return named


def weights_of(drafter: nn.Module) -> int:
    """Count the weights, packed ones too; what stages share counts once."""
    packed = [layer for layer in drafter.modules() if isinstance(layer, PackedLinear)]
    return sum(p.numel() for p in drafter.parameters()) + sum(p.in_features * p.out_features for p in packed)


def run() -> None:
    """Measure and write."""
    parser = arguments(__doc__, "orderings")
    parser.add_argument("--drafters", nargs="+", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--tasks", default="code,prose")
    parser.add_argument("--prompts", type=int, default=40, help="a task")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=100)
    parser.add_argument("--plan", help="for all; by default a chain as deep as the shallowest drafter")
    parser.add_argument("--own-depth", action="store_true", help="a chain of every drafter's own depth instead")
    parser.add_argument("--batch", type=int, default=8)
    args = start(parser)
    target = Target.from_pretrained(args.target or assets.demo_target(), dtype=args.dtype, device=args.device)
    drafters = {name: open_drafter(path, target) for name, path in named_drafters(args.drafters).items()}
    depth = min(drafter.max_depth for drafter in drafters.values())
    plan = make_plan(args.plan or ",".join(["1"] * depth))
    params = SamplingParams(max_tokens=args.new_tokens, ignore_eos=True)
    cells: list[dict[str, Any]] = []
    differences: list[dict[str, Any]] = []
    rows, pairs = [], []
    for task in args.tasks.split(","):
        prompts = make_prompts(target, task, args.prompt_tokens, args.prompts, args.seed)
        taus = {}
        for name, drafter in drafters.items():
            length = args.prompt_tokens + args.new_tokens
            own = make_plan(",".join(["1"] * drafter.max_depth)) if args.own_depth else plan
            measured = measure(Engine(target, drafter, max_batch=args.batch, max_length=length), prompts, params, own)
            accepted = np.array([c.statistics.accepted for c in measured.completions])
            steps = np.array([c.statistics.steps for c in measured.completions])
            taus[name] = pooled_tau(accepted, steps)
            value = bootstrap(len(prompts), taus[name], args.seed)
            by_depth = measured.accepted_by_depth()
            cells.append(
                {
                    "task": task,
                    "drafter": name,
                    "weights": weights_of(drafter),
                    "tau": as_json(value),
                    "accepted_by_depth": by_depth,
                    "tau_by_prompt": (1 + accepted / steps).tolist(),
                    "generated_tokens": measured.new_tokens,
                }
            )
            rows.append([task, name, span(value, 3), " ".join(f"{share:.2f}" for share in by_depth)])
            say(f"{task}, {name}: τ {value.value:.3f}")
        for left, right in combinations(drafters, 2):
            value = bootstrap(
                len(prompts), lambda t, a=taus[left], b=taus[right]: a(t) - b(t), args.seed
            )
            differences.append({"task": task, "first": left, "second": right, "difference": as_json(value)})
            clear = "yes" if value.low > 0 or value.high < 0 else "no"
            pairs.append([task, f"{left} − {right}", span(value, 3), clear])
    print_table(
        f"Tokens a step, greedy, {target.name}, {args.dtype}, "
        f"{'chains of own depth' if args.own_depth else 'plan ' + ','.join(map(str, plan.branching))}, "
        f"{args.prompts} prompts a task (95 % intervals over prompts)",
        ["task", "drafter", "τ", "accepted by depth"],
        rows,
    )
    print_table("Paired differences", ["task", "pair", "difference of τ", "interval excludes 0"], pairs)
    finish(args, {"cells": cells, "differences": differences}, target=target.name, dtype=args.dtype)


if __name__ == "__main__":
    main(run)
