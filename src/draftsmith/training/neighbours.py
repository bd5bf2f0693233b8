"""Fewer threads while other programs want the processor, and all of them again when they are done.

PyTorch's threads wait for each other after every operation, and wait long for one whose core another program has. With
a thread less, none has to share its core.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from rich.console import Console

from draftsmith.processor import Watch, chosen_by_user, usable_cores
from draftsmith.training.terminal import say
from draftsmith.training.wording import counted

LOOKS_EVERY_S = 1.0
MISSING, SPARE = 0.5, 0.75
"""How much less than its threads has to be free, in cores, for there to be fewer, and how much more for one more."""


class Neighbours:
    """Sets the number of PyTorch's threads, for the whole process.

    Args:
        most: threads that there are while nobody else wants the cores.
        cores: that this process may use.
        others: returns how many cores other programs took since the last call; None where that is unknown.
    """

    def __init__(self, console: Console, most: int, cores: int, others: Callable[[], float | None]) -> None:
        self._console, self._most, self._cores, self._others = console, most, cores, others
        self._looked, self._told = -math.inf, False

    def look(self) -> None:
        """Have as many threads as there are free cores; looks only now and then, and costs next to nothing."""
        now = time.monotonic()
        if now - self._looked < LOOKS_EVERY_S:
            return
        self._looked, others = now, self._others()
        if others is None:
            return
        before = torch.get_num_threads()
        after = threads_for(self._cores - others, before, self._most)
        if after == before:
            return
        torch.set_num_threads(after)
        if not self._told:
            self._told = True
            say(
                self._console,
                f"{counted(after, 'thread')} and not {before} while other programs want the processor (now they take "
                f"{min(others, self._cores):.1f} of {counted(self._cores, 'core')}; --threads sets a fixed number).",
            )


def threads_for(free: float, now: int, most: int) -> int:
    """Return how many threads to have where so many cores are free.

    >>> [threads_for(free, 2, 2) for free in (2.0, 1.6, 1.4, 0.2)], [threads_for(free, 1, 2) for free in (1.6, 1.8)]
    ([2, 2, 1, 1], [1, 2])
    """
    if free < now - MISSING:
        return max(1, min(now - 1, round(free)))
    if free > now + SPARE:
        return min(most, int(free + 1 - SPARE))
    return now


@contextmanager
def yielding(console: Console, threads: int | None, watch: Watch) -> Iterator[Callable[[], None]]:
    """Give a function to call now and then while a process trains, see `Neighbours.look`.

    It does nothing where the user chose the number of threads.

    Args:
        threads: what the user asked for.
        watch: since when what others take counts at the first call; at least some tenths of a second before it.
    """
    most = torch.get_num_threads()
    if threads is not None or chosen_by_user() is not None or most == 1:
        yield lambda: None
        return
    watches = [watch]

    def others() -> float | None:
        watches.append(Watch())
        return watches.pop(0).others()

    try:
        yield Neighbours(console, most, len(usable_cores()), others).look
    finally:
        torch.set_num_threads(most)
