"""`draftsmith demo`: the whole idea on the embedded model, trained and measured before your eyes in a few minutes."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from draftsmith import assets
from draftsmith.cli.common import (
    OUTPUT,
    CompileOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    NativeOption,
    TargetOption,
    check_outputs,
    gather_prompts,
    load_target,
    settle_compilation,
)
from draftsmith.plan import NO_DRAFT
from draftsmith.types import DraftsmithError

if TYPE_CHECKING:
    from draftsmith.drafters.mlp import MLPSpeculator
    from draftsmith.evaluation.measure import Measurement
    from draftsmith.target import Target

TASKS = ("code", "prose")
ROWS = 8


def demo(
    minutes: Annotated[float, typer.Option(help="How long to train.")] = 2.5,
    out: Annotated[Path, typer.Option(help="Folder of the report.", rich_help_panel=OUTPUT)] = Path("report"),
    prompts: Annotated[int, typer.Option(help="Held-out prompts a task.")] = 8,
    new_tokens: Annotated[int, typer.Option(help="Exactly so many tokens behind each.")] = 128,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 64,
    target: TargetOption = None,
    init_from: Annotated[
        str | None, typer.Option(help="Speculator to go on from; the embedded first stage by default.")
    ] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    compile: CompileOption = "auto",
    native: NativeOption = True,
    seed: Annotated[int, typer.Option(help="Of the training and of the order of runs.")] = 0,
    json_path: JsonOption = None,
) -> None:
    """Train a speculator live, then race it against plain decoding: same text, sooner.

    Example: `draftsmith demo --minutes 1 --out my-report`
    """
    begun = time.monotonic()
    for name, value in (("--minutes", minutes), ("--prompts", prompts), ("--prompt-tokens", prompt_tokens - 1)):
        if not 0 < value < 1e6:
            raise DraftsmithError(f"{name} is too small or too large; try the default.")
    check_outputs(json_path, out)
    console = Console()
    first_stage = Path(init_from) if init_from is not None else assets.demo_first_stage()
    texts = gather_prompts(None, None)
    loaded = load_target(target, dtype, device, False, console, native)
    if prompt_tokens + max(new_tokens, 2) > loaded.max_length:
        raise DraftsmithError(
            f"{prompt_tokens} prompt tokens and {new_tokens} new ones do not fit the context of {loaded.max_length}; "
            "shorten one of them."
        )

    import torch

    from draftsmith.cli.demo_report import DemoResult, coloured_sample, print_race, print_training, write_demo_report
    from draftsmith.cli.demo_training import LiveSettings, train_live
    from draftsmith.drafters.mlp import MLPSpeculator
    from draftsmith.drafters.registry import load_drafter
    from draftsmith.engine import Engine
    from draftsmith.evaluation.prompts import cut, embedded_prompts
    from draftsmith.evaluation.provenance import provenance
    from draftsmith.evaluation.race import race
    from draftsmith.evaluation.report import write_json

    speculator = MLPSpeculator.from_pretrained(first_stage, loaded, dtype=torch.float32)
    held_out = {task: cut(loaded, [p for p in texts if p.task == task], prompt_tokens, prompts) for task in TASKS}
    console.print(
        f"Target {loaded.name}: {loaded.weights / 1e6:.1f} M parameters, "
        f"{str(loaded.dtype).removeprefix('torch.')} on {loaded.device}. Speculator {first_stage.name}: "
        f"{speculator.config.n_predict} stages, {sum(p.numel() for p in speculator.parameters()) / 1e6:.1f} M."
    )
    with console.status("Measuring tokens per step on held-out text, before training …"):
        before = tokens_per_step(loaded, speculator, held_out, new_tokens)
    settings = LiveSettings(minutes=minutes, prompt_tokens=prompt_tokens, new_tokens=new_tokens, seed=seed)
    pieces = cut(loaded, embedded_prompts(split="train"), prompt_tokens, 4000)
    live = train_live(loaded, speculator, pieces, settings, console)
    with console.status("Measuring again, after training …"):
        after = tokens_per_step(loaded, live.speculator, held_out, new_tokens)
    print_training(console, before, after, live)

    # What is raced is what was saved, read back as any user would read it.
    live.speculator.to(loaded.dtype).save_pretrained(out / "drafter", loaded.facts(), {"trained_by": "draftsmith demo"})
    drafter = load_drafter(out / "drafter", loaded)
    engine = Engine(loaded, drafter, max_batch=1, max_length=prompt_tokens + new_tokens)
    tokens = 2 * len(TASKS) * prompts * new_tokens
    engine = settle_compilation(
        console, engine, compile, tokens, lambda compiled: compiled.prepare(1, NO_DRAFT) + compiled.prepare(1)
    )
    races = {}
    with console.status("Racing plain decoding against drafted decoding …"):
        for task in TASKS:
            races[task] = race(engine, held_out[task], new_tokens, seed=seed)
    print_race(console, races)
    result = DemoResult(
        provenance(
            target=loaded.name,
            drafter=first_stage.name,
            dtype=str(loaded.dtype).removeprefix("torch."),
            device=str(loaded.device),
            compiled=engine.compiled,
            prompts="embedded held-out prompts",
        ),
        before,
        after,
        live,
        settings,
        races,
        time.monotonic() - begun,
    )
    coloured_sample(console, engine, races["code"])
    path = write_demo_report(out, result, loaded)
    if json_path is not None:
        write_json(json_path, result.as_json())
    console.print(f"\nReport: {path}, trained speculator: {out / 'drafter'}. {time.monotonic() - begun:.0f} s in all.")


def tokens_per_step(
    target: "Target", drafter: "MLPSpeculator", held_out: dict[str, list[list[int]]], new_tokens: int
) -> "dict[str, Measurement]":
    """Decode the held-out prompts of every task greedily with this speculator."""
    from draftsmith.engine import Engine
    from draftsmith.evaluation.measure import measure
    from draftsmith.types import SamplingParams

    engine = Engine(target, drafter.for_decoding(target), max_batch=ROWS)
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    return {task: measure(engine, prompts, params) for task, prompts in held_out.items()}
