"""`draftsmith load` where something is wrong: mistakes, servers that are not ready, requests that fail, and Ctrl-C."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from draftsmith.evaluation.load.settings import Server
from tests.cli.test_cli_load import NEW_TOKENS, answer, load, refused, stream
from tests.helpers.canned_server import Asked, Reply, events, json_reply


def test_mistakes_are_one_sentence(serving):
    gone = load("http://127.0.0.1:1", "--ready-check-timeout-sec", "0")
    refused(gone, "http://127.0.0.1:1 cannot be reached", "check --base-url")
    known = serving(answer)
    refused(load(known, "--model", "tinny"), "no model 'tinny'", "did you mean tiny?")
    closed = serving(lambda asked: json_reply({"error": {"message": "no"}}, 401))
    refused(load(closed), "wants an API key", "--api-key")
    refused(load(closed, "--api-key", "wrong"), "refuses the API key")
    two = serving(lambda asked: json_reply({"data": [{"id": "a"}, {"id": "b"}]}))
    refused(load(two), "has 2 (a, b)", "--model")
    failing = serving(
        lambda asked: answer(asked) if asked.method == "GET" else json_reply({"error": {"message": "too hot"}}, 503)
    )
    refused(load(failing, "--num-prompts", "3"), "all 3 requests failed", "answered 503: too hot")
    refused(load(failing, "--input-len", "8"), "/tokenize gave no ids")
    uncounted = serving(
        lambda asked: answer(asked)
        if asked.method == "GET"
        else Reply(events({"choices": [{"text": "a", "finish_reason": "stop"}]}, "[DONE]"))
    )
    refused(load(uncounted, "--num-prompts", "2"), "no usage chunk")
    elsewhere = serving(
        lambda asked: answer(asked) if asked.method == "GET" else Reply(b"", 307, headers={"Location": "http://x/"})
    )
    refused(load(elsewhere, "--num-prompts", "1"), "sends on to http://x/")
    odd = serving(lambda asked: answer(asked) if asked.method == "GET" else Reply(events([1, 2])))
    refused(load(odd, "--num-prompts", "1"), "no chunk of an answer")


def test_several_answers_to_a_request_are_refused_before_anything_is_sent(serving):
    """Two choices with seven tokens each would come as one answer of fourteen, at half the time a token."""
    known = serving(answer)
    for body in ('{"n": 2}', '{"n": "2"}', '{"n": 0}'):
        told = f"--extra-body asks for n = {json.loads(body)['n']!r}".replace("'", '"')
        refused(load(known, "--num-prompts", "1", "--extra-body", body), told, "leave n out", "--num-prompts")
    assert not known.seen
    for body in ('{"n": 1}', '{"n": null}'):
        assert load(known, "--num-prompts", "1", "--extra-body", body).exit_code == 0


def test_a_server_that_is_not_ready_yet_is_waited_for(serving):
    """Only /ready is asked meanwhile; what is missing is told once, and not again while nothing changes."""
    asked_ready = [0]

    def loading(asked: Asked) -> Reply:
        asked_ready[0] += asked.path == "/ready"
        if asked.path != "/ready" and asked_ready[0] > 2:
            return answer(asked)
        return Reply(b"", 503 if asked_ready[0] <= 2 else 200)

    server = serving(loading)
    done = load(server, "--num-prompts", "1")
    assert done.exit_code == 0, done.output
    assert [one.path for one in server.seen][:4] == ["/ready", "/ready", "/ready", "/v1/models"]
    assert " ".join(done.stderr.split()).count("until the server is ready: the server answered 503 at /ready.") == 1


def test_a_server_that_does_not_listen_yet_is_waited_for():
    """A socket that is bound refuses connections until somebody listens there."""
    from draftsmith.evaluation.load.ready import wait_until_ready

    async def ready(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    async def wait() -> list[str]:
        told: list[str] = []
        begun: list[asyncio.Task[asyncio.Server]] = []
        with socket.socket() as place:
            place.bind(("127.0.0.1", 0))

            def begin(sentence: str) -> None:
                told.append(sentence)
                begun.append(asyncio.ensure_future(asyncio.start_server(ready, sock=place)))

            await wait_until_ready(Server(f"http://127.0.0.1:{place.getsockname()[1]}"), begin)
            (await begun[0]).close()
        return told

    (sentence,) = asyncio.run(wait())
    assert sentence.startswith("Waiting up to 600 s") and "cannot be reached" in sentence


def test_who_is_not_ready_in_time_is_named_in_one_sentence(serving):
    never = serving(lambda asked: Reply(b"", 503))
    words = ("--ready-check-timeout-sec", "0.2")
    refused(load(never, *words), "answered 503 at /ready", "0.2 s", "--ready-check-timeout-sec")
    for url in ("http://127.0.0.1:1", "https://127.0.0.1:1"):
        refused(load(url, *words), f"{url} cannot be reached", "0.2 s")
    # Final or not, which depends on the name server here; the tests of connections know both.
    refused(load("http://nobody.invalid:8000", *words), "http://nobody.invalid:8000 cannot be reached", "--base-url")
    refused(load(never, "--ready-check-timeout-sec", "-1"), "--ready-check-timeout-sec is -1; give 0 or more")


def test_nobody_waits_for_what_never_becomes_ready(serving):
    """One without encryption, one that is no server of a model, and one that wants a key: with 600 seconds."""
    plain = serving(answer).url.replace("http://", "https://")
    refused(load(plain), f"{plain} cannot be reached", "SSL", "check --base-url")
    refused(load(serving(lambda asked: json_reply({}, 404))), "names none at /v1/models")
    refused(load(serving(lambda asked: json_reply({}, 401))), "wants an API key")


@pytest.mark.parametrize(
    "told", [{"error": {"message": "the body is too long; send less."}}, {"detail": "the body is too long; send less."}]
)
def test_what_a_server_says_ends_with_one_full_stop(serving, told: dict[str, object]):
    turns = [0]

    def failing(asked: Asked) -> Reply:
        turns[0] += asked.path == "/v1/completions"
        return json_reply(told, 400) if asked.path == "/v1/completions" and turns[0] > 1 else answer(asked)

    done = load(serving(failing), "--max-concurrency", "1", "--num-prompts", "3")
    assert "most because the server answered 400: the body is too long; send less." in " ".join(done.stderr.split())
    assert done.exit_code == 0 and ".." not in done.stderr
    refused(load(serving(failing), "--num-prompts", "3"), "answered 400: the body is too long; send less.")


def test_some_failures_are_told_and_count_nowhere(serving, tmp_path: Path):
    turns = [0]

    def every_other(asked: Asked) -> Reply:
        if asked.path != "/v1/completions":
            return answer(asked)
        turns[0] += 1
        return stream() if turns[0] % 2 else json_reply({"error": {"message": "busy"}}, 429)

    file = tmp_path / "load.json"
    done = load(serving(every_other), "--max-concurrency", "1", "--num-prompts", "6", "--json", file)
    assert done.exit_code == 0
    assert "3 of 6 requests failed, most because the server answered 429: busy" in " ".join(done.stderr.split())
    level = json.loads(file.read_text())["levels"][0]
    assert (level["completed"], level["failed"], level["total_output_tokens"]) == (3, 3, 3 * NEW_TOKENS)


def test_what_was_measured_survives_ctrl_c_and_no_key_is_written(serving, tmp_path: Path):
    """The server answers two requests, and nobody after them."""
    turns, third, over = [0], threading.Event(), threading.Event()

    def stalling(asked: Asked) -> Reply:
        if asked.path == "/v1/completions":
            turns[0] += 1
            if turns[0] > 2:
                third.set()
                over.wait(60)
        return answer(asked)

    words = ["--max-concurrency", "1", "--num-prompts", "5", "--json", "load.json", "--api-key", "sk-secret"]
    process = subprocess.Popen(
        [sys.executable, "-m", "draftsmith", "load", "--base-url", serving(stalling).url, *words],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # A shell without job control starts background jobs, and so this suite, with the signal ignored.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert third.wait(60)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        output, said = process.communicate(timeout=30)
    finally:
        over.set()
        process.kill()
    assert process.returncode == 130, said
    written = (tmp_path / "load.json").read_text()
    result = json.loads(written)
    level = result["levels"][0]
    assert not result["complete"] and level["completed"] == 2 and level["unfinished"] == 3
    assert level["total_output_tokens"] == 2 * NEW_TOKENS
    assert "2 requests in" in " ".join(output.split()) and "interrupted with 3 requests" in " ".join(said.split())
    assert "sk-secret" not in written + output + said
