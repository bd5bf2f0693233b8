"""What the demo shows and leaves behind: tables, a sample in colour, a report folder."""

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftsmith.evaluation.measuring.measure import Measurement
from draftsmith.evaluation.measuring.speedup import SpeedupResult
from draftsmith.evaluation.reporting.plots import (
    acceptance_by_depth,
    before_and_after,
    coloured_text,
    ratio_bars,
    training_curve,
)
from draftsmith.evaluation.reporting.result_files import markdown_table, write_report
from draftsmith.plan import Plan
from draftsmith.targets import Target
from draftsmith.types import Completion
from draftsmith.workflows.demo_speeds import TargetSpeeds
from draftsmith.workflows.demonstration import DemoResult
from draftsmith.workflows.live import LiveResult

SAMPLE_TOKENS = 96
SPEED_COLUMNS = ("task", "drafter", "tokens/s", "ratio (95 %)", "τ")


def pieces_of(completion: Completion, target: Target, limit: int | None = None) -> list[tuple[str, bool]]:
    """Cut a text into runs, each with whether the speculator drafted it; the rest is the target's own."""
    marks = [False]
    for accepted in completion.accepted_lengths:
        marks += [True] * accepted + [False]
    marks = marks[: len(completion.tokens)][:limit]
    assert target.tokenizer is not None
    pieces: list[tuple[str, bool]] = []
    shown = ""
    for end, drafted in enumerate(marks, 1):
        text = target.tokenizer.decode(completion.tokens[:end])
        # A character of several tokens is shown with the last of them.
        if isinstance(text, str) and not text.endswith("�"):
            pieces.append((text[len(shown) :], drafted))
            shown = text
    return pieces


def most_varied(speedup: SpeedupResult) -> Completion:
    """Return the text with the most different tokens: small models repeat themselves, which is easy to guess."""
    return max(speedup.completions(), key=lambda completion: len(set(completion.tokens)))


def coloured_sample(console: Console, target: Target, speedup: SpeedupResult) -> None:
    """Print one text, the most varied, drafted-and-accepted tokens in colour."""
    chosen = most_varied(speedup)
    assert target.tokenizer is not None
    text = Text(str(target.tokenizer.decode(chosen.prompt_tokens[-24:])), style="dim")
    for piece, drafted in pieces_of(chosen, target, SAMPLE_TOKENS):
        text.append(piece, style="bold green" if drafted else "not dim")
    console.print("\nA sample: [dim]prompt[/dim], target's own tokens, [bold green]drafted and accepted[/bold green]")
    console.print(text)


def print_training(
    console: Console, before: Mapping[str, Measurement], after: Mapping[str, Measurement], live: LiveResult
) -> None:
    """Print τ before and after."""
    table = Table(
        title="Tokens per step on held-out text",
        title_justify="left",
    )
    for name in ("task", "before", "after"):
        table.add_column(name, justify="left" if name == "task" else "right")
    for task in before:
        table.add_row(task, f"{before[task].tokens_per_step:.2f}", f"{after[task].tokens_per_step:.2f}")
    console.print(
        f"Trained {live.seconds:.0f} s: the target wrote {live.sequences} texts, the speculator took {live.steps} "
        f"steps, loss a stage {live.curve[0][1]:.2f} → {live.curve[-1][1]:.2f}. τ = 1 + accepted / steps."
    )
    console.print(table)


def print_speeds(console: Console, speeds: TargetSpeeds) -> None:
    """Print the speed of plain decoding and of every drafter, and whether the texts are identical."""
    table = Table(title=f"{speeds.label} weights: tokens a second, one prompt at a time", title_justify="left")
    for name in SPEED_COLUMNS:
        # At 80 columns, only the names of drafters may take a second line.
        table.add_column(
            name, justify="left" if name in SPEED_COLUMNS[:2] else "right", no_wrap=name != SPEED_COLUMNS[1]
        )
    for row in speed_rows(speeds):
        table.add_row(*row)
    console.print(table)
    for task, found in speeds.tasks.items():
        for sentence, names in sentences(found).items():
            console.print(f"identical, {task} ({'; '.join(names)}): {sentence}", highlight=False)


def speed_rows(speeds: TargetSpeeds) -> list[list[str]]:
    """Return lines under `SPEED_COLUMNS`: of every task plain decoding first, then each drafter with its draft."""
    rows = []
    for task, found in speeds.tasks.items():
        plain = next(iter(found.values())).plain_speed
        rows.append([task, "plain", f"{plain.value:,.0f}", "1", "1"])
        for name, one in found.items():
            ratio = one.speedup
            rows.append([
                task, f"{name}, {in_words(speeds.plans[name])}", f"{one.drafted_speed.value:,.0f}",
                f"{ratio.value:.2f}× ({ratio.low:.2f}–{ratio.high:.2f})", f"{one.total.tokens_per_step:.2f}",
            ])
    return rows


def in_words(plan: Plan) -> str:
    """Say how many guesses a draft has."""
    if not plan.is_chain:
        return f"a tree of {plan.max_nodes} guesses"
    bounded = "up to " if plan.confidence is not None else ""
    return f"{bounded}{plan.max_nodes} guess{'es' * (plan.max_nodes > 1)}"


def sentences(found: Mapping[str, SpeedupResult]) -> dict[str, list[str]]:
    """Return what is said of texts being identical, each sentence with the drafters it is said of."""
    said: dict[str, list[str]] = {}
    for name, one in found.items():
        said.setdefault(one.sentence(), []).append(name)
    return said


def write_demo_report(folder: Path, result: DemoResult) -> Path:
    """Write report.md, report.json and the pictures; return the path of report.md."""
    sample = pieces_of(most_varied(result.trained["code"]), result.target, SAMPLE_TOKENS)
    figures = {
        "speed.png": ratio_bars(
            {
                f"{task}\n{speeds.label}": {name: one.speedup for name, one in found.items()}
                for speeds in result.speeds for task, found in speeds.tasks.items()
            }
        ),
        "acceptance.png": acceptance_by_depth({t: r.total.accepted_by_depth() for t, r in result.trained.items()}),
        "tokens-per-step.png": before_and_after(
            {task: m.tokens_per_step for task, m in result.before.items()},
            {task: m.tokens_per_step for task, m in result.after.items()},
        ),
        "training.png": training_curve(result.live.curve),
        "sample.png": coloured_text(sample),
    }
    return write_report(folder, markdown(result), result.as_json(), figures)


def markdown(result: DemoResult) -> str:
    """Lay the report out."""
    speeds = "\n\n".join(map(speed_section, result.speeds))
    learned = markdown_table(
        ["task", "τ before", "τ after"],
        [
            [task, f"{m.tokens_per_step:.2f}", f"{result.after[task].tokens_per_step:.2f}"]
            for task, m in result.before.items()
        ],
    )
    where = result.provenance
    machine = where["machine"]
    return f"""# Draftsmith demo

`{where["command"]}`, {where["date"]}, {machine["cpu"]}, {machine["cores"]} cores, {where["threads"]} threads,
{where["dtype"]} on {where["device"]}, compilation {where["compiled"]}, torch {where["versions"]["torch"]}.

## Speed, and whether the text is the same

{speeds}

Greedy, one prompt at a time, {result.settings.new_tokens} new tokens exactly; plain decoding and all drafters took
turns in random order after a warm-up, each drafter with the draft that was fastest on texts for tuning (or, where the
step is compiled, with its own). Prefill is included. Intervals are 95 %, bootstrapped. τ = 1 + accepted / steps. A
padded target says what the small one says, and has to be read from memory as a model of its size has.

![times as fast as plain decoding](speed.png)

![share of steps that accepted each depth](acceptance.png)

## What training brought

{learned}

{result.live.seconds:.0f} s of live training: the target wrote {result.live.sequences} texts and the speculator took
{result.live.steps} steps. τ is measured by decoding held-out prompts.

![tokens per step before and after](tokens-per-step.png)
![loss over time](training.png)

## A sample

Green tokens were drafted by the speculator and accepted; black ones are the target's own.

![a text with its drafted tokens in colour](sample.png)
"""


def speed_section(speeds: TargetSpeeds) -> str:
    """Lay out what was measured on one target."""
    identical = [
        f"- {task} ({'; '.join(names)}): {sentence}"
        for task, found in speeds.tasks.items() for sentence, names in sentences(found).items()
    ]
    rounds = len(next(iter(next(iter(speeds.tasks.values())).values())).plain)
    return "\n".join([
        f"### {speeds.label} weights, {rounds} prompts a task", "",
        markdown_table(list(SPEED_COLUMNS), speed_rows(speeds)), "", "Identical to plain decoding?", "", *identical,
    ])
