"""Which loss pays: one drafter, trained from one start with every loss, on text the target wrote greedily and at T = 1.

    python benchmarks/losses.py --recipe recipes/demo-mlp.yaml --start runs/first/drafter --out runs/losses

Every training reads the same texts in the same order, which the first one of its temperature has the target write.
Each drafter then decodes the same held-out prompts at the temperature of its texts: greedily with a chain of its best
guesses; at temperature 1 with a chain drawn from its own distribution, whose acceptance is what `tv` and `lk` learn,
and with one of its best guesses. Intervals resample prompts; differences resample the same prompts on both sides.
"""

from pathlib import Path
from typing import Any

import numpy as np
from common import arguments, as_json, bootstrap, finish, main, make_prompts, pooled_tau, say, show_table, span, start
from rich.console import Console

from draftsmith import assets
from draftsmith.drafters.registry import load_drafter
from draftsmith.engine import Engine
from draftsmith.evaluation.measuring.measure import measure
from draftsmith.plan import Plan
from draftsmith.targets import Target
from draftsmith.types import SamplingParams
from draftsmith.workflows.held_out import Evaluation
from draftsmith.workflows.training import train

LOSSES = {
    "cross-entropy": (0.0, "forward_kl"),
    "0.3 cross-entropy + 0.7 forward_kl": (0.7, "forward_kl"),
    "forward_kl": (1.0, "forward_kl"),
    "reverse_kl": (1.0, "reverse_kl"),
    "js": (1.0, "js"),
    "tv": (1.0, "tv"),
    "lk": (1.0, "lk"),
}
REFERENCE = "cross-entropy"
WAYS = {0.0: {"greedy chain": False}, 1.0: {"drawn chain": True, "chain of best guesses": False}}


def run() -> None:
    """Train, measure and write."""
    parser = arguments(__doc__, "losses")
    parser.add_argument("--recipe", type=Path, default=Path("recipes/demo-mlp.yaml"))
    parser.add_argument("--start", type=Path, default=assets.demo_first_stage(), help="the drafter to go on from")
    parser.add_argument("--out", type=Path, default=Path("runs/losses"))
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="in the recipe")
    parser.add_argument("--depth", type=int, default=4, help="of the chains")
    parser.add_argument("--prompts", type=int, default=80, help="a task")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--tasks", default="code,prose")
    args = start(parser)
    target = Target.from_pretrained(args.target or assets.demo_target(), dtype=args.dtype, device=args.device)
    prompts = [p for task in args.tasks.split(",") for p in make_prompts(target, task, 64, args.prompts, args.seed)]
    cells, table = [], []
    for temperature, ways in WAYS.items():
        texts: Path | None = None
        taus: dict[str, dict[str, Any]] = {}
        for name, (weight, divergence) in LOSSES.items():
            say(f"T = {temperature:g}, {name}")
            folder = args.out / f"t{temperature:g}-{weight:g}-{divergence}"
            given = [] if texts is None else [f"stage2.texts={texts}"]
            train(
                args.recipe, "stage1.steps=0", f"stage2.steps={args.steps}", f"stage2.temperature={temperature:g}",
                "stage2.top_k=0", f"distillation.weight={weight}", f"distillation.divergence={divergence}",
                "evaluation.every=0", *args.set, *given, target=target, init_from=args.start, out=folder,
                resume=(folder / "recipe.yaml").is_file(), evaluation=Evaluation(prompts_a_task=2),
                console=Console(quiet=True),
            )
            texts = texts or folder / "generated.jsonl"
            taus[name] = {
                # The last weights, not the best: so short a training may begin with better ones.
                way: counts(target, folder / "latest", prompts, temperature, sampled, args)
                for way, sampled in ways.items()
            }
        for way in ways:
            for name in LOSSES:
                own, reference = pooled_tau(*taus[name][way]), pooled_tau(*taus[REFERENCE][way])
                value = bootstrap(len(prompts), own, args.seed)
                over = bootstrap(len(prompts), lambda t, a=own, b=reference: a(t) - b(t), args.seed)
                about = {"temperature": temperature, "draft": way, "loss": name}
                cells.append({**about, "tau": as_json(value), "over": as_json(over)})
                difference = "" if name == REFERENCE else span(over, 3)
                table.append([f"{temperature:g}", way, name, span(value, 3), difference])
    show_table(
        f"τ by loss, {target.name}, {args.steps} steps from one start, chains of {args.depth}, {len(prompts)} prompts",
        ["T", "draft", "loss", "τ", f"over {REFERENCE}, paired"], table,
    )
    finish(args, {"cells": cells}, target=target.name, dtype=args.dtype)


def counts(
    target: Target, folder: Path, prompts: list[list[int]], temperature: float, sampled: bool, args: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Return accepted tokens and steps by prompt."""
    engine = Engine(
        target, load_drafter(folder, target), max_batch=16, max_length=max(map(len, prompts)) + args.new_tokens
    )
    rules = [
        SamplingParams(max_tokens=args.new_tokens, ignore_eos=True, temperature=temperature, seed=args.seed + number)
        for number in range(len(prompts))
    ]
    found = measure(engine, prompts, rules, Plan((1,) * args.depth, sampled=sampled))
    statistics = [completion.statistics for completion in found.completions]
    return np.array([s.accepted for s in statistics]), np.array([s.steps for s in statistics])


if __name__ == "__main__":
    main(run)
