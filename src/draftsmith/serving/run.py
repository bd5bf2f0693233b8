"""Runs the application until a signal asks it to end, and lets running requests finish first."""

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from draftsmith.serving.app import application
from draftsmith.serving.protocol import patient_for
from draftsmith.serving.service import Service
from draftsmith.types import DraftsmithError

log = logging.getLogger("draftsmith.serving")
BACKLOG = 2048
"""Connections that may wait to be accepted; uvicorn's own number."""
LOOK_S = 0.25
"""Seconds between two checks whether the engine still works."""
LAST_S = 1.0
"""Seconds that the server goes on after its engine has stopped, to answer open requests and health checks."""
KEEP_S = 60
"""Seconds that an idle connection stays open; a client that sends a request just as it closes would get an error."""
GRACE_S = 3
"""Seconds that the server waits at its end for clients that are still reading."""


class Server(uvicorn.Server):
    """A uvicorn server that ends in two steps: first it lets no new requests in, then it closes connections.

    After a second signal it waits no longer for texts that still run, and a third one ends it at once.
    """

    def __init__(self, config: uvicorn.Config, service: Service, on_ready: Callable[[], None] = lambda: None) -> None:
        super().__init__(config)
        self._service, self._on_ready = service, on_ready
        self._drain: asyncio.Task[None] | None = None
        self._hurried = asyncio.Event()
        self._signals = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watch: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen and to watch the engine."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._watch = self._loop.create_task(self._watch_engine())
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end; unlike uvicorn's own handler, this one lets the process exit with 0 after the first two."""
        self._signals += 1
        if self._signals > 2:
            # Any end in good order waits for the engine's thread, which may hang in a step. As the first process of a
            # container this one would not see the signal's usual effect, so it takes the status that follows from it.
            os._exit(128 + sig)
        if self._loop is None or self.should_exit:
            # Not by force, which would break the application off instead of ending it; its end is near in any case.
            self.should_exit = True
            return
        self._loop.call_soon_threadsafe(self.drain if self._signals == 1 else self._hurried.set)

    def drain(self) -> None:
        """Let no more requests in, and end once the running ones have ended, their time is up or a signal hurries."""
        if self._drain is None:
            self._drain = asyncio.ensure_future(self._end())

    async def _end(self) -> None:
        seconds = self._service.settings.drain_seconds
        log.info("draining", extra={"fields": {"texts": self._service.inside, "seconds": seconds}})
        draining = asyncio.ensure_future(self._service.drained(seconds))
        hurried = asyncio.ensure_future(self._hurried.wait())
        await asyncio.wait((draining, hurried), return_when=asyncio.FIRST_COMPLETED)
        for one in (draining, hurried):
            one.cancel()
        if not (draining.done() and draining.result()):
            log.warning("not all texts came to their end", extra={"fields": {"texts": self._service.inside}})
            await self._service.cut_short(LAST_S)
        self.should_exit = True

    async def _watch_engine(self) -> None:
        while self._service.engine.failure is None:
            await asyncio.sleep(LOOK_S)
        await asyncio.sleep(LAST_S)
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address; DraftsmithError where that is not possible."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches Nagle's algorithm off only for sockets that are declared as TCP. With Nagle's algorithm, a small
    # piece of a stream waits up to 40 ms for the client to acknowledge the piece before it.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        bound.close()
        raise DraftsmithError(f"{host}:{port} cannot be listened at ({error}); choose another host or port.") from error
    return bound


def run(service: Service, bound: socket.socket, on_ready: Callable[[], None] = lambda: None) -> None:
    """Serve until a signal comes, then let running requests end.

    Args:
        bound: where to listen; closed at the end.
        on_ready: called once requests are let in.

    Raises:
        DraftsmithError: the engine has stopped.
    """
    config = uvicorn.Config(
        application(service), log_config=None, access_log=False, server_header=False,
        http=patient_for(service.settings), ws="none", lifespan="on", timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=KEEP_S,
    )
    Server(config, service, on_ready).run(sockets=[bound])
    failure = service.engine.failure
    if failure is not None:
        raise DraftsmithError(
            f"the engine has stopped ({type(failure).__name__}: {failure}); start the server again."
        ) from failure
