"""Prompt lookup by the native operator against its definition in Python: how much sooner the same chains come.

    python benchmarks/lookup.py

Two engines of each kind take turns in random order, because where keys and values lie matters by some percent for as
long as an engine lives. Timed is the time in which all texts are written, per token; ratios are paired by round, with
95 % intervals.
"""

import random
from typing import Any

from common import arguments, as_json, finish, main, make_plan, print_table, say, span, start
from policy import prompts_of, write

from draftsmith import assets
from draftsmith.drafters.lookup.ngram import NativeNgramDrafter, NgramDrafter, NgramLookup
from draftsmith.drafters.lookup.ngram_config import NgramConfig
from draftsmith.engine import Engine
from draftsmith.evaluation.measuring.intervals import ratio_interval
from draftsmith.targets import Target

WARMUPS = 2


def run() -> None:
    """Measure every cell."""
    parser = arguments(__doc__, "lookup")
    parser.add_argument("--tasks", nargs="+", default=["code", "prose"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 512], help="tokens of a prompt")
    parser.add_argument("--plan", default="1,1,1")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=12)
    args = start(parser)
    target = Target.from_pretrained(args.target or assets.demo_target(), dtype=args.dtype, device=args.device)
    kinds: dict[str, Any] = {"python": NgramDrafter, "native": NativeNgramDrafter}
    rng, cells, rows = random.Random(args.seed), [], []
    for count in args.concurrency:
        for tokens in args.prompts:
            def engine_with(drafter: NgramLookup[Any], count: int = count, tokens: int = tokens) -> Engine:
                return Engine(
                    target, drafter, plan=make_plan(args.plan), max_batch=count,
                    max_length=tokens + args.new_tokens, piece_tokens=count * tokens,
                )

            engines = [(kind, engine_with(kinds[kind](NgramConfig()))) for kind in kinds for _ in range(2)]
            for task in args.tasks:
                prompts = prompts_of(target, task, tokens, count * args.rounds, args.seed)
                seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
                same = True
                for number in range(-WARMUPS, args.rounds):
                    rng.shuffle(engines)
                    at, took, texts = number % args.rounds * count, dict.fromkeys(kinds, 0.0), []
                    for kind, engine in engines:
                        one = write(engine, prompts[at : at + count], args.new_tokens, None)
                        took[kind] += one.seconds_a_token
                        texts.append(one.texts)
                    same &= all(text == texts[0] for text in texts)
                    if number >= 0:
                        for kind in kinds:
                            seconds[kind].append(took[kind])
                value = ratio_interval(seconds["python"], seconds["native"], seed=args.seed)
                speed = 2 * args.rounds / sum(seconds["native"])
                cells.append({
                    "concurrency": count, "prompt_tokens": tokens, "task": task, "native_over_python": as_json(value),
                    "native_tokens_a_second": speed, "identical": same,
                })
                rows.append([str(count), str(tokens), task, f"{speed:.0f}", span(value), "yes" if same else "no"])
                say(f"{count} at a time, {tokens} prompt tokens, {task}: {span(value)} times as fast")
    print_table(
        f"Prompt lookup, chain {args.plan}, {target.name}, {args.dtype}, {args.rounds} rounds",
        ["at a time", "prompt", "task", "native, tokens/s", "native over Python", "texts equal"], rows,
    )
    finish(args, {"cells": cells}, target=target.name, dtype=args.dtype)


if __name__ == "__main__":
    main(run)
