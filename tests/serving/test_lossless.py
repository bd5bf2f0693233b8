"""Drafts change no byte of any answer: with them and without, one client or many, in one piece or streamed."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.serving.toy import NAME, PROMPTS, events_of, make_service, plainly, running

TEXTS = [PROMPTS[number % len(PROMPTS)] + "!" * (number // len(PROMPTS)) for number in range(32)]
STOP = plainly("zzz", max_tokens=20).text[6:8]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0},
    "streamed": {"temperature": 0, "stream": True},
    "smoothed": {"temperature": 0, "stream": True, "smooth": True},
    "stopped": {"temperature": 0, "stop": [STOP, "e"]},
    "stopped, streamed": {"temperature": 0, "stop": [STOP, "e"], "stream": True},
    "with log-probabilities": {"temperature": 0, "logprobs": 2},
    "sampled": {"temperature": 1.0, "seed": 7, "top_p": 0.95},
    "with penalties": {"temperature": 0, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
}


async def ask(client: httpx.AsyncClient, prompt: str, fields: dict[str, Any]) -> Any:
    """Return what is said, without ids and times."""
    response = await client.post("/v1/completions", json={"model": NAME, "prompt": prompt, "max_tokens": 9, **fields})
    assert response.status_code == 200, response.text
    if not fields.get("stream"):
        return response.json()["choices"]
    choices = [event["choices"][0] for event in events_of(response)]
    return ["".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]]


@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_is_the_same(kind: str):
    """One client sends the first few texts one after the other; eight send eight at once, 32 send them all."""
    fields = KINDS[kind]

    async def main() -> dict[str, list[str]]:
        found = {}
        for drafts in (False, True):
            async with running(make_service(drafts=drafts, max_batch=16)) as client:
                for many in (1, 8, 32):
                    if many == 1:
                        told = [await ask(client, text, fields) for text in TEXTS[:4]]
                    else:
                        told = await asyncio.gather(*(ask(client, text, fields) for text in TEXTS[:many]))
                    found[f"{'drafted' if drafts else 'plain'}, {many} at a time"] = [rounded(one) for one in told]
        return found

    found = asyncio.run(main())
    expected = found["plain, 32 at a time"]
    assert {name for name, told in found.items() if told != expected[: len(told)]} == set()


def rounded(told: Any) -> str:
    """Return an answer as JSON; log-probabilities may differ by what another order of summing rounds away."""
    def plain(value: Any) -> Any:
        if isinstance(value, float):
            return round(value, 8)
        if isinstance(value, dict):
            return {name: plain(inner) for name, inner in value.items()}
        return [plain(inner) for inner in value] if isinstance(value, list) else value

    return json.dumps(plain(told))
