"""What a copy of the target in int8 or int4 brings as its drafter: tokens a step, cost of a step, speed.

    python benchmarks/padded.py --size 0.5b --out /tmp/padded-0.5b
    python benchmarks/quantised_self.py --target /tmp/padded-0.5b
    python benchmarks/quantised_self.py --target /tmp/padded-0.5b --drafters int4-self ngram --chains 4 5 6 8
    python benchmarks/quantised_self.py --target /tmp/padded-0.5b --drafters int4-self --confidences 0.5 0.7
    python benchmarks/quantised_self.py --geometries 134m 500m

Of a target, by default the embedded one: plain decoding and every drafter with every chain take turns on the same
held-out prompts, one at a time, in random order; at a temperature with the target's own noise, which leaves the text
as it is, and drawn for themselves. τ is tokens a step; the step is told in plain steps, with the parts of
it that drafting and verifying take; the speed-up is that of decoding, and beside it of the whole call with its prompt.
With `--geometries`, of random weights, whose guesses say nothing: a drafted step in plain ones, the least of all rounds
each.
"""

import sys
from collections.abc import Sequence
from itertools import product
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
    interleave,
    main,
    make_prompts,
    pooled_tau,
    say,
    show_table,
    span,
    start,
    statistics_of,
    tokens_of,
    walls,
    with_engine,
)

from draftsmith import assets
from draftsmith.drafters.base import Drafter, StagewiseDrafter
from draftsmith.drafters.models.quantised_self import QuantisedSelf
from draftsmith.drafters.registry import load_drafter
from draftsmith.engine import Engine
from draftsmith.evaluation.bench import TimedCall, run_engine
from draftsmith.evaluation.measuring.intervals import Interval, ratio_interval
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.targets import Target

DRAFTERS = ("int8-self", "int4-self")


def quantised_self() -> None:
    """Measure a target, or random weights."""
    parser = arguments(__doc__, "quantised_self")
    parser.add_argument("--drafters", nargs="+", default=list(DRAFTERS), help="words with options, or folders")
    parser.add_argument("--chains", nargs="+", type=int, default=[3, 4, 5, 6, 8])
    parser.add_argument("--confidences", nargs="+", type=float, default=[], help="of chains that end early")
    parser.add_argument("--longest", nargs="+", type=int, default=[8, 16], help="guesses of those at most")
    parser.add_argument("--tasks", nargs="+", default=["code", "prose"])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="above 0, also chains that are drawn")
    parser.add_argument("--geometries", nargs="+", default=[], choices=list(GEOMETRIES))
    parser.add_argument("--rounds", type=int, default=6, help="of random weights")
    args = start(parser)
    results: dict[str, Any] = {"tasks": {}, "steps": {}}
    if args.target or not args.geometries:
        target = Target.from_pretrained(args.target or assets.demo_target(), dtype=args.dtype)
        results["tasks"] = tasks_of(target, args)
    for name in args.geometries:
        results["steps"][name] = cost_of(name, args)
    if args.geometries:
        header = ["drafter", *(f"{name} {chain}" for name in args.geometries for chain in args.chains)]
        rows = [
            [name, *(f"{table[name][chain]:.2f}" for table in results["steps"].values() for chain in args.chains)]
            for name in args.drafters
        ]
        show_table("A drafted step, in plain steps", header, rows)
    finish(args, results)


def deepest(drafter: Drafter) -> int:
    """Return the longest chain that a drafter makes; one that looks up makes any."""
    return drafter.max_depth if isinstance(drafter, StagewiseDrafter) else sys.maxsize


def tasks_of(target: Target, args: Any) -> dict[str, dict[str, Any]]:
    """Return what every setting brings on every task."""
    length = args.prompt_tokens + args.new_tokens
    drafters: dict[str, Any] = {name: load_drafter(name, target) for name in args.drafters}
    for name, drafter in drafters.items():
        spread = f", spread {drafter.spread:.2f}" if isinstance(drafter, QuantisedSelf) else ""
        say(f"{name}: {drafter.memory_bytes() / 1e6:,.0f} MB beside the target{spread}")
    plain = Engine(target, max_batch=1, max_length=length, share_prefixes=False)
    heat = args.temperature
    settings = {PLAIN: with_engine(plain, NO_DRAFT, args.new_tokens, heat)}
    for name, drafter in drafters.items():
        engine = Engine(target, drafter, max_batch=1, max_length=length, share_prefixes=False)
        chains = [chain for chain in args.chains if chain <= deepest(drafter)]
        for chain in chains:
            for drawn in (False, True) if heat and drafter.can_sample else (False,):
                plan = Plan((1,) * chain, sampled=drawn)
                label = f"{name} {chain}, drawn" if drawn else f"{name} {chain}"
                settings[label] = with_engine(engine, plan, args.new_tokens, heat)
        for longest, least in product(args.longest, [one for one in args.confidences if one in drafter.confidences]):
            plan = Plan((1,) * longest, confidence=least)
            settings[f"{name} {longest} while {least:g}"] = with_engine(engine, plan, args.new_tokens, heat)
    tasks, rows, gains = {}, [], []
    for task in args.tasks:
        prompts = make_prompts(target, task, args.prompt_tokens, args.prompts, args.seed)
        runs = interleave(settings, prompts, 1, args.seed, task)
        tasks[task] = {name: figures(mine, runs[PLAIN], args.seed) for name, mine in runs.items()}
        for name in drafters:
            fixed = [label for label in runs if label in {f"{name} {chain}" for chain in args.chains}]
            early = [label for label in runs if label.startswith(f"{name} ") and " while " in label]
            for label in early if fixed else ():
                best = max(fixed, key=lambda one: tasks[task][one]["speedup"]["value"])
                ratio = ratio_interval(seconds_of(runs[best]), seconds_of(runs[label]), seed=args.seed)
                tasks[task][label] |= {"best_fixed": best, "over_best_fixed": as_json(ratio)}
                gains.append([task, label, best, span(ratio)])
        for name, cell in tasks[task].items():
            numbers = (cell[figure] for figure in ("tokens_per_second", "tau", "step", "speedup", "speedup_of_calls"))
            shares = f"{cell['drafting']:.2f} + {cell['verifying']:.2f} + {cell['rest']:.2f}"
            rows.append(
                [task, name, *(span(Interval(one["value"], *one["ci95"])) for one in numbers), shares,
                 f"{cell['nodes_per_step']:.2f}", f"{cell['same_texts']} of {cell['texts']}",
                 str(cell["generated_tokens"])]
            )
    show_table(
        f"{target.name}, {args.dtype}, {f'temperature {heat:g}' if heat else 'greedy'}, "
        f"one prompt of {args.prompt_tokens} tokens at a time (95 % intervals)",
        ["task", "setting", "tokens/s", "τ", "step, in plain ones", "speed-up", "of whole calls",
         "drafter + target + rest", "guesses a step", "same text", "tokens"],
        rows,
    )
    if gains:
        show_table(
            "Chains that end early: speed over the best of fixed length", ["task", "setting", "best", "times"], gains
        )
    return tasks


def seconds_of(runs: Sequence[TimedCall]) -> list[float]:
    """Return the seconds of decoding, prompt by prompt."""
    return [one.decode_s for one in statistics_of(runs)]


def figures(mine: Sequence[TimedCall], plain: Sequence[TimedCall], seed: int) -> dict[str, Any]:
    """Return what one setting brought; ratios are paired by prompt."""
    own, base = statistics_of(mine), statistics_of(plain)
    seconds, steps = np.array([s.decode_s for s in own]), np.array([s.steps for s in own])
    base_seconds, base_steps = np.array([s.decode_s for s in base]), np.array([s.steps for s in base])
    new_tokens = np.array([sum(map(len, run.tokens)) for run in mine])
    calls = walls(mine)
    plain_step = base_seconds.sum() / base_steps.sum()

    def step(t: np.ndarray) -> float:
        return float(seconds[t].sum() / steps[t].sum() * base_steps[t].sum() / base_seconds[t].sum())

    def share(part: str) -> float:
        return float(sum(getattr(s, part) for s in own) / steps.sum() / plain_step)

    return {
        "tokens_per_second": as_json(bootstrap(len(mine), lambda t: float(new_tokens[t].sum() / calls[t].sum()), seed)),
        "tau": as_json(bootstrap(len(mine), pooled_tau(np.array([s.accepted for s in own]), steps), seed)),
        "step": as_json(bootstrap(len(mine), step, seed)),
        "speedup": as_json(ratio_interval(list(base_seconds), list(seconds), seed=seed)),
        "speedup_of_calls": as_json(ratio_interval(list(walls(plain)), list(calls), seed=seed)),
        "drafting": share("drafter_s"),
        "verifying": share("target_s"),
        "rest": share("rest_s"),
        "nodes_per_step": sum(s.drafted for s in own) / int(steps.sum()),
        "generated_tokens": tokens_of(mine),
        "generated_tokens_plain": tokens_of(plain),
        "texts": len(mine),
        "same_texts": sum(one.tokens == other.tokens for one, other in zip(mine, plain, strict=True)),
        "plain_step_ms": 1000 * float(plain_step),
        "decode_s": seconds.tolist(),
        "wall_s": calls.tolist(),
    }


def cost_of(geometry: str, args: Any) -> dict[str, dict[int, float]]:
    """Return what a step with a chain takes, in plain steps."""
    target = Target(GEOMETRIES[geometry].build(torch.bfloat16), name=geometry)
    engines = {name: Engine(target, load_drafter(name, target), max_batch=1, max_length=256) for name in args.drafters}
    plans = {0: NO_DRAFT, **{chain: Plan((1,) * chain) for chain in args.chains}}
    ways = {(name, chain): plan for name in args.drafters for chain, plan in plans.items()}
    least = dict.fromkeys(ways, float("inf"))
    for _ in range(args.rounds):
        for (name, chain), plan in ways.items():
            run = run_engine(engines[name], [[1, 2, 3, 4]], plan, args.new_tokens)
            assert run.measurement is not None
            statistics = run.measurement.statistics
            least[name, chain] = min(least[name, chain], statistics.decode_s / statistics.steps)
    plain = min(least[name, 0] for name in args.drafters)
    return {name: {chain: least[name, chain] / plain for chain in args.chains} for name in args.drafters}


if __name__ == "__main__":
    main(quantised_self)
