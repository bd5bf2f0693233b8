"""Greedy text of the engine against transformers' `generate`, token for token, in fp32, on 200 held-out prompts.

    python benchmarks/identity.py

Prompts are windows of 40 to 64 tokens of the embedded held-out texts, so that the rows of a batch are ragged; 48 new
tokens each. transformers runs once, at batch 1; the engine at several batch sizes, plainly and with several plans.
Every divergence is reported with the gap of the two tokens' logits there.
"""

import random

from common import (
    PLAIN,
    arguments,
    finish,
    main,
    make_prompts,
    open_drafter,
    plans_within,
    print_table,
    say,
    start,
)

from draftsmith import assets
from draftsmith.engine import Engine
from draftsmith.evaluation.measuring.losslessness import compare_texts
from draftsmith.evaluation.measuring.peers import transformers_peer
from draftsmith.targets import Target
from draftsmith.types import Completion, SamplingParams, Statistics, require_finished

PLANS = (PLAIN, "1,1,1", "1,1,1,1", "4,2,1/4", "3,2,2")


def run() -> None:
    """Compare and write."""
    parser = arguments(__doc__, "identity", dtype="fp32")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--prompt-tokens", type=int, default=64, help="the longest prompt")
    parser.add_argument("--shortest", type=int, default=40, help="the shortest prompt")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 3, 8])
    parser.add_argument("--plans", nargs="+", default=list(PLANS))
    parser.add_argument("--compile", default="off", help="level of the engine")
    args = start(parser)
    name = args.target or str(assets.demo_target())
    target = Target.from_pretrained(name, dtype=args.dtype, device=args.device)
    drafter = open_drafter(args.drafter, target)
    rng = random.Random(args.seed)
    shortest = min(args.shortest, args.prompt_tokens)
    whole = make_prompts(target, None, args.prompt_tokens, args.prompts, args.seed)
    prompts = [prompt[-rng.randint(shortest, args.prompt_tokens) :] for prompt in whole]
    different = len({tuple(prompt) for prompt in prompts})

    peer = transformers_peer(name, target, dtype=target.dtype)
    expected = []
    for prompt in prompts:
        tokens = peer([prompt], args.new_tokens)[0][0]
        expected.append(Completion(prompt, tokens, "", "length", Statistics(), []))
    say(f"transformers: {len(expected)} texts")

    params = SamplingParams(max_tokens=args.new_tokens, ignore_eos=True)
    cells, rows = [], []
    for batch in args.batches:
        engine = Engine(
            target, drafter, max_batch=batch, max_length=args.prompt_tokens + args.new_tokens, compile=args.compile
        )
        for text, plan in plans_within(args.plans, drafter).items():
            got = require_finished(engine.generate(prompts, params, plan))
            comparison = compare_texts(expected, got, target)
            statistics = Statistics()
            for completion in got:
                statistics += completion.statistics
            cell = {
                "batch": batch,
                "plan": text,
                "tokens_per_step": statistics.tokens_per_step,
                "tokens_compared": sum(len(c.tokens) for c in got),
                **comparison.summary(),
            }
            cells.append(cell)
            gaps = ", ".join(f"{item.gap:.2g}" for item in comparison.explained or () if item.gap is not None)
            rows.append(
                [str(batch), text, str(comparison.total), str(comparison.identical), gaps or "none",
                 f"{statistics.tokens_per_step:.2f}"]
            )
            say(f"batch {batch}, {text}: {comparison.sentence()}")
    print_table(
        f"Engine against transformers, greedy, {target.name}, {args.dtype}, {args.prompts} prompts ({different} "
        f"different), {args.new_tokens} new tokens",
        ["batch", "plan", "prompts", "identical", "divergences (logit gaps)", "τ"],
        rows,
    )
    total, identical = sum(c["total"] for c in cells), sum(c["identical"] for c in cells)
    print(f"\n{identical} of {total} texts identical")
    finish(
        args,
        {"different_prompts": different, "total": total, "identical": identical, "cells": cells},
        target=target.name,
        dtype=args.dtype,
    )


if __name__ == "__main__":
    main(run)
