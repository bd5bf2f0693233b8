"""What a step of several rows costs, plain and with drafts, in bf16 on a CPU; from which τ on drafting pays.

    python benchmarks/batches.py --vllm-python ENVIRONMENT/bin/python

A step reads a chain of one root and N guesses behind 64 to 164 tokens of each of B rows, and gives the logits behind
all of them. Its cost over that of a step without guesses is what τ, the tokens that a row gains a step, has to exceed
(drafting itself not counted). Sizes take turns in random order at one context a round.

engine  a plain step of `Engine.generate`: the time for 65 tokens behind prompts of 64 less that for one token, over 64
vllm    (with `--vllm-python`) the same with its `LLM.generate`, compiled, as it is by default, on as many threads

Shapes: B rows, N guesses, L tokens.
"""

import argparse
import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from common import (
    GEOMETRIES,
    arguments,
    as_json,
    finish,
    main,
    median_of,
    model_folder,
    ratio_of,
    say,
    show_table,
    span,
    start,
)
from vllm_peer import VLLM, PausedVllm, add_vllm, vllm_of

from draftsmith.engine import Engine
from draftsmith.evaluation.measuring.interleaving import interleaved
from draftsmith.targets import Target
from draftsmith.types import DraftsmithError, SamplingParams

PROMPT, NEW = 64, 64

Size = tuple[int, int]
"""Rows and guesses; the two below stand in the place of guesses for plain decoding."""
ENGINE_STEP, VLLM_STEP = -1, -2

Generate = Callable[[list[list[int]], int], float]
"""Decodes so many new tokens behind prompts; returns the seconds."""


def decoded_step(generate: Generate, rows: int, vocabulary: int, rng: random.Random) -> float:
    """Return the milliseconds of a step of plain decoding, see the head of this file."""
    prompts = [[rng.randrange(vocabulary) for _ in range(PROMPT)] for _ in range(rows)]
    first = generate(prompts, 1)
    return 1000 * (generate(prompts, NEW + 1) - first) / NEW


def generate_of_ours(target: Target, rows: int) -> Generate:
    """Decode through the engine."""
    engine = Engine(target, None, max_batch=rows, share_prefixes=False)

    def generate(prompts: list[list[int]], new_tokens: int) -> float:
        begun = time.perf_counter()
        done = engine.generate(prompts, SamplingParams(max_tokens=new_tokens, ignore_eos=True))
        seconds = time.perf_counter() - begun
        assert all(len(completion.tokens) == new_tokens for completion in done)
        return seconds

    return generate


def measure(
    target: Target, vllm: PausedVllm | None, args: argparse.Namespace, label: str
) -> dict[Size, list[list[float]]]:
    """Return milliseconds of every size, by round."""
    decoders: dict[int, Generate] = {ENGINE_STEP: generate_of_ours(target, max(args.rows))}
    if vllm is not None:
        decoders[VLLM_STEP] = vllm.generate
    most, length = max(args.rows), args.last_context + max(args.guesses) + args.steps + 1
    rng = random.Random(args.seed)
    tokens_BL = torch.from_numpy(np.random.default_rng(args.seed).integers(0, target.vocab_size, (most, length)))
    cache = target.new_cache(most, length)
    target.read_chain(cache, tokens_BL, torch.zeros(most, dtype=torch.long), ())
    sizes = [(rows, guesses) for rows in args.rows for guesses in args.guesses]
    sizes += [(rows, decoder) for rows in args.rows for decoder in decoders]
    spent: dict[Size, list[list[float]]] = {size: [] for size in sizes}
    contexts = np.linspace(args.first_context, args.last_context, args.rounds).round().astype(int).tolist()
    begun = time.perf_counter()
    contexts = [contexts[0]] * args.warmups + contexts
    for number, (index, size, timed) in enumerate(interleaved(sizes, args.rounds, rng, args.warmups), 1):
        rows, guesses = size
        if guesses in decoders:
            taken = [decoded_step(decoders[guesses], rows, target.vocab_size, rng)]
        else:
            times = [step(target, cache, tokens_BL[:rows], contexts[index] + i, guesses) for i in range(args.steps + 1)]
            taken = times[1:]
        if timed:
            spent[size].append(taken)
        if number % len(sizes) == 0 and (index + 1) % 8 == 0:
            say(f"{label}: round {index + 1} of {len(contexts)}, {time.perf_counter() - begun:.0f} s")
    return spent


def step(target: Target, cache: Any, tokens_BL: torch.Tensor, context: int, guesses: int) -> float:
    """Read a chain behind so many tokens of every row; return milliseconds."""
    nodes_BM = tokens_BL[:, context : context + guesses + 1].contiguous()
    cached_B = torch.full((len(nodes_BM),), context)
    begun = time.perf_counter()
    target.read_chain(cache, nodes_BM, cached_B, ())
    return 1000 * (time.perf_counter() - begun)


def report(result: dict[str, Any], rows: Sequence[int], guesses: Sequence[int]) -> None:
    """Print milliseconds, and the τ from which drafts pay."""
    cells = {(cell["rows"], cell["guesses"]): cell for cell in result["cells"]}
    title = f"{result['name']}, {result['implementation']}"
    decoders = {ENGINE_STEP: "engine", VLLM_STEP: VLLM}
    decoders = {count: name for count, name in decoders.items() if (rows[0], count) in cells}
    names = ["plain" if count == 0 else f"{count} guesses" for count in guesses]
    table = [[str(row), *(span(cells[row, count]["ms"]) for count in [*guesses, *decoders])] for row in rows]
    show_table(f"{title}: milliseconds a step", ["rows", *names, *decoders.values()], table)
    paying = [[str(row), *(span(cells[row, count]["times_plain"]) for count in guesses if count)] for row in rows]
    show_table(f"{title}: τ from which drafts pay", ["rows", *(name for name in names if name != "plain")], paying)


def run() -> None:
    """Measure, print and write."""
    parser = arguments(__doc__, "batches")
    parser.add_argument("--models", nargs="+", default=["demo", "134m"], choices=["demo", *GEOMETRIES])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--guesses", type=int, nargs="+", default=[0, 3, 7, 15], help="0 has to be among them")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--warmups", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a visit")
    parser.add_argument("--first-context", type=int, default=64)
    parser.add_argument("--last-context", type=int, default=164)
    add_vllm(parser)
    args = start(parser)
    if 0 not in args.guesses or min(args.guesses) < 0 or min(args.rows) < 1:
        raise DraftsmithError("--guesses has to hold 0 and nothing below, and --rows nothing below 1.")
    results = []
    for model in args.models:
        with model_folder(model, args.target, torch.bfloat16) as folder, ExitStack() as stack:
            target = Target.from_pretrained(folder, dtype="bf16", device="cpu")
            threads = torch.get_num_threads()
            vllm = stack.enter_context(vllm_of(args.vllm_python, folder, PROMPT + NEW + 8, max(args.rows), threads))
            spent = measure(target, vllm, args, model)
        cells = []
        for (rows, guesses), rounds in spent.items():
            median = median_of(rounds, args.seed)
            ratio = ratio_of(rounds, spent[rows, 0], args.seed) if guesses >= 0 else None
            cells.append({
                "rows": rows, "guesses": guesses, "ms": median, "times_plain": ratio, "ms_rounds": rounds
            })
        result = {"model": model, "name": model, "implementation": target.backend.description, "cells": cells}
        result["vllm"] = None if vllm is None else vllm.version
        report(result, args.rows, args.guesses)
        for cell in cells:
            cell["ms"] = as_json(cell["ms"])
            cell["times_plain"] = None if cell["times_plain"] is None else as_json(cell["times_plain"])
        results.append(result)
    finish(args, {"models": results}, dtype=args.dtype)


if __name__ == "__main__":
    main(run)
