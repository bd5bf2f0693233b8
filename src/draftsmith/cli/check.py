"""`draftsmith check`: does a drafter decode as well as its training promises?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from draftsmith.cli.common import (
    MODELS,
    OUTPUT,
    DeviceOption,
    JsonOption,
    TargetOption,
    ThreadsOption,
    TrustOption,
    check_outputs,
    importing,
    set_up,
)
from draftsmith.types import DraftsmithError

if TYPE_CHECKING:
    from draftsmith.evaluation.checking.check import CheckReport

FAILED = 1


def check(
    folder: Annotated[Path | None, typer.Argument(hidden=True)] = None,
    target: TargetOption = None,
    drafter: Annotated[
        Path | None,
        typer.Option(help="Folder of a trained drafter; the embedded one by default.", rich_help_panel=MODELS),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Precision of the comparison with training: fp32 or fp64 for parity to the last guess.")
    ] = "fp32",
    serving_dtype: Annotated[
        str, typer.Option(help="Precision of the copy that decodes; auto as in generate.")
    ] = "auto",
    device: DeviceOption = "auto",
    trust_remote_code: TrustOption = False,
    threads: ThreadsOption = None,
    data: Annotated[
        Path | None, typer.Option(help="Prompts of your own: JSONL with `text` or `messages` a line, or text.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Only prompts of this task: code, prose or dialogue.")] = None,
    prompts: Annotated[int, typer.Option(help="How many, of 8 to 160 tokens.")] = 24,
    new_tokens: Annotated[int, typer.Option(help="Greedy tokens a prompt.")] = 64,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also list the steps that differ.", rich_help_panel=OUTPUT)
    ] = False,
    json_path: JsonOption = None,
) -> None:
    """Check a trained drafter before it is published: what training predicts, decoding has to accept.

    The drafter's training forward reads the target's own greedy text at once, and says how many guesses each step
    would accept; then the engine decodes, and the two are compared step by step and depth by depth. The files, the
    tokenizer, the alignment of features, positions and masks are checked one by one, and what packing the drafter
    for decoding costs is measured apart.

    The exit code is 1 if a check fails; the depth and the likely cause are named.

    Example: `draftsmith check --target my-model --drafter runs/mine/drafter --json check.json`
    """
    check_outputs(json_path)
    if folder is not None and drafter is not None:
        raise DraftsmithError(f"there is {folder} and --drafter {drafter}; give one of them.")
    from draftsmith.workflows.given import check_models, check_prompts, require_trained

    check_models(target, dtypes=(dtype, serving_dtype), device=device)
    given = drafter or folder
    if given is not None:
        require_trained(given, "check")
    check_prompts(data, task)
    with importing():
        from draftsmith.evaluation.reporting.result_files import write_json
        from draftsmith.workflows.checking import check as run

    notes, console = Console(stderr=True), Console()

    def say(what: str) -> None:
        notes.print(f"[dim]{what} …[/dim]")

    set_up(threads, notes)
    result = run(
        given, target, dtype=dtype, serving_dtype=serving_dtype, device=device,
        trust_remote_code=trust_remote_code, prompts=data, task=task, prompt_count=prompts, new_tokens=new_tokens,
        console=notes, on_progress=say,
    )
    if json_path is not None:
        write_json(json_path, result.as_json())
    show(console, result.report, explain)
    if not result.passed:
        raise typer.Exit(FAILED)


def show(console: Console, report: "CheckReport", explain: bool) -> None:
    """Print the checks, acceptance by depth, and the result in a sentence."""
    table = Table(title="Checks", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_column(style="dim")
    for check in report.checks:
        table.add_row("[green]pass[/green]" if check.passed else "[red]FAIL[/red]", check.name, check.detail)
    console.print(table)
    parity = report.parity
    if parity is not None:
        depths = Table(title="Steps that accept at least so many guesses (greedy chains)", title_justify="left")
        for name in ("depth", "predicted by training", "measured", "measured as it serves"):
            depths.add_column(name, justify="right")
        for d, (want, have) in enumerate(zip(parity.predicted, parity.measured, strict=True)):
            served = f"{report.packed[d]:.1%}" if report.packed is not None else "-"
            depths.add_row(str(d + 1), f"{want:.1%}", f"{have:.1%}", served)
        console.print(depths)
        for gap in parity.gaps if explain else ():
            why = "a tie" if gap.tie else "no tie"
            console.print(
                f"text {gap.text}, token {gap.root}: {gap.measured} accepted, {gap.predicted} predicted ({why})",
                style="dim",
            )
    console.print(report.sentence(), style="green" if report.passed else "red", markup=False)
