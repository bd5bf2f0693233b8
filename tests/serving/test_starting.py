"""What clients see while the server loads its model, and that it ends at once when it is told to."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest

from draftsmith.serving.run import listen
from draftsmith.serving.settings import Settings
from draftsmith.serving.starting import answering
from draftsmith.types import DraftsmithError
from draftsmith.user_cache import CACHE
from tests.serving.toy import make_service, server_of, until


def url_of(bound: socket.socket) -> str:
    return f"http://127.0.0.1:{bound.getsockname()[1]}"


def test_everybody_is_told_to_come_back_in_the_form_that_clients_read():
    with listen("127.0.0.1", 0) as bound, answering(bound, Settings()), httpx.Client(base_url=url_of(bound)) as client:
        for method, path in (("GET", "/health"), ("GET", "/ready"), ("GET", "/"), ("POST", "/v1/completions")):
            response = client.request(method, path, json={} if method == "POST" else None)
            assert response.status_code == 503 and response.headers["retry-after"] == "5", path
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("service_unavailable_error", "loading"), path
            assert response.headers["x-request-id"]
        assert client.head("/ready").status_code == 503
        response = client.post("/v1/messages", json={})
        assert response.status_code == 503
        assert response.json()["type"] == "error" and response.json()["error"]["type"] == "overloaded_error"


def test_keys_are_checked_as_later_on():
    with listen("127.0.0.1", 0) as bound, answering(bound, Settings(keys=("k",))):
        assert httpx.get(f"{url_of(bound)}/v1/models").status_code == 401
        assert httpx.get(f"{url_of(bound)}/v1/models", headers={"x-api-key": "k"}).status_code == 503
        assert httpx.get(f"{url_of(bound)}/ready").status_code == 503


def test_who_comes_between_the_two_servers_waits_for_the_real_one():
    bound = listen("127.0.0.1", 0)
    with answering(bound, Settings()):
        assert httpx.get(f"{url_of(bound)}/ready").status_code == 503
    found: list[int] = []
    asking = threading.Thread(target=lambda: found.append(httpx.get(f"{url_of(bound)}/ready", timeout=30).status_code))
    asking.start()
    time.sleep(0.1)  # for its connection to come; nobody accepts it yet
    assert not found
    with server_of(make_service(), bound):
        asking.join(30)
    assert found == [200]


def test_a_client_that_has_not_said_all_holds_up_nothing():
    with listen("127.0.0.1", 0) as bound:
        with answering(bound, Settings()):
            client = socket.create_connection(bound.getsockname())
            client.sendall(b"GET /health HTTP/1.1\r\n")
        client.settimeout(10)
        assert client.recv(100) == b""
        client.close()


def test_two_servers_at_one_place_are_refused_before_anything_is_loaded():
    with listen("127.0.0.1", 0) as bound, pytest.raises(DraftsmithError, match="cannot be listened at"):
        listen("127.0.0.1", bound.getsockname()[1])


@pytest.mark.parametrize(("sent", "codes"), [
    # Where Ctrl-C comes while code from a string is run, as by every dataclass, `python -m` ends by the signal itself
    # at last, although the interrupt was caught. To a shell both are 130.
    (signal.SIGINT, {130, -signal.SIGINT}), (signal.SIGTERM, {-signal.SIGTERM}),
])
def test_a_signal_ends_the_command_while_it_loads(sent: signal.Signals, codes: set[int], tmp_path: Path):
    """With an empty cache it measures its drafts for much longer than this test takes."""
    with reserved() as port, subprocess.Popen(
        [sys.executable, "-m", "draftsmith", "serve", "--port", str(port), "--threads", "1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {CACHE: str(tmp_path)},
        # A shell without job control starts background jobs, and so this suite, with the signal ignored.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as server:
        try:
            until(lambda: server.poll() is not None or answered(port) == 503, 60)
            server.send_signal(sent)
            said, complained = server.communicate(timeout=20)
        finally:
            server.kill()
    assert server.returncode in codes and "Listening" not in said, complained
    assert "Traceback" not in complained


def test_a_port_is_kept_for_the_command_that_is_told_it():
    with reserved() as port:
        assert answered(port) == 0
        with pytest.raises(OSError, match="in use"), socket.socket() as other:
            other.bind(("127.0.0.1", port))
        with listen("127.0.0.1", port) as bound, answering(bound, Settings()):
            assert answered(port) == 503


@pytest.mark.parametrize("begun", [b"", b"HTTP/1.1 503"])
def test_a_server_that_goes_before_it_has_answered_counts_as_none(begun: bytes):
    with listen("127.0.0.1", 0) as bound:
        asking = threading.Thread(target=lambda: found.append(answered(bound.getsockname()[1])))
        found: list[int] = []
        asking.start()
        with bound.accept()[0] as client:
            client.recv(1000)
            client.sendall(begun)
        asking.join(20)
    assert found == [0]


@contextmanager
def reserved() -> Iterator[int]:
    """Give a free port of this machine that nobody gets who asks for any port, but who names it can listen at.

    A port that is only found free may be somebody else's seconds later, when the command has come so far as to listen.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def answered(port: int) -> int:
    """Return the status of `/health`; 0 while nobody answers, as where a process that loads is too busy to."""
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code
    except httpx.TransportError:
        return 0
