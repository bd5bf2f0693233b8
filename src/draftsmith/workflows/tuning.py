"""Finds the layers of a target to leave out, so that the rest drafts for it: `draftsmith tune-layers`, from Python."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from rich.console import Console

from draftsmith.drafters.models.layer_search import Candidate, LayerSearch, Replay, Text
from draftsmith.drafters.models.place import check_place
from draftsmith.engine import Engine
from draftsmith.evaluation.measuring.measure import measure
from draftsmith.evaluation.prompts import Prompt, cut, distinct, embedded_prompts
from draftsmith.plan import NO_DRAFT
from draftsmith.provenance import provenance
from draftsmith.targets import Target
from draftsmith.types import DraftsmithError, SamplingParams, require_finished
from draftsmith.workflows.models import Loading, dtype_name, load_target, quiet
from draftsmith.workflows.sources import EMBEDDED, gather_prompts, name_of_source

ROWS = 8
HELD_OUT_EVERY = 4


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TunedLayers(_Record):
    """A choice of layers: what is left out, and what that brings; costs are per token, in plain steps.

    `tau` and `cost` refer to the tuning texts. `measured_tau` is τ of decoding on held-out prompts, with
    `measured_cost`; both are None if nothing was measured.
    """

    skip_attention: list[int]
    skip_mlp: list[int]
    guesses: int
    share: float
    tau: float
    cost: float
    measured_tau: float | None = None
    measured_cost: float | None = None


@dataclass(frozen=True)
class TuneResult:
    """What was found: `drafter` is the folder to decode with; None if nothing gains, so that nothing was saved.

    Args:
        best: the cheapest of all choices.
        first_layers: the cheapest of the choices that only read the first layers.
        evaluations: every choice that was examined, in order.
        complete: whether the search ended by itself or by its limits, and not by Ctrl-C.
        sources: what was tuned on, and what was measured on.
    """

    provenance: Mapping[str, Any]
    drafter: Path | None
    best: TunedLayers
    first_layers: TunedLayers | None
    evaluations: list[TunedLayers]
    complete: bool
    sources: tuple[str, str]

    def as_json(self) -> dict[str, Any]:
        """Return what `draftsmith tune-layers --json` writes."""
        first = self.first_layers
        return {
            "provenance": dict(self.provenance), "complete": self.complete,
            "tuned_on": self.sources[0], "measured_on": self.sources[1], "best": self.best.model_dump(),
            "first_layers": None if first is None else first.model_dump(),
            "evaluations": [
                found.model_dump(exclude={"measured_tau", "measured_cost"}) for found in self.evaluations
            ],
        }


def tune_layers(
    target: Target | str | Path | None = None,
    out: str | Path = "runs/layers",
    *,
    prompts: Path | str | Sequence[str | Prompt] | None = None,
    task: str | None = None,
    guesses: int = 6,
    whole: bool | None = None,
    evaluations: int = 200,
    minutes: float | None = None,
    prompt_count: int = 16,
    prompt_tokens: int = 64,
    new_tokens: int = 64,
    overhead: float = 0.0,
    seed: int = 0,
    loading: Loading | None = None,
    console: Console | None = None,
    on_progress: Callable[[int, Candidate], None] = lambda done, best: None,
) -> TuneResult:
    """Search for the attentions and feed-forwards that a target drafts best without, and write such a drafter.

    Args:
        target: a folder, a hub name or a `Target`; the embedded one by default.
        out: folder of the drafter.
        prompts: a file, or texts, a quarter of which is held out; by default the embedded training texts are tuned on,
            and the embedded held-out ones measured on.
        task: use only the prompts of this task.
        guesses: the longest chain that is tried.
        whole: leave out whole layers only. None does so if the native code can only skip whole layers.
        evaluations: the most choices to examine.
        minutes: the longest time to search.
        prompt_count: number of texts to tune on.
        prompt_tokens: their greatest length.
        new_tokens: tokens that the target writes after each of them.
        overhead: cost of a step besides target and drafted passes, in plain steps.
        seed: of the search.
        loading: how a model given by name is loaded.
        console: where loading is reported; nowhere by default.
        on_progress: receives the number of choices examined, and the best so far.

    Raises:
        DraftsmithError: impossible numbers, a folder that holds something else, or layers that have no such parts.
    """
    counts = {"guesses": guesses, "evaluations": evaluations, "prompts": prompt_count, "prompt_tokens": prompt_tokens}
    for name, value in counts.items():
        if value < 1:
            raise DraftsmithError(f"{name} is {value}; give a positive number.")
    if minutes is not None and not minutes > 0:
        raise DraftsmithError(f"minutes is {minutes:g}; give a positive number.")
    if not 0 <= overhead < math.inf:
        raise DraftsmithError(f"overhead is {overhead:g}; give 0 or more plain steps.")
    if new_tokens <= guesses + 1:
        raise DraftsmithError(f"{new_tokens} new tokens hold no step of {guesses} guesses; give more tokens.")
    folder, shown = Path(out).expanduser(), console or quiet()
    check_place(folder)
    loaded = load_target(target, loading or Loading(), shown)
    tuning, held_out, sources = settle_prompts(loaded, prompts, task, prompt_tokens, prompt_count, new_tokens)
    whole = not loaded.backend.takes_parts if whole is None else whole
    search = LayerSearch(Replay(loaded, write(loaded, tuning, new_tokens), guesses), whole, overhead, seed)
    end = None if minutes is None else time.monotonic() + 60 * minutes
    complete = True
    try:
        for done, _ in enumerate(islice(search.candidates(), evaluations), 1):
            on_progress(done, search.best)
            if end is not None and time.monotonic() > end:
                break
    except KeyboardInterrupt:
        if not search.seen:
            raise
        complete = False
    first = search.best_of_first_layers
    best = settled(search.best, loaded, held_out, new_tokens, overhead)
    prefix = None if first is None else settled(first, loaded, held_out, new_tokens, overhead)
    where = provenance(
        target=loaded.name, dtype=dtype_name(loaded), device=str(loaded.device), seed=seed, whole_layers=whole,
        overhead=overhead, prompts=len(tuning), new_tokens=new_tokens, read_by=loaded.backend.description,
    )
    drafter = None
    if best.cost < 1:
        numbers = best.model_dump(include={"share", "tau", "cost", "measured_tau", "measured_cost"})
        search.best.save(folder, loaded, {"tuned": {**numbers, "on": sources[0], "date": where["date"]}})
        drafter = folder
    looked_at = [described(candidate) for candidate in search.seen.values()]
    return TuneResult(where, drafter, best, prefix, looked_at, complete, sources)


def settle_prompts(
    target: Target, source: Path | str | Sequence[str | Prompt] | None, task: str | None, tokens: int, count: int,
    new_tokens: int,
) -> tuple[list[list[int]], list[list[int]], tuple[str, str]]:
    """Return the prompts to tune on, others to measure on, and a description of both."""
    room = target.max_length - new_tokens
    if room < 1:
        raise DraftsmithError(f"{new_tokens} new tokens do not fit the context of {target.max_length}; give fewer.")

    def windows(prompts: Sequence[Prompt], wanted: int) -> list[list[int]]:
        found = cut(target, spread(prompts, wanted), min(tokens, room), wanted, exact=False)
        fitting = [window for window in distinct(found) if len(window) <= room]
        if not fitting:
            raise DraftsmithError(f"no prompt leaves room for {new_tokens} new tokens; give shorter ones.")
        return fitting

    if source is None:
        tuning, held_out = windows(embedded_prompts(task, "train"), count), windows(embedded_prompts(task), count)
        return tuning, held_out, ("embedded training texts", EMBEDDED)
    every = windows(gather_prompts(source, task), count + -(-count // (HELD_OUT_EVERY - 1)))
    name, held_out = name_of_source(source), every[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    if not held_out:
        return every, every, (name, f"the same prompts of {name}, too few to hold any out")
    tuning = [window for number, window in enumerate(every, 1) if number % HELD_OUT_EVERY]
    return tuning, held_out, (name, f"held-out prompts of {name}")


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Return `count` prompts, or all, spread evenly over the whole list."""
    taken = min(count, len(prompts))
    return [prompts[number * len(prompts) // taken] for number in range(taken)]


def write(target: Target, prompts: Sequence[list[int]], new_tokens: int) -> list[Text]:
    """Let the target write greedily after every prompt, up to its end token."""
    engine = Engine(target, max_batch=len(prompts), max_length=max(map(len, prompts)) + new_tokens)
    done = require_finished(engine.generate(prompts, SamplingParams(max_tokens=new_tokens), plan=NO_DRAFT))
    return [(len(prompt), [*prompt, *text.tokens]) for prompt, text in zip(prompts, done, strict=True)]


def settled(
    candidate: Candidate, target: Target, prompts: Sequence[list[int]], new_tokens: int, overhead: float
) -> TunedLayers:
    """Measure a candidate by decoding."""
    longest = max(map(len, prompts)) + new_tokens
    engine = Engine(target, candidate.drafter(target), max_batch=ROWS, max_length=longest)
    tau = measure(engine, prompts, SamplingParams(max_tokens=new_tokens)).tokens_per_step
    cost = (candidate.guesses * candidate.share + 1 + overhead) / tau
    return described(candidate).model_copy(update={"measured_tau": tau, "measured_cost": cost})


def described(candidate: Candidate) -> TunedLayers:
    """Return a candidate as results show it."""
    return TunedLayers(
        skip_attention=sorted(candidate.skipped.attention), skip_mlp=sorted(candidate.skipped.mlp),
        guesses=candidate.guesses, share=candidate.share, tau=candidate.tau, cost=candidate.cost,
    )
