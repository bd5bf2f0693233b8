"""`/v1/messages`: Anthropic's form."""

import json
from typing import Any

import httpx
import pytest

from tests.serving.toy import NAME, make_service, plainly, post, with_client

PATH = "/v1/messages"
WRITTEN = "s:be kind;u:hi;a:"
BODY: dict[str, Any] = {
    "model": NAME, "system": "be kind", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 16,
    "temperature": 0,
}

YES_OR_NO = {"type": "json_schema", "schema": {"enum": ["yes", "no"]}}


def events_of(text: str) -> list[Any]:
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def test_an_answer_in_one_piece():
    told, own = post(PATH, BODY).json(), plainly(WRITTEN)
    assert told["type"] == "message" and told["role"] == "assistant" and told["id"].startswith("msg_")
    assert told["content"] == [{"type": "text", "text": own.text}]
    assert (told["stop_reason"], told["stop_sequence"]) == ("max_tokens", None)
    assert (told["usage"]["input_tokens"], told["usage"]["output_tokens"]) == (len(WRITTEN), 16)


def test_what_the_assistant_began_goes_on():
    begun = [*BODY["messages"], {"role": "assistant", "content": "The answer is ("}]
    body, own = {**BODY, "messages": begun}, plainly(f"{WRITTEN}The answer is (")
    assert post(PATH, body).json()["content"] == [{"type": "text", "text": own.text}]
    events = events_of(post(PATH, {**body, "stream": True}).text)
    assert "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta") == own.text
    counted = {name: body[name] for name in ("model", "messages", "system")}
    assert post(f"{PATH}/count_tokens", counted).json() == {"input_tokens": len(own.prompt_tokens)}


def test_a_stream_has_all_events_in_order():
    events = events_of(post(PATH, {**BODY, "stream": True}).text)
    kinds = [event["type"] for event in events]
    deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(deltas) == plainly(WRITTEN).text
    assert events[0]["message"]["usage"]["input_tokens"] == len(WRITTEN)
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 16


def test_prompt_tokens_that_were_read_before_are_told_apart():
    """In whole blocks of 64; in a stream at its end, where Anthropic's client reads all of the usage anew."""
    body = {**BODY, "system": "be kind " * 10, "max_tokens": 2}
    whole = len(f"s:{body['system']};u:hi;a:")

    async def work(client: httpx.AsyncClient) -> list[dict[str, int]]:
        found = [(await client.post(PATH, json=body)).json()["usage"] for _ in range(2)]
        events = events_of((await client.post(PATH, json={**body, "stream": True})).text)
        return [*found, events[0]["message"]["usage"], events[-2]["usage"]]

    def usage(cached: int, written: int = 2) -> dict[str, int]:
        return {
            "input_tokens": whole - cached, "output_tokens": written, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
        }

    assert with_client(make_service(), work) == [usage(0), usage(64), usage(0, written=0), usage(64)]


def test_the_stop_sequence_that_ended_it_is_told():
    own = plainly(WRITTEN, max_tokens=24).text
    stop = own[4:6]
    told = post(PATH, {**BODY, "max_tokens": 24, "stop_sequences": ["never", stop]}).json()
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", stop)
    assert told["content"][0]["text"] == own[: own.index(stop)]
    events = events_of(post(PATH, {**BODY, "max_tokens": 24, "stop_sequences": [stop], "stream": True}).text)
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": stop}


def test_parts_of_a_content_and_counting():
    parts = [{"type": "text", "text": "h", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "i"}]
    body = {**BODY, "messages": [{"role": "user", "content": parts}], "system": [{"type": "text", "text": "be kind"}]}
    assert post(PATH, body).json()["content"] == post(PATH, BODY).json()["content"]
    counted = {name: body[name] for name in ("model", "messages", "system")}
    assert post(f"{PATH}/count_tokens", counted).json() == {"input_tokens": len(WRITTEN)}


@pytest.mark.parametrize("field", [{"output_config": {"format": YES_OR_NO}}, {"output_format": YES_OR_NO}])
def test_an_answer_follows_the_schema_that_is_asked_for(field: dict[str, Any]):
    body = {**BODY, **field}
    told = post(PATH, body).json()
    (block,) = told["content"]
    assert json.loads(block["text"]) in ("yes", "no") and told["stop_reason"] == "end_turn"
    events = events_of(post(PATH, {**body, "stream": True}).text)
    assert "".join(one["delta"]["text"] for one in events if one["type"] == "content_block_delta") == block["text"]
    counted = {name: body[name] for name in ("model", "messages", "system", *field)}
    assert post(f"{PATH}/count_tokens", counted).json() == {"input_tokens": len(WRITTEN)}


def test_an_effort_alone_asks_for_no_form():
    told = post(PATH, {**BODY, "output_config": {"effort": "low"}}).json()
    assert told["content"] == post(PATH, BODY).json()["content"]


@pytest.mark.parametrize(
    ("change", "status", "kind"),
    [
        ({"max_tokens": 0}, 400, "invalid_request_error"), ({"model": "other"}, 404, "not_found_error"),
        ({"max_tokens": None}, 400, "invalid_request_error"),
        ({"tools": [{"name": "x"}]}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, "invalid_request_error"),
        ({"max_tokens": 10**12}, 400, "invalid_request_error"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, 400, "invalid_request_error"),
        ({"output_config": {"format": {"type": "json_schema"}}}, 400, "invalid_request_error"),
        ({"output_config": {"format": {"type": "xml", "schema": {}}}}, 400, "invalid_request_error"),
        ({"output_config": {"format": YES_OR_NO}, "output_format": YES_OR_NO}, 400, "invalid_request_error"),
    ],
)
def test_errors_have_anthropics_form(change: dict[str, Any], status: int, kind: str):
    response = post(PATH, {**BODY, **change})
    assert response.status_code == status
    told = response.json()
    assert told["type"] == "error" and told["error"]["type"] == kind and told["error"]["message"]
    assert told["request_id"] == response.headers["request-id"]


def test_more_turns_than_there_can_be_tokens_are_refused_before_they_are_read():
    many = {**BODY, "messages": [{"role": "user", "content": ""}] * 100_000}
    response = post(PATH, many)
    assert response.status_code == 400 and "maximum context length" in response.json()["error"]["message"]


def test_a_key_may_come_as_anthropic_sends_it():
    for headers, status in (({"x-api-key": "k"}, 200), ({"x-api-key": "wrong"}, 401), ({}, 401)):
        response = post(PATH, BODY, make_service(keys=("k",)), headers=headers)
        assert response.status_code == status
        if status == 401:
            assert response.json()["error"]["type"] == "authentication_error"
