"""Draws docs/images/core.png: the life of a request, and one step of the core.

    python docs/images/core.py
"""

from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

STATE, WORK, EDGE = "#dbe9f6", "#fdeacd", "#44546a"
READING = "has a slot; its prompt\npiece by piece, but for\nwhat others have read"
DECODING = "one step after the other,\nby the plan that the\npolicy chose for it"


def box(axes: Axes, x: float, y: float, width: float, height: float, title: str, text: str, colour: str) -> None:
    """Draw a box with a title and a few lines."""
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.02,rounding_size=0.12", fc=colour, ec=EDGE, lw=1.2)
    )
    axes.text(x + width / 2, y + height - 0.22, title, ha="center", va="top", fontsize=11, weight="bold")
    axes.text(x + width / 2, y + height - 0.62, text, ha="center", va="top", fontsize=9, linespacing=1.35)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], text: str = "", curve: float = 0.0) -> None:
    """Draw an arrow with a word above it."""
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=14, color=EDGE, lw=1.3, connectionstyle=f"arc3,rad={curve}"
        )
    )
    if text:
        middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + 0.16
        axes.text(*middle, text, ha="center", va="bottom", fontsize=8.5, color=EDGE)


def draw(path: Path) -> None:
    """Draw both rows of boxes."""
    figure, axes = plt.subplots(figsize=(12, 6.4), layout="constrained")
    axes.set_xlim(0, 15)
    axes.set_ylim(0, 8)
    axes.axis("off")
    axes.text(0.1, 7.8, "The life of a request", fontsize=13, weight="bold", va="top")
    box(axes, 0.2, 5.2, 2.5, 1.75, "waiting", "by priority,\nthen by arrival", STATE)
    box(axes, 4.2, 5.2, 2.7, 1.75, "reading", READING, STATE)
    box(axes, 8.4, 5.2, 2.7, 1.75, "decoding", DECODING, STATE)
    box(axes, 12.3, 5.2, 2.4, 1.75, "finished", "stop, length, abort,\ndeadline or error", STATE)
    arrow(axes, (2.75, 6.05), (4.15, 6.05), "room for all\nof its text")
    arrow(axes, (6.95, 6.05), (8.35, 6.05), "first token")
    arrow(axes, (11.15, 6.05), (12.25, 6.05), "its end")
    axes.text(
        13.5, 4.95, "the slot is free at once; full blocks\nof its text stay findable", ha="center", va="top",
        fontsize=8.5, color=EDGE,
    )
    axes.text(0.1, 4.35, "One step of the core", fontsize=13, weight="bold", va="top")
    work = [
        ("ask the policy", "a plan for every row;\nrows with the same plan\nform a group"),
        ("draft", "each group by its\ndrafter; trees of any\nshape, or nothing"),
        ("verify", "one forward over the\nnodes of all groups,\nno padding"),
        ("commit", "greedy rows by argmax,\nothers by their rules;\none table to the host"),
        ("read prompts", "newcomers take free\nslots; pieces within a\nbudget of tokens"),
    ]
    for number, (title, text) in enumerate(work):
        x = 0.2 + 3.0 * number
        box(axes, x, 1.5, 2.45, 1.75, title, text, WORK)
        if number:
            arrow(axes, (x - 0.5, 2.37), (x - 0.05, 2.37))
    arrow(axes, (13.4, 1.45), (1.4, 1.45), curve=-0.12)
    axes.text(7.5, 0.32, "the next step; requests come and go in between", ha="center", fontsize=8.5, color=EDGE)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".png"))
