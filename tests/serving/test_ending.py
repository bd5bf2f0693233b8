"""How the server ends: what runs may come to its end, until its time is up or further signals come."""

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftsmith.serving.run import listen, run
from tests.serving.test_faults import PATH, Slow, body
from tests.serving.toy import (
    PROMPTS,
    events_of,
    make_service,
    oracle,
    plainly,
    running,
    text_of,
    until,
)


def test_draining_lets_what_runs_come_to_its_end():
    async def main() -> None:
        service, prompts = make_service(), PROMPTS * 4
        async with running(service) as client:
            asked = [asyncio.create_task(client.post(PATH, json=body(prompt, stream=True))) for prompt in prompts]
            async with asyncio.timeout(30):
                while service.inside < len(prompts):
                    await asyncio.sleep(0)
            draining = asyncio.create_task(service.drained(30))
            await asyncio.sleep(0)
            assert (await client.post(PATH, json=body("late"))).status_code == 503
            assert await draining
            own = {prompt: plainly(prompt, max_tokens=24).text for prompt in PROMPTS}
            for prompt, response in zip(prompts, await asyncio.gather(*asked), strict=True):
                assert text_of(events_of(response)) == own[prompt]
            assert await service.drained(0)

    asyncio.run(main())


@pytest.mark.parametrize(("signals", "seconds"), [(1, 0.2), (2, 600.0)])
def test_who_is_still_in_when_the_time_to_drain_is_up_is_told_so(signals: int, seconds: float):
    """Answers that have begun end with an error, others with a status; the server ends by itself, in good order."""
    service, bound = make_service(drafter=oracle(kind=Slow), drain_seconds=seconds), listen("127.0.0.1", 0)
    address = f"http://127.0.0.1:{bound.getsockname()[1]}"
    told: dict[str, Any] = {}

    def plain() -> None:
        told["plain"] = httpx.post(f"{address}{PATH}", json=body("Once upon", max_tokens=100))

    def ask() -> None:
        other = threading.Thread(target=plain)
        other.start()
        with httpx.stream("POST", f"{address}{PATH}", json=body("one", stream=True, max_tokens=100)) as stream:
            pieces = stream.iter_text()
            first = next(pieces)
            until(lambda: service.inside == 2)
            for number in range(signals):
                until(lambda waits=number > 0: service.draining == waits)
                os.kill(os.getpid(), signal.SIGTERM)
            told["streamed"] = first + "".join(pieces)
        other.join()

    asking = threading.Thread(target=ask)
    run(service, bound, asking.start)
    asking.join(10)
    assert told["plain"].status_code == 503
    assert told["plain"].json()["error"]["message"] == "the server ended before this text did; ask another one."
    *_, last, done, _ = told["streamed"].split("\n\n")
    assert "the server ended before this text did" in last and done == "data: [DONE]"


class Ends(logging.Handler):
    """Sends this process SIGTERM as uvicorn comes to one of its steps."""

    def __init__(self, step: str) -> None:
        super().__init__()
        self._step = step

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith(self._step):
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("step", "before"), [
    ("Started server process", 0), ("Shutting down", 1), ("Waiting for application shutdown", 1),
])
def test_an_idle_server_ends_quietly_whenever_signals_come(
    step: str, before: int, caplog: pytest.LogCaptureFixture
):
    """One comes before it listens, or, after another one, while it closes; its application still ends in good order."""
    logger, ends, service = logging.getLogger("uvicorn.error"), Ends(step), make_service()
    caplog.set_level(logging.INFO)
    logger.addHandler(ends)
    try:
        run(service, listen("127.0.0.1", 0), lambda: [os.kill(os.getpid(), signal.SIGTERM) for _ in range(before)])
    finally:
        logger.removeHandler(ends)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert "Application shutdown complete." in caplog.messages


HUNG = """
from draftsmith.serving.run import listen, run
from tests.serving.test_faults import Hangs
from tests.serving.toy import make_service, oracle

bound = listen("127.0.0.1", 0)
service = make_service(drafter=oracle(kind=Hangs), drain_seconds=600.0)
run(service, bound, lambda: print(bound.getsockname()[1], flush=True))
"""


def test_a_third_signal_ends_a_server_at_once_whose_step_hangs():
    with subprocess.Popen(
        [sys.executable, "-c", HUNG], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None and server.stderr is not None
        try:
            port = int(server.stdout.readline())
            with socket.create_connection(("127.0.0.1", port), timeout=20) as asking:
                content = json.dumps(body("one"))
                head = f"POST {PATH} HTTP/1.1\r\nhost: toy\r\ncontent-type: application/json\r\n"
                asking.sendall(f"{head}content-length: {len(content)}\r\n\r\n{content}".encode())
                until(lambda: httpx.get(f"http://127.0.0.1:{port}/status").json()["texts"] == 1)
                server.send_signal(signal.SIGTERM)
                until(lambda: httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 503)
                server.send_signal(signal.SIGTERM)
                assert "not all texts came to their end" in server.stderr.readline()
                server.send_signal(signal.SIGTERM)
                assert server.wait(10) == 128 + signal.SIGTERM
        finally:
            server.kill()


def test_the_command_serves_and_ends_in_good_order(tmp_path: Path):
    """With the embedded models: it listens, answers, and after SIGTERM finishes what runs and exits with 0."""
    keys = tmp_path / "keys"
    keys.write_text("# ours\nopen-sesame\n")
    words = [
        sys.executable, "-m", "draftsmith", "serve", "--port", "0", "--plan", "own", "--api-key-file", str(keys),
        "--max-batch", "4", "--threads", "1", "--served-model-name", "demo",
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ) as server:
        assert server.stdout is not None and server.stderr is not None
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(server.stderr))  # type: ignore[arg-type]
        reader.start()
        try:
            address = server.stdout.readline().removeprefix("Listening at ").strip()
            assert address.startswith("http://127.0.0.1:"), lines
            headers = {"authorization": "Bearer open-sesame"}
            assert httpx.get(f"{address}/v1/models").status_code == 401
            # So long that the text still runs while the two questions below are asked.
            asked = {
                "model": "demo", "prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True, "temperature": 0,
                "speculation": {"enabled": False}, "stream": True,
            }
            with httpx.stream("POST", f"{address}{PATH}", json=asked, headers=headers, timeout=60) as stream:
                assert stream.status_code == 200
                pieces = stream.iter_text()
                text = next(pieces)
                server.send_signal(signal.SIGTERM)
                until(lambda: httpx.get(f"{address}/ready").status_code == 503)
                assert httpx.post(f"{address}{PATH}", json=asked, headers=headers).status_code == 503
                text += "".join(pieces)
            assert text.endswith("data: [DONE]\n\n")
            assert '"finish_reason":"length"' in text
            assert server.wait(30) == 0
        finally:
            server.kill()
            reader.join(10)
    told = [json.loads(line) for line in lines if line.startswith("{")]
    assert {"draining", "request"} <= {line["event"] for line in told}
    assert "Once upon" not in "".join(lines)
