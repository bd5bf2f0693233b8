"""`/v1/completions`: what goes in, what comes out, in one piece and as a stream."""

import asyncio
import json
from itertools import pairwise
from typing import Any

import pytest

from tests.serving.toy import (
    NAME,
    PROMPTS,
    events_of,
    make_service,
    plainly,
    post,
    running,
    text_of,
    tokens_of,
    with_client,
)

PATH = "/v1/completions"


def ask(**fields: Any) -> Any:
    response = post(PATH, {"model": NAME, "prompt": "one", "temperature": 0, "max_tokens": 16, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def test_a_text_is_the_targets_own():
    told, own = ask(), plainly("one")
    assert told["object"] == "text_completion" and told["model"] == NAME and told["id"].startswith("cmpl-")
    assert told["choices"] == [{"index": 0, "text": own.text, "logprobs": None, "finish_reason": "length"}]
    usage = told["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 16, 19)


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("né", ["né"]), (["one", "zzz"], ["one", "zzz"]), (tokens_of("one"), ["one"]),
        ([tokens_of("12 + 3"), tokens_of("one")], ["12 + 3", "one"]),
    ],
)
def test_prompts_of_every_kind(prompt: Any, texts: list[str]):
    told = ask(prompt=prompt)
    assert [choice["text"] for choice in told["choices"]] == [plainly(text).text for text in texts]
    assert told["usage"]["prompt_tokens"] == sum(len(tokens_of(text)) for text in texts)


def test_max_completion_tokens_counts_as_in_chats():
    assert ask(max_completion_tokens=3)["usage"]["completion_tokens"] == 3
    refused = post(PATH, {"prompt": "x", "max_completion_tokens": 0}).json()["error"]
    assert refused["param"] == "max_completion_tokens" and "max_completion_tokens is 0" in refused["message"]


def test_prompts_near_the_end_of_the_context_get_what_room_there_is():
    async def main() -> list[Any]:
        async with running(make_service(max_length=40)) as client:
            asked = [{}, {"max_tokens": 4}, {"max_tokens": 0, "echo": True}]
            found = [await client.post(PATH, json={"prompt": [5] * 37, **fields}) for fields in asked]
            return [*found, await client.post(PATH, json={"prompt": [5] * 40, "max_tokens": 0, "echo": True})]

    free, asked, scored, full = asyncio.run(main())
    assert free.json()["usage"]["completion_tokens"] == 3 and scored.status_code == 200
    assert asked.status_code == full.status_code == 400
    assert "lower max_tokens to 3" in asked.json()["error"]["message"]
    assert "give at most 39" in full.json()["error"]["message"]


def test_an_empty_stop_string_is_named_as_the_client_named_it():
    told = post(PATH, {"prompt": "x", "stop": ""}).json()["error"]
    assert told["message"] == "stop has an empty string; leave it out." and told["param"] == "stop"
    hi = {"model": NAME, "max_tokens": 1, "messages": [{"role": "user", "content": "x"}], "stop_sequences": [""]}
    assert "stop_sequences has an empty string" in post("/v1/messages", hi).json()["error"]["message"]


def test_a_stream_says_the_same_piece_by_piece():
    body = {"prompt": "Once upon", "temperature": 0, "max_tokens": 20, "stream": True}
    events = events_of(post(PATH, body))
    assert text_of(events) == plainly("Once upon", max_tokens=20).text
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons[-1] == "length" and set(reasons[:-1]) == {None}
    assert events[-1]["choices"][0]["text"] == ""
    assert len({event["id"] for event in events}) == 1 and not any("usage" in event for event in events)


def test_a_stream_counts_its_tokens():
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": ["one", "zzz"], "n": 2, "temperature": 0, "max_tokens": 9, "stream": True}
    events = events_of(post(PATH, {**body, "stream_options": options}))
    *others, last = events
    assert last["choices"] == []
    usage = last["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (6, 36, 42)
    counts = [event["usage"]["completion_tokens"] for event in others]
    assert counts == sorted(counts) and counts[-1] == 36
    for index, text in enumerate(["one", "one", "zzz", "zzz"]):
        assert text_of(events, index) == plainly(text, max_tokens=9).text


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
@pytest.mark.parametrize("explain", [False, True])
def test_before_the_usage_every_chunk_has_a_usage_of_null(path: str, explain: bool):
    """As the types of OpenAI's client say; without `include_usage` there is no such field."""
    asked = {"prompt": "zzz"} if path == PATH else {"messages": [{"role": "user", "content": "zzz"}]}
    body = {**asked, "temperature": 0, "max_tokens": 9, "stream": True, "explain": explain}
    *others, last = events_of(post(path, {**body, "stream_options": {"include_usage": True}}))
    assert len(others) > 1 and last["usage"]["completion_tokens"] == 9
    assert all(event["usage"] is None for event in others)
    assert not any("usage" in event for event in events_of(post(path, body)))


def test_copies_and_seeds():
    fields = {"temperature": 1.0, "seed": 5, "n": 3, "prompt": ["one", "one"]}
    first, second = ask(**fields)["choices"], ask(**fields)["choices"]
    assert [one["text"] for one in first] == [one["text"] for one in second]
    assert [one["index"] for one in first] == [0, 1, 2, 3, 4, 5]
    assert len({one["text"] for one in first}) == 3  # every prompt has the same draws, as if it came alone
    assert first[0]["text"] == plainly("one", temperature=1.0, seed=5).text


def test_seeds_may_be_negative():
    """-1 draws a seed, as with other servers; the others have 64 bits and stand for seeds of the engine."""
    sampled = {"prompt": "one", "temperature": 1.0, "max_tokens": 24}
    drawn = {ask(**sampled, seed=-1)["choices"][0]["text"] for _ in range(3)}
    assert len(drawn) == 3
    for seed, same in ((-2, 2**63 - 2), (-(2**63), 0), (2**63 - 1, 2**63 - 1)):
        own = plainly("one", temperature=1.0, max_tokens=24, seed=same).text
        assert ask(**sampled, seed=seed)["choices"][0]["text"] == own, seed


def test_a_stop_string_ends_the_text():
    own = plainly("one", max_tokens=24).text
    stop = own[5:7]
    told = ask(max_tokens=24, stop=[stop, "never"])
    assert told["choices"][0]["finish_reason"] == "stop"
    assert told["choices"][0]["text"] == own[: own.index(stop)]
    events = events_of(post(PATH, {"prompt": "one", "temperature": 0, "max_tokens": 24, "stop": stop, "stream": True}))
    assert text_of(events) == own[: own.index(stop)]


@pytest.mark.parametrize(
    "rules",
    [
        {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}, {"presence_penalty": 0.5, "temperature": 0},
        {"frequency_penalty": 0.5}, {"repetition_penalty": 1.3}, {"logit_bias": {"65": 5.0}},
        {"logit_bias": {"66": -100}, "temperature": 0},
    ],
)
def test_every_rule_of_sampling_reaches_the_engine(rules: dict[str, Any]):
    asked = {"temperature": 0.9, "seed": 3, **rules}
    params = {**asked, "logit_bias": {int(k): float(v) for k, v in rules.get("logit_bias", {}).items()}}
    assert ask(**asked)["choices"][0]["text"] == plainly("one", **params).text


def test_the_text_goes_on_after_the_end_token_if_it_shall():
    bias = {"256": 100.0}
    assert ask(logit_bias=bias)["choices"][0]["finish_reason"] == "stop"
    told = ask(logit_bias=bias, ignore_eos=True, stop_token_ids=[])
    assert told["choices"][0]["finish_reason"] == "length" and told["usage"]["completion_tokens"] == 16


def test_log_probabilities_are_those_of_the_target():
    own = plainly("one", logprobs=3)
    assert own.logprobs is not None
    told = ask(logprobs=3)["choices"][0]["logprobs"]
    assert told["token_logprobs"] == pytest.approx([entry.logprob for entry in own.logprobs])
    assert len(told["tokens"]) == len(told["top_logprobs"]) == len(told["text_offset"]) == 16
    assert all(max(top.values()) == pytest.approx(lp) for top, lp in zip(
        told["top_logprobs"], told["token_logprobs"], strict=True
    ))
    events = events_of(post(PATH, {
        "prompt": "one", "temperature": 0, "max_tokens": 16, "logprobs": 3, "stream": True,
    }))
    pieces = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [value for piece in pieces for value in piece[name]] == told[name]


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_are_places_in_the_text_where_characters_have_several_tokens(stream: bool):
    prompt = "aé👩 z"
    body = {"prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": 0, "stream": stream}
    response = post(PATH, body)
    if stream:
        told = [event["choices"][0]["logprobs"] or {} for event in events_of(response)]
        offsets = [at for one in told for at in one.get("text_offset", [])]
    else:
        offsets = response.json()["choices"][0]["logprobs"]["text_offset"]
    # A token a byte.
    assert offsets == [at for at, character in enumerate(prompt) for _ in character.encode()]


@pytest.mark.parametrize("asked", [0, 1, 5])
@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_is_scored_as_harnesses_want_it(asked: int, stream: bool):
    """The first token has no probability; each other has that of the target behind the tokens before it."""
    prompt = tokens_of("Once upon a time")
    body = {
        "prompt": [prompt, prompt[:5]], "temperature": 0, "max_tokens": asked, "echo": True, "logprobs": 1,
        "stream": stream,
    }
    response = post(PATH, body)
    if stream:
        events = events_of(response)
        for event in events:
            assert set(event["choices"][0]) == {"index", "text", "logprobs", "finish_reason"}
        pieces = [event["choices"][0] for event in events if event["choices"][0]["index"] == 0]
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for piece in pieces:
            for name, values in found.items():
                values += (piece["logprobs"] or {}).get(name, [])
        text = text_of(events)
    else:
        told = response.json()
        assert told["usage"]["completion_tokens"] == 2 * asked
        found, text = told["choices"][0]["logprobs"], told["choices"][0]["text"]
    own = plainly(prompt, max_tokens=max(1, asked), logprobs=1, prompt_logprobs=1)
    assert own.prompt_logprobs is not None and own.logprobs is not None
    expected = [*own.prompt_logprobs, *own.logprobs[:asked]]
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert found["token_logprobs"][1:] == pytest.approx([entry.logprob for entry in expected])
    for top, entry in zip(found["top_logprobs"][1:], expected, strict=True):
        assert max(top.values()) == pytest.approx(max(entry.top.values()))
    assert text == "Once upon a time" + (own.text if asked else "")
    assert found["text_offset"][:3] == [0, 1, 2]


def test_scored_prompts_that_begin_alike_are_right_too():
    """What others have read of a prompt is read again where its tokens are to be scored."""
    long = tokens_of("x" * 80)
    scored = {"prompt": long, "max_tokens": 1, "echo": True, "logprobs": 0, "temperature": 0}

    async def work(client: Any) -> list[Any]:
        await client.post(PATH, json={"prompt": long, "max_tokens": 2, "temperature": 0})
        answers = [await client.post(PATH, json=scored) for _ in range(2)]
        later = await client.post(PATH, json={"prompt": long, "max_tokens": 2, "temperature": 0})
        assert later.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
        return [answer.json()["choices"][0]["logprobs"]["token_logprobs"] for answer in answers]

    own = plainly(long, max_tokens=1, prompt_logprobs=0).prompt_logprobs
    assert own is not None
    for found in with_client(make_service(), work):
        assert found[1:80] == pytest.approx([entry.logprob for entry in own])


@pytest.mark.parametrize("detail", ["summary", "detailed"])
@pytest.mark.parametrize("stream", [False, True])
def test_statistics_of_the_drafts_are_told_on_demand(detail: str, stream: bool):
    body = {
        "prompt": PROMPTS[1], "temperature": 0, "max_tokens": 24, "spec_decode_metrics": detail, "stream": stream,
        "stream_options": {"include_usage": True} if stream else None,
    }
    response = post(PATH, body)
    told = events_of(response)[-1] if stream else response.json()
    metrics = told["metrics"]["speculative_decoding"]
    steps, accepted = metrics["num_spec_steps"], metrics["num_accepted_draft_tokens"]
    assert steps + accepted + 1 == 24 and accepted > 0
    assert metrics["mean_acceptance_length"] == 1 + accepted / steps
    assert metrics["num_draft_tokens"] == 6 * steps and metrics["num_spec_tokens"] == 3
    histogram = metrics["acceptance_histogram"]
    assert sum(histogram) == steps and sum(at * count for at, count in enumerate(histogram)) == accepted
    assert metrics["steps_by_reason"] == {"fixed": steps}
    assert ("per_step_accepted" in metrics) == (detail == "detailed")
    if detail == "detailed":
        assert sum(metrics["per_step_accepted"]) == accepted and metrics["per_step_drafted"] == [6] * steps


@pytest.mark.parametrize(
    ("speculation", "plans"),
    [
        (None, {"2,1,1"}), ({"enabled": False}, {"none"}), ({"plan": "chain 2"}, {"chain 2"}),
        ({"plan": "3,1"}, {"3,1"}), ({"drafter": "oracle"}, {"chain 4"}), ({"plan": "none"}, {"none"}),
        ({"enabled": True}, {"2,1,1"}),
    ],
)
def test_a_request_may_draft_as_it_likes(speculation: Any, plans: set[str]):
    told = ask(speculation=speculation, explain=True, prompt="zzz")
    steps = [piece["step"] for piece in told["choices"][0]["draftsmith"] if piece["step"]]
    assert {step["plan"] for step in steps} == plans
    own = speculation not in (None, {"enabled": True})
    why = "asked for by the request" if own else "the plan that is always taken here"
    assert {step["why"] for step in steps} == {why}
    assert told["choices"][0]["text"] == plainly("zzz").text


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (PATH, {"prompt": "zzz"}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "model": NAME, "max_tokens": 4}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_typo_in_what_a_request_asks_of_drafts_is_told(path: str, asked: dict[str, Any], stream: bool):
    response = post(path, {**asked, "stream": stream, "speculation": {"plan": "2,1", "detph": 3}})
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    told = "speculation: there is no field 'detph' in it; the fields are enabled, plan and drafter."
    assert error["message"] == told
    if path != "/v1/messages":  # errors have Anthropic's form there
        assert (error["param"], error["code"]) == ("speculation", None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_who_guessed_which_token_is_explained(stream: bool, smooth: bool, echo: bool):
    body = {"prompt": "zzz", "temperature": 0, "max_tokens": 24, "explain": True, "stream": stream, "smooth": smooth}
    response = post(PATH, body | {"echo": echo})
    if stream:
        events = events_of(response)
        pieces, text = [event["draftsmith"] for event in events if "draftsmith" in event], text_of(events)
        if smooth:
            assert all(len(piece["tokens"]) == 1 for piece in pieces)
    else:
        choice = response.json()["choices"][0]
        pieces, text = choice["draftsmith"], choice["text"]
    own = plainly("zzz", max_tokens=24)
    tokens = [token for piece in pieces for token in piece["tokens"]]
    assert [token["id"] for token in tokens] == own.tokens
    assert text == "zzz" * echo + own.text and "".join(token["text"] for token in tokens) == own.text
    guessed = [token for token in tokens if token["source"] == "oracle"]
    assert all(token["depth"] in (1, 2, 3) for token in guessed)
    assert all(token["depth"] == 0 for token in tokens if token["source"] == "target")
    steps = [piece["step"] for piece in pieces if piece["step"] is not None]
    assert sum(step["accepted"] for step in steps) == len(guessed) > 0
    for step in steps:
        tree = step["tree"]
        assert step["drafted"] == len(tree["tokens"]) == len(tree["parents"]) == 6
        assert len(tree["accepted"]) == step["accepted"]
        path = [-1, *tree["accepted"]]
        assert all(tree["parents"][node] == above for above, node in pairwise(path))


def test_a_prediction_is_explained_too_and_harms_nobody():
    own = plainly("zzz", max_tokens=24).text
    told = ask(prompt="zzz", max_tokens=24, explain=True, prediction={"type": "content", "content": own})
    assert told["choices"][0]["text"] == own
    assert "prediction" in json.dumps(told), "who guessed is named"
    assert ask(prompt="one")["choices"][0]["text"] == plainly("one").text


def test_smoothed_text_comes_token_by_token():
    """A step of the oracle's brings several tokens at once."""
    body = {"prompt": "zzz", "temperature": 0, "max_tokens": 24, "stream": True, "explain": True}
    smooth, plain = (events_of(post(PATH, {**body, "smooth": smooth})) for smooth in (True, False))
    assert text_of(smooth) == text_of(plain) == plainly("zzz", max_tokens=24).text
    apart, at_once = (
        [len(event["draftsmith"]["tokens"]) for event in events if "draftsmith" in event] for events in (smooth, plain)
    )
    assert apart == [1] * sum(at_once) and max(at_once) > 1


def test_null_stands_for_what_is_left_out():
    nothing = dict.fromkeys(
        ("logprobs", "top_p", "top_k", "min_p", "stop", "seed", "n", "user", "stream_options", "logit_bias", "suffix",
         "best_of", "echo", "stream", "presence_penalty", "response_format", "prediction", "speculation", "timeout",
         "ignore_eos", "smooth", "explain")
    )
    assert ask(**nothing)["choices"] == ask()["choices"]


def test_a_suffix_is_refused_by_its_name():
    error = post(PATH, {"prompt": "x", "suffix": "y"}).json()["error"]
    assert error["param"] == "suffix" and error["message"] == "suffix: it is not served; leave it out."


def test_fields_that_nobody_knows_are_left():
    assert ask(store=True, metadata={"a": 1}, unheard_of=[1])["choices"] == ask()["choices"]


def test_answers_are_in_ascii():
    """Some clients cut a stream at what counts as the end of a line in Unicode."""
    response = post(PATH, {"prompt": "né", "max_tokens": 3, "echo": True, "temperature": 0})
    assert response.content.isascii() and json.loads(response.content)["choices"][0]["text"].startswith("né")
