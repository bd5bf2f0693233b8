"""Tool calls: which ones a request wants, and how they are read from the text of an answer as it comes.

Where a request requires a call, the answer is a JSON list of calls, whatever form the model has learnt. Where the model
decides, it writes calls in the form it has learnt; only calls between `<tool_call>` and `</tool_call>` are read.
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

    A whole list without any call that can be returned, for example because a number is too large, becomes text.
    """

    def __init__(self) -> None:
        self._left, self._told = "", False
        # Of what is left: characters that were looked at, braces that are open there, and whether a string is.
        self._seen, self._open, self._quoted, self._escaped = 0, 0, False, False

    def feed(self, text: str) -> list[Part]:
        self._left += text
        parts: list[Part] = []
        while self._closes():  # a call that is not whole is not parsed, from its beginning, with every piece
            rest = self._left.lstrip(", \t\r\n" if self._told else "[ \t\r\n")
            try:
                value, end = _DECODER.raw_decode(rest)
            except (ValueError, RecursionError):
                break
            call = call_of(value)
            if call is None:
                break
            parts.append(call)
            self._left, self._told, self._seen = rest[end:], True, 0
        return parts

    def _closes(self) -> bool:
        """Look at what came since the last time, up to where an object is whole; return whether one is."""
        for at in range(self._seen, len(self._left)):
            character = self._left[at]
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = character == "\\", character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "{}":
                self._open += 1 if character == "{" else -1
                if character == "}" and self._open <= 0:
                    self._seen, self._open = at + 1, 0
                    return True
        self._seen = len(self._left)
        return False

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
    """Reads an answer with calls between marks and text around them; mere white space next to a call is left out.

    What stands between marks but is no call, or was cut off, is text.

    Args:
        most: calls that are returned; further ones are left out. None returns all.
        names: the tools that may be called; a call of any other tool is text. None allows all.
    """

    def __init__(self, most: int | None = None, names: frozenset[str] | None = None) -> None:
        self._left, self._names = most, names
        self._held, self._inside, self._called = "", False, False
        self._space: str | None = ""
        """White space since the last call, or since the beginning; None once other text has followed."""

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
        """Return what can be shown of a text outside of calls; white space is held until other text follows."""
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
    """Return the call that a JSON value stands for; None where it is no call."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    try:
        told = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):  # NaN and infinities, which Python's parser accepts but which are not JSON
        return None
    return ToolCall(value["name"], told)


@dataclass(frozen=True)
class Choice:
    """Which tools may be called.

    Args:
        tools: the tools that may be called.
        must: whether one has to be called.
        most: the most calls that are returned; None returns all.
        is_narrow: whether the model is not shown the request's other tools.
    """

    tools: Sequence[Tool]
    must: bool
    most: int | None
    is_narrow: bool = False


def reader_of(template: str, choice: Choice) -> Callable[[], CallReader]:
    """Return a factory of call readers, one for each text; ApiError where the model's form of calls is not read here.

    Args:
        template: the chat template, which shows how the model writes calls.
        choice: the tools that may be called.
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
    """Return which of its tools a request wants called; ApiError where it names a tool that it does not have."""
    tools, asked = fields.tools or (), fields.tool_choice
    most = 1 if fields.parallel_tool_calls is False else None
    if not isinstance(asked, dict):
        return Choice(tools, asked == "required", most)
    if asked.get("type") != "allowed_tools":
        function = asked.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        # A request that names one tool wants it called exactly once.
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
