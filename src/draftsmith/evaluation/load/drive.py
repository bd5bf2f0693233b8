"""Sends the requests of one level at their times, with a limit on those in flight, and watches its own event loop."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from draftsmith.evaluation.load.records import Record

HEARTBEAT = 0.01
LAG_LIMIT = 0.01
CPU_LIMIT = 0.8

Send = Callable[[dict[str, Any]], Awaitable[Record]]


@dataclass
class Level:
    """What was measured under one load. Times are seconds of `time.perf_counter`.

    Args:
        clients: the most requests in flight; None for no limit.
        records: the records of the requests that ended, in the order in which they ended.
        unfinished: requests that were in flight when the measurement was interrupted.
        unsent: requests that had not been sent by then.
        peak: the most requests that really were in flight.
        waits: seconds by which requests were sent after their time, because all clients were busy or this process was.
        lags: seconds by which a timer of this process was late, measured again and again.
        cpu: seconds of processor time that this process took.
    """

    clients: int | None
    records: list[Record] = field(default_factory=list)
    began: float = 0.0
    ended: float = 0.0
    unfinished: int = 0
    unsent: int = 0
    peak: int = 0
    waits: list[float] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    cpu: float = 0.0

    @property
    def name(self) -> str:
        """The name of the level in reports."""
        return level_name(self.clients)

    @property
    def complete(self) -> bool:
        """Whether every request ended."""
        return self.unfinished == self.unsent == 0

    @property
    def duration(self) -> float:
        """Seconds from the first request to the last answer, or to the interruption."""
        return max(self.ended - self.began, 1e-9)

    @property
    def lag(self) -> float:
        """The 99th percentile of the lateness of this process's timers, in seconds."""
        ordered = sorted(self.lags)
        return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] if ordered else 0.0

    @property
    def cpu_share(self) -> float:
        """The part of one core that this process took."""
        return self.cpu / self.duration

    @property
    def bottleneck(self) -> bool:
        """Whether the generator itself was too slow for its own numbers to be trusted."""
        return self.lag > LAG_LIMIT or self.cpu_share > CPU_LIMIT


def level_name(clients: int | None) -> str:
    """Say how many clients there are at most."""
    if clients is None:
        return "no limit of clients"
    return "1 client" if clients == 1 else f"{clients} clients"


async def drive(
    level: Level,
    bodies: Sequence[dict[str, Any]],
    times: Sequence[float],
    send: Send,
    on_done: Callable[[Record], None],
) -> None:
    """Send every body when it is due, and fill `level` while answers come; a cancellation keeps what has come by then.

    Args:
        times: when each body is due, in seconds from now; if all clients are busy then, it waits for a free one.
    """
    places = asyncio.Semaphore(level.clients) if level.clients is not None else None
    level.unsent = len(bodies)
    level.began = level.ended = time.perf_counter()
    processor = time.process_time()
    beat = asyncio.create_task(watch(level.lags))

    async def one(body: dict[str, Any]) -> None:
        level.unsent -= 1
        level.unfinished += 1
        level.peak = max(level.peak, level.unfinished)
        try:
            record = await send(body)
        finally:
            if places is not None:
                places.release()
        level.unfinished -= 1
        level.records.append(record)
        level.ended = time.perf_counter()
        on_done(record)

    try:
        async with asyncio.TaskGroup() as group:
            for body, due in zip(bodies, times, strict=True):
                ahead = level.began + due - time.perf_counter()
                if ahead > 0:
                    await asyncio.sleep(ahead)
                if places is not None:
                    await places.acquire()
                level.waits.append(max(0.0, time.perf_counter() - level.began - due))
                group.create_task(one(body))
    finally:
        beat.cancel()
        level.cpu = time.process_time() - processor
        if not level.complete:
            level.ended = time.perf_counter()
        with suppress(asyncio.CancelledError):
            await beat


async def watch(lags: list[float]) -> None:
    """Note by how much short sleeps are too long, until cancelled: answers are noticed that late, too."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(HEARTBEAT)
        lags.append(max(0.0, time.perf_counter() - before - HEARTBEAT))
