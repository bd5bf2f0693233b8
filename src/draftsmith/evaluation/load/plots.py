"""Pictures of a server under load: latency against throughput, and the percentiles of a time over the clients."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from draftsmith.evaluation.reporting.plots import INK, MARKERS, SERIES, canvas, finish


def latency_against_throughput(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """One line per result: median milliseconds a token over output tokens a second; points name the clients."""
    figure, axes = canvas(6.4, 4.0)
    for at, (name, levels) in enumerate(curves.items()):
        shown = [level for level in levels if level.get("median_tpot_ms") is not None]
        across, up = ([level[key] for level in shown] for key in ("output_throughput", "median_tpot_ms"))
        colour = SERIES[at % len(SERIES)]
        axes.plot(across, up, marker=MARKERS[at % len(MARKERS)], color=colour, label=name)
        for x, y, level in zip(across, up, shown, strict=True):
            clients = level.get("max_concurrency")
            axes.annotate(
                "no limit" if clients is None else f"{clients}", (x, y), xytext=(5, 5 if at % 2 == 0 else -12),
                textcoords="offset points", fontsize=8, color=INK,
            )
    axes.set_xlabel("output tokens a second, all clients together")
    axes.set_ylabel("median ms a token (TPOT)")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.margins(x=0.1)
    finish(axes, legend=len(curves) > 1, title="Latency against throughput; beside each point its clients")
    return figure


def percentiles_over_clients(levels: Sequence[Mapping[str, Any]], metric: str, names: Sequence[str]) -> Figure:
    """One line per percentile: milliseconds of a metric ("ttft", "tpot" …) over the number of clients."""
    figure, axes = canvas(6.4, 3.8)
    labels = ["no limit" if level["max_concurrency"] is None else str(level["max_concurrency"]) for level in levels]
    for at, name in enumerate(names):
        points = [(x, level.get(f"{name}_{metric}_ms")) for x, level in enumerate(levels)]
        known = [(x, value) for x, value in points if value is not None]
        axes.plot(
            [x for x, _ in known], [value for _, value in known], marker=MARKERS[at % len(MARKERS)],
            color=SERIES[at % len(SERIES)], label=name,
        )
    axes.set_xticks(range(len(levels)), labels)
    axes.set_xlabel("clients")
    axes.set_ylabel(f"{metric.upper()}, ms")
    axes.set_ylim(bottom=0)
    finish(axes, legend=True, title=f"{metric.upper()} over the number of clients")
    return figure
