"""Answers of a given form, calls of tools and predicted answers; drafts change no byte of them."""

import asyncio
import json
import re
from functools import cache
from typing import Any

import httpx
import pytest

from draftsmith.serving.call_readers import ListOfCalls, MarkedCalls, ToolCall
from tests.serving.test_messages_tools import SAID, reciter
from tests.serving.test_messages_tools import TEMPLATE as TEMPLATE_OF_CALLS
from tests.serving.toy import (
    NAME,
    PROMPTS,
    events_of,
    make_service,
    plainly,
    post,
    running,
    target,
    text_of,
    tokens_of,
)

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
SCHEMA = {
    "type": "object", "properties": {"name": {"enum": ["ann", "bob"]}, "old": {"type": "boolean"}},
    "required": ["name", "old"], "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object", "properties": {"city": {"enum": ["Rome", "Bonn"]}}, "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}}


FORMS: dict[str, dict[str, Any]] = {
    "a schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    "a schema, sampled": {
        "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}, "temperature": 1, "seed": 3,
    },
    "a pattern": {"structured_outputs": {"regex": "[ab]{3}-[0-9]{4}"}},
    "a choice": {"structured_outputs": {"choice": ["yes, of course", "not at all"]}},
    "a grammar": {"structured_outputs": {"grammar": 'root ::= "x" ("y" | "z") "!"'}},
    "a tool": {"tools": [WEATHER, CLOCK], "tool_choice": "required", "parallel_tool_calls": False},
    "this tool": {"tools": [CLOCK, WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    "an allowed tool": {"tools": [CLOCK, WEATHER], **allowed("required", "weather"), "parallel_tool_calls": False},
    "a prediction": {"prediction": {"type": "content", "content": "something else"}},
}


@cache
def no_white_space() -> dict[str, float]:
    """Return biases; a model that knows nothing may otherwise write white space until its tokens are spent."""
    return dict.fromkeys(map(str, {*tokens_of("\t\n\r ")} - {*tokens_of("x")}), -100.0)


async def ask(client: httpx.AsyncClient, text: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the message and why it ended, whole or put together from a stream, without ids."""
    body = {
        "model": NAME, "messages": [{"role": "user", "content": text}], "max_tokens": 60, "temperature": 0,
        "logit_bias": no_white_space(), **fields,
    }
    response = await client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    if not fields.get("stream"):
        (choice,) = response.json()["choices"]
        message = choice["message"]
        return told(message["content"] or "", message.get("tool_calls", []), choice["finish_reason"])
    content, calls, reason = "", [], None
    for event in events_of(response):
        (choice,) = event["choices"]
        content += choice["delta"].get("content") or ""
        calls += choice["delta"].get("tool_calls", [])
        reason = choice["finish_reason"] or reason
    assert [call["index"] for call in calls] == list(range(len(calls)))
    return told(content, calls, reason)


def told(content: str, calls: list[Any], reason: str | None) -> dict[str, Any]:
    assert len({call["id"] for call in calls}) == len(calls) and all(call["type"] == "function" for call in calls)
    return {"content": content, "calls": [call["function"] for call in calls], "reason": reason}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_kept_and_the_same_drafted_and_plain_alone_and_in_a_crowd(form: str):
    async def main() -> list[dict[str, Any]]:
        found = []
        for drafts in (False, True):
            async with running(make_service(drafts=drafts, max_batch=8)) as client:
                fields = FORMS[form]
                found.append(await asyncio.gather(*(ask(client, text, fields) for text in PROMPTS[:4])))
                # Two of them alone: what is written for one text does not hang on the others.
                found.append([await ask(client, text, fields) for text in PROMPTS[:2]])
                found.append([await ask(client, text, {**fields, "stream": True}) for text in PROMPTS[1:3]])
        whole = found[0]
        assert found[3] == whole, form
        assert all(told == whole[:2] for told in found[1::3]), form
        assert all(told == whole[1:3] for told in found[2::3]), form
        return whole

    answers = asyncio.run(main())
    ended = [answer for answer in answers if answer["reason"] != "length"]
    assert ended or form == "a prediction", answers
    for answer in ended:
        text, calls = answer["content"], answer["calls"]
        if "schema" in form:
            value = json.loads(text)
            assert value.keys() == {"name", "old"} and value["name"] in ("ann", "bob") and value["old"] in (True, False)
        if form == "a pattern":
            assert re.fullmatch("[ab]{3}-[0-9]{4}", text)
        if form == "a choice":
            assert text in ("yes, of course", "not at all")
        if form == "a grammar":
            assert text in ("xy!", "xz!")
        if form in ("this tool", "an allowed tool"):
            (call,) = calls
            assert call["name"] == "weather" and json.loads(call["arguments"])["city"] in ("Rome", "Bonn")
        if "tool" in form and calls:
            assert text == "" and answer["reason"] == "tool_calls"
            assert all(call["name"] in ("weather", "clock") for call in calls)
        if "tool" not in form:
            assert not calls and answer["reason"] == "stop"


def test_what_the_client_expects_is_accepted_and_counted():
    expected = plainly(PROMPTS[0], max_tokens=24).text
    body = {"model": NAME, "prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0}
    prediction = {"type": "content", "content": [{"type": "text", "text": expected}]}
    service = make_service(drafts=False)
    plain = post(COMPLETION, body, service).json()
    assert "completion_tokens_details" not in plain["usage"]
    found = post(COMPLETION, {**body, "prediction": prediction}, make_service(drafts=False)).json()
    assert found["choices"][0]["text"] == plain["choices"][0]["text"] == expected
    counted = found["usage"]["completion_tokens_details"]
    # What the model says holds broken bytes, of which a text has other tokens.
    assert counted["accepted_prediction_tokens"] >= 8
    streamed = post(
        COMPLETION,
        {**body, "prediction": prediction, "stream": True, "stream_options": {"include_usage": True}},
        make_service(drafts=False),
    )
    assert events_of(streamed)[-1]["usage"]["completion_tokens_details"] == counted
    body["prediction"] = {"type": "content", "content": "q" * 20}
    wrong = post(COMPLETION, body, make_service(drafts=False))
    assert wrong.json()["choices"][0]["text"] == expected
    assert wrong.json()["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 0


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no schema": ({"response_format": {"type": "json_schema"}}, "has no json_schema"),
    "a schema that says nothing": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no such"}}}}, "schema",
    ),
    "a pattern that counts too far": ({"structured_outputs": {"regex": "a{99999}"}}, "the most is"),
    "a broken pattern": ({"structured_outputs": {"regex": "(a"}}, "regular expression"),
    "a schema that is cut off": ({"structured_outputs": {"json": '{"type": '}}, "schema"),
    "two at once": ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "exactly one"),
    "a form and tools": (
        {"response_format": {"type": "json_object"}, "tools": [CLOCK], "tool_choice": "required"}, "cannot be both",
    ),
    "no such tool": (
        {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "names no tool",
    ),
    "a choice without tools": ({"tool_choice": "required"}, "there are no tools"),
    "a template without calls": ({"tools": [CLOCK]}, "does not write calls between"),
    "a picture": (
        {"prediction": {"type": "content", "content": [{"type": "image_url"}]}}, "only text is understood",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_nothing_can_be_held_to_is_refused_alone(name: str):
    fields, words = REFUSED[name]

    async def main() -> httpx.Response:
        async with running(make_service()) as client:
            asked = {"model": NAME, "messages": [{"role": "user", "content": "hm"}], "max_tokens": 8}
            other = asyncio.create_task(client.post(CHAT, json=asked))
            refused = await client.post(CHAT, json={**asked, **fields})
            assert (await other).status_code == 200
            return refused

    response = asyncio.run(main())
    assert response.status_code == 400 and words in response.json()["error"]["message"], response.text


STRINGS = {"type": "function", "function": {"name": "say", "parameters": {"type": "string"}}}
NO_SUCH = {"type": "object", "properties": {"a": {"type": "no such"}}}


def named(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


BLAMED: dict[str, tuple[dict[str, Any], str]] = {
    "a schema": ({"response_format": {"type": "json_schema", "json_schema": {"schema": NO_SUCH}}}, "response_format"),
    "a pattern": ({"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
    "two at once": ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    "half a character": ({"structured_outputs": {"choice": ["\ud800"]}}, "structured_outputs"),
    "a tool's schema": (
        {"tools": [{"type": "function", "function": {"name": "x", "parameters": NO_SUCH}}], "tool_choice": "required"},
        "tools",
    ),
    "a tool that takes a string": ({"tools": [STRINGS], "tool_choice": "required"}, "tools"),
    "a tool that takes a string, asked for by nobody": ({"tools": [STRINGS]}, "tools"),
    "no such tool among those allowed": ({"tools": [CLOCK], **allowed("auto", "clock", "x")}, "tool_choice"),
    "no tool allowed": ({"tools": [CLOCK], **allowed("required")}, "tool_choice"),
    "allowed in no known mode": ({"tools": [CLOCK], **allowed("none", "clock")}, "tool_choice"),
    "a schema that nothing satisfies": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}}, "response_format"
    ),
    "half a character in a tool's name": ({"tools": [named("\ud800")]}, "tools"),
    "half a character in the name of a tool that must be called": (
        {"tools": [CLOCK, named("\ud800")], "tool_choice": "required"}, "tools"
    ),
    "half a character in a description": ({"tools": [named("x", description="a\udc00")]}, "tools"),
    "half a character in the name of an argument": (
        {"tools": [named("x", parameters={"type": "object", "properties": {"\udfff": True}})]}, "tools"
    ),
    "half of a character": ({"prediction": {"type": "content", "content": "\ud800"}}, "prediction"),
    "allowed, but not which": ({"tools": [CLOCK], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
}


def test_a_refusal_says_which_field_asked_for_it():
    async def main() -> dict[str, httpx.Response]:
        async with running(make_service(of=target(TEMPLATE_OF_CALLS))) as client:
            asked = {"model": NAME, "messages": [{"role": "user", "content": "hm"}], "max_tokens": 8}
            bodies = {name: json.dumps({**asked, **fields}) for name, (fields, _) in BLAMED.items()}
            sent = {"content-type": "application/json"}
            return {name: await client.post(CHAT, content=body, headers=sent) for name, body in bodies.items()}

    told = asyncio.run(main())
    assert {name: response.status_code for name, response in told.items()} == dict.fromkeys(BLAMED, 400)
    found = {name: response.json()["error"]["param"] for name, response in told.items()}
    assert found == {name: field for name, (_, field) in BLAMED.items()}


@pytest.mark.parametrize("stream", [False, True])
def test_only_tools_that_are_allowed_are_called(stream: bool):
    # The template is shown "[weather][watch]", which is as long as what the reciter waits for.
    watch = {"type": "function", "function": {"name": "watch"}}
    fields = {"tools": [WEATHER, CLOCK, watch], "logit_bias": {}, "max_tokens": 150, "stream": stream}

    async def main() -> dict[str, Any]:
        async with running(reciter(SAID, drafts=True)) as client:
            return await ask(client, "hi", {**fields, **allowed("auto", "watch", "weather")})

    found = asyncio.run(main())
    assert [call["name"] for call in found["calls"]] == ["weather"] and found["reason"] == "tool_calls"
    assert '<tool_call>{"name": "clock"}</tool_call>' in found["content"]


CALLED: dict[str, dict[str, Any]] = {
    "required": {"tool_choice": "required"},
    "by name": {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
}


@pytest.mark.parametrize("choice", CALLED)
def test_a_forced_call_that_is_cut_off_is_left_out(choice: str):
    body = {
        "model": NAME, "messages": [{"role": "user", "content": "hm"}], "max_tokens": 12, "temperature": 0,
        "tools": [WEATHER], **CALLED[choice],
    }
    (found,) = post(CHAT, body).json()["choices"]
    assert found["message"] == {"role": "assistant", "content": None, "refusal": None}
    assert found["finish_reason"] == "length"
    events = events_of(post(CHAT, {**body, "stream": True}))
    assert text_of(events) == "" and not any("tool_calls" in event["choices"][0]["delta"] for event in events)
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_tools_and_earlier_calls_reach_the_template():
    template = (
        "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}<tool_call>"
        "{% for message in messages %}{{ message.content }}"
        "{% for call in message.tool_calls or [] %}({{ call.function.arguments.city }}){% endfor %}{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": "and?"}, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "1"},
    ]
    written = "[weather][clock]<tool_call>and?(Rome)rain"
    body = {"model": NAME, "messages": messages, "tools": [WEATHER, CLOCK], "max_tokens": 12, "temperature": 0}
    response = post(CHAT, body, make_service(of=target(template)))
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"] == plainly(written, max_tokens=12).text


OF_ITEMS = (
    "{% for message in messages %}{{ message.content }}{% for call in message.tool_calls or [] %}"
    "({{ call.function.name }}{% for name, value in call.function.arguments | items %} {{ name }}={{ value }}"
    "{% endfor %}){% endfor %}{% endfor %}"
)


def with_a_call(call: dict[str, Any]) -> httpx.Response:
    """Return the answer behind a call, of a target whose template goes through the arguments of calls."""
    messages = [{"role": "user", "content": "and?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    body = {"model": NAME, "messages": messages, "max_tokens": 12, "temperature": 0}
    return post(CHAT, body, make_service(of=target(OF_ITEMS)))


@pytest.mark.parametrize(
    ("arguments", "written"),
    [({"arguments": ""}, "(clock)"), ({"arguments": None}, "(clock)"), ({}, "(clock)"),
     ({"arguments": '{"a": 1}'}, "(clock a=1)"), ({"arguments": {"a": 1}}, "(clock a=1)")],
)
def test_a_call_without_arguments_is_shown_with_none(arguments: dict[str, Any], written: str):
    response = with_a_call({"id": "1", "type": "function", "function": {"name": "clock", **arguments}})
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"] == plainly(f"and?{written}", max_tokens=12).text


@pytest.mark.parametrize(
    "function", [{}, {"function": None}, {"function": {"arguments": "{}"}}, {"custom": {"name": "x"}}]
)
def test_a_call_that_names_no_function_is_the_clients_mistake(function: dict[str, Any]):
    error = with_a_call({"id": "1", **function}).json()["error"]
    assert error["param"] == "messages" and error["message"].startswith("message 1 has a tool call without the name")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_marked_calls_are_read_however_they_come(size: int):
    whole = (
        '\n Let me see. <tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>\n'
        '<tool_call>{"name": "b"}</tool_call>\n and  <tool_call>{"name": "c"}</tool_call>'
        "<tool_call>no call</tool_call> <tool"
    )
    reader, told = MarkedCalls(), [""]
    for part in [*(part for start in range(0, len(whole), size) for part in reader.feed(whole[start : start + size])),
                 *reader.end()]:
        if isinstance(part, str):
            told[-1] += part
        else:
            told += [f"{part.name} {part.arguments}", ""]
    assert told == [
        "\n Let me see. ", 'a {"x": 1}', "", "b {}", "\n and  ", "c {}", "<tool_call>no call</tool_call> <tool",
    ]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_each_call_of_a_list_is_told_when_it_is_whole(size: int):
    whole = '[{"name": "a", "arguments": {"x": "}]"}} ,\n{"name": "b", "arguments": {}}'
    for behind in ("]", ', {"name": "c", "argu', ""):
        reader, text = ListOfCalls(), whole + behind
        calls = [part for start in range(0, len(text), size) for part in reader.feed(text[start : start + size])]
        assert [(call.name, call.arguments) for call in calls if not isinstance(call, str)] == [
            ("a", '{"x": "}]"}'), ("b", "{}"),
        ]
        assert reader.end() == []
    for cut in (1, 20, len(whole) // 3):
        reader = ListOfCalls()
        assert reader.feed(whole[:cut]) == [] and reader.end() == []


@pytest.mark.parametrize("number", ["NaN", "1e999", "-Infinity"])
def test_a_call_with_numbers_that_json_does_not_have_is_text(number: str):
    whole = f'so <tool_call>{{"name": "a", "arguments": {{"x": [{number}]}}}}</tool_call> then'
    reader = MarkedCalls()
    assert "".join(map(str, [part for letter in whole for part in reader.feed(letter)] + reader.end())) == whole


@pytest.mark.parametrize("inside", ["NaN", "[" * 100_000 + "]" * 100_000])
def test_a_list_with_what_is_no_call_is_text(inside: str):
    whole = f'[{{"name": "a", "arguments": {{"x": {inside}}}}}]'
    reader = ListOfCalls()
    assert reader.feed(whole) == [] and reader.end() == [whole]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_off_behind_a_call_says_so(stream: bool):
    most = SAID.index("</tool_call>") + len("</tool_call>") + 4

    async def main() -> dict[str, Any]:
        async with running(reciter(SAID, drafts=True)) as client:
            fields = {"tools": [WEATHER, CLOCK], "max_tokens": most, "logit_bias": {}, "stream": stream}
            return await ask(client, "hi", fields)

    found = asyncio.run(main())
    assert [call["name"] for call in found["calls"]] == ["weather"] and found["reason"] == "length"


def test_calls_beyond_those_that_are_allowed_are_left_out():
    """`parallel_tool_calls: false`, however the answer is cut."""
    whole = 'a <tool_call>{"name": "b"}</tool_call> c <tool_call>{"name": "d"}</tool_call>'
    for size in (1, 7, len(whole)):
        reader = MarkedCalls(most=1)
        cuts = [whole[at : at + size] for at in range(0, len(whole), size)]
        parts = [part for cut in cuts for part in reader.feed(cut)] + reader.end()
        assert [part.name for part in parts if isinstance(part, ToolCall)] == ["b"]
        assert "".join(part for part in parts if isinstance(part, str)) == "a  c "


@pytest.mark.parametrize(("whole", "text"), [(' \n<tool_call>{"name": "a"}</tool_call>\n', ""), (" \n ", " \n ")])
def test_white_space_is_text_only_where_no_call_is(whole: str, text: str):
    reader = MarkedCalls()
    parts = [part for letter in whole for part in reader.feed(letter)] + reader.end()
    assert "".join(part for part in parts if isinstance(part, str)) == text


def test_braces_in_strings_and_objects_inside_end_no_call():
    arguments = {"a": '}{"\\', "b": {"c": {}}, "d": [{}, "\\"], "}": "é}"}
    text = json.dumps([{"name": "f", "arguments": arguments}] * 2)
    for size in (1, 3, len(text)):
        reader = ListOfCalls()
        found = [part for at in range(0, len(text), size) for part in reader.feed(text[at : at + size])]
        assert [json.loads(part.arguments) for part in found if isinstance(part, ToolCall)] == [arguments] * 2
        assert reader.end() == []
