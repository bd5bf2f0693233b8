"""Training with memory that stays with the process once it was freed, and without: seconds a step, pages met, memory.

    python benchmarks/kept_memory.py

Every run is a `draftsmith train` of its own on the embedded texts, in a new folder; those that do not keep memory have
an environment variable that leaves the C library as it is. The time and the pages of a step are those between a short
and a longer run, so that loading and measuring do not count. A page is counted when it is met for the first time, and
the system clears it then. The largest memory is that of the longer run, in MB. The runs of a setting take turns in
random order.
"""

import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from common import arguments, finish, main, say, show_table, start, told

from draftsmith.evaluation.measuring.interleaving import interleaved
from draftsmith.memory import SWITCH

SETTINGS = {"kept": {}, "given back": {SWITCH: "0"}}


class Run(NamedTuple):
    """What a training took."""

    seconds: float
    pages: int
    system_s: float
    most_mb: int


def train(family: str, steps: int, setting: str, target: str | None) -> Run:
    """Train for so many steps of stage 1."""
    with tempfile.TemporaryDirectory() as place:
        command = [
            sys.executable, "-m", "draftsmith", "train", "--family", family, f"stage1.steps={steps}", "stage2.steps=0",
            "evaluation.every=0", "--out", str(Path(place) / "run"), *(["--target", target] if target else []),
        ]
        begun = time.perf_counter()
        running = subprocess.Popen(
            command, env={**os.environ, **SETTINGS[setting]}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        _, status, usage = os.wait4(running.pid, 0)
        seconds = time.perf_counter() - begun
        running.returncode = os.waitstatus_to_exitcode(status)
        assert running.returncode == 0, f"a training of {family} failed"
        return Run(seconds, usage.ru_minflt, usage.ru_stime, usage.ru_maxrss // 1024)


def run() -> None:
    """Measure and write."""
    parser = arguments(__doc__, "kept_memory")
    parser.add_argument("--families", nargs="+", default=["mlp", "eagle3", "medusa"])
    parser.add_argument("--steps", nargs=2, type=int, default=[4, 24], help="of the short and of the longer run")
    parser.add_argument("--rounds", type=int, default=3)
    args = start(parser)
    short, long = args.steps
    cells: list[dict[str, Any]] = []
    table: list[list[str]] = []
    for family in args.families:
        found: dict[str, list[list[float]]] = {setting: [] for setting in SETTINGS}
        for number, setting, _ in interleaved(list(SETTINGS), args.rounds, random.Random(args.seed)):
            say(f"{family}: round {number + 1} of {args.rounds}, {setting}")
            first, second = (train(family, steps, setting, args.target) for steps in (short, long))
            a_step = [(after - before) / (long - short) for before, after in zip(first[:3], second[:3], strict=True)]
            found[setting].append([*a_step, second.most_mb])
        for setting, runs in found.items():
            step_s, pages, system_s, most_mb = map(list, zip(*runs, strict=True))
            cells.append(
                {"family": family, "setting": setting, "step_s": step_s, "pages": pages, "system_s": system_s,
                 "most_mb": most_mb}
            )
            table.append(
                [family, setting, told(step_s, 3), told(pages, 0), told(system_s, 3), told(most_mb, 0)]
            )
    show_table(
        f"A training step, median (all of {args.rounds} rounds)",
        ["family", "freed memory is", "step, s", "pages", "of it in the system, s", "most memory, MB"], table,
    )
    finish(args, {"cells": cells})


if __name__ == "__main__":
    main(run)
