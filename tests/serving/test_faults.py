"""What breaks inside the server: it costs those whom it concerns an answer, and nobody else anything."""

import asyncio
import json
import socket
import threading
import time
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from draftsmith.plan import Plan
from draftsmith.serving.run import listen, run
from draftsmith.targets import Target
from draftsmith.types import Context, Draft, DraftsmithError
from tests.helpers.oracle import OracleDrafter
from tests.serving.toy import (
    PROMPTS,
    events_of,
    make_service,
    model,
    oracle,
    plainly,
    running,
    server_of,
    target,
    text_of,
    until,
)

PATH = "/v1/completions"


def body(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 24, "temperature": 0, **fields}


class Broken(OracleDrafter):
    """Raises at every third draft, and returns what does not fit at every other third."""

    calls = 0

    def propose(self, context: Context, plan: Plan) -> Draft:
        self.calls += 1
        draft = super().propose(context, plan)
        if self.calls % 3 == 0:
            raise RuntimeError("the drafter is broken")
        if self.calls % 3 == 1:
            draft.tokens_BN = draft.tokens_BN[:, :-1]
        return draft


def test_a_drafter_that_fails_costs_no_text():
    async def main() -> None:
        service = make_service(drafter=oracle(kind=Broken))
        async with running(service) as client:
            told = await asyncio.gather(*(client.post(PATH, json=body(prompt)) for prompt in PROMPTS))
            for prompt, response in zip(PROMPTS, told, strict=True):
                assert response.json()["choices"][0]["text"] == plainly(prompt, max_tokens=24).text
            text = (await client.get("/metrics")).text
            (line,) = [line for line in text.splitlines() if line.startswith("draftsmith_drafter_failures_total")]
            assert float(line.split()[-1]) > 3

    asyncio.run(main())


class Hangs(OracleDrafter):
    """Does not come back from a draft until it is let go."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.reached, self.free = threading.Event(), threading.Event()

    def propose(self, context: Context, plan: Plan) -> Draft:
        self.reached.set()
        assert self.free.wait(20)
        return super().propose(context, plan)


def test_an_engine_that_hangs_in_a_step_is_not_healthy():
    async def main() -> None:
        drafter = oracle(kind=Hangs)
        assert isinstance(drafter, Hangs)
        async with running(make_service(drafter=drafter, stall_seconds=0.2)) as client:
            assert (await client.get("/health")).status_code == 200, "it is idle"
            asked = asyncio.create_task(client.post(PATH, json=body("one")))
            await asyncio.to_thread(drafter.reached.wait, 20)
            await until_health(client, 503)
            drafter.free.set()
            assert (await asked).json()["choices"][0]["text"] == plainly("one", max_tokens=24).text
            await until_health(client, 200)

    async def until_health(client: httpx.AsyncClient, status: int) -> None:
        async with asyncio.timeout(20):
            while (await client.get("/health")).status_code != status:
                await asyncio.sleep(0.02)

    asyncio.run(main())


class Slow(OracleDrafter):
    """Takes its time over every draft."""

    def propose(self, context: Context, plan: Plan) -> Draft:
        time.sleep(0.05)
        return super().propose(context, plan)


class Fails:
    """Makes the forward of a target raise as often as it is told to."""

    def __init__(self, times: int) -> None:
        self.left = times
        self.target = Target(model(), target().tokenizer, name="failing")
        self._forward = self.target.backend.read
        self.target.backend.read = self._read  # type: ignore[method-assign]

    def _read(self, *args: Any) -> Any:
        if self.left:
            self.left -= 1
            raise RuntimeError("the device is gone")
        return self._forward(*args)


def test_a_step_that_fails_is_told_to_those_who_were_in_it_and_the_server_goes_on():
    async def main() -> None:
        broken = Fails(1)
        service = make_service(of=broken.target, drafts=False)
        async with running(service) as client:
            first = await client.post(PATH, json=body("one"))
            assert first.status_code == 500 and first.json()["error"]["type"] == "server_error"
            assert "device" not in first.text
            second = await client.post(PATH, json=body("one"))
            assert second.json()["choices"][0]["text"] == plainly("one", max_tokens=24).text
            assert (await client.get("/health")).status_code == 200

    asyncio.run(main())


def test_a_stream_that_fails_in_the_middle_ends_with_an_error():
    async def main() -> None:
        broken = Fails(0)
        service = make_service(of=broken.target, drafts=False)
        async with running(service) as client:
            asked = asyncio.create_task(client.post(PATH, json=body("one", stream=True, max_tokens=100)))
            # Until text has come: what fails before the first event is no stream, and is answered with a status.
            async with asyncio.timeout(30):
                while service.meter.new_tokens < 9:
                    await asyncio.sleep(0)
            broken.left = 1
            events = events_of(await asked)
            assert events[-1]["error"]["type"] == "server_error"
            assert plainly("one", max_tokens=100).text.startswith(text_of(events[:-1]))

    asyncio.run(main())


def test_an_engine_that_fails_again_and_again_stops_the_server():
    """Everybody gets an answer, the server says that it does not work, and ends with an error of its own."""
    broken = Fails(10**6)
    service, bound = make_service(of=broken.target, drafts=False), listen("127.0.0.1", 0)
    address = f"http://127.0.0.1:{bound.getsockname()[1]}"
    told: list[int] = []

    def ask() -> None:
        told.extend(httpx.post(f"{address}{PATH}", json=body("one")).status_code for _ in range(4))
        told.append(httpx.get(f"{address}/health").status_code)

    asking = threading.Thread(target=ask)
    with pytest.raises(DraftsmithError, match="the engine has stopped .*the device is gone.*start the server again"):
        run(service, bound, asking.start)
    asking.join(10)
    assert told[:3] == [500] * 3 and told[3] in (500, 503) and told[4] == 503


class HalfTokenizer(PreTrainedTokenizerFast):
    """Cannot write a token of one of its texts."""

    def decode(self, token_ids: Any, **options: Any) -> Any:
        if self.poison in list(token_ids):
            raise ValueError("no such token")
        return super().decode(token_ids, **options)

    poison = -1


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"stop": ["never"]}])
def test_a_text_that_cannot_be_written_ends_alone(fields: dict[str, Any]):
    tokenizer = HalfTokenizer(tokenizer_object=target().tokenizer.backend_tokenizer)  # type: ignore[union-attr]
    own = plainly("one", max_tokens=24).tokens
    other = next(
        prompt for prompt in PROMPTS[1:] if set(own) - set(plainly(prompt, max_tokens=24).tokens)
    )
    tokenizer.poison = next(
        token for token in own if token not in {*plainly(other, max_tokens=24).tokens, *other.encode(), *b"one"}
    )

    async def main() -> None:
        service = make_service(of=Target(model(), tokenizer, name="half"), drafts=False)
        async with running(service) as client:
            failed, fine = await asyncio.gather(
                client.post(PATH, json=body("one", **fields)), client.post(PATH, json=body(other))
            )
            assert failed.status_code == 500 or events_of(failed)[-1]["error"]["type"] == "server_error"
            assert fine.json()["choices"][0]["text"] == plainly(other, max_tokens=24).text
            assert service.inside == 0
            again = await client.post(PATH, json=body(other))
            assert again.status_code == 200
        assert not service.meter.core.has_work

    asyncio.run(main())


def test_who_does_not_read_is_cut_off():
    """Its text is taken out, and its connection does not wait for it to read."""
    service, bound = make_service(max_batch=16, send_seconds=0.3), listen("127.0.0.1", 0)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # those of its connections are as small
    asked = json.dumps(body("one", stream=True, max_tokens=100, n=16, logprobs=20)).encode()
    with server_of(service, bound) as server, socket.create_connection(bound.getsockname()) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(asked), asked)
        )
        until(lambda: service.inside == 16)
        until(lambda: service.inside == 0 and not server.server_state.connections)
        until(lambda: not service.meter.core.has_work)
        until(lambda: 16 in (service.meter.finished["abort"], service.meter.finished["length"]))


class SlowTokenizer(PreTrainedTokenizerFast):
    """Takes its time over one word."""

    def __call__(self, text: Any = None, *others: Any, **options: Any) -> Any:
        if "slowly" in str(text):
            time.sleep(0.4)
        return super().__call__(text, *others, **options)


def test_time_and_room_are_counted_from_the_moment_a_request_comes():
    tokenizer = SlowTokenizer(tokenizer_object=target().tokenizer.backend_tokenizer)  # type: ignore[union-attr]

    async def main() -> None:
        service = make_service(
            of=Target(model(), tokenizer, name="slow"), drafts=False, max_batch=2, max_waiting=1
        )
        async with running(service) as client:
            slow = [asyncio.create_task(client.post(PATH, json=body("slowly", timeout=0.2))) for _ in range(3)]
            await asyncio.sleep(0.05)
            late = await client.post(PATH, json=body("one"))
            assert late.status_code == 429 and late.headers["retry-after"] == "1"
            assert "prompts wait for the tokenizer" in late.json()["error"]["message"]
            for response in await asyncio.gather(*slow):
                assert response.status_code == 504 and response.json()["error"]["code"] == "timeout"
            fine = await client.post(PATH, json=body("one"))
            assert fine.json()["choices"][0]["text"] == plainly("one", max_tokens=24).text

    asyncio.run(main())


def test_a_form_that_is_too_hard_is_refused_once_and_holds_up_nobody():
    texts = {f"k{number}": {"type": "string", "minLength": 1, "maxLength": 300} for number in range(200)}
    hard = {"structured_outputs": {"json": {"type": "object", "properties": texts}}}

    async def main() -> None:
        service = make_service()
        service.engine.engine.grammars.guard(0.5)
        try:
            async with running(service) as client:
                easy = body("one", structured_outputs={"regex": "[ab]{3}"})
                assert (await client.post(PATH, json=easy)).status_code == 200  # the process has begun
                began = time.monotonic()
                refused = asyncio.create_task(client.post(PATH, json=body("one", n=2, **hard) | {"prompt": PROMPTS}))
                await asyncio.sleep(0)
                for fields in (body("one"), easy):
                    assert (await client.post(PATH, json=fields)).status_code == 200
                assert not refused.done()
                response = await refused
                assert response.status_code == 400 and "takes more than 0.5 seconds" in response.text
                assert time.monotonic() - began < 4 * 0.5, "it was compiled for more than one of its eight prompts"
                assert (await client.post(PATH, json=body("one", **hard))).status_code == 400
        finally:
            service.engine.engine.grammars.close()

    asyncio.run(main())
