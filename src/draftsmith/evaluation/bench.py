"""The report's Tables 1 and 2: batch × candidates × prompt length, exactly N new tokens a trial.

"Accelerating Production LLMs with Combined Token/Embedding Speculators" (arXiv:2404.19124), section 4. In every round
each number of candidates, the baseline without speculation (0) and a peer, if asked for, runs once on the same prompts.
Their order is random, so that a drift of the machine's speed affects all of them alike. Latency is the wall-clock of
the whole call, prefill included, over N; the prefill is also reported by itself. The report decodes greedily; at a
temperature above 0 every setting samples with the same seeds. Shapes: B rows (batch), K candidates, T trials.
"""

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from draftsmith.engine import Engine
from draftsmith.evaluation.grid import BASELINE, Grid
from draftsmith.evaluation.measuring.interleaving import interleaved
from draftsmith.evaluation.measuring.intervals import mean_interval, ratio_interval
from draftsmith.evaluation.measuring.losslessness import first_divergence, is_targets_own
from draftsmith.evaluation.measuring.measure import Measurement, measure
from draftsmith.evaluation.prompts import Prompt, cut
from draftsmith.plan import Plan
from draftsmith.types import DraftsmithError, SamplingParams

PEER_NAME = "transformers"
FITTED = "fitted"
"""The setting in which a policy chooses the drafts that pay on this machine, as `draftsmith generate` does."""

Peer = Callable[[Sequence[Sequence[int]], int], tuple[list[list[int]], float]]
"""Decodes prompts greedily to exactly N new tokens each; returns the tokens and the seconds that took."""


@dataclass(frozen=True)
class TimedCall:
    """One timed call of one setting."""

    wall_s: float
    tokens: list[list[int]]
    measurement: Measurement | None


def run_grid(
    engine: Engine,
    default: Plan,
    prompts: Sequence[Prompt],
    grid: Grid,
    peer: Peer | None = None,
    on_progress: Callable[[str, int, int], None] | None = None,
    on_cells: Callable[[list[dict[str, Any]]], None] | None = None,
    fitted: Mapping[int, Engine] | None = None,
) -> list[dict[str, Any]]:
    """Measure every cell.

    Args:
        on_progress: gets a label, the number of runs that are done, and the number of all runs.
        on_cells: gets all cells so far, whenever a batch size and prompt length is done; after Ctrl-C once more, with
            the rounds that were complete.
        fitted: one more setting: for every batch size an engine of the same target that chooses the drafts that pay.
    """
    rng = random.Random(grid.seed)
    plans = grid.plans(default)
    cells: list[dict[str, Any]] = []
    done, every = count(1), run_count(grid, plans, fitted is not None, peer is not None)

    def report(label: str) -> None:
        if on_progress is not None:
            on_progress(label, next(done), every)

    for length in grid.prompt_tokens:
        for batch in grid.batches:
            settings: list[int | str] = list(plans)
            settings += [FITTED] * (fitted is not None) + [PEER_NAME] * (peer is not None and batch == 1)
            runs: dict[int | str, list[TimedCall]] = {setting: [] for setting in settings}
            shape = {"batch": batch, "prompt_tokens": length, "new_tokens": grid.new_tokens}

            def made(
                runs: dict[int | str, list[TimedCall]] = runs, shape: dict[str, int] = shape
            ) -> list[dict[str, Any]]:
                return [
                    cell_of(setting, runs, shape, plans, grid.seed) | {"temperature": grid.temperature}
                    for setting in runs
                ]

            try:
                best = None if fitted is None else fitted[batch]
                _run_rounds(engine, prompts, grid, plans, peer, best, runs, shape, rng, report)
            except KeyboardInterrupt:
                whole = min(map(len, runs.values()))
                if whole and on_cells is not None:
                    # Complete rounds, in which every setting ran, are kept as a smaller number of trials.
                    on_cells([*cells, *made({setting: several[:whole] for setting, several in runs.items()})])
                raise
            if grid.temperature == 0:
                _check_baseline(engine, runs[BASELINE])
            cells += made()
            if on_cells is not None:
                on_cells(cells)
    return cells


def _run_rounds(
    engine: Engine, prompts: Sequence[Prompt], grid: Grid, plans: dict[int, Plan], peer: Peer | None,
    fitted: Engine | None, runs: dict[int | str, list[TimedCall]], shape: dict[str, int], rng: random.Random,
    report: Callable[[str], None],
) -> None:
    """Fill `runs` round by round, every setting once a round in random order."""
    rounds, batch, length = grid.warmups + grid.trials, shape["batch"], shape["prompt_tokens"]
    pieces = cut(engine.target, prompts, length, batch * rounds)
    for index, setting, timed in interleaved(runs, grid.trials, rng, grid.warmups):
        chosen = pieces[index * batch : (index + 1) * batch]
        seed = grid.seed + index * batch
        if isinstance(setting, int):
            run = run_engine(engine, chosen, plans[setting], grid.new_tokens, grid.temperature, seed)
        elif setting == FITTED:
            assert fitted is not None
            run = run_engine(fitted, chosen, None, grid.new_tokens, grid.temperature, seed)
        else:
            assert peer is not None
            run = run_peer(peer, chosen, grid.new_tokens)
        if timed:
            runs[setting].append(run)
        report(f"prompt {length}, batch {batch}, round {index + 1} of {rounds}")


def run_count(grid: Grid, plans: Collection[int], fitted: bool, peer: bool) -> int:
    """Return how many calls a whole grid takes."""
    alone = sum(batch == 1 for batch in grid.batches) * grid.rounds // len(grid.batches)
    return grid.rounds * (len(plans) + fitted) + peer * alone


def prepare_grid(engine: Engine, default: Plan, grid: Grid) -> float:
    """Compile every shape the grid needs, also those of partly finished batches; return the seconds it took."""
    sizes, most = [1], max(grid.batches)
    while sizes[-1] < most:
        sizes.append(min(2 * sizes[-1], most))
    return sum(engine.prepare(size, plan) for plan in grid.plans(default).values() for size in sizes)


def run_engine(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    plan: Plan | None,
    new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> TimedCall:
    """Decode one batch, exactly `new_tokens` a row; at a temperature above 0, row i samples with the seed `seed` + i.

    Args:
        plan: None leaves the choice to the engine.
    """
    params = [
        SamplingParams(max_tokens=new_tokens, ignore_eos=True, temperature=temperature, seed=seed + row)
        for row in range(len(prompts))
    ]
    result = measure(engine, prompts, params, plan=plan)
    tokens = [completion.tokens for completion in result.completions]
    _check_counts(tokens, new_tokens, "the engine")
    return TimedCall(result.wall_s, tokens, result)


def run_peer(peer: Peer, prompts: Sequence[Sequence[int]], new_tokens: int) -> TimedCall:
    """Decode one batch with the peer."""
    tokens, seconds = peer(prompts, new_tokens)
    _check_counts(tokens, new_tokens, "the peer")
    return TimedCall(seconds, tokens, None)


def cell_of(
    setting: int | str, runs: dict[int | str, list[TimedCall]], shape: dict[str, int], plans: dict[int, Plan], seed: int
) -> dict[str, Any]:
    """Turn the trials of one setting into a cell of the table; ratios are paired with the baseline's rounds."""
    mine, baseline = runs[setting], runs[BASELINE]
    new_tokens = shape["new_tokens"]
    ms = [1000 * run.wall_s / new_tokens for run in mine]
    baseline_ms = [1000 * run.wall_s / new_tokens for run in baseline]
    latency, ratio = mean_interval(ms, seed=seed), ratio_interval(baseline_ms, ms, seed=seed)
    cell: dict[str, Any] = {
        **shape,
        "candidates": setting if isinstance(setting, int) else None,
        "engine": setting if setting == PEER_NAME else "draftsmith",
        "fitted": setting == FITTED,
        "trials": len(mine),
        "generated_tokens": sum(len(row) for run in mine for row in run.tokens),
        "ms_per_token": latency.value,
        "ms_per_token_ci": latency.ends,
        "ms_per_token_trials": ms,
        "speedup": ratio.value,
        "speedup_ci": ratio.ends,
        "identical_texts": sum(
            first_divergence(0, left, right) is None
            for run, base in zip(mine, baseline, strict=True)
            for left, right in zip(base.tokens, run.tokens, strict=True)
        ),
        "texts": len(mine) * shape["batch"],
    }
    measured = [run.measurement for run in mine if run.measurement is not None]
    if measured:
        cell |= decoding_figures(measured, new_tokens)
        cell["realised"] = ratio.value / cell["tokens_per_step"]
    if isinstance(setting, int):
        plan = plans[setting]
        cell |= {"branching": list(plan.branching), "nodes": plan.max_nodes}
        cell |= {"sampled": plan.sampled, "acceptance": plan.acceptance}
        if plan.choices:
            cell["choices"] = [list(path) for path in plan.choices]
    return cell


def decoding_figures(measured: Sequence[Measurement], new_tokens: int) -> dict[str, Any]:
    """Return τ, acceptance by depth, time of a step and its shares over all trials.

    The seconds of a batch are divided among its rows, so their sum is the wall-clock; a batch takes as many steps as
    its slowest row.
    """
    total = Measurement([c for result in measured for c in result.completions], sum(r.wall_s for r in measured))
    statistics = total.statistics
    batch_steps = sum(max(c.statistics.steps for c in result.completions) for result in measured)
    return {
        "lossless": statistics.lossless,
        "drafted": statistics.drafted,
        "tokens_per_step": total.tokens_per_step,
        "accepted_by_depth": total.accepted_by_depth(),
        "step_ms": 1000 * statistics.decode_s / max(1, batch_steps),
        "share": total.shares(),
        "prefill_ms": 1000 * statistics.prefill_s / len(measured),
        "decode_ms_per_token": 1000 * statistics.decode_s / len(measured) / (new_tokens - 1),
    }


def _check_baseline(engine: Engine, runs: Sequence[TimedCall]) -> None:
    """Raise DraftsmithError where the baseline is not the target's own text: a ratio to nonsense would mean nothing."""
    texts = [c for run in runs if run.measurement is not None for c in run.measurement.completions]
    wrong = sum(not is_targets_own(engine.target, text) for text in texts)
    if wrong:
        raise DraftsmithError(
            f"{wrong} of {len(texts)} baseline texts are not what one plain forward of the target says, so ratios to "
            "them would mean nothing; run draftsmith prove on this target to see where they part."
        )


def _check_counts(tokens: list[list[int]], new_tokens: int, who: str) -> None:
    counts = sorted({len(row) for row in tokens})
    if counts != [new_tokens]:
        raise RuntimeError(f"{who} generated {counts} tokens where exactly {new_tokens} were asked for")
