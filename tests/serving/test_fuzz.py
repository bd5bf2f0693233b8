"""Requests that nobody thought of: fields changed by chance, and bytes. Seeds are fixed, so that a failure stays."""

import asyncio
import json
from random import Random
from typing import Any

import httpx
import pytest

from tests.serving.toy import PROMPTS, make_service, plainly, running

JSON = {"content-type": "application/json"}
HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "model": "toy", "prompt": "one", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1,
        "n": 2, "stop": ["x"], "stop_token_ids": [3], "logit_bias": {"5": 1.0}, "seed": 1, "logprobs": 1, "echo": True,
        "stream": True, "stream_options": {"include_usage": True}, "presence_penalty": 0.1, "smooth": True,
        "explain": True, "speculation": {"plan": "2,1", "drafter": "oracle"}, "spec_decode_metrics": "summary",
        "timeout": 5.0,
    },
    "/v1/chat/completions": {
        "messages": HI, "max_completion_tokens": 3, "logprobs": True, "top_logprobs": 2, "stream": False,
        "chat_template_kwargs": {"tone": "dry"}, "response_format": {"type": "text"}, "n": 1,
    },
    "/v1/messages": {
        "model": "toy", "system": "be kind", "messages": HI, "max_tokens": 3, "stop_sequences": ["x"], "top_k": 2,
        "stream": True, "metadata": {"user_id": "u"}, "tools": [{"name": "clock", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "clock"},
    },
    "/v1/messages/count_tokens": {"model": "toy", "messages": HI},
    "/tokenize": {"prompt": "one", "add_special_tokens": True, "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2, 3]},
}
STRANGE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 0.5, -0.5, 1e308, 2**31, 2**63, 2**64, 10**30, "", "x", "\x00", "\ud800",
    "\N{PILE OF POO}" * 9, "a" * 999, [], [[]], [None], [0, "x"], {}, {"": {}}, {"type": "text"}, [{}], [[1, 2], "x"],
    {"role": "user"}, "none", "chain 3", {"plan": "99,99"}, {"enabled": 1}, {"5": "x"},
)


def changed(body: dict[str, Any], random: Random) -> dict[str, Any]:
    """Replace or leave out some fields."""
    found = dict(body)
    for name in random.sample(sorted(found), min(len(found), random.choice((1, 1, 2, 4)))):
        if random.random() < 0.1:
            del found[name]
        else:
            found[name] = random.choice(STRANGE)
    return found


def damaged(body: dict[str, Any], random: Random) -> bytes:
    """Change, take out or double some bytes of a body."""
    text = bytearray(json.dumps(body).encode())
    for _ in range(random.randint(1, 6)):
        at = random.randrange(len(text))
        kind = random.random()
        if kind < 0.4:
            text[at] = random.randrange(256)
        elif kind < 0.7:
            del text[at : at + random.randint(1, 8)]
        else:
            text[at:at] = text[max(0, at - random.randint(1, 8)) : at]
        if not text:
            break
    return bytes(text)


async def check(client: httpx.AsyncClient, random: Random) -> None:
    path = random.choice(sorted(BODIES))
    body = changed(BODIES[path], random)
    sent = json.dumps(body).encode() if random.random() < 0.7 else damaged(body, random)
    response = await client.post(path, content=sent, headers=JSON)
    # 504 is what a tiny timeout of the client's own brings.
    assert response.status_code in (200, 400, 404, 504), (path, sent, response.text)
    if response.status_code == 200 and "event-stream" in response.headers["content-type"]:
        assert "server_error" not in response.text and "api_error" not in response.text, (path, sent, response.text)


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 400), *(pytest.param(seed, 2000, marks=pytest.mark.slow) for seed in range(1, 5))]
)
def test_whatever_is_sent_is_answered_and_hurts_nobody(seed: int, count: int):
    async def main() -> None:
        service, random = make_service(max_batch=8), Random(seed)
        async with running(service) as client:
            for _ in range(count // 4):
                await asyncio.gather(*(check(client, random) for _ in range(4)))
            assert service.inside == 0 and not service.meter.core.has_work and service.engine.failure is None
            assert service.meter.core.blocks.held_tokens == 0
            prompt = PROMPTS[seed]
            told = await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 9, "temperature": 0})
            assert told.json()["choices"][0]["text"] == plainly(prompt, max_tokens=9).text

    asyncio.run(main())
