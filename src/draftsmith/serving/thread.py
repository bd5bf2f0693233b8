"""A thread for what takes too long for the event loop, with a bound on how many requests may wait for it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from draftsmith.serving.errors import full

T = TypeVar("T")


class BoundedThread:
    """Does one piece of work after the other.

    Args:
        name: of the thread.
        most: pieces that may wait or be worked on at once; further ones are refused (429).
        waiting: what waits then, as the end of "7 …".
    """

    def __init__(self, name: str, most: int, waiting: str) -> None:
        self._most, self._waiting, self._inside = most, waiting, 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def run(self, work: Callable[[], T]) -> T:
        """Return what a piece of work returns; ApiError 429 where too many wait."""
        if self._inside >= self._most:
            raise full(f"{self._inside} {self._waiting}")
        self._inside += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            self._inside -= 1

    def close(self) -> None:
        """End after the piece that is worked on now; those that wait are not begun."""
        self._thread.shutdown(wait=False, cancel_futures=True)
