"""`draftsmith compare`: which draft family pays, for which task, on this machine."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from draftsmith.cli.common import (
    OUTPUT,
    DeviceOption,
    DtypeOption,
    JsonOption,
    NativeOption,
    TargetOption,
    ThreadsOption,
    TrustOption,
    check_outputs,
    importing,
    out_folder,
    set_up,
)
from draftsmith.types import DraftsmithError
from draftsmith.workflows.models import Loading

FOLDED = ("fastest draft", "sources", "start")
# Columns that may be folded within a word.
LONG_WORDS = ("sources", "start")
# Of a table: what a column needs beside its text, and the longest name that is not folded.
BORDERS, LONGEST_NAME = 3, 14
# What a run calls the folder of its drafter.
EXPORTED = "drafter"


def compare(
    target: TargetOption = None,
    family: Annotated[
        list[str] | None,
        typer.Option(
            help="A family, with options or without: NAME or NAME:key=value,key=value; `draftsmith families` lists "
            "them. Repeat it; all families by default."
        ),
    ] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(help="Also a drafter that is trained already, as FOLDER or NAME=FOLDER. Repeat it for more."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Text whose beginnings the target continues to train on; embedded by default. Without --prompts a "
            "part of it is measured on."
        ),
    ] = None,
    positions: Annotated[
        int | None,
        typer.Option(help="Positions that every family is trained on; 98,304 by default, each of 2,048 texts once."),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Minutes that every family is trained for, in place of --positions.")
    ] = None,
    search_share: Annotated[
        float,
        typer.Option(
            help="Part of the training, on top of it, that each trial of learning rate and start gets; 0 takes what "
            "the families suggest."
        ),
    ] = 0.15,
    texts: Annotated[int, typer.Option(help="Texts that the target writes for all to learn from.")] = 2048,
    text_tokens: Annotated[int, typer.Option(help="Tokens of each of them.")] = 128,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Prompts of your own to measure on: JSONL, `text` or `messages`, and `task` and `source`, a line."
        ),
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Tasks to decode, such as code,edit; `edit` repeats a file. All by default.")
    ] = None,
    prompt_count: Annotated[int, typer.Option(help="Prompts a task that τ is measured on, greedily.")] = 40,
    sampled_prompt_count: Annotated[int, typer.Option(help="The same at temperature 1.")] = 16,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 64,
    new_tokens: Annotated[int, typer.Option(help="Generate exactly so many tokens for each.")] = 64,
    rounds: Annotated[int, typer.Option(help="Timed rounds a task, one prompt each.")] = 12,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    trust_remote_code: TrustOption = False,
    native: NativeOption = True,
    threads: ThreadsOption = None,
    seed: Annotated[int, typer.Option(help="Of weights, texts and the order of runs.")] = 0,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder of runs and report; the same command goes on there.", parser=out_folder, metavar="<path>",
            rich_help_panel=OUTPUT,
        ),
    ] = Path("comparison"),
    json_path: JsonOption = None,
) -> None:
    """Train draft families on one budget, decode with each, and say which to use for which task.

    Every family is trained by the same trainer on the same texts, which the target itself writes, with the learning
    rate that the same search found best; families without training take part as they are. Nothing is measured on
    sources that are trained or tuned on. A run that was cut goes on where it was when the same command is given again.

    Example: `draftsmith compare --family mlp --family medusa --family ngram --minutes 1`
    """
    check_outputs(json_path)
    from draftsmith.evaluation.comparison.questions import Settings
    from draftsmith.workflows.entries import Budget, entries_beside
    from draftsmith.workflows.given import check_models, check_prompts, check_texts

    budget = Budget(out, positions, minutes, data, texts, text_tokens, seed, search_share)
    wanted = tuple(task for task in (tasks or "").replace(" ", "").split(",") if task)
    settings = Settings(wanted, prompt_count, sampled_prompt_count, prompt_tokens, new_tokens, rounds, seed)
    given = named_folders(drafter or [])
    entries_beside(given, family or [])
    check_models(target, map(Path, given.values()), (dtype,), device=device)
    check_texts(data)
    check_prompts(prompts)
    with importing():
        from draftsmith.evaluation.reporting.result_files import write_json
        from draftsmith.workflows.comparison import compare as run

    console, notes = Console(), Console(stderr=True)
    set_up(threads, notes)
    with progress(notes) as report:
        done = run(
            target, family or [], given, budget=budget, settings=settings, prompts=prompts,
            loading=Loading(dtype, device, trust_remote_code, native), console=notes, on_progress=report,
        )
    result = done.as_json()
    if json_path is not None:
        write_json(json_path, result)
    show(console, result)
    console.print(f"\nReport: {done.report}")


@contextmanager
def progress(console: Console) -> Iterator[Callable[[str], None]]:
    """Give what shows what is being decoded; where that is no terminal, a line for each part of it."""
    status = console.status("")

    def report(label: str) -> None:
        if console.is_terminal:
            status.update(f"decoding, {escape(label)}")
            status.start()  # with the first of it; what is said of training comes before
        else:
            console.print(f"[dim]now: decoding, {escape(label)}[/dim]", highlight=False)

    try:
        yield report
    finally:
        status.stop()


def named_folders(items: Sequence[str]) -> dict[str, str]:
    """Read every --drafter; DraftsmithError where two would be called the same."""
    given: dict[str, str] = {}
    for name, folder in map(named_folder, items):
        if name in given:
            raise DraftsmithError(f"two drafters would be called {name!r}; name them, as NAME=FOLDER.")
        given[name] = folder
    return given


def named_folder(item: str) -> tuple[str, str]:
    """Read NAME=FOLDER, or FOLDER, which is called by its own name, or by its run's where that says nothing."""
    name, equals, folder = item.partition("=")
    if not equals or Path(item).is_dir():
        path = Path(item).absolute()
        return path.parent.name if path.name == EXPORTED else path.name, item
    if not name or not folder:
        raise DraftsmithError(f"--drafter {item!r} is not of the form FOLDER or NAME=FOLDER.")
    return name, folder


def show(console: Console, result: dict[str, Any]) -> None:
    """Print the tables and the verdict."""
    from draftsmith.evaluation.comparison import fairness, orderings, tables
    from draftsmith.evaluation.comparison.methods import MODES

    weights = [row[:-1] for row in tables.family_rows(result["families"])]
    print_table(console, "Texts kept apart", fairness.TEXTS_HEADER, fairness.texts_rows(result["texts"]))
    for sentence in fairness.texts_sentences(result):
        console.print(f"· {sentence.replace('**', '')}", highlight=False, markup=False)
    if sentence := fairness.search_sentence(result):
        console.print(f"· {sentence}", highlight=False, markup=False)
    if rows := fairness.search_rows(result["families"]):
        print_table(console, "Rates and starts", fairness.SEARCH_HEADER[:-1], [row[:-1] for row in rows])
    print_table(console, "Methods", tables.FAMILY_HEADER[:-1], weights)
    for task in result["tasks"]:
        for mode in MODES:
            header, *rows = tables.short_table(result["cells"], task, mode)
            print_table(console, f"{task}, {mode}", header, rows)
    if result["orderings"]:
        rows = orderings.ordering_rows(result["orderings"])
        header = ["T" if name == "temperature" else name for name in orderings.HEADER]
        print_table(console, "Orderings (tree)", header, rows)
    console.print("[bold]Verdict[/bold]")
    for sentence in result["verdict"]:
        console.print(f"· {sentence}")


def print_table(console: Console, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: words to the left, numbers to the right. Where space is short, words are folded, numbers never."""
    table = Table(title=title, title_justify="left")
    columns = [(name, [row[index] for row in rows]) for index, name in enumerate(header)]
    for index, ((name, _), width) in enumerate(zip(columns, widths(columns, console.width), strict=True)):
        wordy = index == 0 or name in (*FOLDED, "task", "holds here")
        table.add_column(name, justify="left" if wordy else "right", overflow="fold", width=width)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def widths(columns: Sequence[tuple[str, Sequence[str]]], width: int) -> list[int]:
    """Share a line among columns: first what numbers and the longest words need, then what would fold nothing."""
    whole = [max(map(len, [name, *entries])) for name, entries in columns]
    least = []
    for index, (name, entries) in enumerate(columns):
        words = [word for text in (name, *entries) for word in text.split()]
        # A method's options, or a source's name, may be longer than a line.
        found = max(map(len, words if name in FOLDED else [*name.split(), *entries]), default=0)
        least.append(min(found, LONGEST_NAME) if index == 0 or name in LONG_WORDS else found)
    spare = width - 1 - sum(least) - BORDERS * len(columns)
    for index, wanted in enumerate(whole):
        more = max(0, min(spare, wanted - least[index]))
        least[index] += more
        spare -= more
    return least
