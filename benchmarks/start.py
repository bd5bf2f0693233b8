"""How long a command takes to say what is wrong with it, to show its help, and to write its first token.

    python benchmarks/start.py
    git worktree add ../before COMMIT       # and build its native kernels, as the README says
    python benchmarks/start.py --before ../before/src

Every run is a process of its own; the commands, and both work trees, take turns in random order, and the first turn of
each is thrown away, after which the files are in memory. "Seconds" are those from the start of the process to its
end, of `generate` to the first character of the text; "processor" are those of all threads to the end, which other
programs on the machine disturb less.
"""

import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import arguments, finish, main, say, show_table, start

MISTAKES: dict[str, tuple[str, ...]] = {
    "wrong option": ("generate", "def f", "--targt", "x"),
    "wrong target": ("generate", "def f", "--target", "./absent"),
    "wrong drafter": ("generate", "def f", "--drafter", "./absent"),
    "unknown family": ("generate", "def f", "--drafter", "ngrm"),
    "wrong plan": ("generate", "def f", "--plan", "4;2"),
    "wrong texts": ("bench", "--data", "absent.jsonl"),
    "wrong family of a comparison": ("compare", "--family", "mpl"),
    "wrong recipe key": ("train", "stage2.stepz=3"),
    "wrong option of a family": ("train", "--family", "mlp:n_predct=3"),
}
"""Each ends with exit code 2."""
GENERATE = "generate, first token"
COMMANDS: dict[str, tuple[str, ...]] = {
    "--version": ("--version",), "--help": ("--help",), "generate --help": ("generate", "--help"), **MISTAKES,
    GENERATE: ("generate", "def f", "--max-tokens", "1"),
}


def timed(name: str, source: Path, folder: str) -> tuple[float, float]:
    """Run a command in a process of its own; return its seconds, see the top, and those of the processor."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "draftsmith", *COMMANDS[name]], cwd=folder, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(source), "HF_HUB_OFFLINE": "1"},
    )
    assert process.stdout is not None
    if name == GENERATE:
        process.stdout.read(1)
        seconds = time.perf_counter() - begun
    process.stdout.read()
    code = process.wait()
    if name != GENERATE:
        seconds = time.perf_counter() - begun
    assert code == (2 if name in MISTAKES else 0), f"{name} ended with {code}"
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime


def run() -> None:
    """Measure and write."""
    parser = arguments(__doc__, "start")
    parser.add_argument("--before", type=Path, help="folder src of another work tree, to be measured beside this one")
    parser.add_argument("--runs", type=int, default=7, help="of each command that count")
    parser.add_argument("--only", help="commands whose names begin with this")
    args = start(parser)
    trees = {"after" if args.before else "here": Path(__file__).resolve().parents[1] / "src"}
    if args.before:
        trees["before"] = args.before.resolve()
    names = [name for name in COMMANDS if name.startswith(args.only or "")]
    turns = [(name, tree) for name in names for tree in trees]
    times: dict[tuple[str, str], list[tuple[float, float]]] = {turn: [] for turn in turns}
    order = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.runs + 1):
            for name, tree in order.sample(turns, len(turns)):
                found = timed(name, trees[tree], folder)
                if number:
                    times[name, tree].append(found)
            say(f"round {number} of {args.runs}")
    cells: list[dict[str, Any]] = []
    rows = []
    for (name, tree), own in times.items():
        seconds, processor = [one for one, _ in own], [one for _, one in own]
        cells.append(
            {"command": name, "words": COMMANDS[name], "tree": tree, "seconds": seconds, "processor_s": processor}
        )
        ends = f"{min(seconds):.2f} to {max(seconds):.2f}"
        rows.append([name, tree, f"{statistics.median(seconds):.2f}", ends, f"{statistics.median(processor):.2f}"])
    show_table(
        f"Seconds of a command, {args.runs} runs", ["command", "", "seconds, median", "all", "processor, median"], rows
    )
    finish(args, {"cells": cells})


if __name__ == "__main__":
    main(run)
