"""Answers while the model loads, so that a server that starts can be told from one that is gone."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from socket import socket

import uvicorn
from starlette.types import Receive, Scope, Send

from draftsmith.serving.access import Access
from draftsmith.serving.errors import ApiError
from draftsmith.serving.metrics import HttpMetrics
from draftsmith.serving.protocol import patient_for
from draftsmith.serving.settings import Settings

AGAIN_S = 5
"""Seconds that clients are told to wait before they ask again."""
END_S = 1
"""Seconds that answers may still take once the model is loaded, or cannot be."""
LOOK_S = 0.01


async def not_yet(scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse every request, `/health` too: those who wait for its 200 take it for a sign that requests are served."""
    raise ApiError(
        503, "the server still loads its model and measures drafts; try again soon.", code="loading",
        retry_after=AGAIN_S,
    )


@contextmanager
def answering(bound: socket, settings: Settings) -> Iterator[None]:
    """Refuse requests with 503 until the block ends; those that come between its end and the real server wait.

    The answers come from an event loop in a thread of its own, which has next to no work while nobody asks. Signals
    are left as they are.

    Args:
        bound: a socket that listens; it still does so afterwards.
    """
    config = uvicorn.Config(
        Access(not_yet, settings, HttpMetrics(), ("/",), ()), log_config=None, access_log=False, server_header=False,
        http=patient_for(settings), ws="none", lifespan="off", timeout_graceful_shutdown=END_S,
        headers=[("connection", "close")],  # kept connections would end with this server
    )
    server = uvicorn.Server(config)
    # Closing a duplicate leaves the connections that wait at the socket to whoever listens next.
    thread = threading.Thread(target=server.run, args=([bound.dup()],), name="draftsmith-starting", daemon=True)
    thread.start()
    try:
        while thread.is_alive() and not server.started:
            time.sleep(LOOK_S)
        yield
    finally:
        server.should_exit = True
        thread.join()
