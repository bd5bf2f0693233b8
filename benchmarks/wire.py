"""What the benchmarks of the server share: a server of its own, and a client that costs next to nothing.

The client writes bytes that were made before, and keeps the bytes that come without a look into them; texts are read
from these when nobody's time is taken. So what it costs is a read for every piece, in a process beside the server's.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from draftsmith.types import DraftsmithError

END = b"\r\n0\r\n\r\n"
"""What a chunked answer ends with."""
_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")


class Served:
    """A server in a process of its own.

    Args:
        port: where it listens at 127.0.0.1.
    """

    def __init__(self, process: subprocess.Popen[str], port: int, lines: list[str]) -> None:
        self.process, self.port, self.lines = process, port, lines

    def memory(self) -> float:
        """Return the MiB of it that are in memory."""
        with open(f"/proc/{self.process.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    def cpu_seconds(self) -> float:
        """Return the seconds of processor time that it took by now."""
        with open(f"/proc/{self.process.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def open_files(self) -> int:
        """Return how many files and sockets it has open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


@contextmanager
def server(words: Sequence[str]) -> Iterator[Served]:
    """Run `draftsmith serve` with these options at a free port; DraftsmithError where it does not come up."""
    command = [sys.executable, "-m", "draftsmith", "serve", "--port", "0", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        lines: list[str] = []
        reader = threading.Thread(target=_keep_last, args=(process.stderr, lines), daemon=True)
        reader.start()
        try:
            found = re.fullmatch(r"Listening at http://127\.0\.0\.1:(\d+)\n?", process.stdout.readline())
            if found is None:
                raise DraftsmithError(f"the server did not come up: {''.join(lines)[-2000:]}")
            yield Served(process, int(found[1]), lines)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def models_of(args: Any) -> list[str]:
    """Return the options of a benchmark that name models, as the server has them."""
    given = {"--target": args.target, "--drafter": args.drafter}
    return [word for name, value in given.items() if value for word in (name, value)]


def _keep_last(stream: Any, lines: list[str]) -> None:
    for line in stream:
        lines.append(line)
        del lines[:-200]


def request(path: str, body: dict[str, Any]) -> bytes:
    """Return the bytes of a POST."""
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(text)}"
    return head.encode() + b"\r\n\r\n" + text


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: bytes) -> bytes:
    """Send a request, and return its answer as it came, head and all; ConnectionError where it breaks off."""
    writer.write(sent)
    came, whole = bytearray(), False
    while not whole:
        piece = await reader.read(1 << 16)
        if not piece:
            raise ConnectionError("the server closed the connection in the middle of an answer")
        came += piece
        whole = is_whole(came)
    return bytes(came)


def is_whole(came: bytearray) -> bool:
    """Return whether these bytes are an answer to its end."""
    head = came.find(b"\r\n\r\n")
    if head < 0:
        return False
    length = _LENGTH.search(came, 0, head)
    return came.endswith(END) if length is None else len(came) >= head + 4 + int(length[1])


def status_of(came: bytes) -> int:
    """Return the status of an answer."""
    return int(came[9:12])


def text_of(came: bytes) -> str:
    """Return the text of a completion, streamed or in one piece; DraftsmithError for one that failed."""
    head, _, body = came.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" not in head.lower():
        return str(json.loads(body)["choices"][0]["text"])
    events = _unchunked(body).decode().split("\n\n")
    if events[-2:] != ["data: [DONE]", ""]:
        raise DraftsmithError(f"a stream has no end: {events[-3:]}")
    told = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    failed = [one["error"]["message"] for one in told if "error" in one]
    if failed:
        raise DraftsmithError(f"a stream failed: {failed[0]}")
    return "".join(one["choices"][0]["text"] for one in told if one["choices"])


def _unchunked(body: bytes) -> bytes:
    found = bytearray()
    while True:
        size, _, body = body.partition(b"\r\n")
        count = int(size, 16)
        if not count:
            return bytes(found)
        found += body[:count]
        body = body[count + 2 :]


async def metrics_of(port: int) -> dict[str, float]:
    """Return the server's metrics, by name and labels."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    came = await ask(reader, writer, b"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
    writer.close()
    lines = came.partition(b"\r\n\r\n")[2].decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line and line[0] != "#"}


async def until(true: Any, seconds: float) -> float | None:
    """Wait until a coroutine function says that something is so; return the seconds it took, None if it is not."""
    begun = time.monotonic()
    while time.monotonic() - begun < seconds:
        if await true():
            return time.monotonic() - begun
        await asyncio.sleep(0.05)
    return None
