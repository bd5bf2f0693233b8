"""Whether defaults ever lose: what `draftsmith generate` drafts, against plain decoding and against fixed plans.

    python benchmarks/defaults.py --drafters ngram suffix lookahead early-exit int8-self mlp=runs/demo-mlp/drafter
    python benchmarks/defaults.py --geometry 134m --drafters ngram int8-self random --no-fixed --json defaults-134m.json

Every drafter decodes prompts of four tasks (one is an edit: a file and then its beginning again) in batches, exactly
so many tokens a row. In every round plain decoding (an engine without a drafter), the fitted policy and, unless
`--no-fixed`, every plan that was measured for it take a turn, in random order. Ratios are paired: the mean, over
rounds, of how many times as long the one took as the other on the same prompts (the geometric mean). `random` is an
untrained speculator.

Two engines of equal code need not be equally fast, for as long as they live: their keys and values lie elsewhere in
memory. So there are `PLACES` engines of each kind, made in turns, and rounds go from one to the next; intervals are of
resampled places, and of rounds within them. The engines under the fitted policy share the policy. The best fixed plan
is the best of this very cell, found afterwards, so by chance alone it looks a little better than it is.
"""

import random
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from common import (
    GEOMETRIES,
    arguments,
    as_json,
    finish,
    main,
    model_folder,
    random_speculator,
    say,
    show_table,
    span,
    start,
)

from draftsmith import assets
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.registry import load_drafter
from draftsmith.dtypes import resolve_dtype
from draftsmith.engine import Engine
from draftsmith.engine.fitted import Fitted
from draftsmith.evaluation.bench import run_engine
from draftsmith.evaluation.comparison.questions import Settings, gather
from draftsmith.evaluation.measuring.interleaving import interleaved
from draftsmith.evaluation.measuring.intervals import RESAMPLES, Interval
from draftsmith.evaluation.prompts import embedded_prompts
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.targets import Target
from draftsmith.workflows.fitting import fitted_engines, shape_in_words
from draftsmith.workflows.models import quiet

PLAIN, FITTED = "plain", "fitted"
LEAST, NEAR = 0.97, 0.95
"""A default may be so much slower than plain decoding, and than the best fixed plan where that gains, and no more."""
PLACES = 6
"""Engines of each kind."""


def defaults() -> None:
    """Measure every drafter in every cell."""
    parser = arguments(__doc__, "defaults")
    parser.add_argument("--geometry", default="demo", choices=["demo", *GEOMETRIES])
    parser.add_argument("--drafters", nargs="+", required=True, help="words, or NAME=FOLDER")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--tasks", nargs="+", default=["code", "prose", "dialogue", "edit"])
    parser.add_argument("--rounds", type=int, default=36)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--no-fixed", action="store_true", help="leave the fixed plans out")
    args = start(parser)
    dtype = resolve_dtype(args.dtype, args.device)
    with model_folder(args.geometry, args.target, dtype) as folder:
        target = Target.from_pretrained(folder, dtype=args.dtype, device=args.device)
        settings = Settings(tuple(args.tasks), max(args.batches) * args.rounds, 1, 64, args.new_tokens)
        # Random weights come without a tokenizer; the embedded one's tokens are tokens of theirs too.
        reader = target if target.tokenizer is not None else Target.from_pretrained(assets.demo_target())
        tuning = embedded_prompts(split="train")
        texts = {task: asked.measured for task, asked in gather(reader, embedded_prompts(), tuning, settings).items()}
        named = {word.partition("=")[0] if ":" not in word else word: word for word in args.drafters}
        given = {name: word.removeprefix(f"{name}=") for name, word in named.items()}
        loaded = {
            name: random_speculator(target) if place == "random" else load_drafter(place, target)
            for name, place in given.items()
        }
        cells = []
        for name, drafter in loaded.items():
            cells += cells_of(name, given[name], target, drafter, texts, args)
    report(cells)
    finish(args, {"cells": cells}, target=target.name, read_by=target.backend.description)


def cells_of(
    name: str, given: str, target: Target, drafter: Drafter, texts: dict[str, list[list[int]]], args: Any
) -> list[dict[str, Any]]:
    """Measure one drafter."""
    begun = time.monotonic()
    longest = max(len(prompt) for prompts in texts.values() for prompt in prompts) + args.new_tokens
    made = partial(Engine, target, max_length=longest, share_prefixes=False)
    name_of = None if given == "random" else given
    fitted = fitted_engines(made(drafter, max_batch=max(args.batches)), args.batches, name_of, quiet())
    measured_s = time.monotonic() - begun
    cells = []
    for batch in args.batches:
        policy = fitted[batch].core.policy
        assert isinstance(policy, Fitted)
        plans = [] if args.no_fixed else [arm.plan for arm in policy.known[0].profile.arms if arm.plan != NO_DRAFT]
        places = [
            (made(None, max_batch=batch), made(fitted[batch].core.drafters, policy=policy, max_batch=batch),
             made(drafter, max_batch=batch))
            for _ in range(PLACES)
        ]
        plain, own, fixed = zip(*places, strict=True)
        ways = {PLAIN: (plain, NO_DRAFT), FITTED: (own, None), **{text_of(plan): (fixed, plan) for plan in plans}}
        for task, prompts in texts.items():
            seconds, before = rounds(ways, prompts, batch, policy, args)
            taken = zip(policy.choices, policy.steps, before, strict=True)
            cell = {
                "drafter": name, "batch": batch, "task": task, "rounds": args.rounds,
                "new_tokens": args.rounds * batch * args.new_tokens, "fit_s": measured_s, "seconds": seconds,
                "plans": {shape_in_words(choice.plan): now - old for choice, now, old in taken if now > old},
                "over_plain": as_json(ratio(seconds[PLAIN], seconds[FITTED], args.seed)),
            }
            if plans:
                best = min(ways.keys() - {PLAIN, FITTED}, key=lambda way: ratio(seconds[way], seconds[PLAIN], 0).value)
                cell |= {
                    "best_fixed": best, "best_over_plain": as_json(ratio(seconds[PLAIN], seconds[best], args.seed)),
                    "over_best": as_json(ratio(seconds[best], seconds[FITTED], args.seed)),
                }
            cells.append(cell)
            say(f"{name}, {task}, batch {batch}: {cell['over_plain']['value']:.2f} × plain, {measured_s:.0f} s to fit")
    return cells


def rounds(
    ways: Mapping[str, tuple[Sequence[Engine], Plan | None]], prompts: Sequence[list[int]], batch: int, policy: Fitted,
    args: Any,
) -> tuple[dict[str, list[float]], list[int]]:
    """Return the seconds of every setting, round by round, and how many steps took which plan before these."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    before: list[int] = []
    # Every engine warms up once.
    for turn in interleaved(list(ways), args.rounds, random.Random(args.seed), PLACES):
        if turn.timed and not before:
            before = list(policy.steps)
        some = [prompts[(turn.number * batch + row) % len(prompts)] for row in range(batch)]
        engines, plan = ways[turn.way]
        run = run_engine(engines[turn.number % PLACES], some, plan, args.new_tokens)
        if turn.timed:
            seconds[turn.way].append(run.wall_s)
    return seconds, before


def text_of(plan: Plan) -> str:
    """Name a plan: its branching, and what it is cut to."""
    if plan.choices:
        return f"static tree of {plan.max_nodes}"
    cut = "".join(f" {name} {value}" for name in ("paths", "nodes") if (value := getattr(plan, name)) is not None)
    return ",".join(map(str, plan.branching)) + cut + ("" if plan.factor is None else f" factor {plan.factor:g}")


def ratio(one: Sequence[float], other: Sequence[float], seed: int) -> Interval:
    """Return how many times as long the one took, on average over rounds, with its interval."""
    # Round r took place r of PLACES, and then the first again.
    times = np.log(np.array(one) / np.array(other))
    places = [times[place::PLACES] for place in range(min(PLACES, len(times)))]
    rng, means = np.random.default_rng(seed), []
    for _ in range(RESAMPLES):
        drawn = [places[place] for place in rng.integers(0, len(places), len(places))]
        means.append(np.mean([rng.choice(some, len(some)).mean() for some in drawn]))
    low, high = np.exp(np.quantile(means, [0.025, 0.975]))
    return Interval(float(np.exp(times.mean())), float(low), float(high))


def report(cells: Sequence[dict[str, Any]]) -> None:
    """Print a table, a drafter a line, and name the cells that lose."""
    columns = list(dict.fromkeys((cell["task"], cell["batch"]) for cell in cells))
    rows = []
    for name in dict.fromkeys(cell["drafter"] for cell in cells):
        own = {(cell["task"], cell["batch"]): cell for cell in cells if cell["drafter"] == name}
        rows.append([name, *(f"{own[column]['over_plain']['value']:.2f}" for column in columns)])
    show_table("Times as fast as plain decoding", ["drafter", *(f"{task} {batch}" for task, batch in columns)], rows)
    for cell in cells:
        where = f"{cell['drafter']}, {cell['task']}, batch {cell['batch']}"
        found = Interval(cell["over_plain"]["value"], *cell["over_plain"]["ci95"])
        if found.value < LEAST:
            print(f"below {LEAST} of plain: {where}: {span(found)}")
        near = cell.get("over_best")
        if near and cell["best_over_plain"]["value"] > 1 and near["value"] < NEAR:
            print(f"below {NEAR} of the best fixed plan: {where}: {near['value']:.2f} of {cell['best_fixed']}")


if __name__ == "__main__":
    main(defaults)
