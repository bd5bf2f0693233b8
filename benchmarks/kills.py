"""kill -9 at random moments of a training run, resumed each time, against a run that nobody disturbed: bit for bit.

    python benchmarks/kills.py --kills 50
    python benchmarks/kills.py --run muon --kills 8
    python benchmarks/kills.py --run joint --kills 8

The commands are a user's own, `draftsmith train` and then `draftsmith train --resume`, each a process of its own. The
run is short, but all is in it: two stages with several micro-batches and drawn positions, checkpoints that are
pruned, τ and the loss on held-out text measured on the way, texts sampled from the target, an export. Every phase has
its share of the kills, short ones too: the run's folder is watched, and the process dies at a random moment after it
has come to the phase that was drawn. In which phase it died is read from what it left.

A run is killed ten times at most, so many kills take several runs. Results of other seeds and other runs that are in
the JSON file stay there and are counted too. The exit code is 1 if anything differs but times.
"""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from common import arguments, finish, main, print_table, say, start

from draftsmith import assets
from draftsmith.types import DraftsmithError

STARTING, READING, STAGE1, MEASURING = "starting", "reading the data", "stage 1", "measuring"
SAVING, WRITING, STAGE2, EXPORTING, ENDING = "saving", "the target writes", "stage 2", "exporting", "ending"
SHARES = {STARTING: 2, READING: 5, STAGE1: 9, MEASURING: 8, SAVING: 11, WRITING: 5, STAGE2: 6, EXPORTING: 4}
"""Of fifty kills."""
KILLS_A_RUN = 10
LOOK_S = 0.002

STAGE1_STEPS, STEPS, EVERY, SAVE_EVERY = 12, 24, 6, 3
RECIPE: dict[str, Any] = {
    "drafter": {"family": "mlp", "n_predict": 3, "inner_dim": 64, "draft_vocab_size": 512,
                "top_k_tokens_per_head": [2, 1, 1], "n_candidates": 2},
    "data": {"sources": [{"path": str(assets.prompt_file("train"))}], "shuffle_documents": 64, "shuffle_windows": 8},
    "stage1": {"steps": STAGE1_STEPS, "batch": 2, "accumulate": 2, "length": 64, "positions_per_sequence": 16,
               "rate": 4e-3, "final_rate": 4e-4},
    "stage2": {"steps": STEPS - STAGE1_STEPS, "batch": 2, "accumulate": 2, "prompt_tokens": 16, "new_tokens": 24,
               "epochs": 2, "generate_batch": 4, "positions_per_sequence": 8, "rate": 3e-3, "final_rate": 3e-4},
    "distillation": {"weight": 0.5},
    "output": {"save_every": SAVE_EVERY, "log_every": 1},
    "evaluation": {"every": EVERY},
}
RUNS: dict[str, dict[str, Any]] = {
    "mlp": {},
    "muon": {"optimizer": {"name": "muon"}},
    "joint": {
        "drafter": {"family": "medusa", "num_heads": 2, "num_layers": 1, "draft_vocab_size": 512,
                    "default_branching": [1, 1]},
        "joint": {"heads_rate_factor": 10, "warmup_steps": 4, "ramp_steps": 4},
        "optimizer": {"precision": "fp32"},
    },
}
"""What each run has in place of these sections."""


@dataclass(frozen=True, order=True)
class Moment:
    """Where a run is: after `step` steps, in a phase; in the order of a run. What every command begins with has -1."""

    step: int
    place: int
    phase: str


@dataclass(frozen=True)
class Aim:
    """Which kill comes next: in this phase, when the run has come so far, at this share of the time that it lasts."""

    moment: Moment
    share: float


@dataclass(frozen=True)
class Kill:
    """One kill: what it was meant for, where it fell, and the temporary files and folders that it left."""

    meant: str
    phase: str
    step: int
    left: list[str]


class Watch:
    """Tells from a run's folder what the command that was just started is doing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.begun = time.time()
        self.before = self._last_command()
        self.opened: tuple[int, ...] | None = None

    def moment(self) -> Moment:
        """Return where the run is."""
        if self._last_command() == self.before:
            return Moment(-1, 0, STARTING)
        seen = tuple(_size(self.folder / name) for name in ("metrics.jsonl", "generated.jsonl"))
        if self.opened is None:
            self.opened = seen
        step, measured = self._last_record()
        if self.fresh("checkpoints/.*") or self.fresh(".latest.tmp") or self.fresh(".best.tmp"):
            return Moment(step, 2, SAVING)
        saved = (self.folder / f"checkpoints/step-{step:08d}").is_dir()
        measures = step in (STAGE1_STEPS, STEPS) or step % EVERY == 0
        if measures and not measured:
            return Moment(step, 1, MEASURING)
        if not saved and (measures or step % SAVE_EVERY == 0):
            return Moment(step, 2, SAVING)
        if step == STEPS:
            return Moment(step, 4, ENDING) if self._exported() else Moment(step, 3, EXPORTING)
        if step == STAGE1_STEPS and not self._written():
            return Moment(step, 3, WRITING)
        if seen == self.opened:
            return Moment(-1, 1, READING)
        return Moment(step, 4, STAGE1 if step < STAGE1_STEPS else STAGE2)

    def fresh(self, pattern: str) -> list[str]:
        """Return the names in the folder that this command made or changed."""
        found = []
        for path in self.folder.glob(pattern):
            with suppress(FileNotFoundError):
                found += [str(path.relative_to(self.folder))] if path.lstat().st_mtime >= self.begun else []
        return sorted(found)

    def _last_command(self) -> tuple[int, str] | None:
        """Return what tells the last command that opened the folder; one that starts anew is again the first."""
        path = self.folder / "run.json"
        runs = json.loads(path.read_text())["runs"] if path.exists() else []
        return (len(runs), runs[-1]["date"]) if runs else None

    def _last_record(self) -> tuple[int, bool]:
        """Return the last step that is recorded, and whether its measurement is."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        record = json.loads(lines[-1]) if lines else {"step": 0}
        return record["step"], "evaluation" in record

    def _written(self) -> bool:
        path, section = self.folder / "generated.jsonl", RECIPE["stage2"]
        needed = section["steps"] * section["batch"] * section["accumulate"] // section["epochs"]
        return path.exists() and path.read_text().count("\n") * section["generate_batch"] >= needed

    def _exported(self) -> bool:
        return bool(self.fresh("drafter/manifest.json")) and not self.fresh(".drafter.*")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


class Command:
    """`draftsmith train` in a process of its own, as a user starts it."""

    def __init__(self, recipe: Path, folder: Path, threads: int) -> None:
        self.log = folder.with_suffix(".log")
        self.watch = Watch(folder)
        going_on = any(folder.glob("checkpoints/step-*"))
        words = ["train", str(recipe), "--out", str(folder), "--eval-prompts", "2", "--eval-tokens", "16"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "draftsmith", *words, *(["--resume"] if going_on else [])],
                stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": str(threads)},
            )

    def moments(self) -> Iterator[Moment]:
        """Yield where the run is, again and again, while the command runs.

        Raises:
            DraftsmithError: the command failed by itself.
        """
        while self.process.poll() is None:
            yield self.watch.moment()
            time.sleep(LOOK_S)
        if self.process.returncode != 0:
            raise DraftsmithError(f"a command failed by itself:\n{self.log.read_text()[-3000:]}")

    def kill(self) -> bool:
        """Kill it, and tell whether it was still there."""
        self.process.send_signal(signal.SIGKILL)
        return self.process.wait() == -signal.SIGKILL


class Drill:
    """One kind of run: first undisturbed, then killed as often as asked."""

    def __init__(self, name: str, scratch: Path, seed: int, threads: int) -> None:
        self.scratch, self.rng, self.threads = scratch, random.Random(f"{name} {seed}"), threads
        self.recipe = scratch / "recipe.yaml"
        self.recipe.write_text(yaml.safe_dump(RECIPE | RUNS[name]))
        self.lasted: dict[Moment, float] = {}
        self.reading_s = 0.1
        self._calm()

    def _command(self, folder: Path) -> Command:
        return Command(self.recipe, folder, self.threads)

    def _calm(self) -> None:
        """Let a run end undisturbed, and note how long each of its moments lasts."""
        before, since = None, time.perf_counter()
        for moment in self._command(self.scratch / "calm").moments():
            now = time.perf_counter()
            if before is not None:
                self.lasted[before] = self.lasted.get(before, 0.0) + now - since
            before, since = moment, now
        self.expected = outcome(self.scratch / "calm")

    def aims(self, kills: int) -> list[Aim]:
        """Draw kills by the shares of the phases."""
        deck = [phase for phase, share in SHARES.items() for _ in range(share)]
        phases = deck * (kills // len(deck)) + self.rng.sample(deck, kills % len(deck))
        self.rng.shuffle(phases)
        # A run reads its data whenever it goes on, in either stage.
        places = {phase: (STAGE1, STAGE2) if phase == READING else (phase,) for phase in SHARES}
        moments = [self.rng.choice([m for m in self.lasted if m.phase in places[phase]]) for phase in phases]
        return [
            Aim(replace(moment, phase=phase), self.rng.random()) for moment, phase in zip(moments, phases, strict=True)
        ]

    def killed_run(self, folder: Path, aims: Sequence[Aim]) -> list[Kill]:
        """Kill a run again and again, as its moments come, then let it end."""
        kills = []
        for aim in sorted(aims, key=lambda aim: aim.moment):
            share, kill = aim.share, None
            while kill is None:
                kill = self._strike(self._command(folder), aim.moment, share)
                share /= 2
            kills.append(kill)
            say(f"{folder.name}: killed at step {kill.step}, {kill.phase}; meant for {kill.meant}")
        for _ in self._command(folder).moments():
            pass
        return kills

    def _strike(self, command: Command, aim: Moment, share: float) -> Kill | None:
        """Kill a command when its moment has come or is past; None if it ended before."""
        read_since = None
        for moment in command.moments():
            if moment.phase == READING and read_since is None:
                read_since = time.perf_counter()
            if read_since is not None and moment.phase not in (STARTING, READING):
                self.reading_s, read_since = time.perf_counter() - read_since, None
            if not due(moment, aim):
                continue
            time.sleep(share * self._seconds(aim.phase))
            if not command.kill():
                return None
            found = command.watch.moment()
            return Kill(aim.phase, found.phase, found.step, command.watch.fresh("**/.*"))
        return None


    def _seconds(self, phase: str) -> float:
        """Return how long a phase lasts at least."""
        if phase == READING:
            return self.reading_s
        return min(seconds for moment, seconds in self.lasted.items() if moment.phase == phase)


def due(now: Moment, aim: Moment) -> bool:
    """Tell whether a command has come to where it is to be killed, or is past it."""
    if aim.phase == STARTING:
        return True
    if now.phase == STARTING:
        return False
    return now.phase == READING if aim.phase == READING and now.step < 0 else now >= aim


def outcome(folder: Path) -> dict[str, str]:
    """Return what a run must leave whatever happened to it: sums of its files, links, and names that are temporary."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = str(path.readlink())
        elif path.is_file() and name != "run.json":
            # The recipe tells where the run is kept.
            found[name] = hashlib.sha256(path.read_bytes().replace(bytes(folder), b"")).hexdigest()
        elif path.name.startswith("."):
            found[name] = "left behind"
    return found


def run() -> None:
    """Kill, resume and compare."""
    parser = arguments(__doc__, "kills")
    parser.add_argument("--run", choices=list(RUNS), default="mlp", help="what is trained")
    parser.add_argument("--kills", type=int, default=50)
    parser.set_defaults(threads=1)
    args = start(parser)
    kept = json.loads(args.json.read_text())["sets"] if args.json.exists() else []
    sets = [one for one in kept if (one["run"], one["seed"]) != (args.run, args.seed)]
    with tempfile.TemporaryDirectory() as place:
        drill = Drill(args.run, Path(place), args.seed, args.threads)
        say(f"undisturbed: {len(drill.expected)} files and links, {sum(drill.lasted.values()):.1f} s")
        aims, runs = drill.aims(args.kills), []
        for number in range(-(-len(aims) // KILLS_A_RUN)):
            folder = Path(place) / f"killed-{number}"
            kills = drill.killed_run(folder, aims[number * KILLS_A_RUN : (number + 1) * KILLS_A_RUN])
            found = outcome(folder)
            names = sorted(name for name in found | drill.expected if found.get(name) != drill.expected.get(name))
            say(f"{folder.name}: {len(kills)} kills, " + (f"DIFFERS: {', '.join(names)}" if names else "the same"))
            runs.append({"kills": [asdict(kill) for kill in kills], "different": names})
    sets.append({"run": args.run, "seed": args.seed, "compared": sorted(drill.expected), "runs": runs})
    sets.sort(key=lambda one: (one["run"], one["seed"]))
    tell(sets)
    finish(args, {"sets": sets})
    if any(one["different"] for one in runs):
        raise SystemExit(1)


def tell(sets: Sequence[Mapping[str, Any]]) -> None:
    """Print in which phase the kills fell, by kind of run, and whether anything differs."""
    names = sorted({one["run"] for one in sets})
    runs = {name: [run for one in sets if one["run"] == name for run in one["runs"]] for name in names}
    fell = {name: Counter(kill["phase"] for run in runs[name] for kill in run["kills"]) for name in names}
    rows = [[phase, *(str(fell[name][phase]) for name in names)] for phase in (*SHARES, ENDING)]
    rows.append(["kills", *(str(fell[name].total()) for name in names)])
    rows.append(["runs", *(str(len(runs[name])) for name in names)])
    rows.append(["runs that differ", *(str(sum(bool(run["different"]) for run in runs[name])) for name in names)])
    print_table("Kills by the phase in which they fell", ["phase", *names], rows)


if __name__ == "__main__":
    main(run)
