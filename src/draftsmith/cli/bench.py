"""`draftsmith bench`: the report's tables of latency, batch × candidates × prompt length."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

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
    ThreadsOption,
    TrustOption,
    check_outputs,
    importing,
    numbers,
    set_up,
)
from draftsmith.cli.plans import (
    AcceptanceOption,
    BeamOption,
    ConfidenceOption,
    DeltaOption,
    EpsilonOption,
    NodesOption,
    RemeasureOption,
    SampledOption,
    ShapeOption,
    check_prunable,
    read_rules,
    read_shape,
)
from draftsmith.cli.progress import counted
from draftsmith.types import LOSSY, DraftsmithError
from draftsmith.workflows.models import Loading

# What a column needs beside its text, and the first one in all.
BORDERS, BATCH_WIDTH = 3, 9
LEGEND = (
    "Columns: 0 is plain decoding; another number is the most drafted paths that a step verifies; fitted drafts what "
    "pays on this machine, as generate and serve do. τ is tokens a step at the batch sizes that draft."
)


def bench(
    target: TargetOption = None,
    drafter: DrafterOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    trust_remote_code: TrustOption = False,
    data: Annotated[
        Path | None,
        typer.Option(help="Texts of your own: a file or folder, as `train --data` takes it, or JSONL of prompts."),
    ] = None,
    task: Annotated[str | None, typer.Option(help="Only prompts of this task: code, prose or dialogue.")] = None,
    batch: Annotated[str, typer.Option(help="Rows decoded together.")] = "1,2,4",
    candidates: Annotated[
        str | None,
        typer.Option(
            help="Paths verified in a step; 0 is the baseline. By default the --plan whole, or what the drafter comes "
            "with, and what pays on this machine, as `generate` drafts."
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
    confidence: ConfidenceOption = None,
    acceptance: AcceptanceOption = "exact",
    epsilon: EpsilonOption = None,
    delta: DeltaOption = None,
    remeasure: RemeasureOption = False,
    temperature: Annotated[float, typer.Option(help="0 is greedy; otherwise every setting samples.")] = 0.0,
    peer: Annotated[
        str | None,
        typer.Option(help="Also time `transformers` generate at batch 1, in the same rounds.", rich_help_panel=SPEED),
    ] = None,
    compile: CompileOption = "auto",
    native: NativeOption = True,
    threads: ThreadsOption = None,
    quantize: QuantizeOption = "none",
    seed: Annotated[int, typer.Option(help="Of the order of runs.")] = 0,
    plots: Annotated[Path | None, typer.Option(help="Write PNGs into this folder.", rich_help_panel=OUTPUT)] = None,
    json_path: JsonOption = None,
) -> None:
    """Measure ms a token over batch size and number of candidates, baseline and drafts interleaved.

    Example: `draftsmith bench --task code --batch 1,4 --candidates 0,1,4,8 --trials 8 --json bench.json`
    """
    check_outputs(json_path, plots)
    rules = read_rules(acceptance, epsilon, delta, sampled, beam, nodes, temperature, confidence)
    from draftsmith.evaluation.grid import Grid, check_peer
    from draftsmith.workflows.given import check_models, check_prompts

    check_peer(peer, temperature)
    tree = read_shape(plan) if plan is not None else None
    if candidates is not None and tree is not None:
        check_prunable(tree, plan)
    grid = Grid(
        batches=numbers(batch, "--batch"),
        candidates=None if candidates is None else numbers(candidates, "--candidates"),
        prompt_tokens=numbers(prompt_tokens, "--prompt-tokens"),
        new_tokens=new_tokens,
        trials=trials,
        warmups=warmups,
        branching=None if tree is None else tree.branching,
        choices=() if tree is None else tree.choices,
        seed=seed,
        rules=rules,
        temperature=temperature,
    )
    if remeasure and not grid.is_open:
        raise DraftsmithError(
            "--remeasure finds out which drafts pay, but the plan is given; leave out --candidates, --plan and the "
            "rules of drafts, or --remeasure."
        )
    check_models(target, (drafter,), (dtype,), device=device)
    check_prompts(data, task)
    with importing():
        from draftsmith.evaluation.reporting.result_files import write_json
        from draftsmith.workflows.benchmark import BenchResult
        from draftsmith.workflows.benchmark import bench as run

    kept: list[BenchResult] = []

    def keep(found: BenchResult) -> None:
        kept[:] = [found]
        if json_path is not None:
            write_json(json_path, found.as_json())

    console, notes = Console(), Console(stderr=True)
    set_up(threads, notes)
    try:
        with counted(notes, "measuring") as report:
            run(
                target, drafter, grid, prompts=data, task=task, peer=peer, compile=compile,
                loading=Loading(dtype, device, trust_remote_code, native, quantize), console=notes,
                on_progress=report, on_cells=keep, remeasure=remeasure,
            )
    finally:
        # After Ctrl-C too: what was measured is shown, and is in the file already.
        for found in kept:
            cells = found.as_json()["cells"]
            show(console, cells)
            if plots is not None:
                write_plots(plots, cells)


def show(console: Console, cells: Sequence[Mapping[str, Any]]) -> None:
    """Print one table a prompt length, in the report's layout, τ in the last row; a wide one in several pieces."""
    for length in sorted({cell["prompt_tokens"] for cell in cells}):
        mine = [cell for cell in cells if cell["prompt_tokens"] == length]
        title = (
            f"ms a token, prompts of {length}, {mine[0]['new_tokens']} new tokens, {mine[0]['trials']} trials "
            f"({'95 % interval; ' if mine[0]['trials'] > 1 else ''}× against candidates 0)"
            f"{'' if lossless(mine) else f'; {LOSSY}'}"
        )
        console.print(title, style="italic", highlight=False)
        for columns in pieces(columns_of(mine), console.width):
            table = Table()
            table.add_column("batch", justify="right", no_wrap=True)
            for name, _ in columns:
                table.add_column(name, justify="right", no_wrap=True)
            *rows, tau = zip(*(entries for _, entries in columns), strict=True)
            for batch, row in zip(sorted({cell["batch"] for cell in mine}), rows, strict=True):
                table.add_row(str(batch), *row)
            table.add_section()
            table.add_row("τ", *tau)
            console.print(table)
        console.print(LEGEND, style="dim", highlight=False)
        if any(cell["candidates"] for cell in mine):
            console.print(verdict(mine))


def columns_of(mine: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return what stands under each number of candidates and each peer: an entry a batch size, then τ."""
    settings = {setting_of(cell) for cell in mine}
    counts = sorted(setting for setting in settings if isinstance(setting, int))
    others = sorted(setting for setting in settings if isinstance(setting, str))
    batches = sorted({cell["batch"] for cell in mine})
    columns = []
    for key in [*counts, *others]:
        own = [cell for cell in mine if setting_of(cell) == key]
        found = {cell["batch"]: entry(cell) for cell in own}
        tau = mean_tau(own)
        columns.append((str(key), [*(found.get(batch, "") for batch in batches), tau]))
    return columns


def setting_of(cell: Mapping[str, Any]) -> int | str:
    """Return the candidates of a cell; of one without, "fitted" or the peer's name."""
    if cell["candidates"] is not None:
        return int(cell["candidates"])
    return "fitted" if cell.get("fitted") else str(cell["engine"])


def pieces(columns: Sequence[tuple[str, list[str]]], width: int) -> list[list[tuple[str, list[str]]]]:
    """Cut columns into pieces that fit beside the batch sizes, so that no number is cut."""
    found: list[list[tuple[str, list[str]]]] = [[]]
    left = width - BATCH_WIDTH
    for name, entries in columns:
        lines = [line for text in (name, *entries) for line in Text.from_markup(text).plain.split("\n")]
        needed = max(map(len, lines)) + BORDERS
        if needed > left and found[-1]:
            found.append([])
            left = width - BATCH_WIDTH
        found[-1].append((name, entries))
        left -= needed
    return found


def lossless(cells: Sequence[Mapping[str, Any]]) -> bool:
    """Whether nothing but exact rules decoded these cells."""
    return all(cell.get("lossless", True) for cell in cells)


def verdict(cells: Sequence[Mapping[str, Any]]) -> str:
    """Say how the texts relate to the baseline's."""
    drafted = [cell for cell in cells if cell["candidates"] or cell.get("fitted")]
    if not lossless(cells):
        return f"Texts are {LOSSY}: they are not distributed as the baseline's."
    if any(cell.get("sampled") for cell in drafted) and any(cell["temperature"] for cell in drafted):
        return "Texts are lossless: distributed as the baseline's, and not equal to them, because guesses are drawn."
    texts, equal = (sum(cell[key] for cell in drafted) for key in ("texts", "identical_texts"))
    return f"Texts equal to the baseline's, token for token: {equal} of {texts}."


def entry(cell: Mapping[str, Any]) -> str:
    """One cell: latency, interval, ratio; and whether an engine that may draft never did."""
    low, high = cell["ms_per_token_ci"]
    ratio = "" if cell["candidates"] == 0 else f"\n{cell['speedup']:.2f}×"
    if cell.get("fitted") and cell.get("drafted") == 0:
        ratio += ", no drafts"
    interval = f"\n[dim]{low:.2f}–{high:.2f}[/dim]" if cell["trials"] > 1 else ""
    return f"{cell['ms_per_token']:.2f}{interval}{ratio}"


def mean_tau(cells: Sequence[Mapping[str, Any]]) -> str:
    """τ over the batch sizes at which something was drafted, or over all; empty for a peer, which does not tell."""
    drafting = [cell for cell in cells if cell.get("drafted") != 0] or cells
    values = [cell["tokens_per_step"] for cell in drafting if "tokens_per_step" in cell]
    return f"{sum(values) / len(values):.2f}" if values else ""


def write_plots(folder: Path, cells: Sequence[Mapping[str, Any]]) -> None:
    """Write a picture of latency for each prompt length and one of acceptance."""
    from draftsmith.evaluation.reporting.plots import acceptance_by_depth, latency_by_candidates
    from draftsmith.evaluation.reporting.result_files import write_figure

    pictures = {
        f"latency-{length}.png": latency_by_candidates(cells, length)
        for length in sorted({cell["prompt_tokens"] for cell in cells})
    }
    first = [c for c in cells if c["candidates"] and c["batch"] == cells[0]["batch"]]
    series = {
        f"{c['candidates']} candidate{'s' if c['candidates'] > 1 else ''}": c["accepted_by_depth"]
        for c in first
        if c["prompt_tokens"] == cells[0]["prompt_tokens"]
    }
    if series:
        pictures["acceptance.png"] = acceptance_by_depth(series)
    for name, picture in pictures.items():
        if not lossless(cells):
            picture.suptitle(LOSSY)
        write_figure(folder / name, picture)
