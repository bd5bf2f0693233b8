"""A run in the terminal: a progress bar with rate and time left, and a Ctrl-C that never interrupts a step half-way."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text


class _Rate(ProgressColumn):
    """Items a second."""

    def render(self, task: Task) -> Text:
        """Return the rate, or nothing before it is known."""
        return Text(f"{task.speed:.2f}/s" if task.speed else "", style="dim")


def say(console: Console, *lines: str) -> None:
    """Print lines unchanged: paths and numbers get no colours, brackets are no markup."""
    for line in lines:
        console.print(line, highlight=False, markup=False)


def progress_bar(console: Console) -> Progress:
    """Return a bar with description, count, rate and time left."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True)


@contextmanager
def one_gentle_interrupt() -> Iterator[threading.Event]:
    """Turn the first Ctrl-C into an event, so that a step is never interrupted half-way; a second one stops at once."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def note(_: int, __: Any) -> None:
        event.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
