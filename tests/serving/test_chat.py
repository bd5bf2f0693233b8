"""`/v1/chat/completions`: conversations by the target's own template."""

from typing import Any

import httpx
import pytest

from draftsmith.engine import Engine
from draftsmith.serving.service import Service
from draftsmith.serving.settings import Settings
from tests.serving.toy import NAME, events_of, get, make_service, plainly, post, target, text_of, with_client

PATH = "/v1/chat/completions"
ASKED = [{"role": "user", "content": "hi"}]
WRITTEN = "u:hi;a:"
"""What the template makes of it."""


def ask(**fields: Any) -> Any:
    response = post(PATH, {"model": NAME, "messages": ASKED, "temperature": 0, "max_tokens": 12, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def test_an_answer_is_what_the_target_says_behind_its_template():
    told, own = ask(), plainly(WRITTEN, max_tokens=12)
    assert told["object"] == "chat.completion" and told["id"].startswith("chatcmpl-")
    (choice,) = told["choices"]
    assert choice["message"] == {"role": "assistant", "content": own.text, "refusal": None}
    assert choice["finish_reason"] == "length" and choice["logprobs"] is None
    assert told["usage"]["prompt_tokens"] == len(WRITTEN)


def test_an_engine_with_room_for_less_than_its_context_says_how_much():
    """A chat without a limit of its own takes what there is room for, and does not ask for more than can ever fit."""
    engine = Engine(target(), max_tokens_in_flight=40)
    service = Service(engine, Settings(names=(NAME,)), {})

    async def work(client: httpx.AsyncClient) -> tuple[Any, Any, Any]:
        asked = {"messages": ASKED, "temperature": 0}
        return (
            (await client.get("/v1/models")).json(), (await client.post(PATH, json=asked)).json(),
            (await client.post(PATH, json={**asked, "max_tokens": 41 - len(WRITTEN)})).json(),
        )

    known, told, refused = with_client(service, work)
    assert engine.max_length > known["data"][0]["max_model_len"] == 40
    assert told["usage"]["total_tokens"] == 40
    assert "maximum context length is 40 tokens" in refused["error"]["message"]


def test_an_answer_may_go_on_with_the_last_message():
    messages = [*ASKED, {"role": "assistant", "content": "The answer is ("}]
    for given, written in (
        ({"continue_final_message": True}, "u:hi;a:The answer is ("),
        ({"continue_final_message": True, "add_generation_prompt": False}, "u:hi;a:The answer is ("),
        ({"continue_final_message": None, "add_generation_prompt": True}, "u:hi;a:The answer is (;a:"),
        ({}, "u:hi;a:The answer is (;a:"),
    ):
        told = ask(messages=messages, **given)["choices"][0]["message"]["content"]
        assert told == plainly(written, max_tokens=12).text, given


@pytest.mark.parametrize("both", [True, False])
def test_an_answer_begins_or_goes_on_but_not_both(both: bool):
    response = post(PATH, {"messages": ASKED, "add_generation_prompt": both, "continue_final_message": both})
    assert response.status_code == 400 and response.json()["error"]["param"] == "continue_final_message"


@pytest.mark.parametrize(
    ("messages", "written"),
    [
        ([{"role": "system", "content": "be kind"}, *ASKED], "s:be kind;u:hi;a:"),
        ([{"role": "developer", "content": "be kind"}, *ASKED], "s:be kind;u:hi;a:"),
        ([{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}], WRITTEN),
        ([*ASKED, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "so"}], "u:hi;a:yes;u:so;a:"),
        ([*ASKED, {"role": "assistant", "content": None}, {"role": "user", "content": "so"}], "u:hi;a:;u:so;a:"),
    ],
)
def test_messages_of_every_kind(messages: Any, written: str):
    assert ask(messages=messages)["choices"][0]["message"]["content"] == plainly(written, max_tokens=12).text


def test_a_stream_has_the_role_with_the_first_token_and_an_empty_delta_with_the_end():
    body = {
        "messages": ASKED, "temperature": 0, "max_tokens": 20, "n": 2, "stream": True,
        "stream_options": {"include_usage": True},
    }
    *events, usage = events_of(post(PATH, body))
    own = plainly(WRITTEN, max_tokens=20)
    for index in range(2):
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert [("role" in choice["delta"]) for choice in mine] == [True] + [False] * (len(mine) - 1)
        assert mine[-1]["delta"] == {} and mine[-1]["finish_reason"] == "length"
        assert all(choice["finish_reason"] is None for choice in mine[:-1])
        assert text_of(events, index) == own.text
    assert {event["object"] for event in [*events, usage]} == {"chat.completion.chunk"}
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 40


def test_an_answer_may_be_as_long_as_the_context():
    told = post(PATH, {"messages": ASKED, "temperature": 0, "ignore_eos": True}).json()
    assert told["usage"]["total_tokens"] == 128
    assert ask(max_tokens=None, max_completion_tokens=5)["usage"]["completion_tokens"] == 5


def test_a_limit_is_refused_by_the_name_that_the_request_gave_it():
    for name in ("max_tokens", "max_completion_tokens"):
        error = post(PATH, {"messages": ASKED, name: 0}).json()["error"]
        assert error["param"] == name and error["message"].startswith(f"{name} is 0;")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"max_tokens": "10"}, 'max_tokens: Input should be a valid integer, and not "10".'),
        ({"temperature": True}, "temperature: Input should be a valid number, and not true."),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "and not \"robot\"."),
        ({"seed": "é" * 10**6}, 'seed: Input should be a valid integer, and not "\\u00e9\\u00e9'),
    ],
    ids=["a word", "a truth", "a role", "a long word"],
)
def test_a_value_of_another_kind_is_told(fields: dict[str, Any], told: str):
    message = post(PATH, {"messages": ASKED, **fields}).json()["error"]["message"]
    assert told in message and len(message) < 300


def test_log_probabilities():
    own = plainly(WRITTEN, max_tokens=12, logprobs=2)
    assert own.logprobs is not None
    told = ask(logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in told] == pytest.approx([entry.logprob for entry in own.logprobs])
    for entry, mine in zip(told, own.logprobs, strict=True):
        assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx(list(mine.top.values()))
    written = bytes(byte for entry in told for byte in entry["bytes"])
    assert written.decode("utf-8", "replace") == own.text
    events = events_of(post(PATH, {
        "messages": ASKED, "temperature": 0, "max_tokens": 12, "logprobs": True, "top_logprobs": 2, "stream": True,
    }))
    pieces = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]]
    assert [entry for piece in pieces for entry in piece["content"]] == told


def test_variables_of_the_template_can_be_set_and_no_others():
    told = ask(chat_template_kwargs={"tone": "dry"})
    assert told["choices"][0]["message"]["content"] == plainly(WRITTEN + "dry", max_tokens=12).text
    for wrong in ({"mood": "dry"}, {"tone": ["dry"]}, {"messages": "x"}):
        response = post(PATH, {"messages": ASKED, "chat_template_kwargs": wrong})
        assert response.status_code == 400 and "takes tone" in response.json()["error"]["message"]


def test_a_target_without_a_template_says_so():
    response = post(PATH, {"messages": ASKED}, make_service(of=target(None), drafts=False))
    assert response.status_code == 400
    assert "toy has no chat template, so it takes no messages" in response.json()["error"]["message"]


def test_tokens_can_be_asked_for_and_given_back():
    told = post("/tokenize", {"model": NAME, "prompt": "né", "return_token_strs": True}).json()
    assert told["count"] == 3 and len(told["token_strs"]) == 3 and told["max_model_len"] == 128
    assert post("/detokenize", {"tokens": told["tokens"]}).json() == {"prompt": "né"}
    assert post("/tokenize", {"messages": ASKED}).json()["count"] == len(WRITTEN)
    whole = post("/tokenize", {"messages": ASKED, "add_generation_prompt": False}).json()["count"]
    assert whole == len(WRITTEN.removesuffix("a:")), "no answer is to follow"
    assert post("/tokenize", {"messages": ASKED, "chat_template_kwargs": {"nobody": 1}}).status_code == 400
    assert post("/detokenize", {"tokens": [257]}).status_code == 400
    assert post("/tokenize", {}).status_code == 400


def test_the_model_is_listed_by_all_its_names():
    service = make_service(names=("toy", "gpt-4o"))
    listed = get("/v1/models", service).json()["data"]
    assert [model["id"] for model in listed] == ["toy", "gpt-4o"]
    assert all(model["root"] == "somewhere/toy" and model["max_model_len"] == 128 for model in listed)
    assert listed[0]["drafters"] == ["oracle"]
    assert get("/v1/models/toy").json()["id"] == "toy"
    assert get("/v1/models/other").status_code == 404
    assert post(PATH, {"model": "gpt-4o", "messages": ASKED, "max_tokens": 1}, make_service(names=("toy", "gpt-4o")))
