"""`draftsmith check`: does a drafter decode as well as its training promises?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from draftsmith import assets
from draftsmith.cli.common import (
    OUTPUT,
    DeviceOption,
    JsonOption,
    TargetOption,
    TrustOption,
    check_outputs,
    gather_prompts,
    load_target,
)
from draftsmith.types import DraftsmithError

if TYPE_CHECKING:
    from collections.abc import Callable

    from draftsmith.evaluation.check import Report
    from draftsmith.evaluation.prompts import Prompt
    from draftsmith.target import Target

FAILED = 1
SHORTEST, LONGEST = 8, 160


def check(
    draft: Annotated[
        Path | None, typer.Argument(help="Folder of a trained drafter; the embedded one by default.")
    ] = None,
    target: TargetOption = None,
    dtype: Annotated[
        str, typer.Option(help="Precision of the comparison with training: fp32 or fp64 for parity to the last guess.")
    ] = "fp32",
    serving_dtype: Annotated[
        str, typer.Option(help="Precision of the copy that decodes; auto as in generate.")
    ] = "auto",
    device: DeviceOption = "auto",
    trust_remote_code: TrustOption = False,
    data: Annotated[
        Path | None, typer.Option(help="Prompts of your own: JSONL with `text` a line, or a text file.")
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

    Example: `draftsmith check runs/mine/drafter --target my-model --json check.json`
    """
    check_outputs(json_path)
    if prompts < 3 or new_tokens < 4:
        raise DraftsmithError(f"{prompts} prompts of {new_tokens} tokens are too few; use at least 3 of 4 tokens.")
    from draftsmith.evaluation.provenance import provenance
    from draftsmith.evaluation.report import write_json

    folder = draft if draft is not None else assets.demo_drafter()
    notes, console = Console(stderr=True), Console()
    texts = gather_prompts(data, task)

    def load(kind: str, native: bool) -> "Target":
        option = "--serving-dtype " if native else "--dtype "
        return load_target(target, kind, device, trust_remote_code, notes, native, dtype_option=option)

    def say(what: str) -> None:
        notes.print(f"[dim]{what} …[/dim]")

    report, name = check_folder(folder, load, dtype, serving_dtype, texts, prompts, new_tokens, say)
    show(console, report, explain)
    if json_path is not None:
        where = provenance(
            target=name, drafter=folder.name, dtype=dtype, serving_dtype=serving_dtype, prompts=prompts,
            new_tokens=new_tokens,
        )
        write_json(json_path, {"provenance": where, **report.summary()})
    if not report.passed:
        raise typer.Exit(FAILED)


def check_folder(
    folder: Path,
    load: "Callable[[str, bool], Target]",
    dtype: str,
    serving_dtype: str,
    texts: "list[Prompt]",
    prompts: int,
    new_tokens: int,
    say: "Callable[[str], None]",
) -> "tuple[Report, str]":
    """Run every check on a folder; what a failure makes impossible is not run. Returns the target's name too."""
    from draftsmith.evaluation.check import (
        Check,
        Report,
        check_drafter,
        check_files,
        check_packing,
        load_pair,
        training_form,
    )
    from draftsmith.evaluation.prompts import cut

    report = Report(check_files(folder))
    reference = load(dtype, False)
    if not report.passed:
        return report, reference.name
    drafter, made_for = load_pair(folder, reference)
    report.checks.append(made_for)
    if drafter is None:
        return report, reference.name
    learner = training_form(folder, drafter, reference)
    longest = min(LONGEST, reference.max_length - new_tokens)
    windows = cut(reference, texts, longest, prompts)
    ragged = [window[: SHORTEST + (longest - SHORTEST) * i // (prompts - 1)] for i, window in enumerate(windows)]
    found = check_drafter(reference, learner, drafter, ragged, new_tokens, say)
    report.checks += found.checks
    report.parity = found.parity
    say("measuring the copy that decodes")
    serving = load(serving_dtype, True)
    packed, loads = load_pair(folder, serving)
    if packed is None:
        report.checks.append(Check("the copy that decodes", False, loads.detail))
        return report, reference.name
    cost, report.packed, report.unpacked = check_packing(
        serving, packed, drafter, learner.max_depth, ragged, new_tokens
    )
    report.checks.append(cost)
    return report, reference.name


def show(console: Console, report: "Report", explain: bool) -> None:
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
