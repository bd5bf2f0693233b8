"""Waits until the server is ready: one that has just been started loads its model before it lets requests in."""

import asyncio
import time
from collections.abc import Callable

from draftsmith.evaluation.load.client import Client
from draftsmith.evaluation.load.settings import Server
from draftsmith.types import DraftsmithError

LOOK_S = 0.5
"""Seconds between two questions."""
ANSWER_S = 10.0
"""Seconds that one question may take."""

OnWait = Callable[[str], None]


async def wait_until_ready(server: Server, on_wait: OnWait = lambda told: None) -> None:
    """Return once a server is ready, or at once where its `ready_timeout` is 0.

    Args:
        on_wait: called with a sentence when waiting begins, and whenever something else is waited for.

    Raises:
        DraftsmithError: the server was not ready in time, or its address cannot be right.
    """
    longest = server.ready_timeout
    if not longest:
        return
    end, told = time.monotonic() + longest, ""
    async with Client(server) as client:
        while missing := await client.missing(max(LOOK_S, min(ANSWER_S, end - time.monotonic()))):
            left = end - time.monotonic()
            if left <= 0:
                raise DraftsmithError(
                    f"{missing}, and the server was not ready within {longest:g} s; check --base-url, and that "
                    "it runs, or wait longer with --ready-check-timeout-sec."
                )
            if missing != told:
                told = missing
                on_wait(f"Waiting up to {longest:g} s until the server is ready: {missing}.")
            await asyncio.sleep(min(LOOK_S, left))
