"""What clients see while the server loads its model, and that it ends at once when it is told to."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
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
    with listen("127.0.0.1", 0) as place:
        url, port = url_of(place), place.getsockname()[1]
    words = [sys.executable, "-m", "draftsmith", "serve", "--port", str(port), "--threads", "1"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {CACHE: str(tmp_path)},
        # A shell without job control starts background jobs, and so this suite, with the signal ignored.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as server:
        try:
            until(lambda: answered(url) == 503, 60)
            server.send_signal(sent)
            said, complained = server.communicate(timeout=20)
        finally:
            server.kill()
    assert server.returncode in codes and "Listening" not in said, complained
    assert "Traceback" not in complained


def answered(url: str) -> int:
    """Return the status of `/health`; 0 while nobody listens."""
    try:
        return httpx.get(f"{url}/health").status_code
    except httpx.ConnectError:
        return 0
