"""More clients than there is room for, and clients that leave: whoever stays has the text that it has alone."""

import asyncio
from random import Random
from typing import Any

import pytest

from tests.serving.toy import PROMPTS, events_of, make_service, plainly, running, text_of, until

PATH = "/v1/completions"


def body(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 24, "temperature": 0, **fields}


@pytest.mark.slow
def test_of_a_thousand_clients_half_leave_and_the_others_have_their_texts():
    """Some leave while they wait, some while their prompt is read, some in the middle of their text."""
    own = [plainly(prompt, max_tokens=24).text for prompt in PROMPTS]

    async def main() -> None:
        service, random = make_service(max_batch=16, max_waiting=2000), Random(0)
        async with running(service) as client:
            async def ask(number: int) -> tuple[int, str | None]:
                prompt = PROMPTS[number % len(PROMPTS)]
                asked = asyncio.create_task(client.post(PATH, json=body(prompt, stream=number % 3 == 0)))
                if number % 2:
                    await asyncio.sleep(random.random() * 3)
                    if asked.cancel():
                        return number, None
                response = await asked
                if number % 3 == 0:
                    return number, text_of(events_of(response))
                return number, response.json()["choices"][0]["text"]

            for number, text in await asyncio.gather(*(ask(number) for number in range(1000))):
                assert text in (None, own[number % len(PROMPTS)])
                assert text is not None or number % 2
            until(lambda: not service.meter.core.has_work)
            assert service.inside == 0 and service.meter.core.blocks.held_tokens == 0
            assert service.meter.finished["abort"] > 50

    asyncio.run(main())


@pytest.mark.slow
def test_ten_times_too_many_are_told_at_once_and_the_others_have_their_texts():
    own = [plainly(prompt, max_tokens=24).text for prompt in PROMPTS]

    async def main() -> None:
        service = make_service(max_batch=4, max_waiting=12)
        async with running(service) as client:
            async def ask(number: int) -> tuple[int, int, str]:
                prompt = PROMPTS[number % len(PROMPTS)]
                response = await client.post(PATH, json=body(prompt))
                text = response.json()["choices"][0]["text"] if response.status_code == 200 else ""
                return number, response.status_code, text

            found = await asyncio.gather(*(ask(number) for number in range(160)))
            assert {status for _, status, _ in found} == {200, 429}
            assert 16 <= sum(status == 200 for _, status, _ in found) < 160
            for number, status, text in found:
                if status == 200:
                    assert text == own[number % len(PROMPTS)]

    asyncio.run(main())
