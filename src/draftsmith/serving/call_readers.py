"""Reads tool calls from the text of an answer as it comes."""

import json
import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from draftsmith.serving.json_object import JsonObject

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """A tool call as clients get it; `arguments` is JSON text."""

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
    """Splits an answer, piece by piece, into text to show and tool calls; how it is cut into pieces changes neither."""

    @abstractmethod
    def feed(self, text: str) -> list[Part]:
        """Take a piece; return the text and the calls that are certain by now, in order."""

    @abstractmethod
    def end(self) -> list[Part]:
        """Return what is left when the answer has ended."""


class ListOfCalls(CallReader):
    """Reads an answer that is only a JSON list of calls: returns each call once it is whole, leaves out one cut off.

    A part of the list that is whole but cannot be read as a call, for example because a number is too large, becomes
    a line of text in its place. A whole list without any call that can be read becomes text as it stands.
    """

    def __init__(self) -> None:
        self._left, self._seen, self._object = "", 0, JsonObject()
        self._unread: list[str] = []
        self._told = False
        self._said = ""
        """All of the answer, kept until a call has been returned."""

    def feed(self, text: str) -> list[Part]:
        self._left += text
        if not self._told:
            self._said += text
        parts: list[Part] = []
        while self._closes():
            one, self._left = self._left[: self._seen].lstrip("[, \t\r\n"), self._left[self._seen :]
            self._seen, self._object = 0, JsonObject()
            call = call_of(_parsed(one))
            if call is None:
                self._unread.append(one)
            else:
                self._told, self._said = True, ""
            if self._told:
                parts += self._lines()
            if call is not None:
                parts.append(call)
        return parts

    def _closes(self) -> bool:
        """Look at what came since the last time, up to where an object is whole; return whether one is."""
        while self._seen < len(self._left) and not self._object.whole:
            self._object.take(self._left[self._seen])
            self._seen += 1
        return self._object.whole

    def _lines(self) -> list[Part]:
        """Return what could not be read, each on a line of its own, and forget it."""
        lines: list[Part] = [f"{one}\n" for one in self._unread]
        self._unread = []
        return lines

    def end(self) -> list[Part]:
        is_whole = not (self._object.depth or self._object.quoted) and self._left.rstrip().endswith("]")
        return [self._said] if is_whole and not self._told else self._lines()


class MarkedCalls(CallReader):
    """Reads an answer with calls between marks and text around them; mere white space next to a call is left out.

    What stands between marks but is no call, or was cut off, is text. A mark inside a string of a call belongs to the
    string.

    Args:
        most: calls that are returned; further ones are left out. None returns all.
        names: the tools that may be called; a call of any other tool is text. None allows all.
    """

    def __init__(self, most: int | None = None, names: frozenset[str] | None = None) -> None:
        self._left, self._names = most, names
        self._held, self._called = "", False
        self._closing: _Closing | None = None
        """What looks for the end of the call that the held text is the beginning of; None outside of calls."""
        self._space: str | None = ""
        """White space since the last call, or since the beginning; None once other text has followed."""

    def feed(self, text: str) -> list[Part]:
        self._held += text
        return self._ready(ended=False)

    def end(self) -> list[Part]:
        parts = self._ready(ended=True)
        left, self._held = (OPEN if self._closing is not None else "") + self._held, ""
        parts += self._said(left)
        return parts if self._called or not self._space else [*parts, self._space]

    def _ready(self, ended: bool) -> list[Part]:
        """Return what is certain by now; where the answer has ended, what is not closed never will be."""
        parts: list[Part] = []
        while True:
            if self._closing is None:
                before, found, behind = self._held.partition(OPEN)
                if not found:
                    break
                parts += self._said(before)
                self._held, self._closing = behind, _Closing()
            else:
                at = self._closing.find(self._held, ended)
                if at is None:
                    return parts
                parts += self._between(at)
        keeps = begun(self._held, OPEN)
        ready, self._held = self._held[: len(self._held) - keeps], self._held[len(self._held) - keeps :]
        return [*parts, *self._said(ready)]

    def _between(self, at: int) -> list[Part]:
        """Take what stands between two marks, the closing one at this place, out of what is held, and return it."""
        value = _parsed(self._held[:at])
        if value is None:  # no JSON, so there were no strings either
            at = self._held.index(CLOSE)
        before, self._held, self._closing = self._held[:at], self._held[at + len(CLOSE) :], None
        call = call_of(value)
        if call is None or (self._names is not None and call.name not in self._names):
            return self._said(OPEN + before + CLOSE)
        self._called, self._space = True, ""
        if self._left is None:
            return [call]
        self._left -= 1
        return [call] if self._left >= 0 else []

    def _said(self, text: str) -> list[Part]:
        """Return what can be shown of a text outside of calls; white space is held until other text follows."""
        if self._space is not None:
            text = self._space + text
            self._space = None if text.strip() else text
        return [text] if text and self._space is None else []


class _Closing:
    """Looks for the mark that closes a call: the first one outside of strings, or of all where it is no JSON object.

    Each character is looked at once. Where no JSON shows early, little is looked at again: marks that are in strings
    when read from one opening mark are outside of them when read from the next one.
    """

    def __init__(self) -> None:
        self._object, self._fits = JsonObject(), True
        self._seen = self._searched = 0

    def find(self, text: str, ended: bool) -> int | None:
        """Return where the mark is in all the text behind the opening one; None where it has not come yet."""
        while self._fits and self._seen < len(text):
            if text[self._seen] == CLOSE[0] and not self._object.quoted:
                if text.startswith(CLOSE, self._seen):
                    return self._seen
                if CLOSE.startswith(text[self._seen :]):  # the rest of it may follow
                    break
            self._fits = self._object.take(text[self._seen])
            self._seen += 1
        if self._fits and not ended:
            return None
        self._fits = False
        at = text.find(CLOSE, self._searched)
        self._searched = max(0, len(text) - len(CLOSE) + 1)
        return at if at >= 0 else None


def _parsed(text: str) -> Any:
    """Return the value of a JSON text; None for anything else, and for what Python does not read."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def begun(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a mark.

    >>> begun("see <tool", "<tool_call>")
    5
    """
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-size:])), 0)


def call_of(value: Any) -> ToolCall | None:
    """Return the call that a JSON value stands for; None where it is no call.

    Arguments are called so, or `parameters`, as some models of the Llama family have learnt it.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    try:
        told = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):  # NaN and infinities, which Python's parser accepts but which are not JSON
        return None
    return ToolCall(value["name"], told)
