"""Bars for work in several parts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn


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
