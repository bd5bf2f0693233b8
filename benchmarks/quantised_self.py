"""What a copy of the target in int8 or int4 guesses, and what its chains cost.

    python benchmarks/quantised_self.py
    python benchmarks/quantised_self.py --geometries 134m 500m

On the embedded target: tokens a step of greedy chains, on code and prose. On random weights, whose guesses say nothing:
seconds of a drafted step in plain ones, by decoding the same prompt in turns, the least of all rounds each.
"""

from typing import Any

import torch
from common import GEOMETRIES, arguments, finish, main, make_prompts, show_table, start

from draftsmith import assets
from draftsmith.drafters.registry import load_drafter
from draftsmith.engine import Engine
from draftsmith.evaluation.bench import run_engine
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.targets import Target

DRAFTERS = ("int8-self", "int4-self")


def quantised_self() -> None:
    """Measure both."""
    parser = arguments(__doc__, "quantised_self")
    parser.add_argument("--geometries", nargs="+", default=["134m"], choices=list(GEOMETRIES))
    parser.add_argument("--chains", nargs="+", type=int, default=[3, 4, 5])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=64)
    args = start(parser)
    embedded = Target.from_pretrained(args.target or assets.demo_target(), dtype=args.dtype)
    guessed = [guesses_of(embedded, task, args) for task in ("code", "prose")]
    costs = [cost_of(name, args) for name in args.geometries]
    header = ["drafter", *(f"{name} {chain}" for name in ("code", "prose") for chain in args.chains)]
    rows = [[name, *(f"{table[name][chain]:.2f}" for table in guessed for chain in args.chains)] for name in DRAFTERS]
    show_table("Tokens a step, greedy, by the length of the chain", header, rows)
    header = ["drafter", *(f"{name} {chain}" for name in args.geometries for chain in args.chains)]
    rows = [[name, *(f"{table[name][chain]:.2f}" for table in costs for chain in args.chains)] for name in DRAFTERS]
    show_table("A drafted step, in plain steps", header, rows)
    finish(args, {"tokens_per_step": guessed, "steps": dict(zip(args.geometries, costs, strict=True))})


def guesses_of(target: Target, task: str, args: Any) -> dict[str, dict[int, float]]:
    """Return tokens a step, by drafter and length of the chain."""
    prompts = make_prompts(target, task, 48, args.prompts, args.seed)
    found: dict[str, dict[int, float]] = {}
    for name in DRAFTERS:
        engine = Engine(target, load_drafter(name, target), max_batch=4, max_length=48 + args.new_tokens)
        runs = {chain: run_engine(engine, prompts, Plan((1,) * chain), args.new_tokens) for chain in args.chains}
        found[name] = {
            chain: run.measurement.tokens_per_step for chain, run in runs.items() if run.measurement is not None
        }
    return found


def cost_of(geometry: str, args: Any) -> dict[str, dict[int, float]]:
    """Return what a step with a chain takes, in plain steps."""
    target = Target(GEOMETRIES[geometry].build(torch.bfloat16), name=geometry)
    engines = {name: Engine(target, load_drafter(name, target), max_batch=1, max_length=256) for name in DRAFTERS}
    plans = {0: NO_DRAFT, **{chain: Plan((1,) * chain) for chain in args.chains}}
    ways = {(name, chain): plan for name in DRAFTERS for chain, plan in plans.items()}
    least = dict.fromkeys(ways, float("inf"))
    for _ in range(args.rounds):
        for (name, chain), plan in ways.items():
            run = run_engine(engines[name], [[1, 2, 3, 4]], plan, args.new_tokens)
            assert run.measurement is not None
            statistics = run.measurement.statistics
            least[name, chain] = min(least[name, chain], statistics.decode_s / statistics.steps)
    plain = min(least[name, 0] for name in DRAFTERS)
    return {name: {chain: least[name, chain] / plain for chain in args.chains} for name in DRAFTERS}


if __name__ == "__main__":
    main(quantised_self)
