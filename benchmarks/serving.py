"""What requests that come and go feel: gaps between tokens, memory, and the first token behind a shared beginning.

    python benchmarks/serving.py

gaps    Rows decode while prompts of 2,000 tokens arrive. The longest time between two tokens of a running row, when
        prompts are read in pieces beside the rows and when they are read whole while the rows wait.
memory  Requests of random lengths come and go. Bytes of keys and values in blocks that rows hold, against what the
        tokens themselves take, after every step; and a picture of it.
prefix  The time to the first token of prompts that share 1,000 tokens, when these are stored and when they are not.

The target has 134 million random weights. Ways take turns.
"""

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import (
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
from matplotlib import pyplot as plt

from draftsmith.dtypes import resolve_dtype
from draftsmith.engine import Engine
from draftsmith.evaluation.reporting.result_files import ensure_writable
from draftsmith.targets import Target
from draftsmith.types import SamplingParams

WHOLE = 1_000_000
"""A piece that no prompt fills: it is read whole."""


def random_prompt(target: Target, length: int, rng: random.Random) -> list[int]:
    """Return random tokens."""
    return [rng.randrange(target.vocab_size) for _ in range(length)]


def longest_gap(engine: Engine, rows: int, arrivals: int, length: int, rng: random.Random) -> tuple[float, float, int]:
    """Let prompts arrive while rows decode; return the longest gap (ms), the usual one, and the tokens seen."""
    target, core = engine.target, engine.core
    params = SamplingParams(max_tokens=10_000, ignore_eos=True)
    running = engine.admit_call(
        [random_prompt(target, 16, rng) for _ in range(rows)], SamplingParams(max_tokens=engine.max_length - 32,
                                                                               ignore_eos=True)
    )
    for request in running:
        core.add(request)
    while not all(len(request.tokens) > 4 for request in running):
        core.step()
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    late = engine.admit_call([random_prompt(target, length, rng) for _ in range(arrivals)], params)
    last, gaps = dict.fromkeys((request.id for request in running), time.perf_counter()), []
    for number in range(10_000):
        if number % 12 == 4 and late:
            core.add(late.pop())
        progress = core.step()
        now = time.perf_counter()
        for one in progress:
            if one.request.id in last and one.tokens:
                gaps.append(now - last[one.request.id])
                last[one.request.id] = now
        if not late and not core.scheduler.reading and not core.scheduler.waiting and number > 12 * arrivals + 8:
            break
    for request in running:
        core.abort(request.id)
    while core.has_work:
        core.step()
    gaps.sort()
    return 1000 * gaps[-1], 1000 * gaps[len(gaps) // 2], len(gaps)


def measure_gaps(target: Target, args: Any) -> list[dict[str, Any]]:
    """Compare pieces with whole prompts."""
    ways = {"whole": WHOLE, **{f"pieces of {piece}": piece for piece in args.pieces}}
    engines = {
        name: Engine(target, None, max_batch=args.rows + 1, max_length=args.prompt_tokens + 64, piece_tokens=piece,
                     share_prefixes=False)
        for name, piece in ways.items()
    }
    found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in ways}
    for turn in range(args.rounds + 1):
        say(f"gaps: round {turn} of {args.rounds}")
        for name, engine in engines.items():
            one = longest_gap(engine, args.rows, args.arrivals, args.prompt_tokens, random.Random(turn))
            if turn:
                found[name].append(one)
    return [
        {
            "way": name,
            "longest_ms": as_json(median_of([[one[0]] for one in rounds], args.seed)),
            "longest": span(median_of([[one[0]] for one in rounds], args.seed), 0),
            "usual_ms": as_json(median_of([[one[1]] for one in rounds], args.seed)),
            "usual": span(median_of([[one[1]] for one in rounds], args.seed), 1),
            "tokens": sum(one[2] for one in rounds),
        }
        for name, rounds in found.items()
    ]


def measure_memory(target: Target, args: Any) -> dict[str, Any]:
    """Let requests come and go; return held bytes and tokens by step."""
    rng = random.Random(args.seed)
    engine = Engine(target, None, max_batch=16, max_length=1024)
    core, blocks = engine.core, engine.core.blocks
    per_token = blocks.block_bytes / 64
    held, tokens, kept = [], [], []
    left = args.requests
    while left or core.has_work:
        if left and rng.random() < 0.25:
            left -= 1
            prompt = random_prompt(target, rng.randrange(16, 500), rng)
            (request,) = engine.admit_call([prompt], SamplingParams(max_tokens=rng.randrange(8, 200), ignore_eos=True))
            core.add(request)
        core.step()
        held.append(blocks.held_bytes)
        kept.append(blocks.cached_bytes)
        tokens.append(sum(r.read + len(r.tokens) for r in [*core.scheduler.reading, *core.scheduler.decoding.values()]))
    inside = [h / (t * per_token) for h, t in zip(held, tokens, strict=True) if t]
    before = blocks.cached_bytes
    blocks.trim()
    return {
        "steps": len(held), "bytes_a_token": per_token, "held": held, "tokens": tokens, "kept_for_others": kept,
        "held_over_needed": sorted(inside)[len(inside) // 2], "most_held": max(held),
        "slots_would_hold": 16 * (1024 + 256) * per_token, "kept_at_the_end": before,
        "kept_after_trim": blocks.cached_bytes, "held_at_the_end": held[-1],
    }


def draw_memory(memory: dict[str, Any], path: Path) -> None:
    """Draw bytes held against bytes that the tokens take."""
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    mega = 1024**2
    axes.plot([held / mega for held in memory["held"]], label="held by rows, in whole blocks")
    axes.plot(
        [tokens * memory["bytes_a_token"] / mega for tokens in memory["tokens"]], linestyle="--",
        label="keys and values of their tokens",
    )
    axes.set_xlabel("step")
    axes.set_ylabel("MiB")
    axes.set_title("Memory of keys and values while requests come and go")
    axes.legend()
    axes.set_ylim(bottom=0)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def first_token(engine: Engine, prompt: Sequence[int]) -> float:
    """Return the milliseconds from a request to its first token."""
    begun = time.perf_counter()
    stream = engine.stream([prompt], SamplingParams(max_tokens=2, ignore_eos=True))
    next(stream)
    seconds = time.perf_counter() - begun
    stream.close()
    return 1000 * seconds


def measure_prefix(target: Target, args: Any) -> dict[str, Any]:
    """Compare the first token with and without a stored beginning."""
    rng = random.Random(args.seed)
    system = random_prompt(target, 1000, rng)
    shared = Engine(target, None, max_batch=1, max_length=1280)
    alone = Engine(target, None, max_batch=1, max_length=1280, share_prefixes=False)
    with_it, without = [], []
    for turn in range(args.rounds * 3 + 1):
        prompt = system + random_prompt(target, 50, rng)
        pair = first_token(alone, prompt), first_token(shared, prompt)
        if turn:
            without.append([pair[0]])
            with_it.append([pair[1]])
    return {
        "without_ms": median_of(without, args.seed), "with_ms": median_of(with_it, args.seed),
        "times_sooner": ratio_of(without, with_it, args.seed), "prompts": len(with_it),
    }


def run() -> None:
    """Measure and write."""
    parser = arguments(__doc__, "serving")
    parser.add_argument("--rows", type=int, default=4, help="that decode while prompts arrive")
    parser.add_argument("--arrivals", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--pieces", nargs="+", type=int, default=[512, 128])
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    args = start(parser)
    picture = args.json.with_suffix(".png")
    ensure_writable(picture)
    with model_folder("134m", args.target, resolve_dtype(args.dtype, torch.device(args.device))) as folder:
        target = Target.from_pretrained(folder, dtype=args.dtype, device=args.device)
    gaps = measure_gaps(target, args)
    show_table(
        f"{args.rows} rows decode while {args.arrivals} prompts of {args.prompt_tokens} tokens arrive",
        ["prompts are read", "longest gap, ms", "usual gap, ms", "tokens"],
        [[cell["way"], cell.pop("longest"), cell.pop("usual"), str(cell["tokens"])] for cell in gaps],
    )
    memory = measure_memory(target, args)
    draw_memory(memory, picture)
    mega = 1024**2
    show_table(
        f"Memory over {memory['steps']} steps, {args.requests} requests",
        ["held over what the tokens need (median)", "most held, MiB", "sixteen whole slots, MiB", "held at the end"],
        [[f"{memory['held_over_needed']:.2f}", f"{memory['most_held'] / mega:.1f}",
          f"{memory['slots_would_hold'] / mega:.1f}", str(memory["held_at_the_end"])]],
    )
    prefix = measure_prefix(target, args)
    show_table(
        "First token behind a prompt of 1,050 tokens, of which 1,000 are shared",
        ["read anew, ms", "stored, ms", "times sooner", "prompts"],
        [[span(prefix["without_ms"], 0), span(prefix["with_ms"], 1), span(prefix["times_sooner"]),
          str(prefix["prompts"])]],
    )
    prefix = {key: as_json(value) if key != "prompts" else value for key, value in prefix.items()}
    finish(args, {"gaps": gaps, "memory": memory, "prefix": prefix}, dtype=args.dtype)


if __name__ == "__main__":
    main(run)
