"""`draftsmith bench`: the report's tables of latency, batch × candidates × prompt length."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from draftsmith import assets
from draftsmith.cli.common import (
    OUTPUT,
    SPEED,
    CompileOption,
    DeviceOption,
    DrafterOption,
    DtypeOption,
    JsonOption,
    NativeOption,
    QuantizeOption,
    TargetOption,
    TrustOption,
    check_outputs,
    gather_prompts,
    load_engine,
    numbers,
    settle_compilation,
)
from draftsmith.cli.plans import (
    AcceptanceOption,
    BeamOption,
    DeltaOption,
    EpsilonOption,
    NodesOption,
    SampledOption,
    ShapeOption,
    check_drafter,
    check_prunable,
    read_rules,
    read_shape,
)
from draftsmith.plan import NO_DRAFT
from draftsmith.types import LOSSY, DraftsmithError

if TYPE_CHECKING:
    from draftsmith.engine import Engine
    from draftsmith.evaluation.bench import Grid, Peer

PEERS = ("transformers",)


def bench(
    target: TargetOption = None,
    drafter: DrafterOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    trust_remote_code: TrustOption = False,
    data: Annotated[
        Path | None, typer.Option(help="Prompts of your own: JSONL with `text` a line, or a text file.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Only prompts of this task: code, prose or dialogue.")] = None,
    batch: Annotated[str, typer.Option(help="Rows decoded together.")] = "1,2,4",
    candidates: Annotated[
        str | None,
        typer.Option(
            help="Paths verified in a step; 0 is the baseline. 0,1,2,4,8,16,32 by default; a static --plan is whole."
        ),
    ] = None,
    prompt_tokens: Annotated[str, typer.Option(help="Prompt lengths.")] = "64",
    new_tokens: Annotated[int, typer.Option(help="Generate exactly so many tokens a trial.")] = 100,
    trials: Annotated[int, typer.Option(help="Timed rounds.")] = 16,
    warmups: Annotated[int, typer.Option(help="Untimed rounds before them.")] = 1,
    plan: ShapeOption = None,
    sampled: SampledOption = False,
    beam: BeamOption = None,
    nodes: NodesOption = None,
    acceptance: AcceptanceOption = "exact",
    epsilon: EpsilonOption = None,
    delta: DeltaOption = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy; otherwise every setting samples.")] = 0.0,
    peer: Annotated[
        str | None,
        typer.Option(help="Also time `transformers` generate at batch 1, in the same rounds.", rich_help_panel=SPEED),
    ] = None,
    compile: CompileOption = "auto",
    native: NativeOption = True,
    quantize: QuantizeOption = "none",
    seed: Annotated[int, typer.Option(help="Of the order of runs.")] = 0,
    plots: Annotated[Path | None, typer.Option(help="Write PNGs into this folder.", rich_help_panel=OUTPUT)] = None,
    json_path: JsonOption = None,
) -> None:
    """Measure ms a token over batch size and number of candidates, baseline and drafts interleaved.

    Example: `draftsmith bench --task code --batch 1,4 --candidates 0,1,4,8 --trials 8 --json bench.json`
    """
    check_outputs(json_path, plots)
    if peer is not None and peer not in PEERS:
        raise DraftsmithError(f"--peer is {peer!r}; known is {', '.join(PEERS)}.")
    if peer is not None and temperature != 0:
        raise DraftsmithError(f"--peer decodes greedily, but --temperature is {temperature}; leave one of them out.")
    rules = read_rules(acceptance, epsilon, delta, sampled, beam, nodes, temperature)
    from draftsmith.evaluation.bench import BASELINE, CANDIDATES, Grid, prepare_grid, run_grid
    from draftsmith.evaluation.provenance import provenance
    from draftsmith.evaluation.report import write_json

    tree = read_shape(plan) if plan is not None else NO_DRAFT
    if candidates is not None:
        check_prunable(tree, plan)
    grid = Grid(
        batches=numbers(batch, "--batch"),
        candidates=CANDIDATES if candidates is None else numbers(candidates, "--candidates"),
        prompt_tokens=numbers(prompt_tokens, "--prompt-tokens"),
        new_tokens=new_tokens,
        trials=trials,
        warmups=warmups,
        branching=tree.branching if plan is not None else None,
        choices=tree.choices,
        seed=seed,
        rules=rules,
        temperature=temperature,
    )
    prompts = gather_prompts(data, task)
    console = Console()
    drafting = any(count != BASELINE for count in grid.counts)
    engine = load_engine(
        Console(stderr=True),
        target=target,
        drafter=drafter,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        native=native,
        quantize=quantize,
        max_batch=max(grid.batches),
        max_length=max(grid.prompt_tokens) + new_tokens,
        draft=drafting,
    )
    if max(grid.prompt_tokens) + new_tokens > engine.target.max_length:
        raise DraftsmithError(
            f"{max(grid.prompt_tokens)} prompt tokens and {new_tokens} new ones do not fit the context of "
            f"{engine.target.max_length}; shorten one of them."
        )
    if drafting:
        check_drafter(engine.drafter, rules)
    grid.plans(engine.plan)  # refuses what cannot be made before anything is measured
    other = load_peer(target, engine, trust_remote_code) if peer is not None else None
    tokens = grid.runs * new_tokens * sum(grid.batches) // len(grid.batches)
    engine = settle_compilation(
        console, engine, compile, tokens, lambda compiled: prepare_grid(compiled, compiled.plan, grid)
    )
    cells = run_with_progress(engine, grid, lambda report: run_grid(engine, engine.plan, prompts, grid, other, report))
    show(console, cells)
    where = provenance(
        target=engine.target.name,
        drafter=Path(drafter).name if drafter else assets.DRAFTER_NAME if drafting else None,
        dtype=str(engine.target.dtype).removeprefix("torch."),
        device=str(engine.target.device),
        compiled=engine.compiled,
        temperature=temperature,
        task=task,
        data=data.name if data is not None else "embedded held-out prompts",
    )
    if json_path is not None:
        write_json(json_path, {"provenance": where, "cells": cells})
    if plots is not None:
        write_plots(plots, cells)


def load_peer(target: str | None, engine: "Engine", trust_remote_code: bool) -> "Peer":
    """Load transformers' own decoding of the same target."""
    from draftsmith.evaluation.peers import transformers_peer

    return transformers_peer(target or assets.demo_target(), engine.target, trust_remote_code)


def run_with_progress(engine: "Engine", grid: "Grid", work: Any) -> list[dict[str, Any]]:
    """Run the grid behind a progress bar on stderr."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("measuring", total=grid.runs)

        def report(label: str, done: int) -> None:
            progress.update(bar, description=label, advance=done)

        cells: list[dict[str, Any]] = work(report)
    return cells


def show(console: Console, cells: Sequence[Mapping[str, Any]]) -> None:
    """Print one table a prompt length, in the report's layout, τ in the last row."""
    for length in sorted({cell["prompt_tokens"] for cell in cells}):
        mine = [cell for cell in cells if cell["prompt_tokens"] == length]
        counts = sorted({cell["candidates"] for cell in mine if cell["candidates"] is not None})
        peers = sorted({cell["engine"] for cell in mine if cell["candidates"] is None})
        table = Table(
            title=f"ms a token, prompts of {length}, {mine[0]['new_tokens']} new tokens, {mine[0]['trials']} trials "
            f"(95 % interval; × against candidates 0){'' if lossless(mine) else f'; {LOSSY}'}",
            title_justify="left",
        )
        table.add_column("batch", justify="right")
        for name in [*(str(count) for count in counts), *peers]:
            table.add_column(name, justify="right")
        for batch in sorted({cell["batch"] for cell in mine}):
            cells_here = [c for c in mine if c["batch"] == batch]
            row = {(c["engine"] if c["candidates"] is None else c["candidates"]): c for c in cells_here}
            table.add_row(str(batch), *(entry(row[key]) if key in row else "" for key in [*counts, *peers]))
        table.add_section()
        table.add_row("τ", *(f"{mean_tau(mine, count):.2f}" for count in counts), *("" for _ in peers))
        console.print(table)
        if any(cell["candidates"] for cell in mine):
            console.print(verdict(mine))


def lossless(cells: Sequence[Mapping[str, Any]]) -> bool:
    """Whether nothing but exact rules decoded these cells."""
    return all(cell.get("lossless", True) for cell in cells)


def verdict(cells: Sequence[Mapping[str, Any]]) -> str:
    """Say how the texts relate to the baseline's."""
    drafted = [cell for cell in cells if cell["candidates"]]
    if not lossless(cells):
        return f"Texts are {LOSSY}: they are not distributed as the baseline's."
    if any(cell["sampled"] for cell in drafted) and any(cell["temperature"] for cell in drafted):
        return "Texts are lossless: distributed as the baseline's, and not equal to them, because guesses are drawn."
    texts, equal = (sum(cell[key] for cell in drafted) for key in ("texts", "identical_texts"))
    return f"Texts equal to the baseline's, token for token: {equal} of {texts}."


def entry(cell: Mapping[str, Any]) -> str:
    """One cell: latency, interval, ratio."""
    low, high = cell["ms_per_token_ci"]
    ratio = "" if cell["candidates"] == 0 else f"\n{cell['speedup']:.2f}×"
    return f"{cell['ms_per_token']:.2f}\n[dim]{low:.2f}–{high:.2f}[/dim]{ratio}"


def mean_tau(cells: Sequence[Mapping[str, Any]], candidates: int) -> float:
    """τ over all batch sizes, as the report gives it."""
    values = [cell["tokens_per_step"] for cell in cells if cell["candidates"] == candidates]
    return float(sum(values) / len(values))


def write_plots(folder: Path, cells: Sequence[Mapping[str, Any]]) -> None:
    """Write a picture of latency for each prompt length and one of acceptance."""
    from draftsmith.evaluation.plots import acceptance_by_depth, latency_by_candidates
    from draftsmith.evaluation.report import write_figure

    pictures = {
        f"latency-{length}.png": latency_by_candidates(cells, length)
        for length in sorted({cell["prompt_tokens"] for cell in cells})
    }
    first = [c for c in cells if c["candidates"] and c["batch"] == cells[0]["batch"]]
    series = {
        f"{c['candidates']} candidates": c["accepted_by_depth"]
        for c in first
        if c["prompt_tokens"] == cells[0]["prompt_tokens"]
    }
    if series:
        pictures["acceptance.png"] = acceptance_by_depth(series)
    for name, picture in pictures.items():
        if not lossless(cells):
            picture.suptitle(LOSSY)
        write_figure(folder / name, picture)
