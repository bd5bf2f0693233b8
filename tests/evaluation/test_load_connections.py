"""What servers do with their connections, and what a load generator may not take for a failure, or may not overlook."""

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from draftsmith.evaluation.load.client import END_SECONDS, Client
from draftsmith.evaluation.load.records import Record
from draftsmith.evaluation.load.settings import Server
from draftsmith.types import DraftsmithError

Answer = Callable[[asyncio.StreamWriter, int], Awaitable[bool]]
"""Answers the nth request of a connection; returns whether the connection goes on."""

CHUNKS = (
    {"choices": [{"text": "ab"}]}, {"choices": [{"text": "", "finish_reason": "length"}]},
    {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}, "[DONE]",
)


def piece(text: str) -> bytes:
    """A piece of a body whose length is not told beforehand."""
    return f"{len(text):x}\r\n{text}\r\n".encode()


async def write_stream(writer: asyncio.StreamWriter, *chunks: object) -> None:
    """Write the head of a stream and these events, but not its end."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    for chunk in chunks:
        writer.write(piece(f"data: {chunk if isinstance(chunk, str) else json.dumps(chunk)}\n\n"))
    await writer.drain()


def ask(answer: Answer, times: int, timeout: float = 20.0) -> tuple[list[Record], int]:
    """Send requests one after the other; return what came back, and how many connections were opened."""
    opened = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened, number = opened + 1, 0
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                (length,) = [line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                await reader.readexactly(int(length))
                if not await answer(writer, number):
                    break
                number += 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client left
        finally:
            writer.close()

    async def main() -> list[Record]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            async with Client(Server(address, timeout=timeout)) as client:
                records = [await client.send({"prompt": "x", "stream": True}) for _ in range(times)]
            serving = asyncio.all_tasks() - {asyncio.current_task()}
            for task in serving:
                task.cancel()
            await asyncio.gather(*serving, return_exceptions=True)
            await asyncio.sleep(0)  # transports close in the next round
            return records

    return asyncio.run(main()), opened


async def whole(writer: asyncio.StreamWriter, number: int) -> bool:
    await write_stream(writer, *CHUNKS)
    writer.write(b"0\r\n\r\n")
    return True


def test_a_connection_is_kept_for_the_next_request():
    records, opened = ask(whole, 3)
    assert opened == 1 and all(record.ok and not record.again for record in records)


def test_a_kept_connection_that_the_server_has_closed_is_no_failure():
    async def once(writer: asyncio.StreamWriter, number: int) -> bool:
        return number == 0 and await whole(writer, number)

    records, opened = ask(once, 3)
    assert [record.again for record in records] == [False, True, True] and opened == 3
    assert all(record.ok and record.output_tokens == 4 for record in records)


def test_a_server_that_closes_new_connections_has_failed():
    async def never(writer: asyncio.StreamWriter, number: int) -> bool:
        return False

    records, opened = ask(never, 2)
    assert opened == 2 and not any(record.ok or record.again for record in records)
    assert "broke" in records[0].error


def test_an_answer_that_broke_off_has_failed_on_a_kept_connection_too():
    async def half(writer: asyncio.StreamWriter, number: int) -> bool:
        if number == 0:
            return await whole(writer, number)
        await write_stream(writer, CHUNKS[0])
        return False

    records, _ = ask(half, 2)
    assert records[0].ok and not records[1].ok and not records[1].again


@pytest.mark.parametrize("breaks", [True, False])
def test_what_comes_behind_the_last_event_is_nobodys_loss(breaks: bool):
    """A connection that breaks there, or an answer that is not ended."""
    async def without_end(writer: asyncio.StreamWriter, number: int) -> bool:
        await write_stream(writer, *CHUNKS)
        if not breaks:
            await asyncio.sleep(20 * END_SECONDS)
        return False

    (record,), _ = ask(without_end, 1)
    assert record.ok and record.output_tokens == 4 and record.e2el < END_SECONDS


@pytest.mark.parametrize(
    "chunk", ['{"usage": {"completion_tokens": Infinity}}', '{"choices": ' + "[" * 100_000, '"text"', "{"]
)
def test_a_chunk_that_is_none_is_a_failure_of_its_own(chunk: str):
    async def odd(writer: asyncio.StreamWriter, number: int) -> bool:
        await write_stream(writer, CHUNKS[0], chunk)
        return False

    (record,), _ = ask(odd, 1)
    assert record.error == "the server sent something that is no chunk of an answer"


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_who_only_closes_connections_may_become_ready(scheme: str):
    """A proxy in front of a server that does not run yet."""
    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.close()

    async def main() -> str:
        async with await asyncio.start_server(close, "127.0.0.1", 0) as closing:
            port = closing.sockets[0].getsockname()[1]
            async with Client(Server(f"{scheme}://127.0.0.1:{port}")) as client:
                return await client.missing(20.0)

    assert "127.0.0.1" in asyncio.run(main())


def test_a_question_takes_no_longer_than_it_may_though_the_answer_trickles():
    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            for letter in b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n":
                writer.write(bytes([letter]))
                await writer.drain()
                await asyncio.sleep(0.1)
        except ConnectionError:
            pass  # the client left
        finally:
            writer.close()

    async def main() -> str:
        async with await asyncio.start_server(trickle, "127.0.0.1", 0) as trickling:
            port = trickling.sockets[0].getsockname()[1]
            async with Client(Server(f"http://127.0.0.1:{port}")) as client:
                return await client.missing(0.5)

    begun = time.monotonic()
    assert "did not answer in time" in asyncio.run(main())
    assert time.monotonic() - begun < 3  # the whole answer takes 5 seconds


class Nameless(asyncio.SelectorEventLoop):
    """An event loop for which no host has an address, for the same reason always."""

    def __init__(self, reason: int) -> None:
        super().__init__()
        self.reason = reason

    async def getaddrinfo(self, *host: Any, **options: Any) -> Any:
        raise socket.gaierror(self.reason, "no address")


async def ask_nobody() -> str:
    async with Client(Server("http://nobody.invalid:8000")) as client:
        return await client.missing(20.0)


def test_a_name_that_cannot_be_looked_up_for_now_may_get_an_address():
    """That of a container that is not up yet."""
    with asyncio.Runner(loop_factory=partial(Nameless, socket.EAI_AGAIN)) as runner:
        assert "nobody.invalid:8000 cannot be reached" in runner.run(ask_nobody())


@pytest.mark.parametrize("reason", [socket.EAI_NONAME, socket.EAI_FAIL])
def test_a_name_without_an_address_is_final(reason: int):
    refused = pytest.raises(DraftsmithError, match="cannot be reached .*check --base-url")
    with asyncio.Runner(loop_factory=partial(Nameless, reason)) as runner, refused:
        runner.run(ask_nobody())
