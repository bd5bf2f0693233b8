"""What surrounds every request: an id, the check of its key, a count, a log line, and a catch for every exception."""

import hmac
import json
import logging
import re
import secrets
import sys
import time
from collections.abc import Iterable, MutableMapping
from typing import Any
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftsmith.serving.answers import error_answer
from draftsmith.serving.body import CLOSED
from draftsmith.serving.errors import ApiError, broken
from draftsmith.serving.metrics import HttpMetrics
from draftsmith.serving.settings import Settings

log = logging.getLogger("draftsmith.serving")

OPEN = frozenset({"/health", "/ready"})
"""Routes that need no key: those that report the server's health. Pages need none either."""
PROBES = OPEN | {"/metrics"}
"""What other programs read every few seconds: only an answer with another status than the last one is logged."""
MODEL, MODEL_PATHS = "/v1/models/{model}", "/v1/models/"
"""Requests for a single model are counted together, whatever its name."""
REQUEST_IDS = (b"x-request-id", b"request-id")
"""The headers in which OpenAI's and Anthropic's clients read the id of a request."""
_ADDRESS = re.compile(rb"https?://[^/]*", re.IGNORECASE)
_ID = re.compile(r"[\w.:@/+=-]{1,128}")


class Access:
    """The outermost part of the application.

    Args:
        app: the application that answers.
        pages: paths of files that everybody may see.
        routes: paths whose requests are counted by name; all others are counted together.
    """

    def __init__(
        self, app: ASGIApp, settings: Settings, http: HttpMetrics, pages: Iterable[str], routes: Iterable[str]
    ) -> None:
        self.app, self._settings, self._http = app, settings, http
        self._free = OPEN | frozenset(pages)
        self._routes = frozenset(routes)
        self._keys = [key.encode() for key in settings.keys]
        self._probed: dict[str, int] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, and see it to its end."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        take_origin_form(scope)
        began, path = time.monotonic(), str(scope["path"])
        identity = _id_of(scope)
        state: dict[str, Any] = {"request_id": identity, "key": "", "began": began}
        scope["state"] = {**scope.get("state", {}), **state}
        status = 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                named = [(name, identity.encode()) for name in REQUEST_IDS]
                message = {**message, "headers": [*message.get("headers", ()), *named]}
            await send(message)

        problem: ApiError | None = None
        try:
            if len(scope["headers"]) > self._settings.max_headers:
                raise ApiError(431, f"the request has more than {self._settings.max_headers} header fields.")
            if path not in self._free:
                scope["state"]["key"] = self._check_key(scope)
            await self.app(scope, receive, noted)
        except ApiError as error:
            problem = error
        except Exception as error:  # the boundary: whatever failed, other requests go on
            log.error("request %s failed", identity, exc_info=error)
            problem = broken()
        if problem is not None and not status:
            await error_answer(problem, scope)(scope, receive, noted)
        route = MODEL if path.startswith(MODEL_PATHS) else path if path in self._routes else "other"
        self._http.note(route, scope["method"], status or CLOSED, began)
        if path not in PROBES or self._probed.get(path) != status:
            write_line(scope, status or CLOSED, began)
        if path in PROBES:
            self._probed[path] = status

    def _check_key(self, scope: Scope) -> str:
        """Return the key of a request, "" where none is needed; ApiError where it is missing or wrong."""
        if not self._keys:
            return ""
        given = _key_of(scope)
        # Compare with all keys, each in constant time, so that the time taken reveals nothing.
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        if not given or not any(matches):
            raise ApiError(401, "the API key is missing or wrong.", code="invalid_api_key")
        return given.decode("utf-8", "replace")


def take_origin_form(scope: Scope) -> None:
    """Read `GET http://host/health` as `GET /health`: servers have to take both (RFC 9112, section 3.2.2)."""
    if scope["path"].startswith("/"):
        return
    raw: bytes = scope.get("raw_path") or b""
    address = _ADDRESS.match(raw)
    if address is not None:
        scope["raw_path"] = raw[address.end() :] or b"/"
        scope["path"] = unquote(scope["raw_path"].decode("ascii"))


def _key_of(scope: Scope) -> bytes:
    found = b""
    for name, value in scope["headers"]:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            found = bytes(value[7:].strip())
        elif name == b"x-api-key" and not found:
            found = bytes(value.strip())
    return found


def _id_of(scope: Scope) -> str:
    """Return the id that a request brings, if it is safe in a log and a header; otherwise a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = value.decode("latin-1")
            if _ID.fullmatch(text):
                return str(text)
    return f"req-{secrets.token_hex(12)}"


def write_line(scope: Scope, status: int, began: float) -> None:
    """Write the outcome of a request to the log, without any of its content."""
    told: MutableMapping[str, Any] = {
        "request_id": scope["state"]["request_id"], "method": scope["method"], "path": scope["path"],
        "status": status, "seconds": round(time.monotonic() - began, 4), **scope["state"].get("told", {}),
    }
    log.info("request", extra={"fields": told})


class JsonLines(logging.Formatter):
    """Formats every event as a line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(), "event": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_as_json() -> None:
    """Write the log of this process to standard error, a line of JSON for every event."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    log.setLevel(logging.INFO)
