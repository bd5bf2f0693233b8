"""What the commands share: options, parsing of lists, checks before the work begins."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from draftsmith.memory import keep_freed_memory
from draftsmith.processor import check_threads, use_threads
from draftsmith.types import DraftsmithError, Quantization
from draftsmith.workflows.models import CompileChoice, load_engine, settle_compilation

__all__ = ["CompileChoice", "load_engine", "settle_compilation"]

MODELS, SPEED, OUTPUT = "Models", "Speed", "Output"

TargetOption = Annotated[
    str | None,
    typer.Option(help="Folder or hub name of a causal LM; the embedded one by default.", rich_help_panel=MODELS),
]
DrafterOption = Annotated[
    str | None,
    typer.Option(
        help="Folder or hub name of a drafter, or a word such as ngram; by default the embedded target's own.",
        rich_help_panel=MODELS,
    ),
]
DtypeOption = Annotated[
    str, typer.Option(help="auto (bf16 where it is fast, else fp32), bf16, fp16, fp32 or fp64.", rich_help_panel=MODELS)
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 …", rich_help_panel=MODELS)]
TrustOption = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run code that comes with the model. Off.", rich_help_panel=MODELS),
]
CompileOption = Annotated[
    CompileChoice,
    typer.Option(
        help="How much of the step PyTorch compiles: trace takes seconds, full a minute or so a shape, kept on disk; "
        "auto takes full when the job is long enough to win that back. Native code and a GPU need none of it.",
        rich_help_panel=SPEED,
    ),
]
NativeOption = Annotated[
    bool,
    typer.Option("--native/--no-native", help="Use the native kernels (bf16 on a CPU).", rich_help_panel=SPEED),
]
QuantizeOption = Annotated[
    Quantization,
    typer.Option(
        help="int8 or int4 quantises the target's linear layers on a CPU; text is then that of the quantised model.",
        rich_help_panel=MODELS,
    ),
]


def _checked_threads(threads: int | None) -> int | None:
    check_threads(threads, "--threads")
    return threads


ThreadsOption = Annotated[
    int | None,
    typer.Option(
        help="Threads to compute with on a CPU; by default as many as there are cores, or as a container's quota "
        "allows. Under the native kernels no bit of a text depends on it.",
        callback=_checked_threads,
        rich_help_panel=SPEED,
    ),
]
JsonOption = Annotated[
    Path | None, typer.Option("--json", help="Also write the result to this file.", rich_help_panel=OUTPUT)
]


def check_outputs(json_path: Path | None = None, folder: Path | None = None) -> None:
    """Raise DraftsmithError, before any work, for a result that could not be written in the end."""
    from draftsmith.evaluation.reporting.result_files import ensure_folder, ensure_writable

    if json_path is not None:
        ensure_writable(json_path)
    if folder is not None:
        ensure_folder(folder)


def out_folder(given: str | Path) -> Path:
    """Read --out, or take its default; DraftsmithError if it is empty, which would stand for the current folder."""
    if not str(given).strip():
        raise DraftsmithError("--out is empty; name a folder, or give . for the current one.")
    return Path(given)


def set_up(threads: int | None, notes: Console) -> None:
    """Keep freed memory, and compute with so many threads, by default those that fit; say what is to be known of it."""
    keep_freed_memory()
    note = use_threads(threads)
    if note is not None:
        notes.print(f"[dim]{note}[/dim]", highlight=False)


def numbers(text: str, option: str) -> tuple[int, ...]:
    """Read "1,2,4", at least one number and nothing left out; DraftsmithError names the option."""
    try:
        return tuple(map(int, text.split(",")))
    except ValueError as error:
        raise DraftsmithError(f"{option} is {text!r}; give whole numbers with commas, such as 1,2,4.") from error


def say(sentence: str) -> None:
    """Print one sentence in red on stderr."""
    Console(stderr=True, soft_wrap=True).print(Text(sentence, style="red"))


@contextmanager
def importing() -> Iterator[None]:
    """Import what takes seconds without looking for garbage, and never look through it again.

    What modules hold stays as long as the process does. PyTorch and transformers make so many objects that looking
    for garbage among them takes a quarter of the time of their imports.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
