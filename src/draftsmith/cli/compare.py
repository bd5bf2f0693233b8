"""`draftsmith compare`: which draft family pays, for which task, on this machine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from draftsmith.cli.common import (
    OUTPUT,
    DeviceOption,
    DtypeOption,
    JsonOption,
    NativeOption,
    TargetOption,
    TrustOption,
    check_outputs,
    gather_prompts,
    load_target,
)
from draftsmith.types import DraftsmithError

# Of the measurements that a comparison keeps; those of another format are not gone on with.
FORMAT = 2


def compare(
    target: TargetOption = None,
    family: Annotated[
        list[str] | None,
        typer.Option(
            help="A family, with options or without: mlp, mlp:n_predict=7, ngram. Repeat it; all families by default."
        ),
    ] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(help="Also a drafter that is trained already, as NAME=FOLDER. Repeat it for more."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Text whose beginnings the target continues to train on; embedded by default.")
    ] = None,
    positions: Annotated[
        int | None, typer.Option(help="Positions that every family is trained on; 100,000 by default.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Minutes that every family is trained for, in place of --positions.")
    ] = None,
    texts: Annotated[int, typer.Option(help="Texts that the target writes for all to learn from.")] = 2048,
    text_tokens: Annotated[int, typer.Option(help="Tokens of each of them.")] = 128,
    prompts: Annotated[
        Path | None, typer.Option(help="Held-out prompts of your own: JSONL with `text` and `task` a line.")
    ] = None,
    tasks: Annotated[str, typer.Option(help="Tasks to decode; `edit` repeats a file.")] = "code,prose,dialogue,edit",
    prompt_count: Annotated[int, typer.Option(help="Prompts a task that τ is measured on, greedily.")] = 40,
    sampled_prompt_count: Annotated[int, typer.Option(help="The same at temperature 1.")] = 16,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 64,
    new_tokens: Annotated[int, typer.Option(help="Generate exactly so many tokens for each.")] = 64,
    rounds: Annotated[int, typer.Option(help="Timed rounds a task, one prompt each.")] = 12,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    trust_remote_code: TrustOption = False,
    native: NativeOption = True,
    seed: Annotated[int, typer.Option(help="Of weights, texts and the order of runs.")] = 0,
    out: Annotated[
        Path, typer.Option(help="Folder of runs and report; the same command goes on there.", rich_help_panel=OUTPUT)
    ] = Path("comparison"),
    json_path: JsonOption = None,
) -> None:
    """Train draft families on one budget, decode with each, and say which to use for which task.

    Every family is trained by the same trainer on the same texts, which the target itself writes; families without
    training take part as they are. A run that was cut goes on where it was when the same command is given again.

    Example: `draftsmith compare --family mlp --family medusa --family ngram --minutes 1`
    """
    check_outputs(json_path, out)
    from draftsmith.cli.compare_training import Budget, enlist, read_entries
    from draftsmith.evaluation.contest import Settings, gather, run_contest
    from draftsmith.evaluation.contest_orderings import orderings, summary
    from draftsmith.evaluation.contest_plots import figures
    from draftsmith.evaluation.contest_report import to_markdown, verdict
    from draftsmith.evaluation.ledger import Ledger
    from draftsmith.evaluation.provenance import provenance
    from draftsmith.evaluation.report import write_json, write_report

    budget = Budget(out, positions, minutes, data, texts, text_tokens, seed)
    entries = [] if drafter and not family else read_entries(family or [])
    wanted = tuple(task for task in tasks.replace(" ", "").split(",") if task)
    settings = Settings(wanted, prompt_count, sampled_prompt_count, prompt_tokens, new_tokens, rounds, seed)
    given = dict(named_folder(item) for item in drafter or [])
    console, notes = Console(), Console(stderr=True)
    loaded = load_target(target, dtype, device, trust_remote_code, notes, native)
    questions = gather(loaded, gather_prompts(prompts, None), settings)
    ledger = Ledger(out / "measurements.jsonl")
    terms = {
        "format": FORMAT, "target": loaded.name, "dtype": str(loaded.dtype), "data": data and str(data),
        "positions": positions, "minutes": minutes, "texts": [texts, text_tokens], "seed": seed,
        "prompts": [prompt_count, sampled_prompt_count, prompt_tokens, new_tokens],
        "prompts_from": prompts and str(prompts),
        "device": str(loaded.device), "implementation": loaded.implementation,
        "given": {name: fingerprint(folder) for name, folder in given.items()},
    }
    if ledger.once("terms", lambda: terms) != terms:
        raise DraftsmithError(f"{out} holds a comparison on other terms; choose another --out, or delete it.")
    about = provenance(target=loaded.name, dtype=str(loaded.dtype))
    begun = ledger.once("begun", lambda: about)
    contenders, weighed = enlist(loaded, entries, given, budget, ledger, notes)
    with notes.status("") as status:
        cells = run_contest(
            loaded, contenders, questions, settings, ledger, lambda label: status.update(f"decoding, {label}")
        )
    ordered = orderings(cells, list(questions), weighed)
    result = {
        "provenance": about,
        # A comparison that was cut, or only reported again, was measured by an earlier command.
        "begun": begun,
        "target": loaded.name,
        "budget": budget.sentence(),
        "prompts": [prompt_count, sampled_prompt_count],
        "rounds": rounds,
        "tasks": list(questions),
        "families": weighed,
        "cells": cells,
        "orderings": ordered,
        "verdict": verdict(cells, list(questions)) + summary(ordered),
    }
    show(console, result)
    console.print(f"\nReport: {write_report(out, to_markdown(result), result, figures(cells, list(questions)))}")
    if json_path is not None:
        write_json(json_path, result)


def named_folder(item: str) -> tuple[str, str]:
    """Read NAME=FOLDER."""
    name, _, folder = item.partition("=")
    if not name or not folder:
        raise DraftsmithError(f"--drafter {item!r} is not of the form NAME=FOLDER.")
    return name, folder


def fingerprint(folder: str) -> str:
    """Return a digest of a drafter's folder, by which a comparison knows that it is the same drafter."""
    from draftsmith.drafters.storage import MANIFEST, require_folder, sha256

    require_folder(Path(folder))
    sealed = Path(folder) / MANIFEST
    return sha256(sealed if sealed.exists() else Path(folder) / "config.json")


def show(console: Console, result: dict[str, Any]) -> None:
    """Print the tables and the verdict."""
    from draftsmith.evaluation import contest_orderings, contest_report
    from draftsmith.evaluation.contest import MODES

    weights = [row[:-1] for row in contest_report.family_rows(result["families"])]
    print_table(console, "Contenders", contest_report.FAMILY_HEADER[:-1], weights)
    for task in result["tasks"]:
        for mode in MODES:
            header, *rows = contest_report.short_table(result["cells"], task, mode)
            print_table(console, f"{task}, {mode}", header, rows)
    if result["orderings"]:
        rows = contest_orderings.ordering_rows(result["orderings"])
        print_table(console, "Orderings (tree)", contest_orderings.HEADER, rows)
    console.print("[bold]Verdict[/bold]")
    for sentence in result["verdict"]:
        console.print(f"· {sentence}")


def print_table(console: Console, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: words to the left, numbers to the right."""
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(header):
        wordy = index == 0 or name in ("fastest draft", "task", "holds here")
        whole = index == 0 or name in ("speed-up", "difference in τ")
        table.add_column(name, justify="left" if wordy else "right", overflow="fold", no_wrap=whole)
    for row in rows:
        table.add_row(*row)
    console.print(table)
