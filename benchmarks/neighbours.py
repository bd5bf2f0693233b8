"""Plain decoding beside other programs that want the processor: this code and another work tree, one thread and all.

    git worktree add ../before COMMIT       # and build its native kernels, as the README says
    python benchmarks/neighbours.py --before ../before/src

Every run is a process of its own that decodes for some seconds beside so many busy loops; the runs of a number of loops
take turns in random order. The tokens of all runs have to be the same.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WORKER = "--worker"
LOOP = "while True: pass"
TOKENS = 100


def work(folder: str, threads: int) -> None:
    """Load, then answer every line of standard input, a number of seconds, with the tokens a second."""
    import torch

    from draftsmith import Engine, Plan, SamplingParams, Target

    torch.set_num_threads(threads)
    target = Target.from_pretrained(folder, dtype="bf16")
    engine = Engine(target, None, max_batch=1, max_length=64 + TOKENS)
    prompt = torch.randint(5, target.vocab_size, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    engine.generate([prompt], params, Plan())
    print("ready", flush=True)
    for line in sys.stdin:
        begun, count, text = time.perf_counter(), 0, None
        while time.perf_counter() - begun < float(line):
            found = engine.generate([prompt], params, Plan())[0].tokens
            assert text is None or found == text, "one prompt was gone on with in two ways"
            count, text = count + len(found), found
        print(json.dumps({"rate": count / (time.perf_counter() - begun), "tokens": text}), flush=True)


def measured(source: Path, folder: str, threads: int, busy: int, seconds: float) -> dict[str, Any]:
    """Return what a process of its own brings beside so many busy loops."""
    worker = subprocess.Popen(
        [sys.executable, __file__, WORKER, folder, str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, env=os.environ | {"PYTHONPATH": str(source), "HF_HUB_OFFLINE": "1"},
    )
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdout.readline()
    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(busy)]
    try:
        print(seconds, file=worker.stdin, flush=True)
        found: dict[str, Any] = json.loads(worker.stdout.readline())
        return found
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
        worker.kill()
        worker.wait()


def run() -> None:
    """Measure and write."""
    from common import arguments, finish, model_folder, say, show_table, start

    parser = arguments(__doc__, "neighbours")
    parser.add_argument("--before", type=Path, required=True, help="folder src of the other work tree")
    parser.add_argument("--busy", default="0,1,2", help="numbers of busy loops")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=4.0, help="that a run decodes for")
    args = start(parser)
    here = Path(__file__).resolve().parents[1] / "src"
    every = args.threads or len(os.sched_getaffinity(0))
    ways = {
        "before, all threads": (args.before.resolve(), every), "after, all threads": (here, every),
        "after, one thread": (here, 1),
    }
    cells, rows, texts = [], [], set()
    order = random.Random(args.seed)
    import torch

    with model_folder("demo", args.target, torch.bfloat16) as folder:
        for busy in map(int, args.busy.split(",")):
            rates: dict[str, list[float]] = {name: [] for name in ways}
            for number in range(args.runs):
                for name in order.sample(list(ways), len(ways)):
                    found = measured(ways[name][0], folder, ways[name][1], busy, args.seconds)
                    rates[name].append(found["rate"])
                    texts.add(tuple(found["tokens"]))
                say(f"{busy} busy, run {number + 1}: " + ", ".join(f"{n} {r[-1]:.0f}" for n, r in rates.items()))
            alone = statistics.median(rates["after, one thread"])
            for name, own in rates.items():
                middle = statistics.median(own)
                cells.append({"busy": busy, "way": name, "tokens_per_second": own})
                ends = f"{min(own):.0f} to {max(own):.0f}"
                shares = [f"{value / alone:.2f}" for value in (middle, min(own))]
                rows.append([str(busy), name, f"{middle:.0f}", ends, *shares])
    assert len(texts) == 1, f"{len(texts)} different texts of one prompt"
    show_table(
        f"Tokens a second beside busy loops, {every} threads, {args.runs} runs",
        ["busy loops", "", "median", "all", "over one thread", "the least over it"], rows,
    )
    finish(args, {"cells": cells}, all_threads=every)


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        work(sys.argv[2], int(sys.argv[3]))
    else:
        from common import main

        main(run)
