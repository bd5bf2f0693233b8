"""Plain decoding beside other programs that want the processor: this code and another work tree, one thread and all.

    git worktree add ../before COMMIT       # and build its native kernels, as the README says
    python benchmarks/neighbours.py --before ../before/src

Every run is a process of its own that decodes for some seconds beside so many busy loops; the runs of a number of loops
take turns in random order. The tokens of all runs have to be the same.

    python benchmarks/neighbours.py --quota 1,1.5 --busy 0 --json quota.json

runs this code alone, one thread and all, in control groups with such quotas, in cores, as containers have them; that
needs Linux and the right to make such groups. `longest` is the longest wait for a token.
"""

import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WORKER = "--worker"
LOOP = "while True: pass"
TOKENS = 100
GROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 100_000


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
        steps = [begun]
        while time.perf_counter() - begun < float(line):
            found = engine.generate(
                [prompt], params, Plan(), on_progress=lambda tokens, steps=steps: steps.append(time.perf_counter())
            )[0].tokens
            assert text is None or found == text, "one prompt was gone on with in two ways"
            count, text = count + len(found), found
        rate = count / (time.perf_counter() - begun)
        longest = max(after - before for before, after in itertools.pairwise(steps))
        print(json.dumps({"rate": rate, "longest": longest, "tokens": text}), flush=True)


@contextmanager
def group(quota: float | None) -> Iterator[Path | None]:
    """Make a control group that may use so many cores' worth of time."""
    if quota is None:
        yield None
        return
    first = GROUPS / "cpu"
    folder = (first if first.is_dir() else GROUPS) / f"draftsmith-{os.getpid()}"
    folder.mkdir()
    try:
        granted = round(quota * PERIOD_US)
        if first.is_dir():
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(granted))
        else:
            (folder / "cpu.max").write_text(f"{granted} {PERIOD_US}")
        yield folder
    finally:
        folder.rmdir()


def measured(
    source: Path, folder: str, threads: int, busy: int, seconds: float, quota: float | None = None
) -> dict[str, Any]:
    """Return what a process of its own brings beside so many busy loops, under a quota or none."""
    with group(quota) as limited:
        return _measured(source, folder, threads, busy, seconds, limited)


def _measured(
    source: Path, folder: str, threads: int, busy: int, seconds: float, limited: Path | None
) -> dict[str, Any]:
    worker = subprocess.Popen(
        [sys.executable, __file__, WORKER, folder, str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, env=os.environ | {"PYTHONPATH": str(source), "HF_HUB_OFFLINE": "1"},
    )
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdout.readline()
    if limited is not None:
        (limited / "cgroup.procs").write_text(str(worker.pid))
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
    parser.add_argument("--before", type=Path, help="folder src of the other work tree; without it, this code alone")
    parser.add_argument("--quota", help="quotas in cores, such as 1,1.5")
    parser.add_argument("--busy", default="0,1,2", help="numbers of busy loops")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=4.0, help="that a run decodes for")
    args = start(parser)
    here = Path(__file__).resolve().parents[1] / "src"
    every = args.threads or len(os.sched_getaffinity(0))
    ways = {"after, all threads": (here, every), "after, one thread": (here, 1)}
    if args.before is not None:
        ways = {"before, all threads": (args.before.resolve(), every), **ways}
    quotas = [None] if args.quota is None else [float(word) for word in args.quota.split(",")]
    cells, rows, texts = [], [], set()
    order = random.Random(args.seed)
    import torch

    with model_folder("demo", args.target, torch.bfloat16) as folder:
        for quota, busy in itertools.product(quotas, map(int, args.busy.split(","))):
            rates: dict[str, list[float]] = {name: [] for name in ways}
            waits: dict[str, list[float]] = {name: [] for name in ways}
            place = f"{busy}" if quota is None else f"{busy}, quota {quota:g}"
            for number in range(args.runs):
                for name in order.sample(list(ways), len(ways)):
                    found = measured(ways[name][0], folder, ways[name][1], busy, args.seconds, quota)
                    rates[name].append(found["rate"])
                    waits[name].append(found["longest"])
                    texts.add(tuple(found["tokens"]))
                say(f"{place} busy, run {number + 1}: " + ", ".join(f"{n} {r[-1]:.0f}" for n, r in rates.items()))
            alone = statistics.median(rates["after, one thread"])
            for name, own in rates.items():
                middle = statistics.median(own)
                cells.append({
                    "busy": busy, "quota": quota, "way": name, "tokens_per_second": own, "longest_s": waits[name]
                })
                ends = f"{min(own):.0f} to {max(own):.0f}"
                shares = [f"{value / alone:.2f}" for value in (middle, min(own))]
                longest = f"{1e3 * statistics.median(waits[name]):.0f}"
                rows.append([place, name, f"{middle:.0f}", ends, *shares, longest])
    assert len(texts) == 1, f"{len(texts)} different texts of one prompt"
    show_table(
        f"Tokens a second beside busy loops, {every} threads, {args.runs} runs",
        ["busy loops", "", "median", "all", "over one thread", "the least over it", "longest, ms"], rows,
    )
    finish(args, {"cells": cells}, all_threads=every)


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        work(sys.argv[2], int(sys.argv[3]))
    else:
        from common import main

        main(run)
