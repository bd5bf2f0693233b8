"""Sends answers, as JSON in one piece or as a stream of events, and stops the work for clients that have left."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from draftsmith.serving.body import CLOSED
from draftsmith.serving.errors import ApiError, broken

log = logging.getLogger(__name__)
ANTHROPIC = "/v1/messages"
T = TypeVar("T")
Told = Callable[[ApiError], str]


_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def dumps(value: Any) -> str:
    """Return JSON in ASCII: some clients also split streams at non-ASCII characters that count as line ends."""
    return _ENCODER.encode(value)


def json_answer(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return an answer in one piece."""
    return Response(dumps(value), status, headers, media_type="application/json")


def error_answer(error: ApiError, scope: Scope) -> Response:
    """Return an error in the form of the request's route: Anthropic's or OpenAI's."""
    is_anthropic = scope["path"].startswith(ANTHROPIC)
    told = error.anthropic(scope["state"]["request_id"]) if is_anthropic else error.openai()
    headers = error.headers()
    if error.status in (408, 413):
        headers["connection"] = "close"  # the rest of the body is not read
    return json_answer(told, error.status, headers)


def data(value: Any) -> str:
    """Return an event of OpenAI's streams."""
    return f"data: {dumps(value)}\n\n"


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Return the result of the work; if the client leaves before, the work is cancelled.

    Raises:
        ApiError: the client left.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_gone(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(CLOSED, "the client left.")
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _ClientLeft(Exception):
    """Nobody reads the stream any more; an OSError of the engine says something else."""


class EventStream(Response):
    """A stream of events whose first event is already there; an error before it was answered with an HTTP status.

    Args:
        first: the first event.
        events: the events after it; closed at the end, and when the client leaves.
        failure: writes an error in the middle of the stream as its last events.
    """

    media_type = "text/event-stream"

    def __init__(self, first: str, events: AsyncGenerator[str, None], failure: Told) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first, self._events, self._failure = first, events, failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client leaves."""
        writing = asyncio.create_task(self._write(send))
        left = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait((writing, left), return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            for one in (writing, left):
                one.cancel()
            await asyncio.gather(writing, left, return_exceptions=True)
            await self._events.aclose()

    async def _write(self, send: Send) -> None:
        async def write(event: str, more: bool = True) -> None:
            try:
                await send({"type": "http.response.body", "body": event.encode("utf-8", "replace"), "more_body": more})
            except OSError as error:
                raise _ClientLeft from error

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        with suppress(_ClientLeft):
            await write(self._first)
            try:
                async for event in self._events:
                    await write(event)
            except ApiError as error:
                await write(self._failure(error))
            except _ClientLeft:
                raise
            except Exception:
                log.exception("a stream failed")
                await write(self._failure(broken()))
            await write("", more=False)


async def streamed(request: Request, events: AsyncGenerator[str, None], failure: Told) -> Response:
    """Return a stream once its first event is there, so that an error before that is answered with an HTTP status.

    Raises:
        ApiError: the first event failed, or the client left.
    """
    try:
        first = await unless_gone(request, anext(events))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events, failure)
