"""Calls of tools: which of them a request wants, and how they are read from the text of an answer as it comes.

Where a request says that a tool has to be called, the answer is a JSON list of calls, whatever the model has learnt.
Where the model decides, it writes calls as it learnt to; read are those between `<tool_call>` and `</tool_call>`.
"""

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pydantic import ValidationError

from draftsmith.serving.errors import bad
from draftsmith.serving.openai_fields import AllowedTools, ChatFields, Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_DECODER = json.JSONDecoder()


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
        """Return what is left when the answer has ended."""


class ListOfCalls(CallReader):
    """An answer that is a JSON list of calls and no more: each is told when it is whole, one cut off is left out.

    A whole list that has no call that could be told, such as one with a number too large, is text.
    """

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
        if self._told:
            return []
        try:
            json.loads(self._left)
        except ValueError:
            return []
        except RecursionError:
            pass
        return [self._left]


class MarkedCalls(CallReader):
    """An answer that may have calls between marks, and text around them; white space alone beside a call is no text.

    What is no call, because it was cut off, is text.

    Args:
        most: calls that are told; further ones are left out. None tells all.
        names: of tools that may be called; what looks like a call of another one is text. None lets all be called.
    """

    def __init__(self, most: int | None = None, names: frozenset[str] | None = None) -> None:
        self._left, self._names = most, names
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
            if call is not None and (self._names is None or call.name in self._names):
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


@dataclass(frozen=True)
class Choice:
    """Which tools may be called.

    Args:
        tools: those.
        must: whether one has to be called.
        most: calls that are told; None tells all.
        is_narrow: whether nothing is to be known of the other tools of the request.
    """

    tools: Sequence[Tool]
    must: bool
    most: int | None
    is_narrow: bool = False


def reader_of(template: str, choice: Choice) -> Callable[[], CallReader]:
    """Return what makes readers of the calls of an answer; ApiError where the model writes them in a way not read here.

    Args:
        template: tells how the model writes calls.
        choice: of tools.
    """
    if choice.must:
        return ListOfCalls
    if OPEN not in template:
        raise bad(
            f"the model's chat template does not write calls between {OPEN} and {CLOSE}; let tool_choice ask for a "
            'call, or be "none".', "tool_choice",
        )
    names = frozenset(tool.function.name for tool in choice.tools) if choice.is_narrow else None
    return partial(MarkedCalls, choice.most, names)


def choice_of(fields: ChatFields) -> Choice:
    """Return which of its tools a request wants to be called; ApiError where it names one that it does not have."""
    tools, asked = fields.tools or (), fields.tool_choice
    most = 1 if fields.parallel_tool_calls is False else None
    if not isinstance(asked, dict):
        return Choice(tools, asked == "required", most)
    if asked.get("type") != "allowed_tools":
        function = asked.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        # Whoever names a tool wants it called, and not again and again.
        return Choice(_named(tools, {name} if isinstance(name, str) else {None})[:1], True, 1)
    try:
        allowed = AllowedTools.model_validate(asked.get("allowed_tools"))
    except ValidationError as error:
        raise bad(
            'tool_choice is of the type "allowed_tools", which needs allowed_tools with a mode, "auto" or "required", '
            "and a list of tools by their names; give both.", "tool_choice",
        ) from error
    if not allowed.tools:
        raise bad('tool_choice allows no tool; name some, or let it be "none".', "tool_choice")
    chosen = _named(tools, {one.function.name for one in allowed.tools})
    return Choice(chosen, allowed.mode == "required", most, is_narrow=True)


def _named(tools: Sequence[Tool], names: Set[object]) -> list[Tool]:
    """Return the tools of these names; ApiError for a name that none of them has."""
    found = [tool for tool in tools if tool.function.name in names]
    if names - {tool.function.name for tool in found}:
        raise bad("tool_choice names no tool of the request; name one of its tools.", "tool_choice")
    return found
