"""The pictures of a comparison: speed-up and acceptance by depth for each task, and τ against what a step costs."""

from collections.abc import Mapping, Sequence
from math import exp, log
from statistics import fmean
from typing import Any

from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from draftsmith.evaluation.comparison.orderings import Cells
from draftsmith.evaluation.comparison.tables import of
from draftsmith.evaluation.measuring.intervals import Interval
from draftsmith.evaluation.reporting.plots import (
    BLUE,
    GREY,
    GRID,
    INK,
    INTERVALS,
    MARKERS,
    SERIES,
    canvas,
    finish,
    ranked_bars,
)

TICKS = (0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8, 12, 16)
SHADES = LinearSegmentedColormap.from_list("shades", ["white", BLUE])


def figures(cells: Cells, tasks: Sequence[str]) -> dict[str, Figure]:
    """Draw greedy decoding: bars of speed-up and acceptance by depth for each task, and τ against a step's cost."""
    drawn: dict[str, Figure] = {}
    for task in tasks:
        ranked = of(cells, task, "greedy")
        by_tau = sorted(ranked, key=lambda cell: -cell["tree"]["tokens_per_step"])
        drawn[f"acceptance-{task}.png"] = depth_table(
            {cell["method"]: cell["tree"]["accepted_by_depth"] for cell in by_tau}, f"{task}, greedy, tree"
        )
        bars = {
            f"{cell['method']} · {cell['plan']}": Interval(cell["speedup"], *cell["speedup_ci"]) for cell in ranked
        }
        drawn[f"speedup-{task}.png"] = ranked_bars(
            bars, f"times as fast as plain decoding\n{INTERVALS}; blue where all of one is above 1",
            f"Speed-up on {task}, greedy: method · the draft it was fastest with",
        )
    drawn["tau-and-cost.png"] = tau_against_cost([cell for cell in cells if cell["mode"] == "greedy"])
    return drawn


def depth_table(series: Mapping[str, Sequence[float]], title: str) -> Figure:
    """A table in shades: a line a method, a column a depth, the share of steps that accepted so deep a guess."""
    deepest = max((len(shares) for shares in series.values()), default=1)
    figure, axes = canvas(max(3.8, 1.9 + 0.46 * deepest), 1.0 + 0.26 * len(series))
    for row, shares in enumerate(series.values()):
        for column, share in enumerate(shares):
            axes.fill_between([column, column + 1], row, row + 1, color=SHADES(share), linewidth=0)
            axes.text(
                column + 0.5, row + 0.5, f"{share:.0%}", ha="center", va="center", fontsize=8,
                color="white" if share > 0.75 else INK,
            )
    axes.set_xlim(0, max(deepest, 1))
    axes.set_ylim(max(len(series), 1), 0)
    axes.set_xticks([depth + 0.5 for depth in range(deepest)], [str(depth + 1) for depth in range(deepest)])
    axes.set_yticks([row + 0.5 for row in range(len(series))], list(series))
    axes.set_title(f"Steps that accepted a guess so deep\n{title}", fontsize=9, color=INK, loc="left")
    axes.set_xlabel("depth of the drafted token", fontsize=9)
    axes.set_ylabel("method", fontsize=9)
    finish(axes, legend=False)
    axes.grid(visible=False)
    axes.tick_params(length=0)
    return figure


def tau_against_cost(cells: Cells) -> Figure:
    """Points: tokens a step over its cost in plain steps, a small one for each task, a large one for their mean."""
    figure, axes = canvas(7.0, 4.6)
    middles = {}
    for name in dict.fromkeys(cell["method"] for cell in cells):
        own = [cell for cell in cells if cell["method"] == name]
        middles[name] = (mean_of(own, "step_cost"), mean_of(own, "tokens_per_step_timed"))
    # The names stand in a column beside the picture, in the order of their points, so that they never overlap.
    for index, name in enumerate(sorted(middles, key=lambda name: -middles[name][1])):
        own = [cell for cell in cells if cell["method"] == name]
        colour, marker = SERIES[index % len(SERIES)], MARKERS[index % len(MARKERS)]
        axes.scatter(
            [cell["step_cost"] for cell in own], [cell["tokens_per_step_timed"] for cell in own], s=12, color=colour,
            alpha=0.45, linewidth=0, marker=marker,
        )
        axes.scatter(*middles[name], s=52, color=colour, zorder=3, marker=marker)
        axes.annotate(
            name, middles[name], xytext=(1.05, 1 - (index + 0.5) / len(middles)), textcoords="axes fraction",
            va="center", fontsize=9, color=colour,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "alpha": 0.7, "relpos": (0, 0.5)},
        )
    values = [cell[key] for cell in cells for key in ("step_cost", "tokens_per_step_timed")]
    least, most = min([*values, 1.0]) / 1.1, max([*values, 2.0]) * 1.1
    axes.fill_between([least, most], [least, most], most, color=GREY, alpha=0.12, linewidth=0)
    axes.plot([least, most], [least, most], color=INK, linewidth=0.8, linestyle=":")
    axes.text(0.02, 0.97, "drafting pays", transform=axes.transAxes, va="top", fontsize=9, color=INK)
    axes.text(0.4, 0.03, "drafting loses", transform=axes.transAxes, fontsize=9, color=INK)
    axes.plot([], [], color=INK, linewidth=0.8, linestyle=":", label="no gain, no loss: τ = cost")
    axes.scatter([], [], s=52, color=GREY, label="mean over tasks")
    axes.scatter([], [], s=12, color=GREY, label="one task")
    for axis, scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
        scale("log")
        axis.set_major_locator(FixedLocator([tick for tick in TICKS if least <= tick <= most]))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlim(least, most)
    axes.set_ylim(least, max(cell["tokens_per_step_timed"] for cell in cells) * 1.15 if cells else most)
    axes.set_xlabel("cost of a drafted step, in plain steps")
    axes.set_ylabel("tokens a step, τ")
    finish(axes, legend=False, title="What a step brings against what it costs, greedy")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(0, 0.93), framealpha=0.85, edgecolor=GRID)
    return figure


def mean_of(own: Sequence[Mapping[str, Any]], key: str) -> float:
    """Return the geometric mean of one figure over the tasks."""
    return exp(fmean(log(cell[key]) for cell in own))
