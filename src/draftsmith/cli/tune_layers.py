"""`draftsmith tune-layers`: which of the target's layers to leave out, so that the rest drafts for it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from draftsmith.cli.common import (
    OUTPUT,
    DeviceOption,
    DtypeOption,
    JsonOption,
    NativeOption,
    QuantizeOption,
    TargetOption,
    ThreadsOption,
    TrustOption,
    check_outputs,
    importing,
    set_up,
)
from draftsmith.cli.progress import counted
from draftsmith.workflows.models import Loading

if TYPE_CHECKING:
    from draftsmith.workflows.tuning import TunedLayers, TuneResult

INTERRUPTED = 130


def tune_layers(
    target: TargetOption = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Prompts like those you will decode: JSONL with `text` or `messages` a line, or text."),
    ] = None,
    task: Annotated[str | None, typer.Option(help="Only prompts of this task: code, prose or dialogue.")] = None,
    guesses: Annotated[int, typer.Option(help="The longest chain of guesses that is tried.")] = 6,
    whole_layers: Annotated[
        bool | None,
        typer.Option(
            "--whole-layers/--parts",
            help="Leave out whole layers, or attention and feed-forward by themselves. By default parts, except where "
            "one native operator reads the target, which takes whole layers only.",
        ),
    ] = None,
    evaluations: Annotated[int, typer.Option(help="Look at so many choices, at most.")] = 200,
    minutes: Annotated[float | None, typer.Option(help="Look for so long, at most.")] = None,
    prompts: Annotated[int, typer.Option(help="Texts to tune on.")] = 16,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each, at most.")] = 64,
    new_tokens: Annotated[int, typer.Option(help="Greedy tokens that the target writes behind each.")] = 64,
    overhead: Annotated[
        float, typer.Option(help="What a step costs beside target and drafted passes, in plain steps.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the search.")] = 0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    trust_remote_code: TrustOption = False,
    native: NativeOption = True,
    threads: ThreadsOption = None,
    quantize: QuantizeOption = "none",
    out: Annotated[Path, typer.Option(help="Folder of the drafter.", rich_help_panel=OUTPUT)] = Path("runs/layers"),
    json_path: JsonOption = None,
) -> None:
    """Search the attentions and feed-forwards that the target drafts best without; nothing is trained.

    Every choice is judged by the guesses that greedy decoding would accept on texts of the target, and by the weights
    that are left to read. The best is decoded with on other prompts, beside the best that reads the first layers only,
    and saved as a drafter. After Ctrl-C the best so far is.

    Example: `draftsmith tune-layers --target my-model --data prompts.jsonl --out runs/my-layers --minutes 20`
    """
    check_outputs(json_path)
    from draftsmith.drafters.models.place import check_place
    from draftsmith.workflows.given import check_models, check_prompts

    check_models(target, dtypes=(dtype,), device=device)
    check_prompts(data, task)
    check_place(out.expanduser())
    with importing():
        from draftsmith.evaluation.reporting.result_files import write_json
        from draftsmith.workflows.tuning import tune_layers as run

    console, notes = Console(), Console(stderr=True)
    set_up(threads, notes)
    with counted(notes, "searching") as report:
        result = run(
            target, out, prompts=data, task=task, guesses=guesses, whole=whole_layers, evaluations=evaluations,
            minutes=minutes, prompt_count=prompts, prompt_tokens=prompt_tokens, new_tokens=new_tokens,
            overhead=overhead, seed=seed, loading=Loading(dtype, device, trust_remote_code, native, quantize),
            console=notes,
            on_progress=lambda done, best: report(f"best: {best.cost:.3f} steps a token", done, evaluations),
        )
    if json_path is not None:
        write_json(json_path, result.as_json())
    show(console, result)
    if not result.complete:
        raise typer.Exit(INTERRUPTED)


def show(console: Console, result: "TuneResult") -> None:
    """Print the best beside the best of the first layers, and what can be done with it."""
    table = Table(
        title=f"The best of {len(result.evaluations)} choices. share: weights that a guess reads; τ: tokens a step; "
        "limit: 1 / (time a token), if time is weights read",
        title_justify="left",
    )
    for name in ("", "without attention of", "without feed-forward of"):
        table.add_column(name)
    for name in ("guesses", "share", "τ tuning", "τ held out", "limit, held out"):
        table.add_column(name, justify="right")
    table.add_row("found", *row(result.best))
    if result.first_layers is not None:
        table.add_row("first layers only", *row(result.first_layers))
    console.print(table)
    console.print(f"Tuned on {result.sources[0]}, measured by decoding on {result.sources[1]}.", style="dim")
    if not result.complete:
        console.print("Interrupted: this is the best so far.", style="yellow")
    if result.drafter is None:
        console.print(
            "Whatever is left out, drafting would cost more than it saves on this target, so nothing was saved.",
            style="yellow",
        )
        return
    console.print(
        f"The drafter is in {result.drafter}; use it with --drafter. The limit leaves out what a pass costs beside its "
        "weights; `draftsmith bench` measures time.",
        highlight=False, markup=False,
    )


def row(found: "TunedLayers") -> list[str]:
    """Lay out one choice."""
    return [
        ", ".join(map(str, found.skip_attention)) or "none", ", ".join(map(str, found.skip_mlp)) or "none",
        str(found.guesses), f"{found.share:.1%}", f"{found.tau:.2f}",
        "-" if found.measured_tau is None else f"{found.measured_tau:.2f}",
        "-" if found.measured_cost is None else f"{1 / found.measured_cost:.2f}×",
    ]
