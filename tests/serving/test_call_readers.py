"""Calls are read from an answer whatever their arguments hold, and nothing else that was written is lost."""

import asyncio
import json
import time
from typing import Any

import pytest

from draftsmith.serving.call_readers import CallReader, ListOfCalls, MarkedCalls, ToolCall
from tests.serving import test_forms as chat
from tests.serving.test_messages_tools import BODY, answer_of, reciter
from tests.serving.toy import running

BAD = '{"name": "a", "arguments": {"x": 1e999}}'
LARGE = '{"name": "a", "arguments": {"x": ' + "9" * 5000 + "}}"
CALLS = [f'{{"name": "c{number}", "arguments": {{}}}}' for number in range(3)]


def read(reader: CallReader, *pieces: str) -> list[str]:
    """Return the runs of text, and between them the calls in words."""
    told = [""]
    for part in [*(part for piece in pieces for part in reader.feed(piece)), *reader.end()]:
        if isinstance(part, ToolCall):
            told += [f"{part.name} {part.arguments}", ""]
        else:
            told[-1] += part
    return told


def marked(arguments: str, key: str = "arguments") -> str:
    return f'<tool_call>{{"name": "f", "{key}": {arguments}}}</tool_call>'


@pytest.mark.parametrize(
    ("said", "arguments"),
    [
        ('{"name": "f", "parameters": {"x": 1}}', '{"x": 1}'),
        ('{"parameters": {"x": 1}, "name": "f", "type": "function"}', '{"x": 1}'),
        ('{"name": "f", "arguments": {"x": 1}, "parameters": {"x": 2}}', '{"x": 1}'),
        ('{"name": "f", "parameters": {}}', "{}"), ('{"name": "f"}', "{}"),
    ],
)
def test_arguments_may_be_called_parameters(said: str, arguments: str):
    assert read(MarkedCalls(), f"<tool_call>{said}</tool_call>") == ["", f"f {arguments}", ""]
    assert read(ListOfCalls(), f"[{said}]") == ["", f"f {arguments}", ""]


@pytest.mark.parametrize("said", ["3", "[]", '"{}"', "null"])
def test_parameters_that_are_no_object_are_text(said: str):
    whole = marked(said, "parameters")
    assert read(MarkedCalls(), whole) == [whole]


HELD: dict[str, tuple[str, list[str]]] = {
    "closing": (marked('{"x": "</tool_call>"}'), ["", 'f {"x": "</tool_call>"}', ""]),
    "several": (
        marked('{"</tool_call>": "a </tool_call><tool_call> b", "y": ["</tool_call>"]}'),
        ["", 'f {"</tool_call>": "a </tool_call><tool_call> b", "y": ["</tool_call>"]}', ""],
    ),
    "behind what is escaped": (
        marked(r'{"x": "\"</tool_call>\\", "y": "\\\"</tool_call>"}'),
        ["", r'f {"x": "\"</tool_call>\\", "y": "\\\"</tool_call>"}', ""],
    ),
    "a call in a call": (
        f"so {marked(json.dumps({'x': marked('{}')}))} and {marked('{}')} then",
        ["so ", f"f {json.dumps({'x': marked('{}')})}", " and ", "f {}", " then"],
    ),
    "cut off in the string": (marked('{"x": "</tool_call> y"}')[:-15], [marked('{"x": "</tool_call> y"}')[:-15]]),
    "a string that nobody closes": (
        f'<tool_call>{{"name": "f}}</tool_call> or {marked("{}")}',
        ['<tool_call>{"name": "f}</tool_call> or ', "f {}", ""],
    ),
    "the same, on the next line": (
        f'<tool_call>{{"name": "f}}</tool_call>\n{marked("{}")} so',
        ['<tool_call>{"name": "f}</tool_call>\n', "f {}", " so"],
    ),
    "a quotation mark in text": (
        f'<tool_call>12" wide</tool_call> {marked("{}")}', ['<tool_call>12" wide</tool_call> ', "f {}", ""],
    ),
    "more behind the object": (
        f'<tool_call>{{}} "</tool_call> {marked("{}")}', ['<tool_call>{} "</tool_call> ', "f {}", ""],
    ),
    "no JSON, though its strings are right": (
        f'<tool_call>{{"</tool_call>" 1}}</tool_call>{marked("{}")}',
        ['<tool_call>{"</tool_call>" 1}</tool_call>', "f {}", ""],
    ),
    "nothing but a string": ('<tool_call>"</tool_call>"</tool_call>', ['<tool_call>"</tool_call>"</tool_call>']),
    "marks at the end": (f'{marked("{}")}<tool_call>{{"x": 1}}</tool_', ["", "f {}", '<tool_call>{"x": 1}</tool_']),
}


@pytest.mark.parametrize("name", HELD)
def test_a_mark_inside_a_string_ends_no_call_however_the_answer_is_cut(name: str):
    whole, told = HELD[name]
    assert read(MarkedCalls(), whole) == told
    assert read(MarkedCalls(), *whole) == told
    for first in range(len(whole) + 1):
        assert read(MarkedCalls(), whole[:first], whole[first:]) == told, first
        assert read(MarkedCalls(), whole[:first], whole[first : first + 3], whole[first + 3 :]) == told, first


def test_a_call_is_returned_with_the_last_letter_of_its_mark():
    whole, reader = marked('{"x": "</tool_call>"}'), MarkedCalls()
    assert reader.feed(whole[:-1]) == [] and len(reader.feed(whole[-1])) == 1


@pytest.mark.parametrize("said", ['12" wide', '{"x": 1} "', '{"x": "\n', "{'x': '\"'}"])
def test_what_is_no_json_is_shown_before_the_answer_ends(said: str):
    whole = f"<tool_call>{said}</tool_call> then"
    assert "".join(map(str, MarkedCalls().feed(whole))) == whole


@pytest.mark.parametrize("part", ['<tool_call>"</tool_call>', '<tool_call>{"\\"</tool_call>'])
def test_strings_that_nobody_closes_cost_little(part: str):
    """Everything behind each of them is not looked at again."""
    whole, begun = part * 20_000, time.process_time()
    assert read(MarkedCalls(), *(whole[at : at + 1000] for at in range(0, len(whole), 1000))) == [whole]
    assert time.process_time() - begun < 20


LISTS: dict[str, tuple[str, list[str]]] = {
    "in the middle": (f"[{CALLS[0]}, {BAD}, {CALLS[1]}]", ["", "c0 {}", f"{BAD}\n", "c1 {}", ""]),
    "first": (f"[{BAD}, {CALLS[0]},{CALLS[1]}]", [f"{BAD}\n", "c0 {}", "", "c1 {}", ""]),
    "last": (f"[\n{CALLS[0]},\n{BAD}\n]", ["", "c0 {}", f"{BAD}\n"]),
    "two": (f"[{BAD}, {LARGE}, {CALLS[2]}, {BAD}]", [f"{BAD}\n{LARGE}\n", "c2 {}", f"{BAD}\n"]),
    "alone": (f"[{BAD}, {LARGE}]", [f"[{BAD}, {LARGE}]"]),
    "alone, too large": (f"[{LARGE}]\n", [f"[{LARGE}]\n"]),
    "before one that is cut off": (f"[{BAD}, {CALLS[0][:-1]}", [f"{BAD}\n"]),
    "behind one that is read, and cut off": (f"[{CALLS[0]}, {BAD}, {CALLS[1][:9]}", ["", "c0 {}", f"{BAD}\n"]),
}


@pytest.mark.parametrize("name", LISTS)
def test_calls_of_a_list_around_one_that_cannot_be_read_are_kept_and_that_one_is_text(name: str):
    whole, told = LISTS[name]
    for size in (1, 2, 7, len(whole)):
        assert read(ListOfCalls(), *(whole[at : at + size] for at in range(0, len(whole), size))) == told, size


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("key", ["arguments", "parameters"])
def test_a_call_that_writes_of_marks_reaches_the_client(stream: bool, key: str):
    said = f'So {marked(json.dumps({"x": "a</tool_call>b"}), key).replace("f", "clock", 1)}'
    fields = {"max_tokens": 150, "stream": stream}
    found = answer_of(reciter(said, drafts=True), {**BODY, **fields})
    assert found["content"] == [
        {"type": "text", "text": "So "}, {"type": "tool_use", "name": "clock", "input": {"x": "a</tool_call>b"}},
    ]
    assert in_a_chat(said, {**fields, "tools": [chat.WEATHER, chat.CLOCK]}) == {
        "content": "So ", "calls": [{"name": "clock", "arguments": '{"x": "a</tool_call>b"}'}], "reason": "tool_calls",
    }


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_forced_list_has_that_cannot_be_read_reaches_the_client(stream: bool):
    schema = {
        "type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"], "additionalProperties": False,
    }
    bad, good = (f'{{"name": "clock", "arguments": {{"x": {number}}}}}' for number in ("1e999", "2"))
    said, fields = f"[{bad}, {good}]", {"max_tokens": 150, "stream": stream}
    clock = {"name": "clock", "input_schema": schema}
    tools = {"tools": [BODY["tools"][0], clock], "tool_choice": {"type": "any"}}
    found = answer_of(reciter(said, drafts=True), {**BODY, **fields, **tools})
    assert found["content"] == [
        {"type": "text", "text": f"{bad}\n"}, {"type": "tool_use", "name": "clock", "input": {"x": 2}},
    ]
    tools = {
        "tools": [chat.WEATHER, {"type": "function", "function": {"name": "clock", "parameters": schema}}],
        "tool_choice": "required",
    }
    assert in_a_chat(said, {**fields, **tools}) == {
        "content": f"{bad}\n", "calls": [{"name": "clock", "arguments": '{"x": 2}'}], "reason": "tool_calls",
    }


def in_a_chat(said: str, fields: dict[str, Any]) -> dict[str, Any]:
    async def main() -> dict[str, Any]:
        async with running(reciter(said, drafts=True)) as client:
            return await chat.ask(client, "hi", {"logit_bias": {}, **fields})

    return asyncio.run(main())
