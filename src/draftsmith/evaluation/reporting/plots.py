"""Pictures of measurements, drawn without a window. Each function returns a figure; the caller writes it."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import PercentFormatter

from draftsmith.evaluation.measuring.intervals import Interval

INK, GRID, GREY, BLUE, ORANGE = "#2b2b2b", "#d9d9d9", "#9aa5b1", "#2f6db3", "#d9822b"
SERIES = (
    BLUE, ORANGE, "#3c9d6d", "#8e5ea2", "#b5483a", "#17a2b8", "#8c6d46", "#e377c2", "#6b8e23", "#1b2a6b", "#c9a400",
    "#7f1d4e", "#4a5a68", "#00b38a", "#ff7f7f",
)
MARKERS = "oXs^DvP*<>"
CAPTION = ": drafted and accepted; the rest is the target's own"
INTERVALS = "thin bars: 95 % intervals"


def ratio_bars(groups: Mapping[str, Mapping[str, Interval]]) -> Figure:
    """Bars with intervals: times as fast as plain decoding, one group per text, one bar per drafter; a line at 1."""
    ways = list(dict.fromkeys(way for group in groups.values() for way in group))
    figure, axes = canvas(max(6.4, 2.4 + 1.6 * len(groups)), 3.8)
    width = 0.8 / len(ways)
    for i, way in enumerate(ways):
        there = [(g, group[way]) for g, group in enumerate(groups.values()) if way in group]
        at = [g + (i - (len(ways) - 1) / 2) * width for g, _ in there]
        shown = [one for _, one in there]
        axes.bar(at, [s.value for s in shown], width * 0.92, color=SERIES[i % len(SERIES)], label=way)
        spread = [[max(0.0, s.value - s.low) for s in shown], [max(0.0, s.high - s.value) for s in shown]]
        axes.errorbar(at, [s.value for s in shown], yerr=spread, fmt="none", ecolor=INK, elinewidth=1, capsize=3)
        for x, s in zip(at, shown, strict=True):
            axes.annotate(
                f"{s.value:.2f}", (x, s.high), xytext=(0, 4), textcoords="offset points", ha="center", fontsize=9
            )
    axes.axhline(1, color=INK, linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_xlabel("task and target")
    axes.set_ylabel("times as fast as plain decoding")
    headroom(axes)
    finish(axes, legend=True, title=f"One prompt at a time, the same text ({INTERVALS})")
    return figure


def ranked_bars(bars: Mapping[str, Interval], unit: str, title: str = "") -> Figure:
    """Horizontal bars with intervals and names, in the given order from the top; a line at 1 is plain decoding."""
    figure, axes = canvas(6.8, 1.3 + 0.28 * len(bars))
    at, shown = range(len(bars)), list(bars.values())
    axes.barh(at, [s.value for s in shown], 0.72, color=[BLUE if s.low > 1 else GREY for s in shown])
    spread = [[max(0.0, s.value - s.low) for s in shown], [max(0.0, s.high - s.value) for s in shown]]
    axes.errorbar([s.value for s in shown], at, xerr=spread, fmt="none", ecolor=INK, elinewidth=1, capsize=3)
    axes.axvline(1, color=INK, linewidth=0.8, linestyle=":")
    axes.annotate(
        "plain decoding", (1, -0.7), xytext=(0, 1), textcoords="offset points", ha="center", fontsize=8, color=INK,
        annotation_clip=False,
    )
    for y, s in zip(at, shown, strict=True):
        axes.annotate(
            f"{s.value:.2f}×", (s.high, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9,
            bbox={"boxstyle": "square,pad=0.1", "color": "white"},
        )
    axes.set_yticks(at, list(bars))
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel(unit)
    axes.set_ylim(len(bars) - 0.4, -0.7)
    finish(axes, legend=False, title=title, pad=16)
    axes.grid(visible=False, axis="y")
    return figure


def acceptance_by_depth(series: Mapping[str, Sequence[float]]) -> Figure:
    """Lines: the share of steps whose accepted path reached each depth, one line per task or drafter."""
    figure, axes = canvas(6.4, 3.8)
    for i, (name, shares) in enumerate(series.items()):
        marker, colour = MARKERS[i % len(MARKERS)], SERIES[i % len(SERIES)]
        axes.plot(range(1, len(shares) + 1), shares, marker=marker, color=colour, label=name)
    deepest = max((len(shares) for shares in series.values()), default=1)
    axes.set_xticks(range(1, deepest + 1))
    axes.set_xlabel("depth of the drafted token")
    axes.set_ylabel("share of steps that accepted it")
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    finish(axes, legend=True, title="How deep drafts are accepted")
    return figure


def latency_by_candidates(cells: Sequence[Mapping[str, Any]], prompt_tokens: int) -> Figure:
    """Lines with intervals: ms a token over the number of candidates, one line per batch size; 0 is the baseline."""
    figure, axes = canvas(6.4, 3.8)
    mine = [c for c in cells if c["prompt_tokens"] == prompt_tokens and c["candidates"] is not None]
    counts = sorted({c["candidates"] for c in mine})
    for i, batch in enumerate(sorted({c["batch"] for c in mine})):
        row = sorted((c for c in mine if c["batch"] == batch), key=lambda c: c["candidates"])
        at = [counts.index(c["candidates"]) for c in row]
        values = [c["ms_per_token"] for c in row]
        low = [max(0.0, c["ms_per_token"] - c["ms_per_token_ci"][0]) for c in row]
        high = [max(0.0, c["ms_per_token_ci"][1] - c["ms_per_token"]) for c in row]
        marker, colour = MARKERS[i % len(MARKERS)], SERIES[i % len(SERIES)]
        axes.errorbar(at, values, yerr=[low, high], marker=marker, capsize=3, color=colour, label=f"batch {batch}")
    axes.set_xticks(range(len(counts)), [str(count) for count in counts])
    axes.set_xlabel("candidates verified in a step (0: plain decoding)")
    axes.set_ylabel("ms a token")
    axes.set_ylim(bottom=0)
    finish(axes, legend=True, title=f"Time of a token, prompts of {prompt_tokens} tokens ({INTERVALS})")
    return figure


def before_and_after(before: Mapping[str, float], after: Mapping[str, float]) -> Figure:
    """Bars: tokens per step of each task before and after training."""
    figure, axes = canvas(6.0, 3.8)
    for i, (label, values) in enumerate((("before training", before), ("after training", after))):
        at = [g + (i - 0.5) * 0.38 for g in range(len(values))]
        bars = axes.bar(at, list(values.values()), 0.35, color=(GREY, BLUE)[i], label=label)
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=9)
    axes.axhline(1, color=INK, linewidth=0.8, linestyle=":", label="plain decoding: 1")
    axes.set_xticks(range(len(before)), list(before))
    axes.set_xlabel("task")
    axes.set_ylabel("tokens per step, τ")
    headroom(axes)
    finish(axes, legend=True, title="Tokens per step on held-out prompts")
    return figure


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Return an empty figure with its axes; sizes in inches."""
    figure = Figure(figsize=(width, height), dpi=144, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def headroom(axes: Axes) -> None:
    """Leave room above bars, for a legend."""
    axes.set_ylim(0, axes.get_ylim()[1] * 1.22)


def finish(axes: Axes, legend: bool, title: str = "", pad: float = 6) -> None:
    """Give the axes the look that all pictures share; a legend stands inside, where it hides least."""
    if title:
        axes.set_title(title, fontsize=10, color=INK, loc="left", pad=pad)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    if legend:
        axes.legend(fontsize=8.5, loc="best", framealpha=0.85, edgecolor=GRID)


def training_curve(curve: Sequence[tuple[float, float]]) -> Figure:
    """Lines: the mean loss a stage over the seconds of a run, as measured and smoothed."""
    figure, axes = canvas(6.0, 3.6)
    seconds, losses = [point[0] for point in curve], [point[1] for point in curve]
    smooth: list[float] = []
    for loss in losses:
        smooth.append(loss if not smooth else 0.9 * smooth[-1] + 0.1 * loss)
    axes.plot(seconds, losses, color=GREY, alpha=0.5, linewidth=1, label="each step")
    axes.plot(seconds, smooth, color=BLUE, linewidth=1.8, label="smoothed")
    axes.set_xlabel("seconds since the command began to train")
    axes.set_ylabel("loss, nats a stage")
    finish(axes, legend=True, title="Loss while training live")
    return figure


def coloured_text(pieces: Sequence[tuple[str, bool]], columns: int = 92) -> Figure:
    """A monospaced text whose marked pieces have a green background, below a caption; long lines are folded."""
    lines: list[list[tuple[str, bool]]] = [[(c, True) for c in "green"] + [(c, False) for c in CAPTION], [], []]
    for character, marked in ((c, marked) for piece, marked in pieces for c in piece):
        if character == "\n" or len(lines[-1]) >= columns:
            lines.append([])
        if character != "\n":
            lines[-1].append((character if character.isprintable() else " ", marked))
    size, height = 9.0, 0.19
    width = size * 0.602 / 72
    total = height * (len(lines) + 1)
    figure = Figure(figsize=(width * (columns + 4), total), dpi=144)
    FigureCanvasAgg(figure)
    across, down = width / (width * (columns + 4)), height / total
    for row, line in enumerate(lines):
        y = 1 - (row + 1) * down
        for column, (character, marked) in enumerate(line):
            style: dict[str, Any] = {"color": INK, "fontsize": size, "family": "DejaVu Sans Mono"}
            x = (column + 2) * across
            if marked:
                style["color"] = "#14633a"
                figure.add_artist(Rectangle((x, y - 0.3 * down), across, down, color="#d5f0df", linewidth=0))
            figure.text(x, y, character.replace("$", r"\$"), **style)
    return figure
