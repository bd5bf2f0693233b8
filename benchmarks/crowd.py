"""A thousand clients at once, half of which hang up at moments of chance: who stays has the right text.

    python benchmarks/crowd.py --seconds 300

A server with the embedded models in a process of its own, on loopback. Every client asks again and again, whole answers
and streams, until the time is up; those that hang up do so at once, after a random while (mostly in the queue), or in
the middle of a stream. Every finished answer is compared with what the engine writes offline, without a server and
without drafts. Afterwards nothing may be left: no text, no keys and values. The command fails if anything is wrong.
"""

import asyncio
import random
import resource
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import wire
from common import arguments, finish, main, make_prompts, say, show_table, start

from draftsmith import assets
from draftsmith.engine import Engine
from draftsmith.targets import Target
from draftsmith.types import DraftsmithError, SamplingParams

LENGTHS = (8, 24, 48)
LEAVES, LATE = ("at once", "in the queue", "in the middle"), "too late"
"""When clients hang up; too late is when the whole answer had come before."""
Key = tuple[int, int]
"""Number of a prompt, and tokens asked for."""


def offline(target: Target, prompts: list[list[int]]) -> dict[Key, str]:
    """Return what the engine writes by itself."""
    engine = Engine(target, max_batch=32, max_length=max(map(len, prompts)) + max(LENGTHS))
    found = {}
    for length in LENGTHS:
        done = engine.generate(prompts, SamplingParams(max_tokens=length, ignore_eos=True))
        found |= {(number, length): one.text for number, one in enumerate(done)}
    return found


class Crowd:
    """The clients, and what they saw.

    Args:
        texts: what is right.
    """

    def __init__(self, port: int, prompts: list[list[int]], texts: Mapping[Key, str], seed: int) -> None:
        self.port, self.prompts, self.texts, self.seed = port, prompts, texts, seed
        self.seen: Counter[str] = Counter()
        self.longest = 0.0

    async def client(self, number: int, end: float) -> None:
        """Ask until the time is up; every second client hangs up instead of waiting."""
        rng = random.Random(f"{self.seed} {number}")
        await asyncio.sleep(2 * rng.random())
        while time.monotonic() < end:
            key = rng.randrange(len(self.prompts)), rng.choice(LENGTHS)
            stream = rng.random() < 0.5
            sent = wire.request("/v1/completions", {
                "prompt": self.prompts[key[0]], "max_tokens": key[1], "temperature": 0, "ignore_eos": True,
                "stream": stream,
            })
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except OSError as error:
                self.seen[f"no connection: {type(error).__name__}"] += 1
                await asyncio.sleep(0.5)
                continue
            try:
                if number % 2:
                    await self._leave(rng, reader, writer, sent)
                else:
                    await self._stay(key, reader, writer, sent)
            except (OSError, DraftsmithError) as error:
                self.seen[f"broken: {str(error)[:80]}"] += 1
            finally:
                writer.transport.abort()

    async def _stay(self, key: Key, reader: Any, writer: Any, sent: bytes) -> None:
        begun = time.monotonic()
        came = await wire.ask(reader, writer, sent)
        self.longest = max(self.longest, time.monotonic() - begun)
        status = wire.status_of(came)
        if status != 200:
            self.seen[f"status {status}"] += 1
            return
        self.seen["right texts" if wire.text_of(came) == self.texts[key] else "wrong texts"] += 1

    async def _leave(self, rng: random.Random, reader: Any, writer: Any, sent: bytes) -> None:
        way = rng.choice(LEAVES)
        if way == "at once":
            writer.write(sent[: rng.randrange(len(sent) + 1)])
            await asyncio.sleep(0.05 * rng.random())
        else:
            writer.write(sent)
            came = bytearray()
            try:
                async with asyncio.timeout(20 * rng.random()):
                    while piece := await reader.read(1 << 16):
                        came += piece
                        if wire.is_whole(came):
                            way = LATE
                            break
                        # The head, or a piece of the text, is there: some leave just now.
                        if way == "in the middle" and rng.random() < 0.3:
                            break
            except TimeoutError:
                pass
        self.seen[f"left {way}"] += 1


async def attend(served: wire.Served, crowd: Crowd, args: Any) -> dict[str, Any]:
    """Let the crowd in, and return what is to be told."""
    warm = Crowd(crowd.port, crowd.prompts, crowd.texts, args.seed + 1)
    await asyncio.gather(*(warm.client(2 * number, time.monotonic() + 3) for number in range(32)))
    memory = [served.memory()]
    files, end = served.open_files(), time.monotonic() + args.seconds
    clients = [asyncio.create_task(crowd.client(number, end)) for number in range(args.clients)]
    half = time.monotonic() + args.seconds / 2
    middle = 0.0
    while time.monotonic() < end:
        await asyncio.sleep(min(5.0, args.seconds / 4))
        memory.append(served.memory())
        if time.monotonic() >= half and not middle:
            middle = memory[-1]
        say(f"{max(0.0, end - time.monotonic()):.0f} s left, {crowd.seen['right texts']} right texts")
    await asyncio.gather(*clients)

    async def nothing_left() -> bool:
        told = await wire.metrics_of(served.port)
        return not any(
            value for name, value in told.items()
            if name.startswith(("vllm:num_requests_", "vllm:kv_cache_usage_perc"))
        )

    emptied = await wire.until(nothing_left, 30)
    told = await wire.metrics_of(served.port)
    failed = sum(value for name, value in told.items() if name.startswith("http_requests_total") and '"5xx"' in name)
    tokens = sum(value for name, value in told.items() if name.startswith("vllm:generation_tokens_total"))
    return {
        "wrong_texts": crowd.seen["wrong texts"], "right_texts": crowd.seen["right texts"],
        "status_500_and_above": int(failed), "seconds_until_nothing_was_left": emptied,
        "memory_mib": {"begin": memory[0], "middle": middle, "end": memory[-1], "most": max(memory)},
        "open_files": {"begin": files, "end": served.open_files()}, "tokens": int(tokens),
        "longest_answer_s": crowd.longest, "seen": dict(crowd.seen),
    }


def run() -> None:
    """Start the server, let the crowd in, tell, and fail where something is wrong."""
    parser = arguments(__doc__, "crowd")
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--prompts", type=int, default=64, help="different ones")
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument("--plan", default="own", help="what the server drafts by")
    parser.set_defaults(threads=1)
    args = start(parser)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a socket for every client, here and in the server
    target = Target.from_pretrained(args.target or assets.demo_target(), dtype=args.dtype, device=args.device)
    prompts = make_prompts(target, None, 32, args.prompts, args.seed)
    texts = offline(target, prompts)
    words = ["--max-batch", str(args.max_batch), "--max-waiting", str(2 * args.clients), "--dtype", args.dtype]
    words += ["--threads", str(args.threads), "--plan", args.plan, "--device", args.device]
    words += wire.models_of(args)
    with wire.server(words) as served:
        told = asyncio.run(attend(served, Crowd(served.port, prompts, texts, args.seed), args))
    memory, seen = told["memory_mib"], told["seen"]
    emptied = told["seconds_until_nothing_was_left"]
    broken = {name: count for name, count in seen.items() if name.startswith(("broken", "status", "no connection"))}
    rows = [
        ["right texts", str(told["right_texts"])], ["wrong texts", str(told["wrong_texts"])],
        *([f"hung up {way}", str(seen.get(f"left {way}", 0))] for way in (*LEAVES, LATE)),
        ["answers with 500 or above", str(told["status_500_and_above"])],
        *([name, str(count)] for name, count in broken.items()),
        ["until no text and no keys and values were left, s", "never" if emptied is None else f"{emptied:.2f}"],
        ["memory of the server: begin, middle, end, most, MiB",
         ", ".join(f"{memory[name]:.0f}" for name in ("begin", "middle", "end", "most"))],
        ["its open files: begin, end", f"{told['open_files']['begin']}, {told['open_files']['end']}"],
        ["tokens written", str(told["tokens"])], ["longest answer, s", f"{told['longest_answer_s']:.1f}"],
    ]
    show_table(f"{args.clients} clients for {args.seconds:.0f} s, {target.name}, {args.dtype}", ["", ""], rows)
    finish(args, told, target=target.name, dtype=args.dtype)
    if told["wrong_texts"] or told["status_500_and_above"] or broken or emptied is None or not told["right_texts"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main(run)
