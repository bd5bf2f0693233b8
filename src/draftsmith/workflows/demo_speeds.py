"""The demo's race: the speculator trained live, alone and behind a lookup, the shipped one, a 4-bit copy, a cascade.

It runs on the target. If that is the embedded one, it also runs on an enlarged copy, which like larger models has to be
read from memory; see `draftsmith.evaluation.padding`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from draftsmith import assets
from draftsmith.drafters.base import Drafter, StagewiseDrafter
from draftsmith.drafters.heads.mlp_padding import pad_speculator
from draftsmith.drafters.registry import load_drafter
from draftsmith.engine import Engine
from draftsmith.evaluation.measuring.fastest import fastest_plan
from draftsmith.evaluation.measuring.speedup import SpeedupResult, measure_speedups
from draftsmith.evaluation.padding import HALF_BILLION, padded_target
from draftsmith.evaluation.reporting.plan_names import plan_name
from draftsmith.plan import Plan
from draftsmith.system import free_memory
from draftsmith.targets import Target
from draftsmith.types import CompileLevel, DraftsmithError

LIVE, SHIPPED, COPY, CASCADE = "trained live", "shipped", "4-bit copy", "4-bit cascade"
BEHIND = "lookup, then live"
SHORT, LONG = ([Plan((1,) * length) for length in lengths] for lengths in ((2, 3, 5), (4, 5, 7)))
TREES = [Plan((2,) * 5, beam=2, nodes=9), Plan((3,) * 5, beam=3, nodes=13)]
EARLY = [Plan((1,) * 8, confidence=0.7), Plan((1,) * 12, confidence=0.5)]
PLANS = {LIVE: SHORT + TREES, SHIPPED: SHORT + TREES, COPY: [Plan((1,) * 5), *EARLY], CASCADE: LONG}
"""The drafts tried for each drafter; drafters that are not listed use their own plan."""
TRIALS, TRIAL_TOKENS = 4, 64
CALIBRATE = 2048
"""Tokens of the target's own text by which the copy is rounded, and the same copy in the cascade."""
ROOM_GB = 4.0
"""An upper bound of what the larger target, its packed weights, their copy and what rounds it take together."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class TargetSpeeds:
    """What was measured on one target: `tasks` by task and drafter, `plans` what each drafter drafts."""

    name: str
    weights: int
    plans: Mapping[str, Plan]
    tasks: Mapping[str, Mapping[str, SpeedupResult]]

    @property
    def label(self) -> str:
        """A name for the target, with its size."""
        return f"{self.name}, {self.weights / 1e6:,.0f} M"

    def summary(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return {
            "target": self.name, "weights": self.weights,
            "plans": {name: plan_name(plan) for name, plan in self.plans.items()},
            "tasks": {
                task: {name: one.summary() for name, one in found.items()} for task, found in self.tasks.items()
            },
        }


def race(
    target: Target,
    drafters: Mapping[str, Drafter],
    held_out: Mapping[str, Sequence[Sequence[int]]],
    tuning: Sequence[Sequence[int]],
    new_tokens: int,
    seed: int,
    level: CompileLevel,
    say: Say,
) -> TargetSpeeds:
    """Find each drafter's best draft on the tuning texts, then time all of them and plain decoding in turns."""
    longest = new_tokens + max(len(prompt) for prompts in (*held_out.values(), tuning) for prompt in prompts)
    plain = Engine(target, max_batch=1, max_length=longest, share_prefixes=False, compile=level)
    ways: dict[str, tuple[Engine, Plan]] = {}
    for name, drafter in drafters.items():
        engine = Engine(target, drafter, max_batch=1, max_length=longest, share_prefixes=False, compile=level)
        plan = engine.plan
        # With compilation, every shape would have to be compiled.
        if level == "off" and name in PLANS:
            say(f"{target.name}: which draft is best for {name}")
            plans = PLANS[name]
            if isinstance(drafter, StagewiseDrafter):
                plans = list(dict.fromkeys(one.shortened(drafter.max_depth) for one in plans))
            plan = fastest_plan(engine, plans, tuning[:TRIALS], min(new_tokens, TRIAL_TOKENS), seed)
        ways[name] = engine, plan
    tasks = {}
    for task, prompts in held_out.items():
        say(f"{target.name}: {task}, plainly and with every drafter in turn")
        tasks[task] = measure_speedups(plain, ways, prompts, new_tokens, seed=seed)
    return TargetSpeeds(target.name, target.weights, {name: plan for name, (_, plan) in ways.items()}, tasks)


def drafters_for(target: Target, live: Path, shipped: Path | None, tell: Say) -> dict[str, Drafter]:
    """Load the contestants: the speculators in these folders and, if native kernels read the target, all others.

    In the cascade, a lookup guesses for the copy, and where it finds nothing the speculator that was trained live. A
    copy that does not fit into memory, or that cannot be made of this target, is left out.

    Args:
        tell: receives a message about every copy that is left out.
    """
    folders = {LIVE: live} if shipped is None else {LIVE: live, SHIPPED: shipped}
    found = {name: load_drafter(folder, target) for name, folder in folders.items()}
    quoted = json.dumps(str(live), ensure_ascii=False)
    words = {
        BEHIND: f"lookup-first:then={quoted}", COPY: f"int4-self:calibrate={CALIBRATE}",
        CASCADE: f"cascade:inner=[ngram,{quoted}],calibrate={CALIBRATE}",
    }
    for name, word in words.items() if target.backend.native else ():
        try:
            found[name] = load_drafter(word, target)
        except DraftsmithError as error:
            tell(f"The {name} is left out: {error}")
    return found


def why_not_larger(target: Target, origin: Path) -> str | None:
    """Return, as a sentence, why the target in `origin` is not measured enlarged too; None if it is."""
    free = free_memory()
    if origin.resolve() != assets.demo_target().resolve():
        return "Only the embedded target is made larger."
    if not target.backend.native:
        return "The larger target is left out: without native kernels it would take many minutes."
    if free is not None and free / 1e9 < ROOM_GB:
        return f"The larger target is left out: it takes {ROOM_GB:.0f} GB of memory, and {free / 1e9:.1f} are free."
    return None


def race_on_larger(
    origin: Path,
    live: Path,
    held_out: Mapping[str, Sequence[Sequence[int]]],
    tuning: Sequence[Sequence[int]],
    new_tokens: int,
    seed: int,
    say: Say,
    tell: Say,
) -> TargetSpeeds:
    """Do as `race` on an enlarged copy of the embedded target in `origin`; the speculators read its wider states."""
    say("making the target as large as those that are read from memory")
    target = padded_target(origin, HALF_BILLION, f"{origin.name}, padded")
    with TemporaryDirectory() as folder:
        wide = {name: Path(folder) / name for name in ("live", "shipped")}
        pad_speculator(live, wide["live"], HALF_BILLION.times)
        pad_speculator(assets.demo_drafter(), wide["shipped"], HALF_BILLION.times)
        drafters = drafters_for(target, wide["live"], wide["shipped"], tell)
    return race(target, drafters, held_out, tuning, new_tokens, seed, "off", say)
