"""Parts of the server by themselves."""

import asyncio
import gc
import threading
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.serving.body import SMALL_BYTES, Bodies
from draftsmith.serving.delta import Delta
from draftsmith.serving.errors import WAIT_S, ApiError
from draftsmith.serving.meter import Histogram
from draftsmith.serving.metrics import buckets_of
from draftsmith.serving.openai_fields import CompletionFields
from draftsmith.serving.settings import Settings
from draftsmith.serving.smoothing import smooth, split
from draftsmith.serving.speculation import read_plan
from draftsmith.serving.tally import Tally, plan_in_words
from draftsmith.serving.token_texts import TokenTexts
from draftsmith.types import DraftsmithError
from tests.serving.toy import listening, make_service, target


@pytest.mark.parametrize(
    ("words", "plan"),
    [
        ("4,2,1", Plan((4, 2, 1))), ("chain 3", Plan((1, 1, 1))), ("none", NO_DRAFT), (" 2 , 1", Plan((2, 1))),
        ("1", Plan((1,))),
    ],
)
def test_plans_are_read_as_they_are_told(words: str, plan: Plan):
    assert read_plan(words, Settings()) == plan
    assert read_plan(plan_in_words(plan), Settings()) == plan


@pytest.mark.parametrize("words", ["", "chain 0x3", "4;2", "-1", "17", "16,16", "chain 999", "1,0", "9" * 10_000])
def test_plans_that_are_none(words: str):
    with pytest.raises(ApiError) as refused:
        read_plan(words, Settings())
    assert refused.value.status == 400 and len(refused.value.message) < 300


def test_plans_with_bounds_say_so():
    assert plan_in_words(Plan((3, 2), nodes=4, beam=3)) == "3,2 nodes 4 beam 3"
    assert plan_in_words(Plan((2, 1), sampled=True)) == "2,1 sampled"
    assert plan_in_words(Plan((1, 1), factor=0.5)) == "chain 2 factor 0.5"


def delta(tokens: list[int], texts: list[str], text: str | None = None) -> Delta:
    return Delta(0, tokens, "".join(texts) if text is None else text, texts, None, None, None, None, Tally())


def test_a_piece_is_split_at_its_tokens():
    parts = split(delta([1, 2, 3], ["a", "", "bc"]))
    assert [(part.tokens, part.text) for part in parts] == [([1], "a"), ([2], ""), ([3], "bc")]
    # Text that was held back before, or is held back now.
    assert "".join(part.text for part in split(delta([1, 2], ["a", "b"], "xyab"))) == "xyab"
    assert "".join(part.text for part in split(delta([1, 2], ["abc", "d"], "a"))) == "a"


def test_smoothing_never_falls_behind():
    """What has come already goes out at once, however long steps usually take."""
    async def slow_then_fast() -> AsyncGenerator[Delta, None]:
        yield delta([1], ["a"])
        await asyncio.sleep(0.2)
        for _ in range(50):
            yield delta([1, 2, 3, 4], ["a", "b", "c", "d"])

    async def main() -> tuple[int, float]:
        loop, count = asyncio.get_running_loop(), 0
        begun = loop.time()
        async for _ in smooth(slow_then_fast()):
            count += 1
        return count, loop.time() - begun

    count, seconds = asyncio.run(main())
    assert count == 201
    assert seconds < 5  # 50 steps of 0.2 s would be 10


def test_smoothing_passes_failures_on():
    async def fails() -> AsyncGenerator[Delta, None]:
        yield delta([1, 2], ["a", "b"])
        raise ApiError(504, "late")

    async def main() -> list[str]:
        found = []
        with pytest.raises(ApiError, match="late"):
            async for one in smooth(fails()):
                found.append(one.text)
        return found

    assert asyncio.run(main()) == ["a", "b"]


def test_histograms_count_what_is_at_most_a_bound():
    histogram = Histogram((1, 2.5))
    for value in (1, 1, 1.1, 2.5, 9, 9, 9):
        histogram.add(value)
    assert buckets_of(histogram) == [("1.0", 2), ("2.5", 4), ("+Inf", 7)]
    assert histogram.sum == pytest.approx(32.6)


def test_the_bytes_of_a_character_come_token_by_token():
    texts = TokenTexts(target().tokenizer)
    tokens = list(target().tokenizer("né€")["input_ids"])  # type: ignore[misc]
    assert b"".join(texts.bytes_of(token) for token in tokens) == "né€".encode()
    assert texts.pieces().read(tokens) == ["n", "", "é", "", "", "€"]
    assert texts.text(256) == "<eos>" and texts.pieces().read([256]) == [""]


@pytest.mark.parametrize("wrong", [
    {"keys": ("",)}, {"names": ("",)}, {"max_waiting": -1}, {"request_timeout": 0}, {"max_body_bytes": 0},
    {"drain_seconds": float("nan")}, {"request_timeout": float("inf")},
])
def test_settings_that_make_no_sense(wrong: dict[str, object]):
    with pytest.raises(DraftsmithError):
        Settings(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("unit", ["[]", '{"a":1}'])
def test_others_go_on_while_a_large_body_is_read(unit: str):
    """Reading it and looking at how deep it is takes long; a coroutine that never waits has its turns meanwhile."""
    body = b'{"prompt":"x","more":[' + b",".join([unit.encode()] * 300_000) + b"]}"

    async def main() -> tuple[CompletionFields, int]:
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        going = asyncio.create_task(others())
        try:
            return await Bodies(Settings(), 1).read(request_with(body), CompletionFields), turns
        finally:
            going.cancel()

    fields, turns = asyncio.run(main())
    assert fields.prompt == "x" and turns > 10


@pytest.mark.parametrize("size", [0, SMALL_BYTES])
def test_mistakes_in_small_and_large_bodies_are_told_alike(size: int):
    space = b" " * size
    for body, told in ((b'{"prompt":[' + space, "is not JSON"), (b'{"seed":"1"' + space + b"}", "seed: ")):
        with pytest.raises(ApiError, match=told) as refused:
            asyncio.run(Bodies(Settings(), 1).read(request_with(body), CompletionFields))
        assert refused.value.status == 400
        assert gc.isenabled()


def test_large_bodies_beyond_the_most_are_refused_until_one_is_read():
    small, large = b'{"prompt":"x"}', b'{"prompt":"x"' + b" " * SMALL_BYTES + b"}"
    bodies = Bodies(Settings(), 2)

    async def read(*given: bytes) -> list[CompletionFields | BaseException]:
        reads = [bodies.read(request_with(body), CompletionFields) for body in given]
        return await asyncio.gather(*reads, return_exceptions=True)

    *taken, refused, beside = asyncio.run(read(large, large, large, small))
    assert isinstance(refused, ApiError) and "2 large bodies wait" in refused.message
    assert (refused.status, refused.code, refused.retry_after) == (429, "queue_full", WAIT_S)
    taken += [beside, *asyncio.run(read(large, large))]
    assert [isinstance(one, CompletionFields) for one in taken] == [True] * 5


def test_the_thread_of_large_bodies_ends_with_the_server():
    def reading() -> set[threading.Thread]:
        return {one for one in threading.enumerate() if one.name.startswith("draftsmith-bodies")}

    before, service = reading(), make_service()
    with listening(service) as url:
        body = b'{"prompt":"x"' + b" " * SMALL_BYTES + b"}"
        answer = httpx.post(f"{url}/tokenize", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 200
        (thread,) = reading() - before
    thread.join(10)
    assert not thread.is_alive()
    del service  # kept until here: a thread whose executor nobody has any more ends by itself


def request_with(body: bytes) -> Request:
    """Return a request with a body that is there already."""
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"content-type", b"application/json")]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)
