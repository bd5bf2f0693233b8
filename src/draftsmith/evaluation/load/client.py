"""The connection to the server: its models, its tokens, its counters, and one streamed request."""

import asyncio
import json
import socket
import ssl
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from difflib import get_close_matches
from types import TracebackType
from typing import Any, Self

from draftsmith.evaluation.load.events import Events
from draftsmith.evaluation.load.records import Record, message_of
from draftsmith.evaluation.load.settings import Server
from draftsmith.evaluation.load.speculation import Counters, read_counters
from draftsmith.types import DraftsmithError

try:
    import httpx2
except ImportError as error:
    raise DraftsmithError("`load` needs the package httpx2; install draftsmith[serve].") from error

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
CONNECT_SECONDS = 30.0
NOT_OFFERED = (404, 405, 501)
NOT_YET = (502, 503, 504)
"""The status of a server that still loads, or of a proxy before it."""
FINAL = (socket.gaierror, ssl.SSLError)
"""Why a connection cannot be made, and never will be: the host has no address, or speaks no TLS that can be trusted."""
PASSING = (ssl.SSLEOFError, ssl.SSLWantReadError, ssl.SSLZeroReturnError)
"""What is of these types, but says only that the other side closed the connection or did not answer in time.

So does a `socket.gaierror` with EAI_AGAIN of a name server: where containers have names, it is what a name gives whose
container is not up yet.
"""
SHORTEST_CHARACTERS = 32
END_SECONDS = 0.5
"""Seconds that a server may take to end an answer after its last event; only then is the connection used again."""
OURS = "draftsmith"
"""`owned_by` in the model list of our own server, which reports a request's draft statistics when asked."""


class Client:
    """Speaks to one server only: it takes no proxy and no key from the environment, and follows no redirect."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.is_ours = False
        self._fits: int | None = None
        headers = {"Accept-Encoding": "identity"}
        if server.api_key:
            headers["Authorization"] = f"Bearer {server.api_key}"
        self._http = httpx2.AsyncClient(
            base_url=server.base_url,
            headers=headers,
            timeout=httpx2.Timeout(server.timeout, connect=min(CONNECT_SECONDS, server.timeout), pool=None),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            follow_redirects=False,
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.__aexit__(kind, error, trace)

    async def missing(self, seconds: float) -> str:
        """Ask once whether the server is ready; return what is missing, or "" where there is nothing to wait for.

        The latter means one of two things: the server is ready, or it does not say whether it is, because it has no
        `/ready` or does not let us ask. What is asked next tells them apart.

        Args:
            seconds: how long the whole question may take, the answer included.

        Raises:
            DraftsmithError: the host has no address, or the connection cannot be encrypted.
        """
        try:
            # The time limit of the package is one for each piece of an answer.
            async with asyncio.timeout(seconds):
                response = await self._http.get("/ready", timeout=seconds)
        except (httpx2.HTTPError, TimeoutError) as error:
            if any(is_final(cause) for cause in causes(error)):
                raise DraftsmithError(f"{self._unreachable(error)}; check --base-url.") from error
            return self._unreachable(error)
        return f"the server answered {response.status_code} at /ready" if response.status_code in NOT_YET else ""

    async def model(self) -> str:
        """Return the model to ask for: the one that was named, if the server has it, or the server's only one.

        Raises:
            DraftsmithError: the server cannot be reached, refuses the key, or has another model.
        """
        wanted = self.server.model
        response = await self._ask("GET", "/v1/models")
        if response.status_code in NOT_OFFERED and wanted is not None:
            return wanted
        try:
            entries = response.json()["data"] if response.status_code == 200 else []
            names = [str(entry["id"]) for entry in entries]
            self.is_ours = any(entry.get("owned_by") == OURS for entry in entries)
        except (ValueError, KeyError, TypeError, AttributeError):
            names = []
        if wanted is None:
            if len(names) == 1:
                return names[0]
            known = f"has {len(names)} ({', '.join(names[:8])})" if names else "names none at /v1/models"
            raise DraftsmithError(f"the server {known}; say which model with --model.")
        if names and wanted not in names:
            near = get_close_matches(wanted, names, 1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(names[:8])}."
            raise DraftsmithError(f"the server has no model {wanted!r}; {hint}")
        return wanted

    async def tokenize(self, text: str, model: str) -> list[int]:
        """Return the ids of a text by `/tokenize`, without the special tokens around a prompt.

        A server may refuse a text that is longer than its model's context; then only the beginning is sent, of this
        text and of those that follow.
        """
        while True:
            text = text[: self._fits]
            # The last two fields are the names of llama.cpp's server.
            body = {
                "model": model, "prompt": text, "add_special_tokens": False, "content": text, "add_special": False,
            }
            response = await self._ask("POST", "/tokenize", body)
            if response.status_code != 400 or len(text) <= SHORTEST_CHARACTERS:
                break
            self._fits = len(text) // 2
        try:
            found = [int(token) for token in response.json()["tokens"]] if response.status_code == 200 else []
            if found or not text:
                return found
        except (ValueError, KeyError, TypeError):
            pass
        raise DraftsmithError(
            f"the server's /tokenize gave no ids (status {response.status_code}), so texts cannot be cut to a number "
            "of tokens; leave out --input-len, or take --dataset random with --vocab-size."
        )

    async def counters(self) -> Counters | None:
        """Return the server's counts of its drafts so far; None where it does not report them."""
        try:
            response = await self._http.get("/metrics")
        except httpx2.HTTPError:
            return None
        return read_counters(response.text) if response.status_code == 200 else None

    async def send(self, body: Mapping[str, Any]) -> Record:
        """Send one request and return the record of its answer; an error is a sentence in the record.

        A server may close a kept connection just as it is used again, which is no fault of the server; then the request
        is sent once more.
        """
        record = Record(sent=time.perf_counter())
        if not await self._sent(body, record):
            record = Record(sent=time.perf_counter(), again=True)
            await self._sent(body, record)
        return record

    async def _sent(self, body: Mapping[str, Any], record: Record) -> bool:
        """Fill the record; return False where a kept connection broke before any of the answer had come."""
        is_new = answered = finished = False

        async def note(event: str, info: Mapping[str, Any]) -> None:
            nonlocal is_new
            is_new = is_new or event == "connection.connect_tcp.started"

        try:
            path = PATHS[self.server.endpoint]
            async with self._http.stream("POST", path, json=dict(body), extensions={"trace": note}) as response:
                answered = True
                if response.status_code != 200:
                    await response.aread()
                    record.error = self._refused(response)
                    return True
                pieces = timed_events(response)
                async for now, events in pieces:
                    for event in events:
                        if event == b"[DONE]":
                            finished = True
                        elif not finished:
                            record.take(json.loads(event), now)
                    if finished:
                        break
                if finished:
                    await let_end(pieces)
        except httpx2.HTTPError as error:
            broke = isinstance(error, httpx2.RemoteProtocolError | httpx2.ReadError | httpx2.WriteError)
            if broke and not is_new and not answered and not record.again:
                return False
            record.error = record.error or self._unreachable(error)
        except (ValueError, AttributeError, TypeError, ArithmeticError, RecursionError):
            record.error = record.error or "the server sent something that is no chunk of an answer"
        record.close(finished)
        return True

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> httpx2.Response:
        try:
            response = await self._http.request(method, path, json=body)
        except httpx2.HTTPError as error:
            raise DraftsmithError(f"{self._unreachable(error)}; check --base-url, and that it runs.") from error
        if response.status_code in (401, 403):
            raise DraftsmithError(f"{self._refused(response)}.")
        return response

    def _unreachable(self, error: httpx2.HTTPError | TimeoutError) -> str:
        if isinstance(error, httpx2.TimeoutException | TimeoutError):
            return f"the server at {self.server.base_url} did not answer in time ({type(error).__name__})"
        if isinstance(error, httpx2.ConnectError):
            return f"the server at {self.server.base_url} cannot be reached ({first_line(error)})"
        return f"the connection to {self.server.base_url} broke ({first_line(error)})"

    def _refused(self, response: httpx2.Response) -> str:
        status = response.status_code
        if status in (401, 403):
            given = "refuses the API key" if self.server.api_key else "wants an API key"
            return f"the server {given} (status {status}); give the right one with --api-key"
        if 300 <= status < 400:
            return f"the server sends on to {response.headers.get('location', 'elsewhere')} (status {status})"
        try:
            reason = message_of(response.json())
        except ValueError:
            reason = message_of(response.text)
        return f"the server answered {status}: {reason}"


async def timed_events(response: httpx2.Response) -> AsyncIterator[tuple[float, list[bytes]]]:
    """Yield the events of a response in the pieces in which they arrived, each piece with its time."""
    events = Events()
    async for piece in response.aiter_bytes():
        yield time.perf_counter(), events.feed(piece)
    yield time.perf_counter(), events.end()


async def let_end(pieces: AsyncIterator[tuple[float, list[bytes]]]) -> None:
    """Read what follows the last event; the answer is complete, so errors are ignored here."""
    with suppress(httpx2.HTTPError, TimeoutError):
        async with asyncio.timeout(END_SECONDS):
            async for _ in pieces:
                pass


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the error's name if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and, one after the other, those that it came from."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def is_final(cause: BaseException) -> bool:
    """Whether this says that a connection cannot be made now or later."""
    if isinstance(cause, socket.gaierror):
        return cause.errno != socket.EAI_AGAIN
    return isinstance(cause, FINAL) and not isinstance(cause, PASSING)


@asynccontextmanager
async def connected(server: Server) -> AsyncIterator[tuple[Client, str]]:
    """Yield a connected client and the model to ask for; DraftsmithError if the server does not let us in."""
    async with Client(server) as client:
        yield client, await client.model()
