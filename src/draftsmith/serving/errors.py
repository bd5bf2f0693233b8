"""What goes wrong with a request, as its client is told: OpenAI's form and Anthropic's."""

import re
from dataclasses import dataclass
from typing import Any

_DIGITS = re.compile(r"([0-9]{20})[0-9]{20,}")
WAIT_S = 1
"""What a client is told to wait for when there is no room."""


@dataclass
class ApiError(Exception):
    """A request that is not served, or not to its end.

    Args:
        status: of HTTP.
        message: one sentence for whoever wrote the client.
        kind: OpenAI's `type`; None takes the one that goes with the status.
        param: the field that is to blame, if one is.
        code: a word for programs to tell it by.
        retry_after: seconds after which it is worth another try.
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
    """Return what a mistake of the client's is answered with; a number of hundreds of digits is not told in full."""
    return ApiError(400, _DIGITS.sub(r"\1…", message), param=param, code=code)


def full(what: str) -> ApiError:
    """Return what whoever finds no room is answered with."""
    return ApiError(429, f"the server is full: {what}; try again soon.", code="queue_full", retry_after=WAIT_S)


def late() -> ApiError:
    """Return what is answered when the time of a request is up."""
    return ApiError(504, "the time for this request is up.", code="timeout")


def broken() -> ApiError:
    """Return what a mistake of the server's is answered with; the log has what happened."""
    return ApiError(500, "the server failed on this request; its log says more under the request's id.")
