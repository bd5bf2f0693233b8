"""Tools in Anthropic's form: what the template is shown, which calls are told; drafts change no byte of them."""

import json
from functools import cache
from typing import Any

import anthropic
import httpx
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from draftsmith.serving.service import Service
from draftsmith.targets import Target
from tests.helpers.oracle import OracleDrafter
from tests.helpers.tiny import TOKENIZER_EOS, TOKENIZER_SIZE
from tests.serving.test_messages import PATH, events_of
from tests.serving.toy import NAME, listening, make_service, plainly, post, target, tokens_of, with_client

WEATHER = {
    "name": "weather", "description": "Tells the weather.",
    "input_schema": {
        "type": "object", "properties": {"city": {"enum": ["Rome", "Bonn"]}}, "required": ["city"],
        "additionalProperties": False,
    },
}
CLOCK = {"name": "clock", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}}
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}<tool_call>"
    "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}"
    "{% for call in message.tool_calls or [] %}({{ call.id }} {{ call.function.name }} "
    "{{ call.function.arguments.city }}){% endfor %}"
    "{% if message.role == 'tool' %}({{ message.tool_call_id }} {{ message.name }}){% endif %};{% endfor %}"
)
HI = [{"role": "user", "content": "hi"}]
BODY: dict[str, Any] = {"model": NAME, "messages": HI, "max_tokens": 60, "temperature": 0, "tools": [WEATHER, CLOCK]}


SHOWN = "[weather][clock]<tool_call>u:hi;"
"""What `TEMPLATE` writes for `BODY`."""


@cache
def reciting(said: str) -> Target:
    """Return a target that says this after `SHOWN`; it looks at places in the text alone."""
    places = 192
    config = GPT2Config(
        vocab_size=TOKENIZER_SIZE, n_positions=places, n_embd=places, n_layer=1, n_head=1, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=TOKENIZER_EOS,
    )
    model = GPT2LMHeadModel(config).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "ln_" not in name:
                parameter.zero_()
        model.transformer.wpe.weight.copy_(torch.eye(places))
        for place, token in enumerate([*tokens_of(said), TOKENIZER_EOS], len(SHOWN) - 1):
            model.lm_head.weight[token, place] = 5.0
    return Target(model, target(TEMPLATE).tokenizer, name=NAME)


def reciter(said: str, drafts: bool) -> Service:
    drafter = OracleDrafter([tokens_of(SHOWN + said)], TOKENIZER_SIZE, error_rate=0.3) if drafts else None
    return make_service(of=reciting(said), drafts=drafts, drafter=drafter)


def answer_of(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    """Return content and end of an answer without ids, whole or put together from a stream's events."""
    response = post(PATH, body, service)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        told = response.json()
        blocks, reason, usage = told["content"], told["stop_reason"], told["usage"]["output_tokens"]
    else:
        events, blocks, reason, usage = events_of(response.text), [], None, None
        assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
        for event in events:
            if event["type"] == "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(dict(event["content_block"]))
                given = ""
            elif event["type"] == "content_block_delta":
                assert event["index"] == len(blocks) - 1
                delta = event["delta"]
                if delta["type"] == "text_delta":
                    blocks[-1]["text"] += delta["text"]
                else:
                    assert delta["type"] == "input_json_delta"
                    given += delta["partial_json"]
            elif event["type"] == "content_block_stop" and blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = json.loads(given)
            elif event["type"] == "message_delta":
                reason, usage = event["delta"]["stop_reason"], event["usage"]["output_tokens"]
    ids = [block.pop("id") for block in blocks if block["type"] == "tool_use"]
    assert len(set(ids)) == len(ids) and all(one.startswith("toolu_") for one in ids)
    return {"content": blocks, "reason": reason, "tokens": usage}


SAID = (
    'I look. <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call> and '
    '<tool_call>{"name": "clock"}</tool_call>\n'
)
LISTED = '[{"name": "weather", "arguments": {"city": "Bonn"}}]'
CHOICES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "any": ({"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}, {"weather", "clock"}),
    "this tool": ({"tool_choice": {"type": "tool", "name": "weather"}}, {"weather"}),
    "this tool, smoothed": ({"tool_choice": {"type": "tool", "name": "clock"}, "smooth": True}, {"clock"}),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_tool_that_has_to_be_called_is_called(choice: str):
    fields, names = CHOICES[choice]
    body = {**BODY, **fields, "max_tokens": 60}
    answers = [
        answer_of(reciter(LISTED, drafts), {**body, "stream": stream}) for drafts in (False, True)
        for stream in (False, True)
    ]
    assert all(answer == answers[0] for answer in answers), answers
    assert answers[0]["reason"] == "tool_use"
    (block,) = answers[0]["content"]
    assert block["type"] == "tool_use" and block["name"] in names
    assert block["input"] == ({} if block["name"] == "clock" else {"city": "Bonn"})


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_the_model_makes_by_itself_stand_between_its_texts(drafts: bool, stream: bool):
    choice = {"tool_choice": {"type": "auto"}} if drafts else {}  # where nobody says, it is the same
    found = answer_of(reciter(SAID, drafts), {**BODY, **choice, "max_tokens": 150, "stream": stream})
    assert found["content"] == [
        {"type": "text", "text": "I look. "}, {"type": "tool_use", "name": "weather", "input": {"city": "Rome"}},
        {"type": "text", "text": " and "}, {"type": "tool_use", "name": "clock", "input": {}},
    ]
    assert found["reason"] == "tool_use"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_off_is_text(stream: bool):
    found = answer_of(reciter(SAID, True), {**BODY, "max_tokens": 30, "stream": stream})
    assert found == {"content": [{"type": "text", "text": SAID[:30]}], "reason": "max_tokens", "tokens": 30}


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_that_is_cut_off_is_left_out(stream: bool):
    body = {**BODY, "tool_choice": {"type": "any"}, "max_tokens": 12, "stream": stream}
    found = answer_of(reciter(LISTED, True), body)
    assert found == {"content": [{"type": "text", "text": ""}], "reason": "max_tokens", "tokens": 12}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_off_behind_a_call_says_so(stream: bool):
    most = SAID.index("</tool_call>") + len("</tool_call>") + 4
    found = answer_of(reciter(SAID, True), {**BODY, "max_tokens": most, "stream": stream})
    assert [block["type"] for block in found["content"]] == ["text", "tool_use", "text"]
    assert found["reason"] == "max_tokens" and found["tokens"] == most


@pytest.mark.parametrize("said", ['{"x": NaN}', '{"x": [1e999]}', '{"x": {"y": -Infinity}}'])
def test_a_call_with_numbers_that_json_does_not_have_is_text(said: str):
    whole = f'<tool_call>{{"name": "clock", "arguments": {said}}}</tool_call>'
    found = answer_of(reciter(whole, True), {**BODY, "max_tokens": 90})
    assert found["content"] == [{"type": "text", "text": whole}] and found["reason"] == "end_turn"


def test_calls_and_results_reach_the_template_and_are_counted():
    call = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]}
    messages = [
        *HI, {"role": "assistant", "content": [{"type": "text", "text": "so"}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
    ]
    written = "<tool_call>u:hi;a:so(t1 weather Rome);t:rain(t1 weather);u:and?;"
    ways = (({}, "[weather][clock]"), ({"tool_choice": {"type": "none"}}, ""), ({"tools": None}, ""))

    async def ask(client: httpx.AsyncClient) -> None:
        for tools, shown in ways:
            body = {**BODY, "messages": messages, **tools}
            told = (await client.post(PATH, json={**body, "max_tokens": 9})).json()
            assert told["content"] == [{"type": "text", "text": plainly(shown + written, max_tokens=9).text}]
            counted = await client.post(f"{PATH}/count_tokens", json=body)
            read = told["usage"]["input_tokens"] + told["usage"]["cache_read_input_tokens"]
            assert counted.json() == {"input_tokens": read} == {"input_tokens": len(shown + written)}

    with_client(make_service(of=target(TEMPLATE)), ask)


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ({"content": "no such city", "is_error": True}, "Error: no such city"),
        ({"content": [{"type": "text", "text": "no"}], "is_error": True}, "Error: no"),
        ({"content": "ERROR: 7", "is_error": True}, "ERROR: 7"), ({"is_error": True}, "Error: the tool failed."),
        ({"content": "error-free build", "is_error": True}, "Error: error-free build"),
        ({"content": "rain", "is_error": False}, "rain"), ({"content": "rain", "is_error": None}, "rain"), ({}, ""),
    ],
)
def test_the_model_is_told_that_a_tool_failed(result: dict[str, Any], shown: str):
    call = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}}
    answer = {"type": "tool_result", "tool_use_id": "t1", **result}
    messages = [*HI, {"role": "assistant", "content": [call]}, {"role": "user", "content": [answer]}]
    found = post(PATH, {**BODY, "messages": messages, "max_tokens": 9}, make_service(of=target(TEMPLATE))).json()
    written = f"{SHOWN}a:(t1 weather Rome);t:{shown}(t1 weather);"
    assert found["content"] == [{"type": "text", "text": plainly(written, max_tokens=9).text}]


def with_parts(role: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*HI, {"role": role, "content": list(parts)}]}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no schema": ({"tools": [{"name": "x"}]}, "'x' has no input_schema"),
    "a tool of Anthropic's own": ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "does not run here"),
    "no such tool": ({"tool_choice": {"type": "tool", "name": "x"}}, "names no tool"),
    "a tool without a name": ({"tool_choice": {"type": "tool"}}, "has no name"),
    "a kind of choice that there is not": ({"tool_choice": {"type": "required"}}, "tool_choice.type"),
    "a choice without tools": ({"tools": [], "tool_choice": {"type": "any"}}, "there are no tools"),
    "a result of no call": (with_parts("user", {"type": "tool_result", "tool_use_id": "t9"}), "names no tool_use"),
    "a call of the user": (with_parts("user", {"type": "tool_use", "id": "t", "name": "x", "input": {}}), "tool_use"),
    "a result of the assistant": (with_parts("assistant", {"type": "tool_result", "tool_use_id": "t"}), "tool_result"),
    "half a call": (with_parts("assistant", {"type": "tool_use", "id": "t"}), "without id, name or input"),
    "a text without a text": (with_parts("user", {"type": "text"}), "of type 'text' without a text"),
    "a picture": (with_parts("user", {"type": "image", "source": {}}), "of type 'image'"),
    "definitions that are no object": (
        {"tools": [{"name": "x", "input_schema": {"$defs": []}}], "tool_choice": {"type": "any"}},
        "the tool 'x' has a $defs that is no object",
    ),
    "a schema that says nothing": (
        {"tools": [{"name": "x", "input_schema": {"properties": {"a": {"type": "no such"}}}}],
         "tool_choice": {"type": "any"}}, "the JSON schema cannot be compiled",
    ),
    "arguments that are no object": (
        {"tools": [{"name": "x", "input_schema": {"type": "string"}}]}, "'x' has parameters that are no object",
    ),
}


@pytest.fixture(scope="module")
def refusals() -> dict[str, httpx.Response]:
    async def ask(client: httpx.AsyncClient) -> dict[str, httpx.Response]:
        return {name: await client.post(PATH, json={**BODY, **change}) for name, (change, _) in WRONG.items()}

    return with_client(make_service(of=target(TEMPLATE)), ask)


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_told_in_anthropics_form(name: str, refusals: dict[str, httpx.Response]):
    response, words = refusals[name], WRONG[name][1]
    told = response.json()
    assert response.status_code == 400 and told["type"] == "error", response.text
    assert told["error"]["type"] == "invalid_request_error" and words in told["error"]["message"], response.text


def test_tools_that_the_template_cannot_write_have_to_be_asked_for():
    response = post(PATH, BODY)
    assert response.status_code == 400 and "let tool_choice ask for a call" in response.json()["error"]["message"]
    asked = {"tool_choice": {"type": "tool", "name": "clock"}}
    assert post(PATH, {**BODY, **asked, "max_tokens": 4}).status_code == 200


def test_anthropics_own_client_calls_a_tool_and_brings_its_result():
    asked: dict[str, Any] = {
        "model": NAME, "max_tokens": 60, "tools": [WEATHER, CLOCK], "extra_body": {"temperature": 0},
        "tool_choice": {"type": "tool", "name": "weather"},
    }
    with (
        listening(reciter(LISTED, drafts=True)) as address,
        anthropic.Anthropic(base_url=address, api_key="k", max_retries=0) as client,
    ):
        told = client.messages.create(messages=HI, **asked)  # type: ignore[arg-type]
        (block,) = told.content
        assert block.type == "tool_use" and told.stop_reason == "tool_use"
        with client.messages.stream(messages=HI, **asked) as stream:  # type: ignore[arg-type]
            (again,) = stream.get_final_message().content
        assert again.type == "tool_use" and (again.name, again.input) == (block.name, block.input)
        result = {"type": "tool_result", "tool_use_id": block.id, "content": "rain", "is_error": False}
        further = [*HI, {"role": "assistant", "content": told.content}, {"role": "user", "content": [result]}]
        del asked["tool_choice"]
        last = client.messages.create(messages=further, **{**asked, "max_tokens": 8})  # type: ignore[arg-type]
        assert last.usage.output_tokens == 8 and last.content[0].type == "text"
        counted = client.messages.count_tokens(model=NAME, messages=further, tools=[WEATHER, CLOCK])  # type: ignore[arg-type]
        assert counted.input_tokens == last.usage.input_tokens
        with pytest.raises(anthropic.BadRequestError, match="has no input_schema"):
            client.messages.create(messages=HI, **{**asked, "tools": [{"name": "x"}]})  # type: ignore[arg-type]
