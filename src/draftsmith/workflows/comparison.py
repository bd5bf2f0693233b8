"""Which draft family pays, for which task, on this machine: `draftsmith compare`, from Python."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from rich.console import Console

from draftsmith.drafters.trainable import storage
from draftsmith.evaluation.comparison.measurement_log import MeasurementLog
from draftsmith.evaluation.comparison.methods import measure_methods
from draftsmith.evaluation.comparison.orderings import orderings, summary
from draftsmith.evaluation.comparison.plots import figures
from draftsmith.evaluation.comparison.questions import Settings, gather
from draftsmith.evaluation.comparison.tables import to_markdown, too_short, verdict
from draftsmith.evaluation.prompts import Prompt
from draftsmith.evaluation.reporting.result_files import ensure_folder, write_report
from draftsmith.provenance import provenance
from draftsmith.targets import Target
from draftsmith.types import DraftsmithError
from draftsmith.workflows.comparison_terms import differences
from draftsmith.workflows.comparison_texts import comparison_texts
from draftsmith.workflows.entries import Budget, entries_beside
from draftsmith.workflows.fitting import stamp
from draftsmith.workflows.methods import prepare_methods
from draftsmith.workflows.models import Loading, load_target, quiet
from draftsmith.workflows.partition import MEASURED, TUNING
from draftsmith.workflows.search import Judge

# Version of the kept measurements; a comparison in another format is not resumed.
FORMAT = 4


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Guessed(_Record):
    """How well a method guesses with one shape of draft; the interval is over prompts."""

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


class Trial(_Record):
    """A short training of the search, and the τ by which it was judged; None if its loss was not finite."""

    rate: float
    options: dict[str, Any]
    tokens_per_step: float | None
    tokens_per_step_ci: list[float] | None
    steps: int
    seconds: float


class Search(_Record):
    """All trials of a method, and their cost, which comes on top of its training."""

    trials: list[Trial]
    seconds: float
    positions: int


class MethodFacts(_Record):
    """A method's size and training cost; `rate` and `start` are those that the search chose.

    `scored_tokens` is how many tokens it scores if it was trained here. `rate_at_edge` says that the chosen rate is the
    smallest or largest that was tried.
    """

    name: str
    summary: str
    trained: bool
    parameters: int
    memory_bytes: int
    scored_tokens: int | None = None
    training_s: float | None = None
    training_positions: int | None = None
    training_steps: int | None = None
    rate: float | None = None
    suggested_rate: float | None = None
    start: dict[str, Any] | None = None
    rate_at_edge: bool | None = None
    search: Search | None = None


class Ordering(_Record):
    """A difference in τ between two methods on the same prompts, where the literature says which is better."""

    kind: str
    better: str
    worse: str
    task: str
    temperature: float
    difference: float
    difference_ci: list[float]
    prompts: int


class TextsOfPart(_Record):
    """The texts of one task in one part: trained, tuned or measured on."""

    part: str
    task: str
    texts: int
    sources: list[str]
    without_source: int


class TextsApart(_Record):
    """What separates the parts, what was left out because of it, and what the parts still share.

    `prompts` names the source of the measured prompts if they are not a part of the `data`.
    """

    told_apart_by: str
    data: str
    prompts: str | None
    only_the_first_characters: int | None
    parts: list[TextsOfPart]
    left_out: dict[str, int]
    shared_sources: list[str]
    shared_texts: int
    shared_windows: int
    common_windows: int


class Measured(_Record):
    """How many prompts a task was measured on, and from how many texts and known sources they come."""

    task: str
    prompts: int
    texts: int
    sources: int


class CompareResult(_Record):
    """Everything a comparison measured; `begun` describes the command that measured first."""

    provenance: Mapping[str, Any]
    begun: Mapping[str, Any]
    target: str
    budget: str
    prompts: list[int]
    rounds: int
    tasks: list[str]
    texts: TextsApart
    measured: list[Measured]
    search_share: float
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
        """Sentences that say which method to use for which task."""
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

    An interrupted comparison continues where it stopped when it is called again with the same folder.

    Args:
        target: a folder, a hub name or a `Target`; the embedded one by default.
        families: names, with or without options, such as "mlp" or "mlp:n_predict=7"; all families if neither these nor
            `drafters` are given.
        drafters: folders of trained drafters, by the names to show for them.
        budget: what every family may learn from, and the folder of runs and report.
        settings: how much to measure.
        prompts: held-out prompts, a file or texts with their tasks; by default a part of the data, or of the embedded
            texts, whose sources are not used for training or tuning.
        loading: how a target given by name is loaded.
        console: where training is shown; nowhere by default.
        on_progress: receives what is being measured.

    Raises:
        DraftsmithError: an unknown family or task, too little text to set some of it aside, or a folder that holds a
            comparison with other settings.
    """
    budget, settings = budget or Budget(Path("comparison")), settings or Settings()
    loading, console, given = loading or Loading(), console or quiet(), dict(drafters or {})
    entries = entries_beside(given, list(families))
    digests = {name: fingerprint(Path(folder)) for name, folder in given.items()}
    texts = comparison_texts(budget.data, prompts)
    loaded = load_target(target, loading, console)
    tuning, measured = (texts.prompts(part, loaded, settings.new_tokens) for part in (TUNING, MEASURED))
    questions = gather(loaded, measured, tuning, settings)
    ensure_folder(budget.folder)
    measurement_log = MeasurementLog(budget.folder / "measurements.jsonl")
    terms = {
        "format": FORMAT, "target": [loaded.name, loaded.weights_hash], "dtype": str(loaded.dtype),
        "texts": texts.digest(),
        "positions": budget.positions, "minutes": budget.minutes, "written": [budget.texts, budget.text_tokens],
        "search_share": budget.search_share, "scored": budget.scored, "seed": budget.seed,
        "prompts": [settings.prompts, settings.sampled_prompts, settings.prompt_tokens, settings.new_tokens],
        "device": str(loaded.device), "implementation": loaded.backend.description, "given": digests,
    }
    kept = measurement_log.once("terms", lambda: terms)
    if kept.get("format") != FORMAT:
        raise DraftsmithError(
            f"{budget.folder} holds a comparison of another version of Draftsmith, which measured otherwise; choose "
            "another --out, or delete it."
        )
    if kept != terms:
        raise DraftsmithError(
            f"{budget.folder} holds a comparison on other terms: {differences(kept, terms)}; give the same, choose "
            "another --out, or delete it."
        )
    about = provenance(target=loaded.name, dtype=str(loaded.dtype))
    begun = measurement_log.once("begun", lambda: about)
    ensure_folder(budget.parts)
    texts.write(budget.parts)
    judge = Judge.of(loaded, tuning, settings)
    methods, weighed = prepare_methods(loaded, entries, given, budget, tuning, judge, measurement_log, console)
    cells = measure_methods(loaded, methods, questions, settings, measurement_log, on_progress)
    tasks = list(questions)
    ordered = orderings(cells, tasks, weighed)
    values = {
        "provenance": about,
        # An interrupted comparison, or one that is only reported again, was measured by an earlier command.
        "begun": begun,
        "target": loaded.name,
        "budget": budget.sentence(),
        "prompts": [settings.prompts, settings.sampled_prompts],
        "rounds": settings.rounds,
        "tasks": tasks,
        "texts": texts.account(),
        "measured": [
            {"task": task, "prompts": len(asked.measured), "texts": asked.texts, "sources": asked.sources}
            for task, asked in questions.items()
        ],
        "search_share": budget.search_share,
        "families": weighed,
        "cells": cells,
        "orderings": ordered,
        "verdict": too_short(weighed) + verdict(cells, tasks) + summary(ordered),
    }
    result = CompareResult.model_validate(values)
    found = result.as_json()
    return Comparison(result, write_report(budget.folder, to_markdown(found), found, figures(found["cells"], tasks)))


def fingerprint(folder: Path) -> str:
    """Return a digest of a drafter's folder, by which a comparison recognises the same drafter."""
    storage.require_folder(folder)
    folder = storage.standing(folder)
    sealed = folder / storage.MANIFEST
    if sealed.exists():
        return storage.sha256(sealed)
    # A folder of another program has no digest of its weights, and to read them all would take long.
    known = [storage.sha256(folder / "config.json"), stamp(str(folder))]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()
