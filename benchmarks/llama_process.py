"""llama.cpp's server, `llama-server`, in a process of its own; and processes that sleep while others are measured."""

import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from draftsmith.types import DraftsmithError

START_SECONDS = 180.0


def find_binary(given: str) -> str:
    """Return the path of a program that was named by its path or its name; DraftsmithError where there is none."""
    found = shutil.which(given)
    if found is None:
        raise DraftsmithError(
            f"there is no program {given}; build llama.cpp's llama-server, and name it with --llama-server."
        )
    return found


def version_of(binary: str) -> str:
    """Return what the program says of its version and compiler, in one line."""
    done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=60, check=False)
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines()]
    return "; ".join(line for line in lines if re.match(r"version|built", line))


@contextmanager
def llama_server(binary: str, words: Sequence[str]) -> Iterator[tuple[subprocess.Popen[Any], int]]:
    """Run the server with these options at a free port of this machine; give its process and its port.

    Raises:
        DraftsmithError: it ended by itself, or was not ready in time; with the last lines that it wrote.
    """
    port = free_port()
    command = [binary, "--host", "127.0.0.1", "--port", str(port), "--offline", *words]
    with tempfile.TemporaryFile() as log, subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log
    ) as process:
        try:
            end = time.monotonic() + START_SECONDS
            while not healthy(port):
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    told = log.read().decode(errors="replace")[-2000:]
                    raise DraftsmithError(f"{Path(binary).name} did not come up: {told}")
                time.sleep(0.2)
            yield process, port
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def free_port() -> int:
    """Return a port at which nobody listens just now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def healthy(port: int) -> bool:
    """Return whether a server says at `/health` that it works."""
    try:
        # No proxy of the environment: this is about the machine itself.
        with build_opener(ProxyHandler({})).open(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


@contextmanager
def asleep(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Stop a process, so that it takes nothing from others; go on with it at the end, however that comes."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


@contextmanager
def awake(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Let a process that is asleep work for a while."""
    process.send_signal(signal.SIGCONT)
    try:
        yield
    finally:
        process.send_signal(signal.SIGSTOP)
