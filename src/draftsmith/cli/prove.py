"""`draftsmith prove`: is this pair of target and drafter lossless on this machine?"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from draftsmith.cli.common import (
    SPEED,
    DeviceOption,
    DrafterOption,
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
from draftsmith.cli.plans import (
    AcceptanceOption,
    BeamOption,
    ConfidenceOption,
    DeltaOption,
    EpsilonOption,
    NodesOption,
    SampledOption,
    ShapeOption,
    read_drafts,
    read_rules,
)
from draftsmith.cli.progress import progress
from draftsmith.cli.serve import check_packages
from draftsmith.types import DraftsmithError
from draftsmith.workflows.models import Loading

if TYPE_CHECKING:
    from draftsmith.evaluation.proof.prove import Proof
    from draftsmith.evaluation.proof.sampling import Cell

DEFECT = 1
BATCH, TOGETHER = 8, 1024
# Plans are for sampled text as well as greedy here.
ANY_TEMPERATURE = 1.0


def prove(
    target: TargetOption = None,
    drafter: DrafterOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    trust_remote_code: TrustOption = False,
    data: Annotated[
        Path | None, typer.Option(help="Prompts of your own: JSONL with `text` a line, or a text file.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Only prompts of this task: code, prose or dialogue.")] = None,
    prompts: Annotated[int, typer.Option(help="Prompts of the greedy part.")] = 120,
    new_tokens: Annotated[int, typer.Option(help="Greedy tokens a prompt.")] = 48,
    batch: Annotated[
        int | None,
        typer.Option(help=f"Rows of the ragged batch, {BATCH} by default; batch 1 is run too. Not with --serving."),
    ] = None,
    draws: Annotated[
        int,
        typer.Option(
            help="Draws from the target for each plan; ten times as many from the small alphabet. Fewer with --serving."
        ),
    ] = 100_000,
    joint_tokens: Annotated[int, typer.Option(help="Tokens whose joint distribution is tested.")] = 3,
    top_k: Annotated[int, typer.Option(help="Keep so many tokens in the draws from the target.")] = 6,
    quick: Annotated[
        bool, typer.Option("--quick", help="A tenth of the prompts and draws; it says how much less that can see.")
    ] = False,
    serving: Annotated[
        bool,
        typer.Option("--serving", help="Through the server's part, requests coming and going, with 1, 4 and 16 rows."),
    ] = False,
    plan: ShapeOption = None,
    sampled: SampledOption = False,
    beam: BeamOption = None,
    nodes: NodesOption = None,
    confidence: ConfidenceOption = None,
    acceptance: AcceptanceOption = "exact",
    epsilon: EpsilonOption = None,
    delta: DeltaOption = None,
    candidates: Annotated[
        int | None, typer.Option(help="Verify only the best K paths of the tree.", rich_help_panel=SPEED)
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(help=f"Draws made together, {TOGETHER} by default. Not with --serving.", rich_help_panel=SPEED),
    ] = None,
    native: NativeOption = True,
    threads: ThreadsOption = None,
    quantize: QuantizeOption = "none",
    seed: Annotated[int, typer.Option(help="Of all draws.")] = 0,
    json_path: JsonOption = None,
) -> None:
    """Prove, or disprove, that drafting leaves this target's text alone, here: machine, precision, kernels, plan.

    Greedy text is compared token for token with plain decoding, alone and in a ragged batch; every difference is
    shown and is either a tie of the rounding, as measured on that very prefix, or a defect. Plain text is checked
    against the model's own forward. Sampled text is tested by the joint distribution of the next tokens: draws from the
    target under a top-k, and ten times as many from a target of eight tokens, each against the exact distribution.

    With `--serving` the texts go through the server's part, and every row has another plan at every step.

    The exit code is 1 on a defect. What is proven, and how strongly: docs/prove.md.

    Example: `draftsmith prove --dtype bf16 --plan 4,2,1 --json proof.json`
    """
    check_outputs(json_path)
    rules = read_rules(acceptance, epsilon, delta, sampled, beam, nodes, ANY_TEMPERATURE, confidence)
    drafts = read_drafts(plan, candidates, rules)
    from draftsmith.evaluation.proof.workload import Workload
    from draftsmith.workflows.given import check_models, check_prompts

    for option, given in (("--batch", batch), ("--rows", rows)):
        if serving and given is not None:
            raise DraftsmithError(f"--serving runs with 1, 4 and 16 rows; leave out {option} {given}.")
    work = Workload(
        new_tokens=new_tokens, batch=BATCH if batch is None else batch, draws=draws, small_draws=10 * draws,
        joint_tokens=joint_tokens, top_k=top_k, rows=TOGETHER if rows is None else rows, seed=seed,
    )
    if serving:
        check_packages()
    check_models(target, (drafter,), (dtype,), device=device)
    check_prompts(data, task)
    with importing():
        from draftsmith.evaluation.reporting.result_files import write_json
        from draftsmith.workflows.proving import prove as run

    notes, console = Console(stderr=True), Console()
    set_up(threads, notes)
    with progress(notes) as report:
        result = run(
            target, drafter, drafts, prompts=data, task=task, prompt_count=prompts, work=work, quick=quick,
            serving=serving, loading=Loading(dtype, device, trust_remote_code, native, quantize), console=notes,
            on_progress=report,
        )
    if json_path is not None:
        write_json(json_path, result.as_json())
    show(console, result.proof, result.small_alphabet, quick)
    if result.verdict == "defect":
        raise typer.Exit(DEFECT)


def show(console: Console, proof: "Proof", small_drafter: str, quick: bool) -> None:
    """Print both parts, every divergence, and the verdict in a sentence."""
    greedy, sampling = proof.greedy, proof.sampling
    table = Table(title="Greedy text", title_justify="left", show_header=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    batches = " and ".join(map(str, greedy.batches))
    moved = greedy.movement
    for row in (
        ("different prompts, greedy tokens", f"{greedy.prompts}, {greedy.tokens:,}"),
        (f"texts compared with plain decoding (batch {batches})", str(greedy.compared)),
        ("the same token for token", str(greedy.compared - len(greedy.divergent_texts))),
        ("diverging at a tie of the rounding", str(greedy.ties)),
        ("diverging without one", str(len(greedy.divergent_texts) - greedy.ties)),
        ("plain texts that are the model's own", f"{greedy.prompts - len(greedy.foreign)} of {greedy.prompts}"),
        (
            "logits between shapes of the forward",
            "the same bits" if moved.bit_identical else f"move by {moved.largest:.2g} (rounding step {moved.step:.2g})",
        ),
        ("tokens per step, τ = 1 + accepted / steps", f"{greedy.tokens_per_step:.2f}"),
    ):
        table.add_row(*row)
    console.print(table)
    for divergent in greedy.divergent_texts:
        console.print(divergent.sentence(), markup=False, style="yellow" if divergent.tie else "red")
    for where in dict.fromkeys(cell.where for cell in sampling.cells):
        console.print(sampling_table(where, [cell for cell in sampling.cells if cell.where == where]))
    console.print(
        f"Small alphabet: a random target of 8 tokens, drafted for by {small_drafter}. Decoding's distribution is "
        f"{sampling.apart:.2g} in total variation from that of the model's own forward (rounding)."
        + (" Equal rows were read once." if sampling.shared else ""),
        style="dim", markup=False,
    )
    if quick:
        console.print("This was --quick: see the least shifts found for what it cannot see.", style="yellow")
    console.print(proof.sentence(), style="red" if proof.verdict == "defect" else "green", markup=False)


def match_of(cell: "Cell") -> str:
    """Say whether a cell's draws follow the distribution."""
    if not cell.lossless:
        return "[yellow]lossy by choice[/yellow]"
    return "[red]REFUSED[/red]" if cell.refused else "fits"


def sampling_table(where: str, cells: "Sequence[Cell]") -> Table:
    """Lay out the cells of one target."""
    table = Table(
        title=f"Sampled text, {where}: joint distribution against {cells[0].continuations} exact probabilities\n"
        "[dim]TV: total variation, beside what a perfect sampler shows; sees: the least TV found 9 times of 10[/dim]",
        title_justify="left",
    )
    table.add_column("plan")
    for name in ("draws", "p", "TV", "perfect", "sees", "follows"):
        table.add_column(name, justify="right", no_wrap=True)
    for cell in cells:
        table.add_row(
            cell.plan, f"{cell.draws:,}", f"{cell.p_value:.2g}", f"{cell.tv:.4f}", f"{cell.tv_noise:.4f}",
            f"{cell.smallest_shift:.4f}", match_of(cell),
        )
    return table
