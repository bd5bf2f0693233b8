"""Valid requests with their bytes damaged, in the body and around it: never a failure of the server's, never a wait.

Seeds are fixed, so that what fails once fails again.
"""

import asyncio
import errno
import json
import re
import socket
from collections.abc import Callable
from random import Random
from typing import Any

import httpx
import pytest

from tests.serving.test_fuzz import BODIES, JSON
from tests.serving.toy import PROMPTS, listening, make_service, plainly, running, until

COMPLETION = "/v1/completions"


def flipped(text: bytes, random: Random) -> bytes:
    found = bytearray(text)
    for _ in range(random.randint(1, 8)):
        found[random.randrange(len(found))] ^= 1 << random.randrange(8)
    return bytes(found)


def cut(text: bytes, random: Random) -> bytes:
    return text[: random.randrange(len(text))]


def doubled(text: bytes, random: Random) -> bytes:
    begin = random.randrange(len(text))
    end = random.randint(begin, len(text))
    return text[:end] + text[begin:end] * random.choice((1, 2, 50)) + text[end:]


def values_replaced(text: bytes, random: Random, by: Callable[[], bytes]) -> bytes:
    """Replace one of the values of a body, wherever it stands."""
    places = [match.span(1) for match in re.finditer(rb'[:\[,] ?("[^"]*"|-?[\d.]+|true|false|null)', text)]
    begin, end = random.choice(places or [(0, 0)])
    return text[:begin] + by() + text[end:]


def nested(text: bytes, random: Random) -> bytes:
    depth = random.choice((2, 100, 127, 128, 129, 5000, 200_000))
    opened, closed = random.choice(((b"[", b"]"), (b'{"a":', b"}")))
    return values_replaced(text, random, lambda: opened * depth + b"1" + closed * random.choice((depth, depth - 1)))


def huge(text: bytes, random: Random) -> bytes:
    numbers = (
        b"1e309", b"-1e309", b"1e-400", b"9" * 30, b"9" * 4000, b"9" * 5000, b"-0", b"-0.0", b"1E5", b"1.0", b"3.0",
        str(2**63).encode(), str(-(2**63) - 1).encode(), b"0.1e1", b"00", b"0x10", b"1_000", b"+1", b".5",
    )
    return values_replaced(text, random, lambda: random.choice(numbers))


def not_a_number(text: bytes, random: Random) -> bytes:
    return values_replaced(text, random, lambda: random.choice((b"NaN", b"Infinity", b"-Infinity", b"nan")))


def not_utf8(text: bytes, random: Random) -> bytes:
    broken = (
        b'"\xff"', b'"\xc3"', b'"\xed\xa0\x80"', b'"\xf4\x90\x80\x80"', b'"\xc0\x80"', b'"\\ud800"',
        b'"\\udc00\\ud800"', b'"\\u0000"', b'"\x00"', b'"\xef\xbb\xbf"', b'"\\ud83d\\ude00"',
    )
    found = values_replaced(text, random, lambda: random.choice(broken))
    wide = [text.decode("latin-1").encode(code) for code in ("utf-16", "utf-32")]
    return random.choice((found, found, b"\xef\xbb\xbf" + text, *wide))


def of_another_kind(text: bytes, random: Random) -> bytes:
    kinds = (b"null", b"true", b'"x"', b"[]", b"{}", b"[[]]", b"[{}]", b"1", b"0.5", b'""', b'{"type":"x"}')
    return values_replaced(text, random, lambda: random.choice(kinds))


def with_a_key_twice(text: bytes, random: Random) -> bytes:
    name = random.choice(re.findall(rb'"(\w+)":', text) or [b"prompt"])
    other = random.choice((b"null", b"7", b'"x"', b"[]", b"{}", b"true"))
    return b'{"' + name + b'":' + other + b"," + text[1:] if random.random() < 0.5 else (
        text[:-1] + b',"' + name + b'":' + other + b"}"
    )


MUTATIONS = {
    one.__name__: one
    for one in (
        flipped, cut, doubled, nested, huge, not_a_number, not_utf8, of_another_kind, with_a_key_twice,
    )
}


async def send(client: httpx.AsyncClient, random: Random, mutation: Callable[[bytes, Random], bytes]) -> None:
    path = random.choice(sorted(BODIES))
    sent = json.dumps(BODIES[path]).encode()
    for _ in range(random.choice((1, 1, 3))):
        sent = mutation(sent, random) if sent.startswith(b"{") and len(sent) > 20 else sent
    response = await asyncio.wait_for(client.post(path, content=sent, headers=JSON), 30)
    # 504 is what a tiny timeout of the client's own brings.
    assert response.status_code in (200, 400, 404, 413, 504), (path, sent[:2000], response.text)
    if "event-stream" in response.headers["content-type"]:
        assert "server_error" not in response.text and "api_error" not in response.text, (path, sent[:2000])
    elif response.status_code != 200:
        error = response.json()["error"]
        assert error["message"] and len(error["message"]) < 1000, response.text


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 16), *(pytest.param(seed, 600, marks=pytest.mark.slow) for seed in range(1, 4))]
)
def test_damaged_bodies_are_answered_and_leave_nothing(seed: int, count: int):
    async def main() -> None:
        service = make_service(max_batch=8)
        async with running(service) as client:
            for name, mutation in MUTATIONS.items():
                random = Random(f"{seed} {name}")
                for _ in range(count // 4):
                    await asyncio.gather(*(send(client, random, mutation) for _ in range(4)))
                until(lambda: not service.meter.core.has_work)
                assert service.inside == 0 and service.engine.failure is None, name
                assert service.meter.core.blocks.held_tokens == 0, name
                body = {"prompt": PROMPTS[seed], "max_tokens": 9, "temperature": 0}
                told = await client.post(COMPLETION, json=body)
                assert told.json()["choices"][0]["text"] == plainly(PROMPTS[seed], max_tokens=9).text, name

    asyncio.run(main())


BODY = b'{"prompt": "one", "max_tokens": 4, "temperature": 0}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
FRAMES: dict[str, bytes] = {
    "a length too small": HEAD + b"content-length: 10\r\n\r\n" + BODY,
    "a length too large": HEAD + b"content-length: 400\r\n\r\n" + BODY,
    "a length below 0": HEAD + b"content-length: -1\r\n\r\n" + BODY,
    "a length that is no number": HEAD + b"content-length: ten\r\n\r\n" + BODY,
    "a length of 5,000 digits": HEAD + b"content-length: " + b"9" * 5000 + b"\r\n\r\n" + BODY,
    "two lengths": HEAD + b"content-length: 10\r\ncontent-length: 52\r\n\r\n" + BODY,
    "a length and chunks": HEAD + b"content-length: 52\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "no length": HEAD + b"\r\n" + BODY,
    "a chunk of no size": HEAD + b"transfer-encoding: chunked\r\n\r\nxyz\r\n" + BODY,
    "a chunk below 0": HEAD + b"transfer-encoding: chunked\r\n\r\n-5\r\n" + BODY,
    "a chunk that is too long": HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"f" * 30 + b"\r\n" + BODY,
    "a chunk that does not end": HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\n" + BODY,
    "another coding": HEAD + b"transfer-encoding: gzip\r\n\r\n" + BODY,
    "a compressed body": HEAD + b"content-encoding: gzip\r\ncontent-length: 52\r\n\r\n" + BODY,
    "no head": BODY + b"\r\n\r\n",
    "nothing but zeros": bytes(200) + b"\r\n\r\n",
    "bytes above 127": b"POST /v1/\xff\xfe HTTP/1.1\r\nhost: \xff\r\n\r\n",
    "another version": b"POST /v1/completions HTTP/9.9\r\nhost: x\r\n\r\n",
    "a line break in a field": HEAD + b"x-request-id: a\rb\r\ncontent-length: 52\r\n\r\n" + BODY,
    "a folded field": HEAD + b"x-a: b\r\n c\r\ncontent-length: 52\r\n\r\n" + BODY,
    "a head of a megabyte": HEAD + b"x-a: " + b"a" * (1 << 20) + b"\r\n\r\n" + BODY,
    "two requests at once": 2 * (HEAD + b"content-length: 52\r\n\r\n" + BODY),
    "TLS": bytes.fromhex("16030100a5010000a10303") + bytes(range(200)),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(30),
    "an upgrade": b"GET /v1/models HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-key: x\r\nsec-websocket-version: 13\r\n\r\n",
}


def test_damage_around_the_body_is_answered_or_ends_the_connection():
    service = make_service(head_seconds=0.4, body_seconds=0.4)
    own = plainly("one", max_tokens=4).text
    with listening(service) as address:
        host, port = address.removeprefix("http://").split(":")
        for name, sent in FRAMES.items():
            with socket.create_connection((host, int(port)), timeout=10) as connection:
                came = b""
                try:
                    connection.sendall(sent)
                    connection.shutdown(socket.SHUT_WR)
                    while piece := connection.recv(1 << 16):  # ends, or the test fails by the timeout above
                        came += piece
                except OSError as error:  # who is sent away may find the door closed
                    if error.errno not in (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN):
                        raise
            for status in re.findall(rb"HTTP/1\.1 (\d+)", came):
                assert int(status) in (200, 400, 404, 408, 413, 415, 431), (name, came[:500])
            asked: dict[str, Any] = {"prompt": "one", "max_tokens": 4, "temperature": 0}
            assert httpx.post(f"{address}{COMPLETION}", json=asked).json()["choices"][0]["text"] == own, name
        until(lambda: service.inside == 0 and not service.meter.core.has_work)
        assert service.meter.core.blocks.held_tokens == 0 and service.engine.failure is None
