"""Draws the curves of a run as a PNG: losses, τ with its interval, both by source, and the learning rate."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from draftsmith.files import replacing
from draftsmith.training.measuring import BY_SOURCE, HELD_OUT_LOSS, TAU, TAU_INTERVAL

Points = list[tuple[int, Any]]


def draw_curves(records: list[dict[str, Any]], path: Path) -> None:
    """Draw the records of a run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    training = [record for record in records if "loss" in record]
    scores = [(record["step"], record["evaluation"]) for record in records if "evaluation" in record]
    figure = Figure(figsize=(14, 7))
    FigureCanvasAgg(figure)
    # The margins are fixed, because computing them takes as long as drawing.
    figure.subplots_adjust(left=0.05, right=0.985, bottom=0.075, top=0.95, wspace=0.2, hspace=0.32)
    axes = figure.subplot_mosaic([["loss", "heads", "hits"], ["tau", "tau", "rate"]])
    steps = [record["step"] for record in training]

    axes["loss"].plot(steps, [record["loss"] for record in training], color="silver", label="training")
    _plot(axes["loss"], taken(scores, HELD_OUT_LOSS), "held-out text", color="black")
    for name, points in by_source(scores, HELD_OUT_LOSS).items():
        _plot(axes["loss"], points, name, linewidth=0.8, markersize=3)
    axes["loss"].set(title="loss of all heads, in training and on held-out text", ylabel="nats")
    for place, title, unit, key in (
        ("heads", "loss by head, in training", "nats", "loss_by_head"),
        ("hits", "right first guesses in training (not acceptance)", "share", "training_accuracy_by_head"),
    ):
        for head in range(len(training[0][key]) if training else 0):
            axes[place].plot(steps, [record[key][head] for record in training], label=f"head {head + 1}")
        axes[place].set(title=title, ylabel=unit)
    _plot(axes["tau"], taken(scores, TAU), "all held-out prompts", color="black")
    ends = taken(scores, TAU_INTERVAL)
    axes["tau"].fill_between(
        [step for step, _ in ends], [low for _, (low, _) in ends], [high for _, (_, high) in ends], color="black",
        alpha=0.12, linewidth=0, label="95 % interval over prompts",
    )
    for name, points in by_source(scores, TAU).items():
        _plot(axes["tau"], points, name, linewidth=0.8, markersize=3)
    axes["tau"].set(title="τ by decoding (the target's own token included)", ylabel="tokens per step")
    axes["rate"].plot(steps, [record["rate"] for record in training])
    axes["rate"].set(title="learning rate", ylabel="rate")
    # The last step of a stage is logged, unless the stage ended early.
    early = [record["step"] for record in records if record.get("ended_early", {}).get("stage") == "1"]
    begins = [early[0] if early else a["step"] for a, b in pairwise(training) if a["stage"] != b["stage"]]
    for axis in axes.values():
        for step in begins:
            axis.axvline(step, color="grey", linewidth=0.8, linestyle=":", label="stage 2 begins")
        axis.set_xlabel("step")
        axis.title.set_fontsize("medium")
        if axis.get_legend_handles_labels()[1]:
            axis.legend(fontsize="small")
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=110)


def _plot(axis: Any, points: Points, label: str, **style: Any) -> None:
    if points:
        axis.plot(*zip(*points, strict=True), marker="o", label=label, **style)


def taken(scores: Sequence[tuple[int, dict[str, Any]]], key: str) -> Points:
    """Return the steps at which a measure was taken, each with its value."""
    return [(step, found[key]) for step, found in scores if key in found]


def by_source(scores: Sequence[tuple[int, dict[str, Any]]], key: str) -> dict[str, Points]:
    """Return the same for every source, if there are several."""
    parts = [(step, found.get(BY_SOURCE, {})) for step, found in scores]
    names = list(dict.fromkeys(name for _, sources in parts for name in sources))
    if len(names) < 2:
        return {}
    return {name: taken([(step, sources.get(name, {})) for step, sources in parts], key) for name in names}
