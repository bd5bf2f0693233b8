"""How every job begins: loads target and drafter, given by name or as objects, and compiles the step where it pays."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.markup import escape

from draftsmith import assets
from draftsmith.drafters.family import read_spec
from draftsmith.types import Quantization

if TYPE_CHECKING:
    from collections.abc import Callable

    from draftsmith.drafters.base import Drafter
    from draftsmith.engine import Engine
    from draftsmith.targets import Target

CompileChoice = Literal["auto", "off", "trace", "full"]

# Seconds that full compilation takes at first, and the share of a step it saves; measured in benchmarks/README.md.
FULL_COSTS_S, FULL_SAVES = 120.0, 0.5
# For fewer tokens, neither a compilation nor the measurement that decides about it is worth the time.
FEWEST_TOKENS = 1000
# Characters of each embedded text that serve as a sample for `Drafter.note_for_user`.
SAMPLE = 1000


@dataclass(frozen=True)
class Loading:
    """How models given by name are loaded; models given as objects are used as they are.

    Args:
        dtype: auto (bf16 where it is fast, else fp32), bf16, fp16, fp32 or fp64.
        device: auto, cpu, cuda, cuda:1 and so on.
        trust_remote_code: run code that comes with the model.
        native: use the native kernels (bf16 on a CPU).
        quantize: "int8" or "int4" quantises the target's linear layers on a CPU; the text is then that of the
            quantised model.
        dtype_option: how this job's user sets a dtype, for a message that recommends one.
    """

    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False
    native: bool = True
    quantize: Quantization = "none"
    dtype_option: str = "--dtype "


def quiet() -> Console:
    """Return a console that shows nothing, the default of jobs called from Python."""
    return Console(quiet=True)


def dtype_name(target: "Target") -> str:
    """Return the target's precision as results show it: "bfloat16"."""
    return str(target.dtype).removeprefix("torch.")


def name_of(drafter: "Drafter | str | Path | None", default: str | None = None) -> str | None:
    """Return a drafter's name as results show it: the last part of its folder or name, after the word it belongs to."""
    if drafter is None:
        return default
    if isinstance(drafter, str) and "/" in drafter.partition(":")[2] and "/" not in drafter.partition(":")[0]:
        word, options = read_spec(drafter)
        named = [part for value in options.values() for part in (value if isinstance(value, list) else [value])]
        return f"{word}:{','.join(Path(str(part)).name for part in named)}"
    return Path(drafter).name if isinstance(drafter, str | Path) else type(drafter).__name__


def load_target(target: "Target | str | Path | None", loading: Loading, console: Console) -> "Target":
    """Load a target, the embedded one by default, and report what reads it."""
    from transformers.utils import logging as transformers_logging

    from draftsmith.targets import Target
    from draftsmith.targets.loading.loading import short_name

    if isinstance(target, Target):
        return target
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    path = str(target) if target is not None else str(assets.demo_target())
    begun = time.perf_counter()
    with console.status(f"Loading the target {Path(path).name} …"), telling(console):
        loaded = Target.from_pretrained(
            path, dtype=loading.dtype, device=loading.device, trust_remote_code=loading.trust_remote_code,
            native=loading.native, quantize=loading.quantize,
        )
    backend = loaded.backend
    console.print(
        f"[dim]{loaded.name}: {backend.description}, loaded in {time.perf_counter() - begun:.1f} s"
        f"{f' ({backend.packing_s:.2f} s of it packing)' if backend.packing_s else ''}.[/dim]"
    )
    if loaded.precision_on_disk:
        stored = loaded.precision_on_disk
        console.print(
            f"[dim]{loaded.name}: weights are {stored} on disk; using {short_name(loaded.dtype)} here "
            f"({loading.dtype_option}{stored} keeps them).[/dim]"
        )
    if backend.lacks:
        console.print(f"[dim]{backend.lacks}; PyTorch takes several times as long for a token.[/dim]")
    return loaded


def open_drafter(name: str | Path, target: "Target", console: Console) -> "Drafter":
    """Load a drafter as `load_drafter` does, and report its memory and the origin of its weights."""
    from draftsmith.drafters.registry import load_drafter

    with telling(console):
        return load_drafter(name, target)


@contextmanager
def telling(console: Console) -> Iterator[None]:
    """Print the progress that `draftsmith.progress` logs in the meantime."""
    progress, printed = logging.getLogger("draftsmith.progress"), _Printed(console)
    level, passes_on = progress.level, progress.propagate
    progress.addHandler(printed)
    progress.setLevel(logging.INFO)
    progress.propagate = False
    try:
        yield
    finally:
        progress.removeHandler(printed)
        progress.setLevel(level)
        progress.propagate = passes_on


class _Printed(logging.Handler):
    """Prints log records on a console, one per line."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        self._console.print(f"[dim]{escape(record.getMessage())}[/dim]", highlight=False, soft_wrap=True)


def load_engine(
    console: Console,
    *,
    target: "Target | str | Path | None",
    drafter: "Drafter | str | Path | None",
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    native: bool = True,
    quantize: Quantization = "none",
    max_batch: int = 8,
    max_length: int | None = None,
    draft: bool = True,
    share_prefixes: bool = True,
) -> "Engine":
    """Load target and drafter, uncompiled: both embedded by default; for another target, no drafter by default."""
    from draftsmith.engine import Engine
    from draftsmith.evaluation.prompts import embedded_prompts

    if drafter is None and target is None and draft:
        drafter = str(assets.demo_drafter())
    loaded = load_target(target, Loading(dtype, device, trust_remote_code, native, quantize), console)
    if drafter is None and draft:
        console.print(
            f"[dim]No drafter for {loaded.name}, so it decodes plainly; try --drafter ngram or --drafter cascade, "
            "which need no training, or train one with draftsmith train.[/dim]",
            highlight=False,
        )
    if not draft:
        drafter = None
    guesser = open_drafter(drafter, loaded, console) if isinstance(drafter, str | Path) else drafter
    if guesser is not None:
        note_for_user = guesser.note_for_user([prompt.text[:SAMPLE] for prompt in embedded_prompts(None)])
        if note_for_user is not None:
            console.print(f"[dim]{note_for_user} that ship with Draftsmith.[/dim]")
    return Engine(
        loaded, guesser, max_batch=max_batch, max_length=max_length, share_prefixes=share_prefixes,
    )


def settle_compilation(
    console: Console, engine: "Engine", choice: CompileChoice, tokens: int, prepare: "Callable[[Engine], float]"
) -> "Engine":
    """Return the engine for a job of `tokens` tokens, compiled if requested or if it pays; report cost and gain.

    On a GPU, where recordings take the launches off Python, it never pays.

    Args:
        prepare: compiles every shape of the job and returns the seconds it took.
    """
    from draftsmith.replays import can_replay

    leaves = tokens < FEWEST_TOKENS or can_replay(engine.target.device)
    if not engine.target.backend.compiles or choice == "off" or (choice == "auto" and leaves):
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
