"""The report's tables of latency, batch × candidates × prompt length: `draftsmith bench`, from Python."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from rich.console import Console

from draftsmith import assets
from draftsmith.drafters.base import Drafter
from draftsmith.engine import Engine
from draftsmith.evaluation.bench import Peer, prepare_grid, run_grid
from draftsmith.evaluation.grid import Grid, check_peer
from draftsmith.evaluation.prompts import Prompt, check_room, cut
from draftsmith.provenance import provenance
from draftsmith.targets import Target
from draftsmith.types import DraftsmithError
from draftsmith.workflows.drafts import check_drafter
from draftsmith.workflows.fitting import fitted_engines
from draftsmith.workflows.models import (
    CompileChoice,
    Loading,
    dtype_name,
    load_engine,
    name_of,
    quiet,
    settle_compilation,
)
from draftsmith.workflows.sources import gather_prompts, name_of_source


class BenchCell(BaseModel):
    """One measured setting of the grid. For a peer, the fields that only drafts have are None or empty.

    Times are wall-clock times of whole calls; intervals are [low, high] at 95 %. `candidates` is None for a peer, and
    where the engine drafted what pays on this machine (`fitted`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    batch: int
    prompt_tokens: int
    new_tokens: int
    candidates: int | None
    engine: str
    fitted: bool = False
    trials: int
    generated_tokens: int
    ms_per_token: float
    ms_per_token_ci: list[float]
    ms_per_token_trials: list[float]
    speedup: float
    speedup_ci: list[float]
    identical_texts: int
    texts: int
    lossless: bool = True
    drafted: int | None = None
    tokens_per_step: float | None = None
    accepted_by_depth: list[float] = []
    step_ms: float | None = None
    share: dict[str, float] = {}
    prefill_ms: float | None = None
    decode_ms_per_token: float | None = None
    branching: list[int] = []
    nodes: int = 0
    sampled: bool = False
    acceptance: str = "exact"
    choices: list[list[int]] = []
    realised: float | None = None
    temperature: float = 0.0


@dataclass(frozen=True)
class BenchResult:
    """The cells measured so far, in the order of the grid; `complete` says whether these are all of them."""

    provenance: Mapping[str, Any]
    cells: list[BenchCell]
    complete: bool = True

    def as_json(self) -> dict[str, Any]:
        """Return what `draftsmith bench --json` writes."""
        cells = [cell.model_dump(exclude_unset=True) for cell in self.cells]
        return {"provenance": dict(self.provenance), "complete": self.complete, "cells": cells}


def bench(
    target: Target | str | Path | None = None,
    drafter: Drafter | str | Path | None = None,
    grid: Grid | None = None,
    *,
    prompts: Path | str | Sequence[str | Prompt] | None = None,
    task: str | None = None,
    peer: str | None = None,
    compile: CompileChoice = "auto",
    loading: Loading | None = None,
    console: Console | None = None,
    on_progress: Callable[[str, int, int], None] | None = None,
    on_cells: Callable[[BenchResult], None] | None = None,
    remeasure: bool = False,
) -> BenchResult:
    """Measure ms per token for each batch size and number of candidates; runs with and without drafts alternate.

    Args:
        target: a folder, a hub name or a `Target`; the embedded one by default.
        drafter: a folder, a hub name or a `Drafter`; by default the embedded target's own.
        grid: what to measure.
        prompts: a file or folder, as training data are, or texts; the embedded held-out ones by default.
        task: use only the prompts of this task.
        peer: also time `transformers` at batch 1, in the same rounds.
        compile: how much of the step PyTorch compiles.
        loading: how models given by name are loaded.
        console: where loading and compiling are reported; nowhere by default.
        on_progress: receives a label, the number of runs that are done, and the total number of runs.
        on_cells: receives the result so far whenever some cells are done, so that an interrupted run keeps them.
        remeasure: measure anew which drafts pay on this machine, whatever an earlier run has kept.

    Raises:
        DraftsmithError: settings that contradict each other, or prompts that do not fit the context.
    """
    grid, loading, console = grid or Grid(), loading or Loading(), console or quiet()
    check_peer(peer, grid.temperature)
    texts = gather_prompts(prompts, task)
    drafting = grid.drafts
    longest = max(grid.prompt_tokens) + grid.new_tokens
    engine = load_engine(
        console, target=target, drafter=drafter, dtype=loading.dtype, device=loading.device,
        trust_remote_code=loading.trust_remote_code, native=loading.native, quantize=loading.quantize,
        max_batch=max(grid.batches), max_length=longest, draft=drafting,
        share_prefixes=False,  # every trial reads its prompt
    )
    check_room(engine.target.max_length, max(grid.prompt_tokens), grid.new_tokens)
    for length in grid.prompt_tokens:
        cut(engine.target, texts, length, 1)  # refuses a length that no prompt has, before anything is measured
    if drafting:
        check_drafter(engine.drafter, grid.rules)
    own = engine.plan
    plans = grid.plans(own)  # refuses impossible plans before anything is measured
    for plan in plans.values():
        engine.core.check_plan(plan)
    other = load_peer(target, engine, loading.trust_remote_code) if peer is not None else None
    tokens = grid.rounds * len(plans) * grid.new_tokens * sum(grid.batches) // len(grid.batches)
    engine = settle_compilation(
        console, engine, compile, tokens, lambda compiled: prepare_grid(compiled, own, grid)
    )
    best: dict[int, Engine] | None = None
    if grid.is_open:
        origin = assets.demo_drafter() if drafter is None else drafter
        name = origin if isinstance(origin, str | Path) else None
        best = fitted_engines(engine, grid.batches, name, console, anew=remeasure) or None
    where = provenance(
        target=engine.target.name, drafter=name_of(drafter, assets.DRAFTER_NAME if drafting else None),
        dtype=dtype_name(engine.target), device=str(engine.target.device), compiled=engine.compiled,
        temperature=grid.temperature, task=task, data=name_of_source(prompts),
    )

    planned = sum(
        len(plans) + (best is not None) + (other is not None and batch == 1)
        for batch in grid.batches for _ in grid.prompt_tokens
    )

    def result(cells: Sequence[Mapping[str, Any]]) -> BenchResult:
        whole = len(cells) == planned and all(cell["trials"] == grid.trials for cell in cells)
        return BenchResult(where, [BenchCell.model_validate(cell) for cell in cells], whole)

    def tell(cells: Sequence[Mapping[str, Any]]) -> None:
        if on_cells is not None:
            on_cells(result(cells))

    return result(run_grid(engine, own, texts, grid, other, on_progress, tell, best))


def load_peer(target: Target | str | Path | None, engine: Engine, trust_remote_code: bool) -> Peer:
    """Load transformers' own decoding of the same target."""
    from draftsmith.evaluation.measuring.peers import transformers_peer

    if isinstance(target, Target):
        raise DraftsmithError("a peer reads the target from its folder; give that instead of a Target.")
    return transformers_peer(target or assets.demo_target(), engine.target, trust_remote_code)
