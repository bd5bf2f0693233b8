"""What HTTP costs: the tokens a second of the server's streams over those of the engine called directly.

    python benchmarks/over_http.py

Both ways decode the same prompts with the same drafts, in turns, in random order within every round: as many at a time
as `--concurrency` says, through `AsyncEngine` in this process, and as streams of a server in a process of its own. A
round's time is from the first request to the end of the last text. Ratios are paired by round, with 95 % intervals.

PyTorch has one thread in both (`--threads`), so that on two cores one is left for the event loop and for the client,
which stays out of the way: it writes requests made before and only keeps what it reads (`benchmarks/wire.py`). What it
takes of a processor is in the table, a token.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import wire
from common import arguments, as_json, finish, main, make_prompts, say, show_table, span, start

from draftsmith.cli.plans import OWN, read_shape
from draftsmith.engine import AsyncEngine
from draftsmith.evaluation.measuring.interleaving import interleaved
from draftsmith.evaluation.measuring.intervals import ratio_interval
from draftsmith.types import SamplingParams
from draftsmith.workflows.models import Loading, quiet
from draftsmith.workflows.serving import DraftRules, Sizes, make_engine

DIRECT, HTTP = "direct", "http"


@dataclass
class Run:
    """One round of one way: seconds, what every text says, and processor seconds of this process and of the server."""

    seconds: float
    texts: list[str]
    own_cpu_s: float
    server_cpu_s: float = 0.0


async def directly(engine: AsyncEngine, prompts: Sequence[list[int]], params: SamplingParams) -> Run:
    """Decode through the engine in this process."""
    async def one(prompt: list[int]) -> list[str]:
        return [chunk.text async for chunk in engine.stream(prompt, params, timeout=600.0)]

    begun, cpu = time.perf_counter(), time.process_time()
    told = await asyncio.gather(*map(one, prompts))
    seconds = time.perf_counter() - begun
    return Run(seconds, ["".join(pieces) for pieces in told], time.process_time() - cpu)


async def over_http(served: wire.Served, prompts: Sequence[list[int]], tokens: int) -> Run:
    """Decode through the server; connections are open before the time begins."""
    body = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    sent = [wire.request("/v1/completions", {"prompt": prompt, **body}) for prompt in prompts]
    pairs = [await asyncio.open_connection("127.0.0.1", served.port) for _ in prompts]
    server_cpu = served.cpu_seconds()
    begun, cpu = time.perf_counter(), time.process_time()
    came = await asyncio.gather(*(wire.ask(*pair, one) for pair, one in zip(pairs, sent, strict=True)))
    seconds, own = time.perf_counter() - begun, time.process_time() - cpu
    run = Run(seconds, [wire.text_of(one) for one in came], own, served.cpu_seconds() - server_cpu)
    for _, writer in pairs:
        writer.close()
    return run


async def measure(engine: AsyncEngine, served: wire.Served, args: Any) -> list[dict[str, Any]]:
    """Measure every concurrency."""
    target, params = engine.engine.target, SamplingParams(max_tokens=args.new_tokens, ignore_eos=True)
    rng, cells = random.Random(args.seed), []
    for number in map(int, args.concurrency.split(",")):
        rounds = args.rounds * (4 if number == 1 else 1)
        runs: dict[str, list[Run]] = {DIRECT: [], HTTP: []}
        prompts = make_prompts(target, args.task, args.prompt_tokens, number * (rounds + args.warmups), args.seed)
        for turn, way, timed in interleaved((DIRECT, HTTP), rounds, rng, args.warmups):
            chosen = prompts[turn * number : (turn + 1) * number]
            if way == DIRECT:
                run = await directly(engine, chosen, params)
            else:
                run = await over_http(served, chosen, args.new_tokens)
            if timed:
                runs[way].append(run)
        seconds = {way: [run.seconds for run in several] for way, several in runs.items()}
        tokens = number * args.new_tokens
        ratio = ratio_interval(seconds[DIRECT], seconds[HTTP], seed=args.seed)
        cells.append({
            "concurrency": number, "rounds": rounds,
            "tokens_per_second": {way: tokens * rounds / sum(values) for way, values in seconds.items()},
            "http_over_direct": as_json(ratio), "shown": span(ratio, 3),
            "identical": all(a.texts == b.texts for a, b in zip(runs[DIRECT], runs[HTTP], strict=True)),
            "client_us_a_token": 1e6 * sum(run.own_cpu_s for run in runs[HTTP]) / (tokens * rounds),
            "direct_cpu_us_a_token": 1e6 * sum(run.own_cpu_s for run in runs[DIRECT]) / (tokens * rounds),
            "server_cpu_us_a_token": 1e6 * sum(run.server_cpu_s for run in runs[HTTP]) / (tokens * rounds),
        })
        say(f"concurrency {number}: {cells[-1]['shown']}")
    return cells


def run() -> None:
    """Start the server, measure, and write."""
    parser = arguments(__doc__, "over_http")
    parser.add_argument("--concurrency", default="1,16", help="texts at a time, with commas")
    parser.add_argument("--plan", default=OWN, help="own, none, or a plan such as 1,1,1")
    parser.add_argument("--task", default="prose")
    parser.add_argument("--rounds", type=int, default=16, help="of each concurrency; four times as many at 1")
    parser.add_argument("--warmups", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.set_defaults(threads=1)
    args = start(parser)
    draft, most = args.plan != "none", max(map(int, args.concurrency.split(",")))
    length = args.prompt_tokens + args.new_tokens + 8
    words = ["--max-batch", str(most), "--max-length", str(length), "--dtype", args.dtype, "--device", args.device]
    words += ["--threads", str(args.threads), *(["--plan", args.plan] if draft else ["--no-draft"])]
    words += wire.models_of(args)
    rules = DraftRules(None if args.plan == OWN or not draft else read_shape(args.plan), args.plan == OWN)
    torch.set_num_threads(args.threads)
    engine, _ = make_engine(
        args.target, [args.drafter] if args.drafter and draft else (), draft, rules, Sizes(most, length),
        Loading(args.dtype, args.device), quiet(),
    )

    async def measured(served: wire.Served) -> list[dict[str, Any]]:
        async with AsyncEngine(engine) as own:
            return await measure(own, served, args)

    with wire.server(words) as served:
        cells = asyncio.run(measured(served))
    show_table(
        f"Streams over HTTP against the engine called directly, {engine.target.name}, {args.dtype}, plan {args.plan}",
        ["texts at a time", "direct, tokens/s", "HTTP, tokens/s", "HTTP / direct", "texts equal", "client, µs a token",
         "server, CPU µs a token", "direct, CPU µs a token"],
        [[str(cell["concurrency"]), *(f"{cell['tokens_per_second'][way]:.0f}" for way in (DIRECT, HTTP)),
          cell.pop("shown"), "yes" if cell["identical"] else "no", f"{cell['client_us_a_token']:.0f}",
          f"{cell['server_cpu_us_a_token']:.0f}", f"{cell['direct_cpu_us_a_token']:.0f}"] for cell in cells],
    )
    finish(args, {"cells": cells}, target=engine.target.name, dtype=args.dtype)


if __name__ == "__main__":
    main(run)
