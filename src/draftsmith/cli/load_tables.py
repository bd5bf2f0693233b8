"""What `draftsmith load` prints: one level in full, several beside each other, two results against each other."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from draftsmith.evaluation.load.drive import level_name
from draftsmith.evaluation.load.settings import LoadSettings
from draftsmith.evaluation.load.speculation import FORMULA

ACCEPTANCE = "spec_decode_acceptance_length"
OF_REQUESTS = "spec_decode_mean_request_acceptance_length"
Numbers = Mapping[str, Any]


def show(console: Console, levels: Sequence[Numbers], settings: LoadSettings) -> None:
    """Print what was measured: of one level all percentiles, of several a line each."""
    if len(levels) == 1:
        console.print(counts(levels[0]), style="italic", highlight=False)
        console.print(one_level(levels[0], settings))
    else:
        console.print("A line a number of clients; times in ms.", style="italic", highlight=False)
        console.print(all_levels(levels, settings))
    console.print(
        "TPOT = (E2EL - TTFT) / (tokens - 1), tokens as the server counts them; ITL is the gap between chunks, which "
        "may carry several tokens.", style="dim", highlight=False,
    )
    for line in acceptance_lines(levels):
        console.print(line, highlight=False, markup=False)


def one_level(level: Numbers, settings: LoadSettings) -> Table:
    """Return the table of one level: a line a metric, a column a statistic."""
    columns = ["mean", *(f"p{value:g}" for value in settings.percentiles)]
    table = Table()
    table.add_column("ms", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for metric in settings.metrics:
        table.add_row(metric.upper(), *(number(level.get(f"{name}_{metric}_ms"), 2) for name in columns))
    return table


def all_levels(levels: Sequence[Numbers], settings: LoadSettings) -> Table:
    """Return the table of a sweep: a line a number of clients."""
    table = Table()
    columns = [("clients", "max_concurrency", 0), ("tokens/s", "output_throughput", 1)]
    last = f"p{max(settings.percentiles):g}" if settings.percentiles else None
    for metric in settings.metrics:
        if metric in ("ttft", "tpot"):  # the others are in the files; a terminal is narrow
            columns.append((f"{metric.upper()} p50", f"median_{metric}_ms", 1))
        if metric == "tpot" and last is not None:
            columns.append((f"TPOT {last}", f"{last}_tpot_ms", 1))
    if settings.goodput:
        columns.append(("good/s", "request_goodput", 2))
    if any(ACCEPTANCE in level for level in levels):
        columns.append(("length", ACCEPTANCE, 2))
    if any(level["failed"] for level in levels):
        columns.append(("failed", "failed", 0))
    for name, _, _ in columns:
        table.add_column(name, justify="right", min_width=max(map(len, name.split())))
    for level in levels:
        cells = [number(level.get(key), digits) for _, key, digits in columns]
        cells[0] = clients_of(level)
        table.add_row(*cells)
    return table


def counts(level: Numbers) -> str:
    """Say what one level came to."""
    good = level.get("request_goodput")
    parts = [
        level_name(level["max_concurrency"]).capitalize(),
        f"{level['completed']} requests in {number(level['duration'], 1)} s",
        f"{number(level['output_throughput'], 1)} tokens/s written",
        f"{number(level['total_token_throughput'], 1)} with prompts",
        f"{number(level['request_throughput'], 2)} requests/s",
        *([] if good is None else [f"{number(good, 2)} good ones/s ({level['goodput_share']:.0%} of all)"]),
        *([f"{level['failed']} failed"] if level["failed"] else []),
    ]
    return ", ".join(parts) + "."


def acceptance_lines(levels: Sequence[Numbers]) -> list[str]:
    """Say how drafts fared, with the formula; nothing where no server told."""
    lines = []
    for level in levels:
        if ACCEPTANCE not in level:
            continue
        rates = level["spec_decode_per_position_acceptance_rates"]
        deep = ", ".join(f"{at}: {rate:.0%}" for at, rate in enumerate(rates, 1))
        lines.append(
            f"Drafts with {level_name(level['max_concurrency'])}: acceptance length {level[ACCEPTANCE]:.2f}, rate "
            f"{level['spec_decode_acceptance_rate']:.1f} %" + (f", by position {deep}" if deep else "")
            + (f"; mean length of a request {level[OF_REQUESTS]:.2f}" if OF_REQUESTS in level else "")
        )
    return [*lines, f"({FORMULA}; of all that the server answered meanwhile)"] if lines else []


def show_both(console: Console, names: tuple[str, str], first: Sequence[Numbers], second: Sequence[Numbers]) -> None:
    """Print two results, a line a number of clients that both have; then who else is in the picture only."""
    console.print(f"A is {names[0]}, B is {names[1]}.", style="italic", highlight=False, markup=False)
    table = Table()
    for name in ("clients", "A tokens/s", "B tokens/s", "B / A", "A TPOT ms", "B TPOT ms", "A / B"):
        table.add_column(name, justify="right")
    others = named(second)
    shared = [(name, level) for name, level in named(first).items() if name in others]
    for name, a in shared:
        b = others[name]
        table.add_row(
            name, *compared(a, b, "output_throughput", 1), *compared(b, a, "median_tpot_ms", 2, swap=True)
        )
    if shared:
        console.print(table)
        console.print("Ratios above 1 speak for B. TPOT is the median.", style="dim", highlight=False)
    else:
        console.print("The two were measured with no number of clients in common, so only a picture can show both.")


def compared(low: Numbers, high: Numbers, key: str, digits: int, swap: bool = False) -> list[str]:
    """Return both numbers, the first result's first, and what `high` is of `low`."""
    ratio = f"{high[key] / low[key]:.2f}×" if low[key] else "–"
    both = [number(low[key], digits), number(high[key], digits)]
    return [*(reversed(both) if swap else both), ratio]


def named(levels: Sequence[Numbers]) -> dict[str, Numbers]:
    """Return levels by their clients; of several with as many, the second is "4 (2)"."""
    found: dict[str, Numbers] = {}
    for level in levels:
        name = clients_of(level)
        again = sum(clients_of(one) == name for one in found.values())
        found[f"{name} ({again + 1})" if again else name] = level
    return found


def clients_of(level: Numbers) -> str:
    """Name the number of clients."""
    count = level.get("max_concurrency")
    return "no limit" if count is None else str(count)


def number(value: float | None, digits: int) -> str:
    """Write a number with so many digits, a dash for none."""
    return "–" if value is None else f"{value:,.{digits}f}"
