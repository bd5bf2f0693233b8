"""Which draft family pays, for which task, on this machine: `draftsmith compare`, from Python."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from rich.console import Console

from draftsmith.drafters.trainable import storage
from draftsmith.evaluation.comparison.measurement_log import MeasurementLog
from draftsmith.evaluation.comparison.methods import Settings, gather, measure_methods
from draftsmith.evaluation.comparison.orderings import orderings, summary
from draftsmith.evaluation.comparison.plots import figures
from draftsmith.evaluation.comparison.tables import to_markdown, verdict
from draftsmith.evaluation.prompts import Prompt
from draftsmith.evaluation.reporting.result_files import ensure_folder, write_report
from draftsmith.provenance import provenance
from draftsmith.targets import Target
from draftsmith.types import DraftsmithError
from draftsmith.workflows.methods import Budget, prepare_methods, read_entries
from draftsmith.workflows.models import Loading, load_target, quiet
from draftsmith.workflows.sources import gather_prompts

# Of the measurements that a comparison keeps; those of another format are not gone on with.
FORMAT = 2


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Guessed(_Record):
    """How well a method guesses with one shape of draft; interval over prompts."""

    tokens_per_step: float
    tokens_per_step_ci: list[float]
    tokens_by_prompt: list[int]
    steps_by_prompt: list[int]
    accepted_by_depth: list[float]
    drafted_per_step: float


class CompareCell(_Record):
    """One method on one task, greedily or at temperature 1; `plan` is the shape that was fastest."""

    method: str
    task: str
    mode: str
    temperature: float
    plan: str
    sampled: bool
    chain: Guessed
    tree: Guessed
    sampled_chain: Guessed | None = None
    ms_per_token: float
    ms_per_token_ci: list[float]
    speedup: float
    speedup_ci: list[float]
    tokens_per_step_timed: float
    share_drafting: float
    step_cost: float
    identical: int
    rounds: int
    seconds_by_round: list[float]


class MethodFacts(_Record):
    """What a method weighs, and what training it took."""

    name: str
    summary: str
    trained: bool
    parameters: int
    memory_bytes: int
    training_s: float | None = None
    training_positions: int | None = None
    training_steps: int | None = None


class Ordering(_Record):
    """A difference in τ between two methods on the same prompts, where the literature says how it falls."""

    kind: str
    better: str
    worse: str
    task: str
    temperature: float
    difference: float
    difference_ci: list[float]
    prompts: int


class CompareResult(_Record):
    """Everything a comparison measured; `begun` says what command measured first."""

    provenance: Mapping[str, Any]
    begun: Mapping[str, Any]
    target: str
    budget: str
    prompts: list[int]
    rounds: int
    tasks: list[str]
    families: list[MethodFacts]
    cells: list[CompareCell]
    orderings: list[Ordering]
    verdict: list[str]

    def as_json(self) -> dict[str, Any]:
        """Return what `draftsmith compare --json` writes."""
        return self.model_dump(exclude_unset=True)


@dataclass(frozen=True)
class Comparison:
    """The result, and the path of the report."""

    result: CompareResult
    report: Path

    @property
    def verdict(self) -> list[str]:
        """Which method to use for which task, in sentences."""
        return self.result.verdict

    def as_json(self) -> dict[str, Any]:
        """Return what `draftsmith compare --json` writes."""
        return self.result.as_json()


def compare(
    target: Target | str | Path | None = None,
    families: Sequence[str] = (),
    drafters: Mapping[str, str | Path] | None = None,
    *,
    budget: Budget | None = None,
    settings: Settings | None = None,
    prompts: Path | str | Sequence[str | Prompt] | None = None,
    loading: Loading | None = None,
    console: Console | None = None,
    on_progress: Callable[[str], None] = lambda label: None,
) -> Comparison:
    """Train draft families on one budget, decode with each, and say which to use for which task.

    A comparison that was cut goes on where it was when it is called again with the same folder.

    Args:
        target: a folder, a hub name or a `Target`; the embedded one by default.
        families: with options or without: "mlp", "mlp:n_predict=7"; all of them where neither these nor `drafters`
            are given.
        drafters: folders of drafters that are trained already, by the name to call them.
        budget: what every family may learn from, and the folder of runs and report.
        settings: how much to measure.
        prompts: held-out prompts, a file or texts with their tasks; the embedded ones by default.
        loading: how a target given by name is loaded.
        console: where training is shown; nowhere by default.
        on_progress: gets what is being measured.

    Raises:
        DraftsmithError: an unknown family or task, or a folder that holds a comparison on other terms.
    """
    budget, settings = budget or Budget(Path("comparison")), settings or Settings()
    loading, console, given = loading or Loading(), console or quiet(), dict(drafters or {})
    entries = [] if given and not families else read_entries(list(families))
    digests = {name: fingerprint(Path(folder)) for name, folder in given.items()}
    texts = gather_prompts(prompts)
    loaded = load_target(target, loading, console)
    questions = gather(loaded, texts, settings)
    ensure_folder(budget.folder)
    measurement_log = MeasurementLog(budget.folder / "measurements.jsonl")
    terms = {
        "format": FORMAT, "target": loaded.name, "dtype": str(loaded.dtype), "data": budget.data and str(budget.data),
        "positions": budget.positions, "minutes": budget.minutes, "texts": [budget.texts, budget.text_tokens],
        "seed": budget.seed,
        "prompts": [settings.prompts, settings.sampled_prompts, settings.prompt_tokens, settings.new_tokens],
        "prompts_from": source_of(prompts),
        "device": str(loaded.device), "implementation": loaded.backend.description, "given": digests,
    }
    if measurement_log.once("terms", lambda: terms) != terms:
        raise DraftsmithError(
            f"{budget.folder} holds a comparison on other terms; choose another --out, or delete it."
        )
    about = provenance(target=loaded.name, dtype=str(loaded.dtype))
    begun = measurement_log.once("begun", lambda: about)
    methods, weighed = prepare_methods(loaded, entries, given, budget, measurement_log, console)
    cells = measure_methods(loaded, methods, questions, settings, measurement_log, on_progress)
    tasks = list(questions)
    ordered = orderings(cells, tasks, weighed)
    values = {
        "provenance": about,
        # A comparison that was cut, or only reported again, was measured by an earlier command.
        "begun": begun,
        "target": loaded.name,
        "budget": budget.sentence(),
        "prompts": [settings.prompts, settings.sampled_prompts],
        "rounds": settings.rounds,
        "tasks": tasks,
        "families": weighed,
        "cells": cells,
        "orderings": ordered,
        "verdict": verdict(cells, tasks) + summary(ordered),
    }
    result = CompareResult.model_validate(values)
    found = result.as_json()
    return Comparison(result, write_report(budget.folder, to_markdown(found), found, figures(found["cells"], tasks)))


def source_of(prompts: Path | str | Sequence[str | Prompt] | None) -> str | None:
    """Return what tells two sources of prompts apart: a path, or a digest of texts that were handed over."""
    if prompts is None or isinstance(prompts, str | Path):
        return None if prompts is None else str(prompts)
    texts = [item if isinstance(item, str) else f"{item.task}\n{item.text}" for item in prompts]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def fingerprint(folder: Path) -> str:
    """Return a digest of a drafter's folder, by which a comparison knows that it is the same drafter."""
    storage.require_folder(folder)
    sealed = folder / storage.MANIFEST
    return storage.sha256(sealed if sealed.exists() else folder / "config.json")
