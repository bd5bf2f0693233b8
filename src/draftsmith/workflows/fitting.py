"""Chooses the drafts that pay on this machine: measured once per target and drafter, and kept.

Costs and acceptance are measured by decoding itself, on texts that are not used for evaluation.
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from draftsmith.drafters.base import Drafter, workers
from draftsmith.drafters.family import read_spec
from draftsmith.engine import Engine, reasons
from draftsmith.engine.fitted import Fitted
from draftsmith.engine.known import Known
from draftsmith.engine.profile import Profile
from draftsmith.evaluation.measuring.profiling import measure_profile, up_to
from draftsmith.files import replace_text
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.provenance import machine, provenance, versions
from draftsmith.targets import Target
from draftsmith.user_cache import cache_folder
from draftsmith.workflows.models import quiet as silent

READY_HOPE = 4.0
"""A drafter without a model's memory or a lookup costs almost nothing while it does not draft. So it stays ready for
texts that suit it far better than the measured ones."""
MEMORY_HOPE = 0.85
"""A drafter with a model's memory reads every text even when it does not draft, so its gain has to be clear."""
DISTURBED_FOR_S = 600.0
"""A profile that was measured while other programs disturbed the machine is used for this long."""
FORMAT = 33
"""Increased when the content or the format of the profile changes; then everything is measured again."""


@dataclass(frozen=True)
class Fit:
    """A profile, the seconds its measurement took (0 if it was kept), and whether the machine was quiet then."""

    profile: Profile
    seconds: float
    quiet: bool = True

    def to_json(self) -> dict[str, Any]:
        """Return what is kept on disk, as plain JSON."""
        return {"quiet": self.quiet, **self.profile.to_json()}


def fit(
    target: Target, drafter: Drafter, name: str | None, console: Console, most: int, anew: bool = False
) -> Fit:
    """Return the profile of target and drafter on this machine, measured now or kept from an earlier time.

    Args:
        name: the folder or word that the drafter was loaded from; without one, nothing is kept.
        console: shows that a measurement is running.
        most: rows that are decoded together; a profile measured for fewer rows is measured again.
        anew: measure, whatever is kept.
    """
    path = None if name is None else place(target, drafter, name)
    kept, wanted = None if path is None or anew else read(path), up_to(most)
    if kept is not None and kept.profile.rows[: len(wanted)] == wanted:
        return kept
    begun = time.monotonic()
    what_is_done = "Measuring what drafts cost on this machine …"
    if not console.is_terminal:  # where a status is not shown
        often = "once for this target and this drafter: up to a minute, or two with a large target"
        console.print(f"[dim]{what_is_done} ({often})[/dim]", highlight=False)
    with console.status(what_is_done) as status:
        profile, quiet = measure_profile(
            target, drafter, wanted,
            on_progress=lambda what: status.update(f"Measuring what drafts cost here: {what} …"),
        )
    found = Fit(profile, time.monotonic() - begun, quiet)
    if path is not None:
        keep(path, {"provenance": provenance(target=target.name, drafter=name), **found.to_json()})
    return found


Names = str | Path | Mapping[str, str | Path]
"""The folder or word that a drafter was loaded from; of several drafters, by the engine's name for each."""


def fit_drafts(
    engine: Engine, loaded_from: Names | None = None, console: Console | None = None, says_kept: bool = True,
    anew: bool = False,
) -> Engine:
    """Return an engine of the same parts that makes the drafts that pay on this machine, and say which these are.

    The cost and benefit of drafts are measured in a few seconds by decoding the embedded training texts. While the
    engine decodes, each text's own acceptance corrects them. If the engine has several drafters, each text gets the one
    that brings it most. An engine without a drafter is returned as it is, and so is a compiled one, because every plan
    would have to be compiled.

    Args:
        loaded_from: the measurement is kept under this name, for this machine, these versions, this target and this
            drafter.
        console: where the result is reported; nowhere by default.
        says_kept: report a result, too, that was kept from an earlier time.
        anew: measure again, whatever is kept.
    """
    made = fitted_engines(engine, (engine.max_batch,), loaded_from, console, says_kept, anew)
    return made.get(engine.max_batch, engine)


def fitted_engines(
    engine: Engine, batches: Sequence[int], loaded_from: Names | None = None, console: Console | None = None,
    says_kept: bool = True, anew: bool = False,
) -> dict[int, Engine]:
    """Do as `fit_drafts`, with one engine per number of rows; empty where `fit_drafts` would change nothing.

    A drafter with a model's memory has to read every text, drafting or not, so it is used only where that pays with
    that many rows.
    """
    console = console or silent()
    drafting = {name: one for name, one in engine.core.drafters.items() if one.default_plan().depth}
    if not drafting or not engine.plan.depth or engine.compiled != "off":
        return {}
    names = loaded_from if isinstance(loaded_from, Mapping) else dict.fromkeys(drafting, loaded_from)
    loaded = {name: None if names.get(name) is None else str(names[name]) for name in drafting}
    found = {
        name: fit(engine.target, one, loaded[name], console, max(batches), anew) for name, one in drafting.items()
    }
    made: dict[int, Engine] = {}
    said: set[str] = set()
    for rows in batches:
        known = [
            Known(found[name].profile, name, MEMORY_HOPE, rows)
            if any(part.reads_prompt and not part.follows_cheaply for part in workers([one]))
            else Known(found[name].profile, name, READY_HOPE)
            for name, one in drafting.items()
        ]
        for own in known:
            sentence = in_words(found[str(own.name)], Fitted(own), rows)
            sentence = f"{own.name}: {sentence}" if len(known) > 1 else sentence
            is_new = found[str(own.name)].seconds > 0
            if sentence not in said and (is_new or says_kept):
                said.add(sentence)
                console.print(f"[dim]{sentence}[/dim]", highlight=False)
        policy = Fitted(*known, learns_times=True)
        made[rows] = engine.under(policy, rows)
        made[rows].plan = NO_DRAFT if policy.is_fixed else policy.typical.plan
    return made


def in_words(found: Fit, policy: Fitted, rows: int = 1) -> str:
    """Return a line that says which drafts are made, and why; at most `rows` rows are decoded together."""
    said = _drafts_in_words(found, policy, rows)
    if found.quiet:
        return said
    return (
        f"{said} But other programs disturbed the measurement; it is made again at a start in "
        f"{DISTURBED_FOR_S / 60:.0f} minutes or later, or now with --remeasure."
    )


def _drafts_in_words(found: Fit, policy: Fitted, rows: int) -> str:
    profile, arm = found.profile, policy.typical
    when = f"measured in {found.seconds:.1f} s" if found.seconds else "measured before"
    if policy.is_fixed:
        tried = max(profile.arms[1:], key=lambda one: profile.gain(one, rows), default=None)
        beside = f" for {rows} texts at a time" if rows > 1 else ""
        if tried is not None:
            # A drafter that has to read every text, drafting or not, must gain more than a little.
            beside = f" clearly{beside}" if profile.gain(tried, rows) > 1 else beside
            beside += f": the best, {shape_in_words(tried.plan)}, would be {profile.gain(tried, rows):.2f}×"
        return f"No drafts, because on this machine none of this drafter's pays{beside} ({when}; --plan own drafts)."
    if arm is profile.arms[0]:
        return f"Drafts only where guesses stay more often than usual, since otherwise none pays here ({when})."
    gain = f"about {profile.gain(arm, 1):.2f}×" if found.quiet else f"perhaps {profile.gain(arm, 1):.1f}×"
    return (
        f"Drafts for this machine: {shape_in_words(arm.plan)}, {gain} plain decoding for "
        f"one text ({when}; less where guesses fail; --plan own takes the drafter's own)."
    )


def shape_in_words(plan: Plan) -> str:
    """Return "a chain of 3", "a tree of 8" or "none"."""
    return f"a {reasons.shape_in_words(plan)}" if plan.depth else "none"


def place(target: Target, drafter: Drafter, name: str) -> Path:
    """Return the path at which the profile of a target and a drafter on this machine is kept."""
    what = {
        "format": FORMAT, "machine": machine() | {"memory_gib": None}, "threads": torch.get_num_threads(),
        "versions": {**versions(), "python": None}, "device": str(target.device),
        "read_by": target.backend.description, "dtype": str(target.dtype), "name": target.name,
        "target": target.weights_hash,
        "config": target.config.to_json_string(), "drafter": name, "kind": type(drafter).__name__,
        "parameters": drafter.parameter_count(), "default": repr(drafter.default_plan()), "stamp": stamp(name),
    }
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:24]
    return cache_folder("fits") / f"{key}.json"


def stamp(name: str) -> list[float]:
    """Return sizes and times of the weight files in a folder, or in the folders that a word names in its options."""
    folders = folders_in(name)
    files = [path.stat() for folder in folders for path in sorted(folder.glob("*.safetensors"))]
    return [value for file in files for value in (file.st_size, file.st_mtime)]


def folders_in(name: str) -> list[Path]:
    """Return the folder of this name, or the folders that a word names in its options."""
    if Path(name).is_dir():
        return [Path(name)]
    given = read_spec(name)[1].values() if ":" in name else ()
    words = [word for value in given for word in (value if isinstance(value, list) else [value])]
    return [folder for word in words if isinstance(word, str) for folder in folders_in(word)]


def read(path: Path) -> Fit | None:
    """Return the kept profile; None if there is none, or none that can still be used."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        found = Fit(Profile.from_json(value), 0.0, bool(value["quiet"]))
        age = time.time() - path.stat().st_mtime
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if found.quiet or age < DISTURBED_FOR_S else None


def keep(path: Path, value: dict[str, Any]) -> None:
    """Write a profile; if that fails, the only cost is another measurement next time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(value, indent=1))
    except OSError:
        return
