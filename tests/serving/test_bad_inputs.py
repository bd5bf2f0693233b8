"""What a client may send by mistake or on purpose: each is answered at once, and hurts nobody else.

Beside every one of them a neighbour streams, whose text has to stay the same token for token.
"""

import asyncio
import json
import time
from typing import Any

import httpx
import pytest

from tests.serving.toy import PROMPTS, events_of, make_service, plainly, running, target, text_of

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
DEEP = json.dumps({"prompt": "x"})[:-1] + ', "logit_bias": ' + "[" * 10_000 + "]" * 10_000 + "}"
JUST_TOO_DEEP = json.dumps({"prompt": "x"})[:-1] + ', "user": ' + "[" * 128 + "]" * 128 + "}"
MEGABYTE = "a" * (1 << 20)

CASES: dict[str, tuple[str, Any, int]] = {
    # name: route, body, status
    "n, a million": (COMPLETION, {"prompt": "x", "n": 10**6}, 400),
    "n, none": (COMPLETION, {"prompt": "x", "n": 0}, 400),
    "best_of, a million": (COMPLETION, {"prompt": "x", "best_of": 10**6}, 400),
    "n in a chat, a million": (CHAT, {"messages": HI, "n": 10**6}, 400),
    "100,000 prompts": (COMPLETION, {"prompt": ["x"] * 10**5}, 400),
    "100,000 prompts of ids": (COMPLETION, {"prompt": [[1]] * 10**5}, 400),
    "prompts times copies": (COMPLETION, {"prompt": ["x"] * 100, "n": 100}, 400),
    "stops, a million of another kind": (COMPLETION, {"prompt": "x", "stop": [0] * 10**6}, 400),
    "ids of stops, 500,000 of another kind": (COMPLETION, {"prompt": "x", "stop_token_ids": ["a"] * 500_000}, 400),
    "messages, a million of another kind": (CHAT, {"messages": [0] * 10**6}, 400),
    "biases, 200,000 of another kind": (
        COMPLETION, {"prompt": "x", "logit_bias": {str(token): "a" for token in range(200_000)}}, 400
    ),
    "one token by two names": (COMPLETION, {"prompt": "x", "logit_bias": {"5": 1, "05": 2}}, 400),
    "biases that are no numbers": (COMPLETION, {"prompt": "x", "logit_bias": {"1": "a"}}, 400),
    "half a character by itself": ("/tokenize", {"prompt": "\ud800", "add_special_tokens": False}, 400),
    "max_tokens, negative": (COMPLETION, {"prompt": "x", "max_tokens": -1}, 400),
    "max_tokens, none": (COMPLETION, {"prompt": "x", "max_tokens": 0}, 400),
    "max_tokens, 10^12": (COMPLETION, {"prompt": "x", "max_tokens": 10**12}, 400),
    "max_tokens, a text": (COMPLETION, {"prompt": "x", "max_tokens": "16"}, 400),
    "max_tokens in a chat, 10^12": (CHAT, {"messages": HI, "max_completion_tokens": 10**12}, 400),
    "min_tokens above max_tokens": (COMPLETION, {"prompt": "x", "max_tokens": 2, "min_tokens": 3}, 400),
    "temperature, NaN": (COMPLETION, '{"prompt": "x", "temperature": NaN}', 400),
    "temperature, infinite": (COMPLETION, '{"prompt": "x", "temperature": Infinity}', 400),
    "temperature, too large for a float": (COMPLETION, '{"prompt": "x", "temperature": 1e400}', 400),
    "temperature, 1e308": (COMPLETION, {"prompt": "x", "temperature": 1e308}, 400),
    "top_p, 0": (COMPLETION, {"prompt": "x", "top_p": 0}, 400),
    "min_p, -1e308": (COMPLETION, {"prompt": "x", "min_p": -1e308}, 400),
    "presence_penalty, 1e308": (COMPLETION, {"prompt": "x", "presence_penalty": 1e308}, 400),
    "repetition_penalty, 0": (COMPLETION, {"prompt": "x", "repetition_penalty": 0}, 400),
    "top_k, negative": (COMPLETION, {"prompt": "x", "top_k": -7}, 400),
    "seed, 2^63": (COMPLETION, {"prompt": "x", "seed": 2**63}, 400),
    "seed, below 64 bits": (COMPLETION, {"prompt": "x", "seed": -(2**63) - 1}, 400),
    "seed, 2^64": (COMPLETION, {"prompt": "x", "seed": 2**64}, 400),
    "seed, a text": (COMPLETION, {"prompt": "x", "seed": "100"}, 400),
    "logit_bias, the width of the logits": (COMPLETION, {"prompt": "x", "logit_bias": {"257": 1}}, 400),
    "logit_bias, negative": (COMPLETION, {"prompt": "x", "logit_bias": {"-1": 1}}, 400),
    "logit_bias, a word": (COMPLETION, {"prompt": "x", "logit_bias": {"abc": 1}}, 400),
    "logit_bias, a strange digit": (COMPLETION, {"prompt": "x", "logit_bias": {"\N{ARABIC-INDIC DIGIT ONE}": 1}}, 400),
    "logit_bias, 100,000": (COMPLETION, {"prompt": "x", "logit_bias": {str(i): 1 for i in range(10**5)}}, 400),
    "logit_bias, 400 digits": (COMPLETION, '{"prompt": "x", "logit_bias": {"1": ' + "9" * 400 + "}}", 400),
    "logit_bias, NaN": (COMPLETION, '{"prompt": "x", "logit_bias": {"1": NaN}}', 400),
    "stop id, the width of the logits": (COMPLETION, {"prompt": "x", "stop_token_ids": [257]}, 400),
    "stop id, negative": (COMPLETION, {"prompt": "x", "stop_token_ids": [-1]}, 400),
    "prompt of ids, negative": (COMPLETION, {"prompt": [1, -1]}, 400),
    "prompt of ids, too large": (COMPLETION, {"prompt": [1, 257]}, 400),
    "prompt of ids, broken numbers": (COMPLETION, {"prompt": [1.5]}, 400),
    "prompt of ids, yes and no": (COMPLETION, {"prompt": [True]}, 400),
    "prompt, empty text": (COMPLETION, {"prompt": ""}, 400),
    "prompt, empty list": (COMPLETION, {"prompt": []}, 400),
    "prompt, list of an empty list": (COMPLETION, {"prompt": [[]]}, 400),
    "prompt, mixed": (COMPLETION, {"prompt": ["x", 1]}, 400),
    "prompt, missing": (COMPLETION, {}, 400),
    "prompt, half a character": (COMPLETION, '{"prompt": "\\ud800"}', 400),
    "message, half a character": (CHAT, '{"messages": [{"role": "user", "content": "\\ud800"}]}', 400),
    "prompt, one token over": (COMPLETION, {"prompt": [1] * 128, "max_tokens": 1}, 400),
    "prompt, a megabyte": (COMPLETION, {"prompt": MEGABYTE, "max_tokens": 1}, 400),
    "message, a megabyte": (CHAT, {"messages": [{"role": "user", "content": MEGABYTE}]}, 400),
    "logprobs, negative": (COMPLETION, {"prompt": "x", "logprobs": -1}, 400),
    "logprobs, 100,000": (COMPLETION, {"prompt": "x", "logprobs": 10**5}, 400),
    "top_logprobs, 21": (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 21}, 400),
    "top_logprobs alone": (CHAT, {"messages": HI, "top_logprobs": 2}, 400),
    "stop, empty": (COMPLETION, {"prompt": "x", "stop": [""]}, 400),
    "stop, 100,000": (COMPLETION, {"prompt": "x", "stop": ["a"] * 10**5}, 400),
    "stop, a megabyte": (COMPLETION, {"prompt": "x", "stop": MEGABYTE}, 400),
    "a template of the client's": (CHAT, {"messages": HI, "chat_template": "{{ 1 }}"}, 400),
    "an unknown variable of the template": (CHAT, {"messages": HI, "chat_template_kwargs": {"a": 1}}, 400),
    "10,000 levels": (COMPLETION, DEEP, 400),
    "129 levels": (COMPLETION, JUST_TOO_DEEP, 400),
    "no JSON": (COMPLETION, "{prompt", 400),
    "no UTF-8": (COMPLETION, b'{"prompt": "\xff"}', 400),
    "no object": (COMPLETION, "[1]", 400),
    "nothing": (COMPLETION, "", 400),
    "a number of 5,000 digits": (COMPLETION, '{"prompt": "x", "max_tokens": ' + "9" * 5000 + "}", 400),
    "a tool_choice of no type": (
        CHAT, {"messages": HI, "tools": [{"type": "function", "function": {"name": "f"}}],
               "tool_choice": {"type": "banana", "function": {"name": "f"}}}, 400,
    ),
    "a pattern that ends in a backslash": (
        COMPLETION, {"prompt": "x", "structured_outputs": {"json": {"type": "string", "pattern": "a\\"}}}, 400
    ),
    "a picture": (CHAT, {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]}, 400),
    "a role that there is not": (CHAT, {"messages": [{"role": "root", "content": "x"}]}, 400),
    "no messages": (CHAT, {"messages": []}, 400),
    "a model elsewhere": (COMPLETION, {"model": "../../x", "prompt": "x"}, 404),
    "another model": (CHAT, {"model": "gpt-x", "messages": HI}, 404),
    "tensors": (COMPLETION, {"prompt_embeds": "gASVAAA=", "prompt": "x"}, 400),
    "stream_options without a stream": (COMPLETION, {"prompt": "x", "stream_options": {"include_usage": True}}, 400),
    "a plan that is none": (COMPLETION, {"prompt": "x", "speculation": {"plan": "4;2"}}, 400),
    "a plan of 10^9 nodes": (COMPLETION, {"prompt": "x", "speculation": {"plan": "9,9,9,9,9,9,9,9,9"}}, 400),
    "a plan with a wide node": (COMPLETION, {"prompt": "x", "speculation": {"plan": "200"}}, 400),
    "a plan with a node without children": (COMPLETION, {"prompt": "x", "speculation": {"plan": "2,0"}}, 400),
    "a drafter that there is not": (COMPLETION, {"prompt": "x", "speculation": {"drafter": "../x"}}, 400),
    "a typo in speculation": (COMPLETION, {"prompt": "x", "speculation": {"detph": 3}}, 400),
    "a typo in speculation, in a chat": (CHAT, {"messages": HI, "speculation": {"enabled": False, "Plan": "2"}}, 400),
    "a typo of a megabyte": (COMPLETION, {"prompt": "x", "speculation": {MEGABYTE: 3}}, 400),
    "a typo with half a character": (COMPLETION, '{"prompt": "x", "speculation": {"{\\ud800}": 3}}', 400),
    "timeout, 0": (COMPLETION, {"prompt": "x", "timeout": 0}, 400),
    "30,000 brackets in a pattern": (
        COMPLETION, {"prompt": "x", "structured_outputs": {"regex": "(" * 30_000 + "a" + ")" * 30_000}}, 400,
    ),
    "a schema nested in itself": (COMPLETION, {"prompt": "x", "structured_outputs": {"json": "[" * 10_000}}, 400),
    "a tool of a million characters": (
        CHAT, {"messages": HI, "tools": [{"type": "function", "function": {"name": MEGABYTE}}],
               "tool_choice": "required"}, 400,
    ),
    "a tool whose definitions are a list": (
        CHAT, {"messages": HI, "tools": [{"type": "function", "function": {"name": "x", "parameters": {"$defs": []}}}],
               "tool_choice": "required"}, 400,
    ),
    "80,000 tools": (
        CHAT, {"messages": HI, "tools": [{"type": "function", "function": {"name": "f"}}] * 80_000,
               "tool_choice": "required"}, 400,
    ),
    "300,000 earlier calls": (
        CHAT, {"messages": [*HI, {"role": "assistant", "tool_calls": [{"a": {}}] * 300_000}]}, 400
    ),
    "100,000 empty messages": (CHAT, {"messages": [{"role": "user", "content": ""}] * 100_000}, 400),
    "120,000 empty parts": (
        CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 120_000}]}, 400
    ),
    "an earlier call of a megabyte": (
        CHAT, {"messages": [*HI, {"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "x", "arguments": MEGABYTE}}]}]}, 400,
    ),
    "a part without its text": (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400),
    "suffix": (COMPLETION, {"prompt": "x", "suffix": "y"}, 400),
    "beams": (COMPLETION, {"prompt": "x", "use_beam_search": True}, 400),
    **{
        f"{name}, which others have": (COMPLETION, {"prompt": "x", name: value}, 400)
        for name, value in {
            "guided_json": {"type": "null"}, "guided_choice": ["a"], "guided_regex": "a", "grammar": "root ::= \"a\"",
            "allowed_token_ids": [5], "bad_words": ["a"], "include_stop_str_in_output": True,
            "truncate_prompt_tokens": 1, "prompt_logprobs": 1,
        }.items()
    },
    **{
        f"{name} with nothing in it": (COMPLETION, {"prompt": "x", name: value}, 400)
        for name, value in {"guided_json": {}, "guided_regex": "", "guided_choice": [], "prompt_logprobs": 0}.items()
    },
    "audio": (CHAT, {"messages": HI, "modalities": ["text", "audio"]}, 400),
    "a route that there is not": ("/v1/embeddings", {"input": "x"}, 404),
}


async def neighbour(client: httpx.AsyncClient, prompt: str) -> str:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 24, "stream": True}
    return text_of(events_of(await client.post(COMPLETION, json=body)))


async def send(client: httpx.AsyncClient, path: str, body: Any) -> tuple[httpx.Response, float]:
    begun = time.monotonic()
    content = body if isinstance(body, (str, bytes)) else json.dumps(body)
    response = await client.post(path, content=content, headers={"content-type": "application/json"})
    return response, time.monotonic() - begun


@pytest.fixture(scope="module")
def answers() -> dict[str, tuple[httpx.Response, float]]:
    """Send them all, eight at a time, to one server that writes for a neighbour meanwhile."""
    async def main() -> dict[str, tuple[httpx.Response, float]]:
        found: dict[str, tuple[httpx.Response, float]] = {}
        service = make_service(max_batch=8)
        async with running(service) as client:
            names = list(CASES)
            for begin in range(0, len(names), 8):
                part = names[begin : begin + 8]
                beside = PROMPTS[begin // 8 % len(PROMPTS)]
                own, *sent = await asyncio.gather(
                    neighbour(client, beside), *(send(client, *CASES[name][:2]) for name in part)
                )
                assert own == plainly(beside, max_tokens=24).text, part
                found |= dict(zip(part, sent, strict=True))
            assert service.inside == 0 and service.engine.failure is None
            assert not service.meter.core.has_work
        return found

    return asyncio.run(main())


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_in_the_form_that_clients_read(name: str, answers: dict[str, tuple[httpx.Response, float]]):
    response, seconds = answers[name]
    assert response.status_code == CASES[name][2], response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert len(error["message"]) < 500, "it does not send back what it was sent"
    assert seconds < 20  # that it was answered at all; `make test-slow` times them one by one


def test_a_template_that_goes_on_for_ever_is_ended():
    loop = "{% for a in range(9999) %}{% for b in range(9999) %}{{ a }}{% endfor %}{% endfor %}"
    inside = "{{ messages.__class__.__mro__ }}"

    async def main() -> None:
        for template, word in ((loop, "longer than 0.3 seconds"), (inside, "")):
            service = make_service(of=target(template), drafts=False, template_seconds=0.3)
            async with running(service) as client:
                response, _ = await send(client, CHAT, {"messages": HI})
                assert response.status_code in (200, 400)
                assert word in response.text and "__main__" not in response.text and "<class" not in response.text
                response, _ = await send(client, COMPLETION, {"prompt": "one", "max_tokens": 4, "temperature": 0})
                assert response.json()["choices"][0]["text"] == plainly("one", max_tokens=4).text

    asyncio.run(main())


def test_request_ids_may_repeat():
    async def main() -> None:
        async with running(make_service()) as client:
            async def ask(prompt: str, identity: str) -> str:
                response = await client.post(
                    COMPLETION, json={"prompt": prompt, "temperature": 0, "max_tokens": 20},
                    headers={"x-request-id": identity},
                )
                assert response.headers["x-request-id"] == response.headers["request-id"] == identity
                return str(response.json()["choices"][0]["text"])

            asked = [("one", "a"), ("zzz", "a"), ("né", "a-0"), ("12 + 3", "a-0-0")]
            found = await asyncio.gather(*(ask(*one) for one in asked))
            assert found == [plainly(prompt, max_tokens=20).text for prompt, _ in asked]
            response = await client.get("/v1/models", headers={"x-request-id": "x\ty" * 100})
            assert response.headers["x-request-id"].startswith("req-")

    asyncio.run(main())


@pytest.mark.parametrize("rule", [{"presence_penalty": 1.0}, {"frequency_penalty": 1.0}, {"repetition_penalty": 1.5}])
def test_penalties_do_not_mind_drafts(rule: dict[str, float]):
    async def main() -> None:
        async with running(make_service()) as client:
            response, _ = await send(client, COMPLETION, {"prompt": "zzz", "temperature": 0, "max_tokens": 30, **rule})
            assert response.json()["choices"][0]["text"] == plainly("zzz", max_tokens=30, **rule).text

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_it_costs_neither_time_nor_memory(name: str):
    """The answer comes within a second, the next request works, and memory grows by less than 20 MB.

    Of three tries one has to be in time, because other programs may take the processor meanwhile.
    """
    async def main() -> None:
        async with running(make_service(max_batch=8)) as client:
            await neighbour(client, "one")
            await send(client, *CASES[name][:2])
            before = memory()
            took = list[float]()
            while len(took) < 3 and min(took, default=1.0) >= 1:
                own, (_, seconds) = await asyncio.gather(neighbour(client, "zzz"), send(client, *CASES[name][:2]))
                assert own == plainly("zzz", max_tokens=24).text
                took.append(seconds)
            assert min(took) < 1
            assert await neighbour(client, "one") == plainly("one", max_tokens=24).text
            assert memory() - before < 20e6

    asyncio.run(main())


def memory() -> float:
    """Return the bytes of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
