"""Bars for long work, and lines where there is no terminal to show them."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

TOLD_EACH_S = 30.0
"""Where a bar cannot be shown, a line comes after so many seconds or more."""


@contextmanager
def progress(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar for each part of the work as it comes; where that is not a terminal, a line."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    bars = Progress(*columns, console=console, transient=True)
    tasks: dict[str, TaskID] = {}

    def report(what: str, done: int, total: int) -> None:
        part = what.partition(":")[0]
        if console.is_terminal:
            bars.start()  # with the first of the work; what is said of loading comes before
        elif part not in tasks:
            console.print(f"[dim]now: {part}[/dim]", highlight=False)
        if part not in tasks:
            tasks[part] = bars.add_task(what, total=total)
        bars.update(tasks[part], description=what, completed=done)

    try:
        yield report
    finally:
        bars.stop()


@contextmanager
def counted(
    console: Console, description: str, *timing: ProgressColumn
) -> Iterator[Callable[[str, int, int], None]]:
    """Show one bar that counts, from the first time on that it is told a label, how much is done, and of how much.

    Where that is not a terminal, a line comes at first and then now and then.

    Args:
        description: stands there in place of a label until the first comes.
        timing: what stands behind the count; the time that is left by default.
    """
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *(timing or [TimeRemainingColumn()])
    bars = Progress(*columns, console=console, transient=True)
    bar, told_at = bars.add_task(description, total=None, start=False), -math.inf

    def report(label: str, done: int, total: int) -> None:
        nonlocal told_at
        if console.is_terminal:
            bars.start()
            bars.start_task(bar)
            bars.update(bar, description=label, completed=done, total=total)
        elif time.monotonic() - told_at >= TOLD_EACH_S:
            told_at = time.monotonic()
            console.print(f"[dim]now: {escape(label)}, {done} of {total}[/dim]", highlight=False)

    try:
        yield report
    finally:
        bars.stop()
