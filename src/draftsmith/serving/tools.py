"""Calls of tools: the schema that they are held to, and how they are read from the text of an answer as it comes.

Where a request says that a tool has to be called, the answer is a JSON list of calls, whatever the model has learnt.
Where the model decides, it writes calls as it learnt to; read are those between `<tool_call>` and `</tool_call>`.
"""

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from draftsmith.serving.errors import bad
from draftsmith.serving.openai_fields import ChatFields, Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_DECODER = json.JSONDecoder()
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class ToolCall:
    """A call as clients are told of it; the arguments are JSON."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def told(self) -> dict[str, Any]:
        """Return it as a part of a message."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


Part = str | ToolCall
"""A piece of an answer: text to show, or a call."""


class CallReader(ABC):
    """Reads an answer, piece by piece, for text to show and calls to tell; how it is cut changes neither."""

    @abstractmethod
    def feed(self, text: str) -> list[Part]:
        """Take a piece; return what can be shown and told by now, in order."""

    @abstractmethod
    def end(self) -> list[Part]:
        """Return what is left when the answer has ended; what is no call, because it was cut off, is text."""


class ListOfCalls(CallReader):
    """An answer that is a JSON list of calls and no more: each is told when it is whole, one cut off is left out."""

    def __init__(self) -> None:
        self._left, self._told = "", False

    def feed(self, text: str) -> list[Part]:
        self._left += text
        if "}" not in text:  # no call became whole; to read on from its beginning with every piece would take long
            return []
        parts: list[Part] = []
        while "}" in self._left:
            rest = self._left.lstrip(", \t\r\n" if self._told else "[ \t\r\n")
            try:
                value, end = _DECODER.raw_decode(rest)
            except (ValueError, RecursionError):
                break
            call = call_of(value)
            if call is None:
                break
            parts.append(call)
            self._left, self._told = rest[end:], True
        return parts

    def end(self) -> list[Part]:
        return [] if self._told or not self._left else [self._left]


class MarkedCalls(CallReader):
    """An answer that may have calls between marks, and text around them; white space alone beside a call is no text.

    Args:
        most: calls that are told; further ones are left out. None tells all.
    """

    def __init__(self, most: int | None = None) -> None:
        self._left = most
        self._held, self._inside, self._called = "", False, False
        self._space: str | None = ""
        """White space since the last call; None once there was text behind that."""

    def feed(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while True:
            mark = CLOSE if self._inside else OPEN
            before, found, behind = self._held.partition(mark)
            if not found:
                break
            self._held = behind
            call = _read(before) if self._inside else None
            if call is not None:
                if self._left is None or self._left > 0:
                    parts.append(call)
                if self._left:
                    self._left -= 1
                self._called, self._space = True, ""
            elif self._inside:
                parts += self._said(OPEN + before + CLOSE)
            else:
                parts += self._said(before)
            self._inside = not self._inside
        if not self._inside:
            keeps = begun(self._held, OPEN)
            ready, self._held = self._held[: len(self._held) - keeps], self._held[len(self._held) - keeps :]
            parts += self._said(ready)
        return parts

    def end(self) -> list[Part]:
        left, self._held = (OPEN if self._inside else "") + self._held, ""
        parts = self._said(left)
        return parts if self._called or not self._space else [*parts, self._space]

    def _said(self, text: str) -> list[Part]:
        """Return what can be shown of text outside of calls."""
        if self._space is not None:
            text = self._space + text
            self._space = None if text.strip() else text
        return [text] if text and self._space is None else []


def _read(text: str) -> ToolCall | None:
    try:
        return call_of(json.loads(text))
    except (ValueError, RecursionError):
        return None


def begun(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a mark.

    >>> begun("see <tool", "<tool_call>")
    5
    """
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-size:])), 0)


def call_of(value: Any) -> ToolCall | None:
    """Return the call that a JSON object stands for; None where it stands for none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    try:
        told = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):  # NaN and infinities, which are read here and are no JSON
        return None
    return ToolCall(value["name"], told)


def reader_of(template: str, must: bool, most: int | None) -> Callable[[], CallReader]:
    """Return what makes readers of the calls of an answer, of so many at most where these are not a list anyway.

    ApiError where the model writes them in a way that is not read here.
    """
    if must:
        return ListOfCalls
    if OPEN not in template:
        raise bad(
            f"the model's chat template does not write calls between {OPEN} and {CLOSE}; let tool_choice ask for a "
            'call, or be "none".', "tool_choice",
        )
    return partial(MarkedCalls, most)


def named_tool(fields: ChatFields) -> Tool:
    """Return the tool that a request insists on; ApiError where it names none of its own."""
    function = fields.tool_choice.get("function") if isinstance(fields.tool_choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    for tool in fields.tools or ():
        if tool.function.name == name:
            return tool
    raise bad("tool_choice names no tool of the request; name one of its tools.", "tool_choice")


def calls_schema(tools: Sequence[Tool], most: int | None) -> dict[str, Any]:
    """Return the schema of a list of calls, at least one and at most so many; ApiError for definitions that clash."""
    shared: dict[str, Any] = {}
    kinds = []
    for tool in tools:
        called, arguments = tool.function.name, dict(tool.function.parameters or NO_ARGUMENTS)
        for place in ("$defs", "definitions"):
            defined = arguments.pop(place, {})
            if not isinstance(defined, dict):
                raise bad(f"the tool {called[:40]!r} has a {place} that is no object; make it one.", "tools")
            for name, value in defined.items():
                # References count from the root, which is another one now.
                if shared.setdefault(place, {}).setdefault(name, value) != value:
                    raise bad(f"two tools define {name[:40]!r} differently under {place}; rename one.", "tools")
        kinds.append({
            "type": "object", "properties": {"name": {"const": called}, "arguments": arguments},
            "required": ["name", "arguments"], "additionalProperties": False,
        })
    limit = {} if most is None else {"maxItems": most}
    items = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    return {"type": "array", "items": items, "minItems": 1, **limit, **shared}
