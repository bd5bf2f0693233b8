"""What `--stats` shows: which drafts were made, what they cost and brought, and what plain decoding would bring."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from draftsmith.processor import BUSY, usable_cores
from draftsmith.types import Completion, Statistics

if TYPE_CHECKING:
    from draftsmith.engine import Engine
    from draftsmith.plan import Plan

FEW_STEPS, LEAST_S, MOST_STEPS = 8, 0.2, 192
"""A plain step is timed over a few, or over as many as take so many seconds, but not over more than `MOST_STEPS`."""
TOO_FAST = 1.1
"""A gain is at most τ; so many times as much may be the error of a short measurement."""


def drafts_in_words(engine: "Engine", plan: "Plan | None") -> str:
    """Say which plan was taken, or how many steps took which."""
    from draftsmith.engine.fitted import Fitted
    from draftsmith.workflows.fitting import shape_in_words

    policy = engine.core.policy
    if plan is not None or not isinstance(policy, Fitted):
        return shape_in_words(plan if plan is not None else engine.plan)
    taken = sorted(zip(policy.steps, policy.choices, strict=True), key=lambda one: -one[0])
    said = [f"{shape_in_words(choice.plan)}: {steps} step{'s' * (steps > 1)}" for steps, choice in taken if steps]
    return "\n".join(said) or "none"


def plain_pace(engine: "Engine", rows: int) -> float:
    """Return the seconds that a plain step takes now, measured for long enough to be compared with."""
    took = engine.pace(rows)
    steps = min(MOST_STEPS, math.ceil(LEAST_S / took))
    return took if steps <= FEW_STEPS else engine.pace(rows, steps=steps)


def ratio_in_words(speed: float, plain: float, tau: float, others: float | None, cores: int) -> str:
    """Say how many times as fast as plain decoding a text was, or why that cannot be said.

    Args:
        speed, plain: tokens a second.
        tau: tokens a step, more than which nothing can be gained.
        others: the cores that other programs took in the meantime; None if that is unknown.
    """
    if others is not None and others > BUSY * cores:
        return f"no ratio, because other programs took {min(others, cores):.1f} of {cores} cores"
    ratio = speed / plain
    if ratio > TOO_FAST * tau:
        return f"no ratio: {ratio:.2f} were more than {tau:.2f} tokens a step can gain, so the machine's speed changed"
    return f"so this is {ratio:.2f}×"


def show_statistics(
    console: Console, completions: Sequence[Completion], drafts: str, plain: float, short_s: float = 0.0,
    others: float | None = None, quantize: str = "none",
) -> None:
    """Print what drafting cost and brought, the formulas beside the numbers.

    Args:
        drafts: which were made.
        plain: tokens a second that plain decoding brings now.
        short_s: seconds for which native operators had fewer threads than they wanted.
        others: the cores that other programs took from the beginning of the text on; None if that is unknown.
        quantize: how the target's weights are quantised, by which the text is judged.
    """
    total = Statistics()
    for completion in completions:
        total += completion.statistics
    table = Table(title="What drafting cost and brought", title_justify="left", show_header=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    seconds = total.decode_s + total.prefill_s
    rows = [
        ("new tokens", str(total.new_tokens)),
        ("steps", str(total.steps)),
        ("tokens per step, τ = 1 + accepted / steps", f"{total.tokens_per_step:.2f}"),
        ("accepted / drafted", f"{total.accepted} / {total.drafted}"),
        *([] if total.accepted_prediction is None else [
            ("accepted / rejected of the prediction", f"{total.accepted_prediction} / {total.rejected_prediction}")
        ]),
        ("text", total.fidelity if quantize == "none" else f"{total.fidelity}, for {quantize} weights"),
        ("drafts", drafts),
    ]
    for depth, count in enumerate(total.accepted_by_depth, 1):
        rows.append((f"steps that accepted depth {depth}", f"{count / max(1, total.steps):.0%}"))
    parts = {"prefill": total.prefill_s, "target": total.target_s, "drafter": total.drafter_s, "rest": total.rest_s}
    for name, value in parts.items():
        rows.append((f"seconds in {name}", f"{value:.3f} ({value / seconds if seconds else 0:.0%})"))
    if short_s > 0:
        why = "seconds with fewer threads, because other programs wanted the processor"
        rows.append((why, f"{short_s:.3f} of {seconds:.3f}"))
    rows.append(("tokens a second", f"{total.new_tokens / seconds:.1f}" if seconds else "-"))
    decoded = total.new_tokens - len(completions)  # the first token of each comes with its prompt
    if total.decode_s and decoded > 0:
        speed = decoded / total.decode_s
        rows.append(("the same without prompts", f"{speed:.1f}"))
        # Where nothing was drafted, a ratio would only be noise.
        told = ratio_in_words(speed, plain, total.tokens_per_step, others, len(usable_cores()))
        beside = f"{plain:.1f} ({told})" if total.drafted else "this was it"
        rows.append(("plain decoding now, without prompts", beside))
    for row in rows:
        table.add_row(*row)
    console.print(table)
