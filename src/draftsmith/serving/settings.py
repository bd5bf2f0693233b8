"""How a server is set up: its name, its keys, and how much it lets anybody ask for."""

import math
from dataclasses import dataclass
from typing import Literal

from draftsmith.types import DraftsmithError

Detail = Literal["none", "summary", "detailed"]
OPTIONS = frozenset({"max_waiting", "request_timeout", "drain_seconds", "max_body_bytes"})
"""The limits that the command has options for, of the same names."""


@dataclass(frozen=True)
class Settings:
    """The settings of a server: names, keys and limits.

    Args:
        names: names that requests may use for the model; answers use the first. `serve` takes the target's name where
            none is given.
        root: the folder or name that the target was loaded from.
        keys: API keys, one of which every request has to bring; without any, everybody is let in.
        max_waiting: texts that may wait, besides those being written; requests beyond that are refused (429).
        request_timeout: most seconds that a request may take, waiting included.
        drain_seconds: how long running requests may go on after the server was asked to end.
        body_seconds, head_seconds: how long the body and the head of a request may take to arrive.
        send_seconds: how long a client may leave its answer unread; then its connection is cut.
        stall_seconds: an engine whose step takes longer than this counts as hanging; a step that reads a piece of a
            prompt may take seconds.
        max_body_bytes: largest body of a request.
        max_headers: most header fields of a request.
        max_texts: most texts of one request, prompts times copies.
        max_stops, max_stop_characters: most stop strings, and the longest.
        max_bias: most entries of `logit_bias`.
        max_tools: most tools of one request.
        max_logprobs: most alternatives whose log-probabilities a request may ask for.
        max_branching: most guesses that a request's own plan may make after one token.
        template_seconds: how long the target's chat template may take.
        grammar_seconds: how long the required form of an answer may take to compile, in a process of its own.
        metrics: how much of their drafts' statistics answers carry if the request does not say.
    """

    names: tuple[str, ...] = ()
    root: str = ""
    keys: tuple[str, ...] = ()
    max_waiting: int = 256
    request_timeout: float = 600.0
    drain_seconds: float = 30.0
    body_seconds: float = 20.0
    head_seconds: float = 20.0
    send_seconds: float = 60.0
    stall_seconds: float = 120.0
    max_body_bytes: int = 4 << 20
    max_headers: int = 128
    max_texts: int = 128
    max_stops: int = 16
    max_stop_characters: int = 256
    max_bias: int = 1024
    max_tools: int = 128
    max_logprobs: int = 20
    max_branching: int = 16
    template_seconds: float = 2.0
    grammar_seconds: float = 2.0
    metrics: Detail = "none"

    def __post_init__(self) -> None:
        if not all(self.names):
            raise DraftsmithError("a name of the served model is empty; give one, or none to take the target's own.")
        if not all(key.strip() for key in self.keys):
            raise DraftsmithError("an API key is empty; give a key, or none to let everybody in.")
        for name in ("max_waiting", "drain_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise DraftsmithError(f"{_told(name)} is {getattr(self, name)}; give a finite number of 0 or more.")
        for name in (
            "request_timeout", "body_seconds", "head_seconds", "send_seconds", "stall_seconds", "max_body_bytes",
            "grammar_seconds",
        ):
            if not 0 < getattr(self, name) < math.inf:
                raise DraftsmithError(f"{_told(name)} is {getattr(self, name)}; give a finite number above 0.")

    @property
    def name(self) -> str:
        """The name of the model in answers."""
        return self.names[0]


def _told(name: str) -> str:
    """Return what a limit is called in messages: its option, if it has one."""
    return f"--{name.replace('_', '-')}" if name in OPTIONS else name
