"""What it brings to leave out unlikely guesses, and to let a lookup draft first: fixed plans in turns, on one engine.

    python benchmarks/unsure.py

Chains of the speculator with and without a `confidence`, prompt lookup with and without a `factor`, and `lookup-first`,
which has both drafters, write the same texts in random order. Timed is the time in which all texts of a round are
written, per token; ratios to no speculation are paired by round, with 95 % intervals. Beside each the guesses that a
step verified and those that stayed are told.
"""

import random
from typing import Any

from common import arguments, as_json, finish, main, open_drafter, print_table, say, span, start
from policy import BOTH, LOOKUP, NONE, SPECULATOR, Run, Switched, prompts_of, write

from draftsmith import assets
from draftsmith.drafters.lookup.lookup_first import LookupFirst
from draftsmith.drafters.registry import load_drafter
from draftsmith.engine import Engine, Fixed
from draftsmith.evaluation.measuring.intervals import ratio_interval
from draftsmith.evaluation.reporting.plan_names import plan_name
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.targets import Target

WARMUPS = 2
SHORT, DEEP, LONG = (1,) * 3, (1,) * 5, (1,) * 8
PLANS = [
    (SPECULATOR, Plan(SHORT)), (SPECULATOR, Plan(DEEP)), (SPECULATOR, Plan(DEEP, confidence=0.05)),
    (SPECULATOR, Plan(DEEP, confidence=0.1)), (SPECULATOR, Plan(DEEP, confidence=0.15)),
    (SPECULATOR, Plan(DEEP, confidence=0.35)), (LOOKUP, Plan(SHORT)), (LOOKUP, Plan(LONG, factor=1.0)),
    (BOTH, Plan(LONG, factor=1.0, confidence=0.05)), (BOTH, Plan(LONG, factor=0.5, confidence=0.35)),
]


def run() -> None:
    """Measure every cell."""
    parser = arguments(__doc__, "unsure")
    parser.add_argument("--tasks", nargs="+", default=["code", "prose"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 512], help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=6)
    args = start(parser)
    target = Target.from_pretrained(args.target or assets.demo_target(), dtype=args.dtype, device=args.device)
    speculator, lookup = open_drafter(args.drafter, target), load_drafter(LOOKUP, target)
    drafters = {SPECULATOR: speculator, LOOKUP: lookup, BOTH: LookupFirst(lookup, speculator)}
    ways = {f"{name}, {plan_name(plan)}": Fixed(plan, name) for name, plan in PLANS}
    rng, cells, rows = random.Random(args.seed), [], []
    for count in args.concurrency:
        for tokens in args.prompts:
            switched = Switched(ways)
            engine = Engine(
                target, drafters, policy=switched, max_batch=count, max_length=tokens + args.new_tokens,
                piece_tokens=count * tokens,
            )
            for task in args.tasks:
                prompts = prompts_of(target, task, tokens, count * args.rounds, args.seed)
                found: dict[str, list[Run]] = {name: [] for name in (NONE, *ways)}
                for number in range(-WARMUPS, args.rounds):
                    at = number % args.rounds * count
                    for name in rng.sample(list(found), len(found)):
                        if name != NONE:
                            switched.current = name
                        own = NO_DRAFT if name == NONE else None
                        one = write(engine, prompts[at : at + count], args.new_tokens, own)
                        if number >= 0:
                            found[name].append(one)
                cell = told_of(found, args.seed)
                cells.append({"concurrency": count, "prompt_tokens": tokens, "task": task, **cell})
                for name, one in cell["ways"].items():
                    rows.append([
                        str(count), str(tokens), task, name, span(ratio_interval(
                            [run.seconds_a_token for run in found[NONE]],
                            [run.seconds_a_token for run in found[name]], seed=args.seed,
                        )), f"{one['drafted']:.2f}", f"{one['accepted']:.2f}",
                    ])
                same = "the same texts" if cell["identical"] else "OTHER TEXTS"
                say(f"{count} at a time, {tokens} prompt tokens, {task}: {same}")
    print_table(
        f"Fixed plans over no speculation, {target.name}, {args.dtype}, {args.rounds} rounds",
        ["at a time", "prompt", "task", "plan", "over none", "guesses a step", "stayed"], rows,
    )
    finish(args, {"cells": cells}, target=target.name, dtype=args.dtype)


def told_of(found: dict[str, list[Run]], seed: int) -> dict[str, Any]:
    """Return the figures of a cell: of every plan its speed over none, and guesses a step and those that stayed."""
    seconds = {name: [run.seconds_a_token for run in runs] for name, runs in found.items()}
    steps = {name: max(1, sum(run.steps for run in runs)) for name, runs in found.items()}
    same = all(
        ours[: len(theirs)] == theirs[: len(ours)]
        for runs in found.values() for run, other in zip(runs, found[NONE], strict=True)
        for ours, theirs in zip(run.texts, other.texts, strict=True)
    )
    return {
        "identical": same,
        "ways": {
            name: {
                "over_none": as_json(ratio_interval(seconds[NONE], seconds[name], seed=seed)),
                "drafted": sum(run.drafted for run in runs) / steps[name],
                "accepted": sum(run.accepted for run in runs) / steps[name],
            }
            for name, runs in found.items() if name != NONE
        },
    }


if __name__ == "__main__":
    main(run)
