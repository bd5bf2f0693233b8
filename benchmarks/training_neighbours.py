"""Training beside other programs: seconds a step with the threads that it chooses, with all of them, and with one.

    python benchmarks/training_neighbours.py

Every run is a process of its own that trains the embedded speculator's family on the embedded texts, in a new folder.
Beside it are so many busy loops, or the same training once more (`twin`). The time of a step is that between a short
and a longer run, so that loading and measuring do not count; stage 1 only. The runs of a kind of neighbour take turns
in random order.
"""

import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import arguments, finish, main, say, show_table, start, told

LOOP = "while True: pass"
TWIN = "twin"
THREADS = {"chosen by itself": (), "two": ("--threads", "2"), "one": ("--threads", "1")}


def train(folder: Path, steps: int, threads: tuple[str, ...]) -> subprocess.Popen[bytes]:
    """Begin a training of so many steps."""
    command = [
        sys.executable, "-m", "draftsmith", "train", "--family", "mlp", f"stage1.steps={steps}", "stage2.steps=0",
        "evaluation.every=0", "--out", str(folder), *threads,
    ]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def seconds_of(steps: int, threads: tuple[str, ...], beside: str) -> float:
    """Return the seconds of a training; of the slower one where there are two."""
    with tempfile.TemporaryDirectory() as place:
        running: list[subprocess.Popen[bytes]] = []
        try:
            for _ in range(0 if beside == TWIN else int(beside)):
                running.append(subprocess.Popen([sys.executable, "-c", LOOP]))
            begun = time.perf_counter()
            both = [train(Path(place) / str(number), steps, threads) for number in range(2 if beside == TWIN else 1)]
            running += both
            assert [one.wait() for one in both] == [0] * len(both), "a training failed"
            return time.perf_counter() - begun
        finally:
            for one in running:
                one.kill()
                one.wait()


def run() -> None:
    """Measure and write."""
    parser = arguments(__doc__, "training_neighbours")
    parser.add_argument("--beside", nargs="+", default=["0", "1", "2", TWIN], help="busy loops, or twin")
    parser.add_argument("--steps", nargs=2, type=int, default=[4, 24], help="of the short and of the longer run")
    parser.add_argument("--settings", nargs="+", default=list(THREADS), choices=list(THREADS))
    parser.add_argument("--rounds", type=int, default=2)
    args = start(parser)
    short, long = args.steps
    cells: list[dict[str, Any]] = []
    for beside in args.beside:
        found: dict[str, list[float]] = {name: [] for name in args.settings}
        for turn in range(args.rounds):
            names = list(args.settings)
            random.Random(turn).shuffle(names)
            for name in names:
                say(f"beside {beside}: {name} threads, round {turn + 1} of {args.rounds}")
                spent = [seconds_of(steps, THREADS[name], beside) for steps in (short, long)]
                found[name].append((spent[1] - spent[0]) / (long - short))
        cells.append({"beside": beside, "seconds_a_step": found})
    show_table(
        "Seconds a step of stage 1, median (all rounds)", ["beside", *args.settings],
        [[cell["beside"], *(told(values) for values in cell["seconds_a_step"].values())] for cell in cells],
    )
    finish(args, {"cells": cells})


if __name__ == "__main__":
    main(run)
