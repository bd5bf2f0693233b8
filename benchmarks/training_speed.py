"""How soon a speculator guesses well: τ over minutes of training, of two recipes or two work trees, in one run.

    git worktree add ../before COMMIT       # and build its native kernels, as the README says
    python benchmarks/training_speed.py --before ../before/src --before-recipe before.yaml --after-recipe after.yaml

Both trainings are the command `draftsmith train`, whole: reading, learning, the target's writing, saving. They take
turns of some seconds, one being stopped while the other runs, and only a run's own turns count as its time. Afterwards
the drafter of every checkpoint decodes the same held-out prompts, in this process and at leisure; if that is cut, the
same command does not train again.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    arguments,
    as_json,
    bootstrap,
    finish,
    main,
    make_plan,
    make_prompts,
    pooled_tau,
    say,
    show_table,
    span,
    start,
)
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from draftsmith import assets
from draftsmith.drafters.registry import load_drafter
from draftsmith.engine import Engine
from draftsmith.evaluation.measuring.intervals import Interval
from draftsmith.evaluation.measuring.measure import measure
from draftsmith.targets import Target
from draftsmith.types import DraftsmithError, SamplingParams

LOOKED_EVERY = 0.05
"""Seconds."""


@dataclass
class Training:
    """One `draftsmith train`, the seconds of its turns, and when each of its checkpoints was there."""

    name: str
    process: "subprocess.Popen[bytes]"
    folder: Path
    log: Path
    seconds: float = 0.0
    saved: dict[int, float] = field(default_factory=dict)

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    def look(self, now: float) -> None:
        """Note what was saved since the last look, `now` seconds into the run's own time."""
        for place in sorted((self.folder / "checkpoints").glob("step-*")):
            self.saved.setdefault(int(place.name.removeprefix("step-")), now)

    def turn(self, seconds: float) -> None:
        """Let it run for so long, or to its end."""
        begun = time.monotonic()
        os.killpg(self.process.pid, signal.SIGCONT)
        while self.runs and time.monotonic() - begun < seconds:
            time.sleep(LOOKED_EVERY)
            self.look(self.seconds + time.monotonic() - begun)
        if self.runs:
            os.killpg(self.process.pid, signal.SIGSTOP)
        self.seconds += time.monotonic() - begun


def begin(name: str, source: str, recipe: Path, changes: list[str], place: Path, every: int) -> Training:
    """Start a training and stop it at once."""
    folder, log = place / name, place / f"{name}.log"
    command = [
        sys.executable, "-m", "draftsmith", "train", str(recipe), *changes, f"output.folder={folder}",
        f"output.save_every={every}", "output.keep=100000", "evaluation.every=0",
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | {"PYTHONPATH": source, "HF_HUB_OFFLINE": "1"},
        )
    os.killpg(process.pid, signal.SIGSTOP)
    return Training(name, process, folder, log)


def train_both(trainings: list[Training], turn: float) -> None:
    """Let them take turns to their ends; DraftsmithError where one fails."""
    try:
        while any(training.runs for training in trainings):
            for training in trainings:
                if training.runs:
                    training.turn(turn)
                    last = max(training.saved, default=0)
                    say(f"{training.name}: {training.seconds:.0f} s, step {last}")
    finally:
        for training in trainings:
            if training.runs:
                os.killpg(training.process.pid, signal.SIGKILL)
    for training in trainings:
        if training.process.returncode:
            tail = training.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            raise DraftsmithError(f"the training {training.name!r} failed: {' '.join(tail)}")


def taus(target: Target, folder: Path, prompts: list[list[int]], plan: Any, new_tokens: int) -> tuple[Any, Any]:
    """Return accepted tokens and steps by prompt."""
    longest = max(map(len, prompts)) + new_tokens
    engine = Engine(target, load_drafter(folder, target), max_batch=16, max_length=longest)
    found = measure(engine, prompts, SamplingParams(max_tokens=new_tokens, ignore_eos=True), plan)
    statistics = [completion.statistics for completion in found.completions]
    return np.array([s.accepted for s in statistics]), np.array([s.steps for s in statistics])


def reached(points: list[tuple[float, float]], level: float) -> float | None:
    """Return when τ first was at a level, between measurements by a straight line; None where it never was."""
    for (t0, tau0), (t1, tau1) in pairwise(points):
        if tau1 >= level:
            return t0 if tau0 >= level else t0 + (t1 - t0) * (level - tau0) / (tau1 - tau0)
    return None


def ratios(curves: dict[str, list[tuple[float, float]]], levels: np.ndarray) -> list[dict[str, Any]]:
    """Return for every level of τ the minutes both took, and their ratio."""
    found = []
    for level in levels:
        before, after = (reached(curves[name], float(level)) for name in ("before", "after"))
        if before and after:
            found.append({"tau": float(level), "before": before, "after": after, "ratio": before / after})
    return found


def draw(curves: dict[str, list[dict[str, Any]]], path: Path, about: str) -> None:
    """Draw τ over minutes."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for name, points in curves.items():
        minutes = [point["minutes"] for point in points]
        axis.plot(minutes, [point["tau"]["value"] for point in points], marker="o", markersize=3, label=name)
        low, high = ([point["tau"]["ci95"][end] for point in points] for end in (0, 1))
        axis.fill_between(minutes, low, high, alpha=0.2)
    axis.set(xlabel="minutes of training", ylabel="τ, tokens a step", title=about)
    axis.title.set_fontsize("medium")
    axis.legend()
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def run() -> None:
    """Train, measure and write."""
    here = Path(__file__).resolve().parents[1]
    parser = arguments(__doc__, "training-speed")
    parser.add_argument("--before", type=Path, default=here / "src", help="folder src of the other work tree")
    parser.add_argument("--before-recipe", type=Path, required=True)
    parser.add_argument("--after-recipe", type=Path, required=True)
    parser.add_argument("--before-set", action="append", default=[], metavar="KEY=VALUE", help="in that recipe")
    parser.add_argument("--after-set", action="append", default=[], metavar="KEY=VALUE", help="in that recipe")
    parser.add_argument("--save-every", nargs=2, type=int, default=[10, 20], help="steps, before and after")
    parser.add_argument("--out", type=Path, default=Path("runs/training-speed"), help="folder of the trainings")
    parser.add_argument("--turn", type=float, default=20, help="seconds")
    parser.add_argument("--tasks", default="code,prose")
    parser.add_argument("--prompts", type=int, default=80, help="a task")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--plan", default="1,1,1,1,1")
    args = start(parser)
    target = Target.from_pretrained(args.target or assets.demo_target(), dtype=args.dtype, device=args.device)
    prompts = {task: make_prompts(target, task, 64, args.prompts, args.seed) for task in args.tasks.split(",")}
    times = args.out / "times.json"
    if not times.exists():
        args.out.mkdir(parents=True, exist_ok=True)
        trainings = [
            begin(name, str(source.resolve()), recipe, changes, args.out, every)
            for name, source, recipe, changes, every in (
                ("before", args.before, args.before_recipe, args.before_set, args.save_every[0]),
                ("after", here / "src", args.after_recipe, args.after_set, args.save_every[1]),
            )
        ]
        train_both(trainings, args.turn)
        times.write_text(json.dumps({training.name: sorted(training.saved.items()) for training in trainings}))
    curves: dict[str, list[dict[str, Any]]] = {}
    for name, saved in json.loads(times.read_text()).items():
        curves[name] = []
        for step, seconds in saved:
            folder = args.out / name / "checkpoints" / f"step-{step:08d}"
            by_task = {
                task: taus(target, folder, some, make_plan(args.plan), args.new_tokens)
                for task, some in prompts.items()
            }
            accepted, steps = (np.concatenate([pair[at] for pair in by_task.values()]) for at in (0, 1))
            value: Interval = bootstrap(len(steps), pooled_tau(accepted, steps), args.seed)
            each = {task: float(1 + pair[0].sum() / pair[1].sum()) for task, pair in by_task.items()}
            curves[name].append({"step": step, "minutes": seconds / 60, "tau": as_json(value), **each})
            say(f"{name}, {seconds / 60:.1f} minutes: τ {value.value:.3f}")
    rows = [
        [name, str(p["step"]), f"{p['minutes']:.2f}", span(Interval(p["tau"]["value"], *p["tau"]["ci95"]), 3)]
        for name, points in curves.items() for p in points
    ]
    show_table(f"τ over minutes of training, {target.name}", ["run", "step", "minutes", "τ"], rows)
    pairs = {name: [(point["minutes"], point["tau"]["value"]) for point in points] for name, points in curves.items()}
    top = min(max(tau for _, tau in points) for points in pairs.values())
    levels = np.arange(1.2, top + 1e-9, 0.1)
    sooner = ratios(pairs, levels)
    show_table(
        "Minutes until τ was reached", ["τ", "before", "after", "before / after"],
        [[f"{r['tau']:.1f}", f"{r['before']:.2f}", f"{r['after']:.2f}", f"{r['ratio']:.2f}"] for r in sooner],
    )
    args.json.parent.mkdir(parents=True, exist_ok=True)
    draw(curves, args.json.with_suffix(".png"), f"{target.name}, {args.tasks}, greedy, chain {args.plan}")
    finish(args, {"curves": curves, "sooner": sooner}, target=target.name)


if __name__ == "__main__":
    main(run)
