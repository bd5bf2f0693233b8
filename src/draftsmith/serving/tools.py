"""Tool calls: which ones a request wants, and who reads them from the text of an answer.

Where a request requires a call, the answer is a JSON list of calls, whatever form the model has learnt. Where the model
decides, it writes calls in the form it has learnt; only calls between `<tool_call>` and `</tool_call>` are read.
"""

import json
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import partial

from pydantic import ValidationError

from draftsmith.serving.call_readers import CLOSE, OPEN, CallReader, ListOfCalls, MarkedCalls
from draftsmith.serving.errors import bad
from draftsmith.serving.openai_fields import AllowedTools, ChatFields, Tool


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
    if asked.get("type", "function") not in ("function", "allowed_tools"):
        told = json.dumps(asked["type"])[:40]
        raise bad(f'tool_choice is of the type {told}; use "function" or "allowed_tools".', "tool_choice")
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
