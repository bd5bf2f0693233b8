"""`draftsmith demo`: the whole idea on the embedded model, trained and measured before your eyes in a few minutes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from draftsmith.cli.common import (
    MODELS,
    OUTPUT,
    CompileOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    NativeOption,
    TargetOption,
    ThreadsOption,
    check_outputs,
    importing,
    out_folder,
    set_up,
)
from draftsmith.types import DraftsmithError
from draftsmith.workflows.models import Loading

if TYPE_CHECKING:
    from draftsmith.workflows.live import Show


def demo(
    minutes: Annotated[float, typer.Option(help="How long to train.")] = 2.0,
    out: Annotated[
        Path,
        typer.Option(help="Folder of the report.", parser=out_folder, metavar="<path>", rich_help_panel=OUTPUT),
    ] = Path("report"),
    prompts: Annotated[int, typer.Option(help="Held-out prompts a task.")] = 8,
    new_tokens: Annotated[int, typer.Option(help="Exactly so many tokens behind each.")] = 128,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 64,
    larger: Annotated[
        bool,
        typer.Option(
            "--larger/--no-larger", help="Measure on the embedded target padded to 491 M weights as well, which have "
            "to be read from memory.",
        ),
    ] = True,
    target: TargetOption = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            "--drafter", "--init-from", help="Folder of the speculator to go on from; the embedded first stage by "
            "default.", rich_help_panel=MODELS,
        ),
    ] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    compile: CompileOption = "auto",
    native: NativeOption = True,
    threads: ThreadsOption = None,
    seed: Annotated[int, typer.Option(help="Of the training and of the order of runs.")] = 0,
    json_path: JsonOption = None,
) -> None:
    """Train a speculator live, then time it beside the shipped one and 4-bit copies of the target: same text, sooner.

    Example: `draftsmith demo --minutes 1 --out my-report`
    """
    begun = time.monotonic()
    for name, value in (("--minutes", minutes), ("--prompts", prompts), ("--prompt-tokens", prompt_tokens - 1)):
        if not 0 < value < 1e6:
            raise DraftsmithError(f"{name} is too small or too large; try the default.")
    from draftsmith.workflows.given import check_models

    check_models(target, (None if drafter is None else Path(drafter),), (dtype,), device=device)
    check_outputs(json_path, out)
    with importing():
        from draftsmith.cli.demo_report import coloured_sample, print_speeds, print_training, write_demo_report
        from draftsmith.evaluation.reporting.result_files import write_json
        from draftsmith.workflows.demonstration import demonstrate
        from draftsmith.workflows.live import LiveSettings

    console = Console()
    set_up(threads, Console(stderr=True))
    settings = LiveSettings(minutes=minutes, prompt_tokens=prompt_tokens, new_tokens=new_tokens, seed=seed)
    with training_bar(console, 60 * minutes) as show:
        result = demonstrate(
            out, settings, target, drafter, prompts=prompts, larger=larger, compile=compile,
            loading=Loading(dtype, device, native=native), console=console, show=show,
            on_trained=partial(print_training, console),
        )
    for speeds in result.speeds:
        print_speeds(console, speeds)
    coloured_sample(console, result.target, result.trained["code"])
    path = write_demo_report(out, result)
    if json_path is not None:
        write_json(json_path, result.as_json())
    console.print(f"\nReport: {path}, trained speculator: {result.drafter}. {time.monotonic() - begun:.0f} s in all.")


@contextmanager
def training_bar(console: Console, seconds: float) -> "Iterator[Show]":
    """Give what shows how much of the time is spent, what is being done and how fast; the bar goes when it is over."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    progress = Progress(*columns, console=console, transient=True)
    bar = progress.add_task("The target writes", total=seconds, rate="", start=False)
    begun: list[float] = []

    def show(description: str, rate: str) -> None:
        if not description:
            progress.stop()
            return
        if not begun:
            begun.append(time.monotonic())
            progress.start()
            progress.start_task(bar)
        done = min(seconds, time.monotonic() - begun[0])
        progress.update(bar, description=description, rate=rate, completed=done)

    try:
        yield show
    finally:
        progress.stop()
