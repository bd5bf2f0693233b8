"""What the commands share: options, loading, parsing of lists, checks before the work begins."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text

from draftsmith import assets
from draftsmith.types import DraftsmithError, Quantization

if TYPE_CHECKING:
    from collections.abc import Callable

    from draftsmith.engine import Engine
    from draftsmith.evaluation.prompts import Prompt
    from draftsmith.target import Target

MODELS, SPEED, OUTPUT = "Models", "Speed", "Output"
# What full compilation takes at first, and the share of a step it saves: benchmarks/README.md has both measured.
FULL_COSTS_S, FULL_SAVES = 120.0, 0.5
# Below this nobody waits for a compiler, and not even for the measurement that would tell.
FEWEST_TOKENS = 1000
# Characters of each embedded text by which tokens are weighed.
SAMPLE = 1000

TargetOption = Annotated[
    str | None,
    typer.Option(help="Folder or hub name of a causal LM; the embedded one by default.", rich_help_panel=MODELS),
]
DrafterOption = Annotated[
    str | None,
    typer.Option(help="Folder or hub name of a drafter; by default the embedded target's own.", rich_help_panel=MODELS),
]
DtypeOption = Annotated[
    str, typer.Option(help="auto (bf16 where the hardware has it), bf16, fp16, fp32 or fp64.", rich_help_panel=MODELS)
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 …", rich_help_panel=MODELS)]
TrustOption = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run code that comes with the model. Off.", rich_help_panel=MODELS),
]
CompileChoice = Literal["auto", "off", "trace", "full"]
CompileOption = Annotated[
    CompileChoice,
    typer.Option(
        help="How much of the step PyTorch compiles: trace takes seconds, full a minute or so a shape, kept on disk; "
        "auto takes full when the job is long enough to win that back. Native code needs none of it.",
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
        help="int8 quantises the target's linear layers on a CPU; text is then that of the quantised model.",
        rich_help_panel=MODELS,
    ),
]
JsonOption = Annotated[
    Path | None, typer.Option("--json", help="Also write the result to this file.", rich_help_panel=OUTPUT)
]


def check_outputs(json_path: Path | None = None, folder: Path | None = None) -> None:
    """Raise DraftsmithError, before any work, for a result that could not be written in the end."""
    from draftsmith.evaluation.report import ensure_folder, ensure_writable

    if json_path is not None:
        ensure_writable(json_path)
    if folder is not None:
        ensure_folder(folder)


def numbers(text: str, option: str) -> tuple[int, ...]:
    """Read "1,2,4"; DraftsmithError names the option."""
    try:
        return tuple(int(part) for part in text.replace(" ", "").split(",") if part)
    except ValueError as error:
        raise DraftsmithError(f"{option} is {text!r}; give whole numbers with commas, such as 1,2,4.") from error


def load_target(
    target: str | None,
    dtype: str,
    device: str,
    trust_remote_code: bool,
    console: Console,
    native: bool = True,
    quantize: Quantization = "none",
    dtype_option: str = "--dtype ",
) -> "Target":
    """Load a target, the embedded one by default, and say what reads it.

    Args:
        dtype_option: how the user of this command names a dtype.
    """
    from transformers.utils import logging

    from draftsmith.target import Target
    from draftsmith.target.loading import short_name

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    path = target if target is not None else str(assets.demo_target())
    begun = time.perf_counter()
    with console.status(f"Loading the target {Path(path).name} …"):
        loaded = Target.from_pretrained(
            path, dtype=dtype, device=device, trust_remote_code=trust_remote_code, native=native, quantize=quantize
        )
    console.print(
        f"[dim]{loaded.name}: {loaded.implementation}, loaded in {time.perf_counter() - begun:.1f} s"
        f"{f' ({loaded.packing_s:.2f} s of it packing)' if loaded.native else ''}.[/dim]"
    )
    if loaded.precision_on_disk:
        stored = loaded.precision_on_disk
        console.print(
            f"[dim]{loaded.name}: weights are {stored} on disk; using {short_name(loaded.dtype)} here "
            f"({dtype_option}{stored} keeps them).[/dim]"
        )
    if native and loaded.why_not_native:
        console.print(f"[dim]{loaded.why_not_native}.[/dim]")
    return loaded


def load_engine(
    console: Console,
    *,
    target: str | None,
    drafter: str | None,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    native: bool = True,
    quantize: Quantization = "none",
    max_batch: int = 8,
    max_length: int | None = None,
    draft_rows: int | None = None,
    draft: bool = True,
) -> "Engine":
    """Load target and drafter, nothing compiled yet: both embedded by default, no drafter for another target."""
    from draftsmith.drafters.cross_vocabulary import CrossVocabularyDraftModel
    from draftsmith.drafters.registry import load_drafter
    from draftsmith.engine import Engine
    from draftsmith.evaluation.prompts import embedded_prompts

    if drafter is None and target is None and draft:
        drafter = str(assets.demo_drafter())
    loaded = load_target(target, dtype, device, trust_remote_code, console, native, quantize)
    if drafter is None and draft:
        console.print(f"[dim]No drafter for {loaded.name}: decoding without one; give one with --drafter.[/dim]")
    guesser = load_drafter(drafter, loaded) if drafter is not None and draft else None
    if isinstance(guesser, CrossVocabularyDraftModel):
        texts = [prompt.text[:SAMPLE] for prompt in embedded_prompts(None)]
        console.print(f"[dim]{guesser.sharing(texts)} that ship with Draftsmith.[/dim]")
    return Engine(loaded, guesser, max_batch=max_batch, max_length=max_length, draft_rows=draft_rows)


def settle_compilation(
    console: Console, engine: "Engine", choice: CompileChoice, tokens: int, prepare: "Callable[[Engine], float]"
) -> "Engine":
    """Return the engine to use for a job of so many tokens, compiled if asked for or if it pays; say cost and gain.

    Args:
        prepare: compiles every shape of the job and returns the seconds it took.
    """
    if engine.is_native or choice == "off" or (choice == "auto" and tokens < FEWEST_TOKENS):
        return engine
    before = engine.pace()
    if choice == "auto":
        choice = "full" if tokens * before * FULL_SAVES > FULL_COSTS_S else "off"
    if choice == "off":
        return engine
    compiled = engine.at_level(choice)
    with console.status(f"Compiling the step ({choice}) …"):
        seconds = prepare(compiled)
    after = compiled.pace()
    console.print(
        f"[dim]Compiled ({choice}) in {seconds:.1f} s: a plain step takes {after * 1e3:.2f} ms instead of "
        f"{before * 1e3:.2f} ({before / after:.2f}×).[/dim]"
    )
    return compiled


def gather_prompts(data: Path | None, task: str | None) -> "list[Prompt]":
    """Return the user's prompts, or the embedded held-out ones of a task (all tasks by default)."""
    from draftsmith.evaluation.prompts import embedded_prompts, load_prompts

    if data is None:
        return embedded_prompts(task)
    prompts = load_prompts(data)
    chosen = [prompt for prompt in prompts if task is None or prompt.task == task]
    if not chosen:
        known = ", ".join(sorted({prompt.task for prompt in prompts}))
        raise DraftsmithError(f"{data} holds no prompt of task {task!r}; choose one of {known}.")
    return chosen


def say(sentence: str) -> None:
    """Print one sentence in red on stderr."""
    Console(stderr=True, soft_wrap=True).print(Text(sentence, style="red"))
