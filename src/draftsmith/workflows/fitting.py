"""The drafts that pay on this machine: measured once for target and drafter, and kept.

Costs and acceptance are those of decoding itself, on texts that nothing is evaluated on.
"""

import hashlib
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from draftsmith.drafters.base import Drafter, StagewiseDrafter
from draftsmith.engine import Engine
from draftsmith.engine.fitted import Fitted
from draftsmith.engine.profile import Arm, Profile, candidates
from draftsmith.evaluation.prompts import cut, embedded_prompts
from draftsmith.files import replace_text
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.processor import Watch
from draftsmith.provenance import machine, provenance
from draftsmith.targets import Target
from draftsmith.types import SamplingParams, require_finished
from draftsmith.workflows.models import quiet as quiet_console

ROWS = (1, 4, 8)
PROMPT_TOKENS, NEW_TOKENS = 48, 20
SLOW_STEP_S, FEW_TOKENS = 0.02, 10
"""Where a plain step takes longer, fewer tokens are decoded."""
HOPELESS, MISSES = 0.85, 2
"""Larger drafts are not tried after so many in a row had less than this share of the best speed so far."""
FEWEST_TURNS, MOST_TURNS, ENOUGH_S = 2, 6, 0.2
"""How often a plan is timed; no oftener than twice where that takes so long."""
NOISY = 1.4
"""Times the least: where a plain step usually takes longer, other programs disturbed it."""
MOST_NODES = 64
LOOKUP_HOPE = 4.0
"""Texts differ in how often they repeat themselves much more than in how well a model foresees them."""
FORMAT = 1
CACHE = "DRAFTSMITH_CACHE"
"""The variable that names a folder for what is measured once; without it, the user's cache folder has one."""

Taken = dict[Plan, dict[int, list[float]]]
"""Seconds of a step: by plan, by number of rows, of every time it was measured."""


@dataclass(frozen=True)
class Fit:
    """A profile, the seconds it took, 0 where it was kept from an earlier time, and whether it could be kept now:

    because nothing disturbed it, and because the drafter was loaded by a name.
    """

    profile: Profile
    seconds: float
    quiet: bool = True
    named: bool = True


class Sampler:
    """Decodes a little with one plan after the other; every call goes on to other prompts.

    Args:
        engine: with room for all plans.
        prompts: texts that begin again when all were used.
    """

    def __init__(self, engine: Engine, prompts: Sequence[list[int]], new_tokens: int) -> None:
        self.engine, self.prompts, self.new_tokens = engine, prompts, new_tokens
        self.stayed: dict[Plan, list[int]] = {}
        self.steps: dict[Plan, int] = {}
        self._taken: dict[tuple[Plan, int], int] = {}

    def seconds(self, plan: Plan, rows: int) -> float:
        """Return what a step takes now with so many rows, and note which guesses stayed."""
        at = self._taken.get((plan, rows), 0)
        self._taken[plan, rows] = at + rows
        some = [self.prompts[(at + row) % len(self.prompts)] for row in range(rows)]
        params = SamplingParams(max_tokens=self.new_tokens, ignore_eos=True)
        done = [text.statistics for text in require_finished(self.engine.generate(some, params, plan))]
        stayed, steps = self.stayed.setdefault(plan, [0] * plan.depth), sum(one.steps for one in done)
        for one in done:
            for depth, count in enumerate(one.accepted_by_depth[: plan.depth]):
                stayed[depth] += count
        self.steps[plan] = self.steps.get(plan, 0) + steps
        return rows * sum(one.decode_s for one in done) / max(1, steps)

    def survival(self, plan: Plan) -> tuple[float, ...]:
        """Return the shares of steps that accepted at least 1, 2, … guesses; of chains, by all chains as deep."""
        alike = [plan]
        if is_chain(plan):
            alike = [one for one in self.steps if is_chain(one) and one.sampled == plan.sampled]
        found = []
        for depth in range(plan.depth):
            deep = [one for one in alike if one.depth > depth]
            found.append(sum(self.stayed[one][depth] for one in deep) / max(1, sum(self.steps[one] for one in deep)))
        return tuple(found)


def is_chain(plan: Plan) -> bool:
    """Whether every node has one child."""
    return bool(plan.branching) and plan.max_nodes == plan.depth


class Contest:
    """Times plans, smaller ones first, for as long as larger ones may pay.

    Args:
        rows: numbers of rows to time steps with, rising.
        on_progress: gets what is being measured.
    """

    def __init__(self, sampler: Sampler, rows: Sequence[int], on_progress: Callable[[str], None]) -> None:
        self.sampler, self.rows, self.on_progress = sampler, tuple(rows), on_progress
        self.taken: Taken = {}

    def time(self, plan: Plan, rows: int) -> None:
        """Time a plan, and plain decoding beside it, until there is enough of both."""
        self.on_progress(f"{rows} row{'s' if rows > 1 else ''}, {plan.max_nodes} guesses")
        begun = time.monotonic()
        for turn in range(MOST_TURNS):
            for one in dict.fromkeys((NO_DRAFT, plan)):
                took = self.sampler.seconds(one, rows)
                self.taken.setdefault(one, {}).setdefault(rows, []).append(took)
            if turn + 1 >= FEWEST_TURNS and time.monotonic() - begun > ENOUGH_S:
                return

    def speed(self, plan: Plan) -> float:
        """Return tokens a second of one row."""
        return (1 + sum(self.sampler.survival(plan))) / self.seconds(plan, self.rows[0])

    def seconds(self, plan: Plan, rows: int) -> float:
        """Return what a step takes when nobody disturbs it: a chain, and no draft, no more than longer chains took."""
        alike = [plan]
        if plan == NO_DRAFT or is_chain(plan):
            alike += [one for one in self.taken if is_chain(one) and one.depth > plan.depth and rows in self.taken[one]]
        return min(took for one in alike for took in self.taken[one][rows])

    def run(self, plans: Sequence[Plan]) -> Profile:
        """Time them and return what came of it."""
        self.time(NO_DRAFT, self.rows[0])
        misses, best = 0, 0.0
        for plan in plans:
            self.time(plan, self.rows[0])
            best = max(best, self.speed(plan), self.speed(NO_DRAFT))
            misses = misses + 1 if self.speed(plan) < HOPELESS * best else 0
            if misses == MISSES:
                break
        plain = self.speed(NO_DRAFT)
        kept = [plan for plan in self.taken if plan == NO_DRAFT or self.speed(plan) >= HOPELESS * plain]
        for rows in self.rows[1:]:
            for plan in kept:
                self.time(plan, rows)
        return Profile(self.rows, tuple(
            Arm(plan, self.sampler.survival(plan), tuple(self.seconds(plan, rows) for rows in self.rows))
            for plan in kept
        ))

    @property
    def is_steady(self) -> bool:
        """Whether a plain step took about as long whenever it was timed."""
        return all(statistics.median(some) < NOISY * min(some) for some in self.taken[NO_DRAFT].values())


def measure_profile(
    target: Target, drafter: Drafter, rows: Sequence[int] = ROWS, on_progress: Callable[[str], None] = lambda _: None
) -> tuple[Profile, bool]:
    """Decode with plans of more and more nodes; return what that brought, and whether the machine was quiet meanwhile.

    Args:
        rows: numbers of rows to time steps with, rising.
        on_progress: gets what is being measured.
    """
    default, most = drafter.default_plan(), rows[-1]
    longest = drafter.max_depth if isinstance(drafter, StagewiseDrafter) else default.depth
    plans = candidates(default, isinstance(drafter, StagewiseDrafter), MOST_NODES, longest)
    length = min(PROMPT_TOKENS + NEW_TOKENS, target.max_length)
    new_tokens = min(NEW_TOKENS, length - 1)
    prompts = texts_for(target, length - new_tokens, 3 * most)
    largest = max([NO_DRAFT, *plans], key=lambda plan: plan.max_nodes)
    engine = Engine(target, drafter, plan=largest, max_batch=most, max_length=max(map(len, prompts)) + new_tokens)
    sampler = Sampler(engine, prompts, new_tokens)
    sampler.seconds(NO_DRAFT, 1)  # warms up
    if sampler.seconds(NO_DRAFT, 1) > SLOW_STEP_S:
        sampler.new_tokens = min(FEW_TOKENS, new_tokens)
    contest, watch = Contest(sampler, rows, on_progress), Watch()
    return contest.run(plans), contest.is_steady and not watch.is_disturbed


def texts_for(target: Target, tokens: int, count: int) -> list[list[int]]:
    """Return beginnings of the embedded training texts; for a target without a tokenizer, random tokens."""
    if target.tokenizer is not None:
        return cut(target, mixed(), tokens, count, exact=False)
    rng = random.Random(0)
    return [[rng.randrange(target.vocab_size) for _ in range(tokens)] for _ in range(count)]


def mixed() -> list[Any]:
    """Return the embedded training texts, the tasks taking turns."""
    texts = embedded_prompts(split="train")
    tasks = [[text for text in texts if text.task == task] for task in sorted({text.task for text in texts})]
    return list(islice(taking_turns(tasks), len(texts)))


def taking_turns(lists: Sequence[Sequence[Any]]) -> Iterator[Any]:
    """Give the first of each, the second of each, and so on."""
    for at in range(max(map(len, lists))):
        for one in lists:
            if at < len(one):
                yield one[at]


def fit(target: Target, drafter: Drafter, name: str | None, console: Console) -> Fit:
    """Return the profile of target and drafter on this machine, measured now or kept from an earlier time.

    Args:
        name: the folder or word that the drafter was loaded from; without one nothing is kept.
        console: shows that something is measured.
    """
    path = None if name is None else place(target, drafter, name)
    kept = None if path is None else read(path)
    if kept is not None:
        return Fit(kept, 0.0)
    begun = time.monotonic()
    with console.status("Measuring what drafts cost on this machine …") as status:
        profile, quiet = measure_profile(
            target, drafter, on_progress=lambda what: status.update(f"Measuring what drafts cost here: {what} …")
        )
    seconds = time.monotonic() - begun
    if quiet and path is not None:
        keep(path, {"format": FORMAT, "provenance": provenance(target=target.name, drafter=name), **profile.to_json()})
    return Fit(profile, seconds, quiet, path is not None)


def fit_drafts(engine: Engine, loaded_from: str | Path | None = None, console: Console | None = None) -> Engine:
    """Return an engine of the same parts that drafts what pays on this machine, and say what that is.

    What drafts cost and bring is measured in some seconds, by decoding the embedded training texts; while the engine
    decodes, each text's own acceptance corrects it. Without a drafter, or compiled, when every plan would cost a
    compilation, the engine is returned as it is.

    Args:
        loaded_from: the folder or word that the drafter was loaded from; what was measured is then kept for the next
            time, for this machine, these versions, this target and this drafter.
        console: where that is said; nowhere by default.
    """
    console = console or quiet_console()
    if not engine.plan.depth or engine.compiled != "off":
        return engine
    name = None if loaded_from is None else str(loaded_from)
    found = fit(engine.target, engine.drafter, name, console)
    hope = 1.0 if engine.drafter.reads_prompt else LOOKUP_HOPE
    policy = Fitted(found.profile, hope=hope)
    console.print(f"[dim]{in_words(found, policy)}[/dim]", highlight=False)
    limits = engine.core.limits
    made = Engine(
        engine.target, engine.core.drafters, policy=policy, max_batch=limits.max_batch, max_length=limits.max_length,
        max_tokens_in_flight=limits.max_tokens, share_prefixes=limits.share, compile=engine.compiled,
    )
    made.plan = policy.typical.plan if not policy.is_fixed else NO_DRAFT
    return made


def in_words(found: Fit, policy: Fitted) -> str:
    """Say in a line which drafts are made, and why."""
    profile, arm = found.profile, policy.typical
    kept = "kept" if found.named else "not kept"
    if not found.quiet:
        kept = "not kept, because other programs disturbed it"
    when = f"measured in {found.seconds:.1f} s and {kept}" if found.seconds else "measured before"
    if policy.is_fixed:
        tried = max(profile.arms[1:], key=lambda one: profile.gain(one, 1), default=None)
        closest = f": the best, {shape_in_words(tried.plan)}, would be {profile.gain(tried, 1):.2f}×" if tried else ""
        return f"No drafts, because on this machine none of this drafter's pays{closest} ({when}; --plan own drafts)."
    if arm is profile.arms[0]:
        return f"Drafts only where guesses stay more often than usual, since otherwise none pays here ({when})."
    return (
        f"Drafts for this machine: {shape_in_words(arm.plan)}, about {profile.gain(arm, 1):.2f}× plain decoding for "
        f"one text ({when}; less where guesses fail; --plan own takes the drafter's own)."
    )


def shape_in_words(plan: Plan) -> str:
    """Return "a chain of 3", "a tree of 8" or "none"."""
    if not plan.branching:
        return "none"
    return f"a {'chain' if is_chain(plan) else 'tree'} of {plan.max_nodes}"


def place(target: Target, drafter: Drafter, name: str) -> Path:
    """Return where the profile of a target, a drafter and this machine is kept."""
    weights = hashlib.sha256()
    for tensor in (target.embedding_weight_VF, target.head_weight_VF):
        weights.update(tensor[:: max(1, len(tensor) // 64), :16].float().cpu().numpy().tobytes())
    what = {
        "format": FORMAT, "machine": machine() | {"memory_gib": None}, "threads": torch.get_num_threads(),
        "versions": {**provenance()["versions"], "python": None}, "device": str(target.device),
        "read_by": target.backend.description, "dtype": str(target.dtype), "target": weights.hexdigest(),
        "config": target.config.to_json_string(), "drafter": name, "kind": type(drafter).__name__,
        "parameters": drafter.parameter_count(), "default": repr(drafter.default_plan()), "stamp": stamp(name),
    }
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:24]
    shared = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get(CACHE) or shared / "draftsmith") / "fits" / f"{key}.json"


def stamp(name: str) -> list[float]:
    """Return what changes when the weights in a folder do."""
    folder = Path(name)
    if not folder.is_dir():
        return []
    files = [path.stat() for path in sorted(folder.glob("*.safetensors"))]
    return [value for file in files for value in (file.st_size, file.st_mtime)]


def read(path: Path) -> Profile | None:
    """Return a kept profile; None where there is none, or what is there is none."""
    try:
        return Profile.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep(path: Path, value: dict[str, Any]) -> None:
    """Write a profile; a place that cannot be written costs a measurement next time, and no more."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(value, indent=1))
    except OSError:
        return
