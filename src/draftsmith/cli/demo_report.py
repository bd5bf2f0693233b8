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
    speed_bars,
    training_curve,
)
from draftsmith.evaluation.reporting.result_files import markdown_table, write_report
from draftsmith.targets import Target
from draftsmith.types import Completion
from draftsmith.workflows.demonstration import DemoResult
from draftsmith.workflows.live import LiveResult

SAMPLE_TOKENS = 96


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


def print_speedups(console: Console, speedups: Mapping[str, SpeedupResult]) -> None:
    """Print the two speeds, τ, acceptance by depth and whether the texts are identical."""
    table = Table(title="Tokens a second, one prompt at a time (95 % intervals)", title_justify="left")
    for name in ("task", "plain", "drafted", "ratio", "τ"):
        table.add_column(name, justify="left" if name == "task" else "right")
    for task, outcome in speedups.items():
        plain, drafted, ratio = outcome.plain_speed, outcome.drafted_speed, outcome.speedup
        table.add_row(
            task,
            f"{plain.value:.0f} ({plain.low:.0f}–{plain.high:.0f})",
            f"{drafted.value:.0f} ({drafted.low:.0f}–{drafted.high:.0f})",
            f"{ratio.value:.2f}× ({ratio.low:.2f}–{ratio.high:.2f})",
            f"{outcome.total.tokens_per_step:.2f}",
        )
    console.print(table)
    for task, outcome in speedups.items():
        shares = " ".join(f"{share:.0%}" for share in outcome.total.accepted_by_depth())
        console.print(f"accepted by depth, {task}: {shares}")
    for task, outcome in speedups.items():
        console.print(f"identical, {task}: {outcome.sentence()}")


def write_demo_report(folder: Path, result: DemoResult) -> Path:
    """Write report.md, report.json and the pictures; return the path of report.md."""
    sample = pieces_of(most_varied(result.speedups["code"]), result.target, SAMPLE_TOKENS)
    figures = {
        "speed.png": speed_bars(
            {task: {"plain": r.plain_speed, "drafted": r.drafted_speed} for task, r in result.speedups.items()}
        ),
        "acceptance.png": acceptance_by_depth({t: r.total.accepted_by_depth() for t, r in result.speedups.items()}),
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
    speeds = markdown_table(
        ["task", "plain, tokens/s", "drafted, tokens/s", "drafted / plain", "τ", "share of τ realised"],
        [
            [
                task,
                f"{r.plain_speed.value:.1f}",
                f"{r.drafted_speed.value:.1f}",
                f"{r.speedup.value:.2f}× ({r.speedup.low:.2f}–{r.speedup.high:.2f})",
                f"{r.total.tokens_per_step:.2f}",
                f"{r.speedup.value / r.total.tokens_per_step:.2f}",
            ]
            for task, r in result.speedups.items()
        ],
    )
    learned = markdown_table(
        ["task", "τ before", "τ after"],
        [
            [task, f"{m.tokens_per_step:.2f}", f"{result.after[task].tokens_per_step:.2f}"]
            for task, m in result.before.items()
        ],
    )
    identical = "\n".join(f"- {task}: {r.sentence()}" for task, r in result.speedups.items())
    where = result.provenance
    machine = where["machine"]
    rounds = len(next(iter(result.speedups.values())).plain)
    return f"""# Draftsmith demo

`{where["command"]}`, {where["date"]}, {machine["cpu"]}, {machine["cores"]} cores, {where["threads"]} threads,
{where["dtype"]} on {where["device"]}, compilation {where["compiled"]}, torch {where["versions"]["torch"]}.

## Speed, and whether the text is the same

{speeds}

One prompt at a time, greedy, {result.settings.new_tokens} new tokens exactly, {rounds} prompts a task, plain and
drafted decoding interleaved in random order after a warm-up. Prefill is included. Intervals are 95 %, bootstrapped.
τ = 1 + accepted / steps.

![tokens per second](speed.png)

Identical to plain decoding?

{identical}

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
