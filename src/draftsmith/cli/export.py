"""`draftsmith export`: a trained drafter for vLLM."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from draftsmith.cli.common import (
    MODELS,
    OUTPUT,
    DeviceOption,
    DtypeOption,
    JsonOption,
    TargetOption,
    ThreadsOption,
    TrustOption,
    check_outputs,
    importing,
    set_up,
)
from draftsmith.cli.progress import progress
from draftsmith.types import DraftsmithError

if TYPE_CHECKING:
    from draftsmith.evaluation.peers.acceptance import SideBySide

FAILED = 1
CHECK = "Check"
PROMPTS, NEW_TOKENS = 24, 128
"""What a check decodes if nobody says how much."""


def export(
    folder: Annotated[Path | None, typer.Argument(hidden=True)] = None,
    target: TargetOption = None,
    drafter: Annotated[
        Path | None, typer.Option(help="Folder of a trained drafter.", rich_help_panel=MODELS)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder to write; an earlier export is replaced.", rich_help_panel=OUTPUT)
    ] = None,
    guesses: Annotated[
        int | None,
        typer.Option(help="Tokens that vLLM guesses a step; by default as many as the drafter learnt to, up to 5."),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(
            help="The Python of an environment with vLLM: decode there with what was written, and compare.",
            rich_help_panel=CHECK,
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Prompts of your own, in any form that training reads.", rich_help_panel=CHECK),
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="Only prompts of this task: code, prose or dialogue.", rich_help_panel=CHECK)
    ] = None,
    prompts: Annotated[
        int | None, typer.Option(help=f"How many, of 8 to 160 tokens; {PROMPTS} by default.", rich_help_panel=CHECK)
    ] = None,
    new_tokens: Annotated[
        int | None, typer.Option(help=f"Greedy tokens a prompt; {NEW_TOKENS} by default.", rich_help_panel=CHECK)
    ] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    trust_remote_code: TrustOption = False,
    threads: ThreadsOption = None,
    json_path: JsonOption = None,
) -> None:
    """Write a trained drafter as vLLM reads it, with the command line that serves with it.

    --check decodes the same prompts here and in vLLM, and compares how many guesses stay. A drafter that vLLM reads
    wrongly still gives the right text, only not sooner, and nothing else would say so.

    The exit code is 1 if fewer guesses stay in vLLM, or too few here to tell.

    Example: `draftsmith export --target my-model --drafter runs/mine/drafter --out runs/mine/vllm --check
    /opt/vllm/bin/python`
    """
    check_outputs(json_path)
    if folder is not None and drafter is not None:
        raise DraftsmithError(f"there is {folder} and --drafter {drafter}; give one of them.")
    given = drafter or folder
    if given is None or out is None:
        missing = "--drafter, the folder of a trained drafter" if given is None else "--out, the folder to write"
        raise DraftsmithError(f"give {missing}.")
    of_check = {"--data": data, "--task": task, "--prompts": prompts, "--new-tokens": new_tokens}
    idle = next((option for option, value in of_check.items() if value is not None), None)
    if check is None and idle is not None:
        raise DraftsmithError(f"{idle} says what to decode in a check; give --check too, or leave it out.")
    from draftsmith.workflows.exporting import program
    from draftsmith.workflows.given import check_models, check_prompts, require_trained

    if check is not None:
        program(check.expanduser())
    check_models(target, dtypes=(dtype,), device=device)
    require_trained(given, "export")
    check_prompts(data, task)
    with importing():
        from draftsmith.evaluation.reporting.result_files import write_json
        from draftsmith.workflows.exporting import export as run

    notes, console = Console(stderr=True), Console()
    set_up(threads, notes)
    with progress(notes) as report:
        result = run(
            given, target, out=out, guesses=guesses, check=check, prompts=data, task=task,
            prompt_count=PROMPTS if prompts is None else prompts,
            new_tokens=NEW_TOKENS if new_tokens is None else new_tokens, dtype=dtype, device=device,
            trust_remote_code=trust_remote_code, console=notes, on_progress=report,
        )
    if json_path is not None:
        write_json(json_path, result.as_json())
    console.print(f"Written to {result.folder}. To serve with it:\n", highlight=False, markup=False)
    console.print(f"    {result.command}", highlight=False, markup=False, soft_wrap=True)
    if result.compared is not None:
        show(console, result.compared)
    if not result.passed:
        raise typer.Exit(FAILED)


def show(console: Console, compared: "SideBySide") -> None:
    """Print in how many steps how many guesses stayed, and the result in a sentence."""
    table = Table(title="Steps in which so many guesses stay (greedy chains)", title_justify="left")
    for name in ("guesses", "here", "in vLLM"):
        table.add_column(name, justify="right")
    steps, there = sum(compared.steps), sum(compared.steps_there)
    for number, (own, theirs) in enumerate(zip(compared.stayed, compared.stayed_there, strict=True), start=1):
        table.add_row(str(number), f"{own / steps:.1%}", f"{theirs / there:.1%}")
    console.print()
    console.print(table)
    console.print(
        f"{compared.same_texts} of {len(compared.steps)} texts are the same; both round differently.", style="dim",
        highlight=False,
    )
    console.print(
        compared.sentence(), style="green" if compared.passed else "red", markup=False, highlight=False
    )
