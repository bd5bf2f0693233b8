"""The errors that clients get for their requests, in OpenAI's and in Anthropic's form."""

import re
from dataclasses import dataclass
from typing import Any

_DIGITS = re.compile(r"([0-9]{20})[0-9]{20,}")
WAIT_S = 1
"""Seconds that a refused client is told to wait before it tries again."""


@dataclass
class ApiError(Exception):
    """The error of a request that is not served, or not to its end.

    Args:
        status: the HTTP status.
        message: one sentence for the client's programmer.
        kind: OpenAI's `type`; None takes the one that goes with the status.
        param: the field that is to blame, if one is.
        code: a word by which programs recognise the error.
        retry_after: seconds after which another try is worthwhile.
    """

    status: int
    message: str
    kind: str | None = None
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None

    def __str__(self) -> str:
        return self.message

    def openai(self) -> dict[str, Any]:
        """Return it as OpenAI's API writes errors."""
        kind = self.kind or OPENAI_TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic(self, request_id: str) -> dict[str, Any]:
        """Return it as Anthropic's API writes errors."""
        kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}, "request_id": request_id}

    def headers(self) -> dict[str, str]:
        """Return the header fields that go with it."""
        found = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        return found | ({"www-authenticate": "Bearer"} if self.status == 401 else {})


OPENAI_TYPES = {
    401: "authentication_error", 404: "not_found_error", 408: "timeout_error", 429: "rate_limit_error",
    499: "client_closed_request", 500: "server_error", 503: "service_unavailable_error", 504: "timeout_error",
}
ANTHROPIC_TYPES = {
    401: "authentication_error", 404: "not_found_error", 408: "timeout_error", 413: "request_too_large",
    429: "rate_limit_error", 500: "api_error", 503: "overloaded_error", 504: "timeout_error",
}


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the error for a client's mistake; its message shortens numbers of 40 digits and more."""
    return ApiError(400, _DIGITS.sub(r"\1…", message), param=param, code=code)


def full(what: str) -> ApiError:
    """Return the error for a request that finds no room."""
    return ApiError(429, f"the server is full: {what}; try again soon.", code="queue_full", retry_after=WAIT_S)


def late() -> ApiError:
    """Return the error for a request whose time is up."""
    return ApiError(504, "the time for this request is up.", code="timeout")


def broken() -> ApiError:
    """Return the error for a failure of the server; the log has the details."""
    return ApiError(500, "the server failed on this request; its log says more under the request's id.")
