"""The speed of this code over that of another work tree, such as an earlier commit's, in one interleaved run.

    git worktree add ../before COMMIT       # and build its native kernels, as the README says
    python benchmarks/against.py --before ../before/src

Both decode the same prompt, plainly and with a drafter (by default the embedded one; on random weights, prompt lookup),
each in a process of its own, taking turns. Where a process has its memory changes its speed by more than a few per
cent, so processes are started anew several times. Texts and steps have to be the same; with `--other-bits`, for work
trees whose kernels round otherwise, only the number of tokens is.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WORKER = "--worker"


def work(source: str, folder: str, drafter_name: str, quantize: str, rows: int) -> None:
    """Load, then answer every line of standard input with the seconds of a call."""
    import torch

    # Names of the package itself alone: where the rest lies may differ between the two work trees.
    import draftsmith
    from draftsmith import Engine, Plan, SamplingParams, Target, load_drafter

    assert draftsmith.__file__.startswith(source), draftsmith.__file__
    target = Target.from_pretrained(folder, dtype="bf16", quantize=quantize)
    drafter = load_drafter(drafter_name, target)
    engine = Engine(target, drafter, max_batch=rows, max_length=1024)
    prompt = torch.randint(5, target.vocab_size, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    print("ready", flush=True)
    for line in sys.stdin:
        way, tokens = line.split()
        plan = Plan() if way == "plain" else drafter.default_plan()
        begun = time.perf_counter()
        found = engine.generate([prompt] * rows, SamplingParams(max_tokens=int(tokens), ignore_eos=True), plan)
        seconds = time.perf_counter() - begun
        print(json.dumps({"s": seconds, "steps": found[0].statistics.steps, "tokens": found[0].tokens}), flush=True)


def ask(process: Any, way: str, tokens: int) -> dict[str, Any]:
    """Have one process decode."""
    process.stdin.write(f"{way} {tokens}\n")
    process.stdin.flush()
    answer: dict[str, Any] = json.loads(process.stdout.readline())
    return answer


def run() -> None:
    """Measure and write."""
    import torch
    from common import GEOMETRIES, arguments, as_json, finish, model_folder, ratio_of, say, show_table, span, start

    from draftsmith import assets

    parser = arguments(__doc__, "against")
    parser.add_argument("--before", type=Path, required=True, help="folder src of the other work tree")
    parser.add_argument("--geometries", nargs="+", default=["demo", "134m"], choices=["demo", *GEOMETRIES])
    parser.add_argument("--quantize", default="none", choices=["none", "int8", "int4"], help="weights of the target")
    parser.add_argument("--rows", nargs="+", type=int, default=[1])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--processes", type=int, default=5, help="pairs, one after the other")
    parser.add_argument("--rounds", type=int, default=6, help="of each pair")
    parser.add_argument("--other-bits", action="store_true", help="texts and steps may differ")
    args = start(parser)
    sources = [str(args.before.resolve()), str(Path(__file__).resolve().parents[1] / "src")]
    cells, table = [], []
    for geometry in args.geometries:
        for rows in args.rows:
            drafter = args.drafter or (str(assets.demo_drafter()) if geometry == "demo" else "ngram")
            with model_folder(geometry, args.target, torch.bfloat16) as folder:
                say(geometry)
                found = measure_pairs([folder, drafter, args.quantize, str(rows)], sources, args, say)
            for way, (before, after, steps) in found.items():
                ratio = ratio_of(before, after, args.seed)
                cells.append({"geometry": geometry, "rows": rows, "way": way, "speed": as_json(ratio), "steps": steps})
                told = str(steps[0]) if steps[0] == steps[1] else "{} and {}".format(*steps)
                table.append([geometry, str(rows), way, span(ratio, 3), str(len(after)), told])
    show_table(
        "Speed over the other work tree (95 % intervals over pairs of processes)",
        ["target", "rows", "way", "speed", "pairs", "steps on each side"], table,
    )
    finish(args, {"cells": cells}, before=args.before.resolve().parent.name)


def measure_pairs(job: list[str], sources: list[str], args: Any, say: Any) -> dict[str, Any]:
    """Return seconds before and after, a list for each pair of processes, and the steps on each side."""
    ways: dict[str, Any] = {"plain": ([], [], [0, 0]), "drafted": ([], [], [0, 0])}
    for pair in range(args.processes):
        say(f"{job[-1]} rows, pair {pair + 1} of {args.processes}")
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, WORKER, source, *job], text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                env={"PYTHONPATH": source, "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"},
            )
            for source in (sources if pair % 2 else sources[::-1])
        ]
        if pair % 2 == 0:
            processes.reverse()
        for process in processes:
            if process.stdout is None or process.stdout.readline().strip() != "ready":
                raise RuntimeError("a process did not start; try what it does by hand: see --worker")
        for way, (before, after, steps) in list(ways.items()):
            took: list[list[float]] = [[], []]
            for turn in range(args.rounds + 1):
                order = [0, 1] if turn % 2 else [1, 0]
                answers = {which: ask(processes[which], way, args.new_tokens) for which in order}
                if not args.other_bits:
                    assert answers[0]["tokens"] == answers[1]["tokens"]
                    assert answers[0]["steps"] == answers[1]["steps"]
                if turn:  # the first warms up
                    for which in order:
                        steps[which] += answers[which]["steps"]
                        took[which].append(answers[which]["s"])
            ways[way] = ([*before, took[0]], [*after, took[1]], steps)
        for process in processes:
            process.stdin.close()
            process.wait()
    return ways


if __name__ == "__main__":
    if WORKER in sys.argv:
        work(*sys.argv[2:6], rows=int(sys.argv[6]))
    else:
        run()
