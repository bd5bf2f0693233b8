"""The drafts that pay on this machine: measured once for target and drafter, and kept.

Costs and acceptance are those of decoding itself, on texts that nothing is evaluated on.
"""

import hashlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from draftsmith.drafters.base import Drafter
from draftsmith.engine import Engine
from draftsmith.engine.fitted import Fitted
from draftsmith.engine.profile import Profile
from draftsmith.evaluation.measuring.profiling import is_chain, measure_profile
from draftsmith.files import replace_text
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.provenance import machine, provenance
from draftsmith.targets import Target
from draftsmith.workflows.models import quiet as silent

LOOKUP_HOPE = 4.0
"""Texts differ in how often they repeat themselves much more than in how well a model foresees them."""
MEMORY_HOPE = 0.85
"""A drafter with a memory reads every text, also where it does not draft, so it has to gain clearly."""
DISTURBED_FOR_S = 3600.0
"""So long it is made do with what was measured while other programs disturbed it."""
FORMAT = 1
CACHE = "DRAFTSMITH_CACHE"
"""The variable that names a folder for what is measured once; without it, the user's cache folder has one."""


@dataclass(frozen=True)
class Fit:
    """A profile, the seconds it took, 0 where it is of an earlier time, and whether the machine was quiet then."""

    profile: Profile
    seconds: float
    quiet: bool = True

    def to_json(self) -> dict[str, Any]:
        """Return what is kept, as plain JSON."""
        return {"format": FORMAT, "quiet": self.quiet, **self.profile.to_json()}


def fit(target: Target, drafter: Drafter, name: str | None, console: Console) -> Fit:
    """Return the profile of target and drafter on this machine, measured now or kept from an earlier time.

    Args:
        name: the folder or word that the drafter was loaded from; without one nothing is kept.
        console: shows that something is measured.
    """
    path = None if name is None else place(target, drafter, name)
    kept = None if path is None else read(path)
    if kept is not None:
        return kept
    begun = time.monotonic()
    with console.status("Measuring what drafts cost on this machine …") as status:
        profile, quiet = measure_profile(
            target, drafter, on_progress=lambda what: status.update(f"Measuring what drafts cost here: {what} …")
        )
    found = Fit(profile, time.monotonic() - begun, quiet)
    if path is not None:
        keep(path, {"provenance": provenance(target=target.name, drafter=name), **found.to_json()})
    return found


def fit_drafts(
    engine: Engine, loaded_from: str | Path | None = None, console: Console | None = None, max_batch: int | None = None
) -> Engine:
    """Return an engine of the same parts that drafts what pays on this machine, and say what that is.

    What drafts cost and bring is measured in some seconds, by decoding the embedded training texts; while the engine
    decodes, each text's own acceptance corrects it. Without a drafter, or compiled, when every plan would cost a
    compilation, the engine is returned as it is.

    Args:
        loaded_from: the folder or word that the drafter was loaded from; what was measured is then kept for the next
            time, for this machine, these versions, this target and this drafter.
        console: where that is said; nowhere by default.
        max_batch: most rows of the engine that is returned; those of the given one by default. A drafter with a memory
            of its own has to read every text, drafting or not, so it drafts only where that pays with so many rows.
    """
    console = console or silent()
    if not engine.plan.depth or engine.compiled != "off":
        return engine
    name = None if loaded_from is None else str(loaded_from)
    found = fit(engine.target, engine.drafter, name, console)
    limits = engine.core.limits
    most = limits.max_batch if max_batch is None else max_batch
    remembers = engine.drafter.reads_prompt
    policy = Fitted(found.profile, hope=MEMORY_HOPE if remembers else LOOKUP_HOPE, rows=most if remembers else None)
    console.print(f"[dim]{in_words(found, policy, most)}[/dim]", highlight=False)
    made = Engine(
        engine.target, engine.core.drafters, policy=policy, max_batch=most, max_length=limits.max_length,
        max_tokens_in_flight=limits.max_tokens, share_prefixes=limits.share, compile=engine.compiled,
    )
    made.plan = policy.typical.plan if not policy.is_fixed else NO_DRAFT
    return made


def in_words(found: Fit, policy: Fitted, rows: int = 1) -> str:
    """Say in a line which drafts are made, and why; `rows` at most are decoded together."""
    profile, arm = found.profile, policy.typical
    when = f"measured in {found.seconds:.1f} s" if found.seconds else "measured before"
    if not found.quiet:
        when += " while other programs disturbed it, so again in an hour"
    if policy.is_fixed:
        tried = max(profile.arms[1:], key=lambda one: profile.gain(one, rows), default=None)
        beside = f" for {rows} texts at a time" if rows > 1 else ""
        if tried is not None:
            beside += f": the best, {shape_in_words(tried.plan)}, would be {profile.gain(tried, rows):.2f}×"
        return f"No drafts, because on this machine none of this drafter's pays{beside} ({when}; --plan own drafts)."
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


def read(path: Path) -> Fit | None:
    """Return what is kept; None where there is nothing, or nothing that can be used any more."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        found = Fit(Profile.from_json(value), 0.0, bool(value["quiet"]))
        age = time.time() - path.stat().st_mtime
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if found.quiet or age < DISTURBED_FOR_S else None


def keep(path: Path, value: dict[str, Any]) -> None:
    """Write a profile; a place that cannot be written costs a measurement next time, and no more."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(value, indent=1))
    except OSError:
        return
