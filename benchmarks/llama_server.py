"""Draftsmith's server beside llama.cpp's, on the same weights and under the same load.

    python benchmarks/padded.py --size 0.5b --out /tmp/padded-0.5b
    python benchmarks/llama_server.py --target /tmp/padded-0.5b --llama-server BUILD/bin/llama-server \\
        --peer-site ENVIRONMENT/lib/python3.11/site-packages

draftsmith       plain; with the target's speculator, drafting what its own start finds to pay on this machine; and
                 with a cascade of lookup and speculator in front of a 4-bit copy (`--cascade`)
llama.cpp        its C++ server, which writes up to `--slots` texts in one batch: the same weights as GGUF in bf16,
                 plain; with its own lookup (`--llama-lookup`); and with their Q4_0 as draft model (`--llama-draft`)

All servers are there from the beginning to the end, and all but the one that is measured are stopped (SIGSTOP), so that
nobody takes the processors from anybody. In every round each of them meets the same new prompts, held-out texts of code
and prose as token ids, in random order: `--per-client` of them for each of as many clients as `--clients` says, who
ask again when they are answered. The load is made and counted by `draftsmith load`: all tokens are those that
the servers count; times to the first token and per token after it are those of requests, pooled over the rounds.
Nobody ends a text before its last token. Where a request failed or came short, the result says so and the command
fails.
"""

import argparse
import asyncio
import random
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import wire
from common import arguments, finish, main, say, show_table, start
from gguf_export import add_peer_site, find_packages
from gguf_peers import BF16, Q4, write_files
from llama_process import asleep, awake, find_binary, llama_server, version_of
from peers import DRAFTSMITH, LLAMA_CPP, key
from transformers import AutoTokenizer

from draftsmith import assets
from draftsmith.evaluation.load.client import connected
from draftsmith.evaluation.load.drive import Level, drive
from draftsmith.evaluation.load.metrics import metric_values, statistics_of
from draftsmith.evaluation.load.records import Record
from draftsmith.evaluation.load.settings import Server, Workload
from draftsmith.evaluation.load.speculation import Counters, acceptance
from draftsmith.evaluation.load.workload import LoadRequest, Requests, body_of, gather_requests, read_texts
from draftsmith.evaluation.measuring.interleaving import interleaved
from draftsmith.types import DraftsmithError

PLAIN = key(DRAFTSMITH, "plain")
BLOCK = 256
"""llama.cpp rounds the context of a slot up to a multiple of this."""
WARM_TOKENS = 16
COUNTED = ("spec_decode_num_drafts", "spec_decode_num_accepted_tokens")
Cell = tuple[str, int, str]
"""Task, clients, and the server by what it is called."""


@dataclass
class Seen:
    """What was seen of one server under one load, over all rounds: a throughput and counters a round."""

    rates: list[float] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    counters: list[tuple[Counters | None, Counters | None]] = field(default_factory=list)


@dataclass
class Running:
    """A server that sleeps, by what it is called."""

    name: str
    process: Any
    port: int


async def ask(port: int, prompts: Sequence[list[int]], clients: int, new_tokens: int) -> tuple[Level, Any, Any]:
    """Put a server under load; return the level, and its counters before and after."""
    workload = Workload(output_lens=(new_tokens,), ignore_eos=True)
    async with connected(Server(f"http://127.0.0.1:{port}")) as (client, model):
        bodies = [body_of(LoadRequest(prompt, new_tokens), workload, "completions", model) for prompt in prompts]
        level = Level(clients)
        before = await client.counters()
        await drive(level, bodies, [0.0] * len(bodies), client.send, lambda record: None)
        # Answers come in the order in which they are finished; texts are compared prompt by prompt.
        level.records.sort(key=lambda record: record.sent)
        return level, before, await client.counters()


def made_requests(folder: str, task: str, args: Any) -> Requests:
    """Return what makes the prompts of a task, each of another place in the held-out texts."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    workload = Workload(task, (args.prompt_tokens,), seed=args.seed)

    async def tokenize(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    return asyncio.run(gather_requests(workload, "completions", read_texts(workload), tokenize))


def start_servers(stack: ExitStack, folder: str, args: Any) -> list[Running]:
    """Start all servers, let each write a little, and send each to sleep."""
    most = max(args.clients)
    length = args.prompt_tokens + args.new_tokens + 8
    found: list[Running] = []

    def settle(name: str, process: Any, port: int) -> None:
        warm = [[2 + (number + place) % 100 for place in range(args.prompt_tokens)] for number in range(most)]
        asyncio.run(ask(port, warm, most, WARM_TOKENS))
        stack.enter_context(asleep(process))
        found.append(Running(name, process, port))

    speculator = speculator_of(args)
    common = ["--target", folder, "--dtype", "bf16", "--threads", str(args.threads)]
    common += ["--max-batch", str(args.slots), "--max-length", str(length)]
    ours = {
        PLAIN: ["--no-draft"],
        key(DRAFTSMITH, "its speculator"): ["--drafter", speculator],
        key(DRAFTSMITH, "cascade"): ["--drafter", f"cascade:inner=[ngram,{speculator}]", *shlex.split(args.cascade)],
    }
    for name, words in ours.items():
        began = time.perf_counter()
        served = stack.enter_context(wire.server([*common, *words]))
        settle(name, served.process, served.port)
        drafts = [line.strip() for line in served.lines if not line.startswith("{")]
        say(f"{name}: up in {time.perf_counter() - began:.0f} s. {' '.join(drafts)[-200:]}")
    paths = write_files(folder, Path(stack.enter_context(TemporaryDirectory())), (Q4,), vocabulary=True)
    room = -(-(length + 64) // BLOCK) * BLOCK
    common = ["-m", str(paths[BF16]), "-t", str(args.threads), "-tb", str(args.threads), "-np", str(args.slots)]
    # What a slot held before is nobody's prompt here, so it is not kept elsewhere either.
    common += ["-c", str(room * args.slots), "--cache-ram", "0", "--metrics"]
    theirs = {
        key(LLAMA_CPP, f"{BF16} plain"): [],
        key(LLAMA_CPP, f"{BF16}, lookup"): shlex.split(args.llama_lookup),
        key(LLAMA_CPP, f"{BF16}, {Q4} drafts"): ["-md", str(paths[Q4]), *shlex.split(args.llama_draft)],
    }
    for name, words in theirs.items():
        began = time.perf_counter()
        process, port = stack.enter_context(llama_server(args.llama_server, [*common, *words]))
        settle(name, process, port)
        say(f"{name}: up in {time.perf_counter() - began:.0f} s")
    return found


def speculator_of(args: Any) -> str:
    """Return the folder of the speculator: the one that is named, the one inside the target, or the embedded one."""
    if args.drafter or args.target is None:
        return str(args.drafter or assets.demo_drafter())
    inside = Path(args.target) / "speculator"
    if not inside.is_dir():
        raise DraftsmithError(f"{args.target} holds no folder speculator; name one with --drafter.")
    return str(inside)


def measure(
    servers: Sequence[Running], folder: str, args: Any, started: float
) -> tuple[dict[Cell, Seen], list[str]]:
    """Measure all servers in turns; return what was seen, and what whoever reads it should know.

    Args:
        started: when this program did, by `time.perf_counter`; no round begins that would end too late.
    """
    sources = {task: made_requests(folder, task, args) for task in args.tasks}
    seen: dict[Cell, Seen] = {
        (task, clients, server.name): Seen() for task in args.tasks for clients in args.clients for server in servers
    }
    prompts: dict[tuple[int, str, int], list[LoadRequest]] = {}
    notes: list[str] = []
    began, total = time.perf_counter(), args.rounds * len(servers)
    names = {server.name: server for server in servers}
    for number, trial in enumerate(interleaved(names, args.rounds, random.Random(args.seed)), 1):
        server = names[trial.way]
        first, now = number % len(servers) == 1, time.perf_counter()
        if first and trial.number and now - started + (now - began) / trial.number > 60 * args.minutes:
            notes.append(f"{trial.number} of {args.rounds} rounds: another would not have ended within --minutes")
            break
        with awake(server.process):
            for task in args.tasks:
                for clients in args.clients:
                    at = (trial.number, task, clients)
                    if at not in prompts:
                        prompts[at] = sources[task].make(max(args.least, clients * args.per_client))
                    chosen = [list(request.prompt) for request in prompts[at]]
                    level, before, after = asyncio.run(ask(server.port, chosen, clients, args.new_tokens))
                    cell = seen[task, clients, server.name]
                    cell.rates.append(sum(record.output_tokens or 0 for record in level.records) / level.duration)
                    cell.records += level.records
                    cell.counters.append((before, after))
                    if level.bottleneck:
                        notes.append(f"{server.name}, {task}, {level.name}: the load generator itself was held up")
        spent = time.perf_counter() - began
        say(f"{number} of {total}: {server.name}, {spent:.0f} s, about {spent / number * (total - number):.0f} s to go")
    repeated = sum(request.repeated for made in prompts.values() for request in made)
    if repeated:
        notes.append(f"{repeated} prompts had been sent before; servers that remember prompts read those sooner")
    return seen, notes


def summary(seen: Mapping[Cell, Seen], cell: Cell, args: Any) -> dict[str, Any]:
    """Return the figures of one server under one load; times in milliseconds."""
    task, clients, _ = cell
    mine, plain = seen[cell], seen[task, clients, PLAIN]
    done = [record for record in mine.records if record.ok]
    values = metric_values(done)
    told = [acceptance(before, after) for before, after in mine.counters]
    drafts, accepted = (sum(one.get(name, 0) for one in told) for name in COUNTED)
    rate = sum(mine.rates) / len(mine.rates)
    return {
        "requests": len(mine.records),
        "failed": sum(not record.ok for record in mine.records),
        "short": sum(record.output_tokens != args.new_tokens for record in done),
        "errors": sorted({record.error for record in mine.records if record.error})[:3],
        "tokens_per_second": rate,
        "tokens_per_second_by_round": mine.rates,
        "over_our_plain": rate / (sum(plain.rates) / len(plain.rates)),
        **statistics_of("tpot", values["tpot"], (50.0, 95.0)),
        **statistics_of("ttft", values["ttft"], (50.0, 95.0)),
        "acceptance_length": 1 + accepted / drafts if drafts else None,
        "texts_as_our_plain": sum(
            "".join(a.text) == "".join(b.text) for a, b in zip(mine.records, plain.records, strict=True)
        ),
    }


def row(cell: Cell, told: Mapping[str, Any]) -> list[str]:
    """Write the figures of one server under one load."""
    low, high = min(told["tokens_per_second_by_round"]), max(told["tokens_per_second_by_round"])
    length = told["acceptance_length"]

    def shown(name: str, digits: int) -> str:
        return "" if told[name] is None else f"{told[name]:.{digits}f}"

    return [
        cell[2], str(cell[1]), f"{told['tokens_per_second']:.1f} ({low:.1f}–{high:.1f})",
        f"{told['over_our_plain']:.2f}",
        shown("p50_tpot_ms", 1), shown("p95_tpot_ms", 1), shown("p50_ttft_ms", 0), shown("p95_ttft_ms", 0),
        f"{length:.2f}" if length else "", f"{told['texts_as_our_plain']} of {told['requests']}",
        str(told["failed"] + told["short"]),
    ]


def options() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = arguments(__doc__, "llama_server")
    parser.set_defaults(threads=2)
    parser.add_argument("--llama-server", default="llama-server", help="the program, by its path or name")
    parser.add_argument("--cascade", default="", help="options of our cascade's server, such as --plan 1,1,1")
    parser.add_argument("--llama-lookup", default="--spec-type ngram-simple --spec-ngram-simple-size-n 3 "
                        "--spec-ngram-simple-size-m 5", help="options with which it looks guesses up")
    parser.add_argument("--llama-draft", default="--spec-type draft-simple --spec-draft-n-max 5",
                        help="options with which its Q4_0 drafts")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 4, 16], help="requests in flight")
    parser.add_argument("--slots", type=int, default=16, help="texts that each server writes at a time, at most")
    parser.add_argument("--tasks", nargs="+", default=["code", "prose"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=12.0, help="no round begins that would end later than that")
    parser.add_argument("--per-client", type=int, default=2, help="requests of a client in a round")
    parser.add_argument("--least", type=int, default=4, help="requests of a level in a round, at least")
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=64)
    add_peer_site(parser)
    return parser


def run() -> None:
    """Start all servers, measure, tell, and fail where a request did."""
    args = start(options())
    # Whoever ends this ends the servers too, those that are stopped included.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if args.device != "cpu" or args.dtype != "bf16":
        raise DraftsmithError("this benchmark is about bf16 on a CPU; --device and --dtype cannot be changed.")
    args.llama_server = find_binary(args.llama_server)
    missing = find_packages(args.peer_site)
    if missing is not None:
        raise DraftsmithError(missing)
    folder = args.target or str(assets.demo_target())
    started = time.perf_counter()
    with ExitStack() as stack:
        seen, notes = measure(start_servers(stack, folder, args), folder, args, started)
    told = {cell: summary(seen, cell, args) for cell in seen}
    for task in args.tasks:
        show_table(
            f"{task}, greedy, prompts of {args.prompt_tokens} tokens, {args.new_tokens} new ones, {Path(folder).name}, "
            f"{args.threads} threads (tokens/s: mean, least and most of the rounds); milliseconds of requests",
            ["", "clients", "tokens/s", "over our plain", "TPOT p50", "TPOT p95", "TTFT p50", "TTFT p95", "acceptance",
             "texts as our plain", "failed"],
            [row(cell, one) for cell, one in told.items() if cell[0] == task],
        )
    for note in notes:
        print(f"note: {note}")
    levels = [{"task": task, "clients": clients, "server": name, **one} for (task, clients, name), one in told.items()]
    about = {"llama.cpp": version_of(args.llama_server)}
    args.llama_server = Path(args.llama_server).name
    finish(args, {"levels": levels, "notes": notes}, target=Path(folder).name, dtype=args.dtype, peers=about)
    wrong = [one for one in levels if one["failed"] or one["short"]]
    if wrong:
        raise SystemExit(f"error: requests failed or came short, of {wrong[0]['server']}: {wrong[0]['errors']}")


if __name__ == "__main__":
    main(run)
