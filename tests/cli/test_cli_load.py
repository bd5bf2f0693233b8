"""`draftsmith load` against a server that streams known chunks with known counts."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from draftsmith.cli import app
from draftsmith.evaluation.load.arrivals import planned_times
from draftsmith.evaluation.load.settings import METRICS, Arrivals, Server
from tests.helpers.canned_server import Asked, CannedServer, Reply, events, json_reply

pytest.importorskip("httpx2", reason="draftsmith load needs httpx2, of the extra `serve`")

MODELS = {"data": [{"id": "tiny", "root": "tiny"}]}
PROMPT_TOKENS, NEW_TOKENS, CHUNKS = 5, 7, ("ab", "c", "defg")
COUNTERS = """vllm:spec_decode_num_drafts_total {0}
vllm:spec_decode_num_draft_tokens_total {1}
vllm:spec_decode_num_accepted_tokens_total {2}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {3}
"""


def stream(chat: bool = False) -> Reply:
    """Three chunks for seven tokens, the end, the count."""
    said = [{"delta": {"role": "assistant"}}] if chat else []
    said += [{"delta": {"content": text}} if chat else {"text": text} for text in CHUNKS]
    ended = {"delta": {}, "finish_reason": "length"} if chat else {"text": "", "finish_reason": "length"}
    chunks = [{"choices": [choice]} for choice in [*said, ended]]
    usage = {"choices": [], "usage": {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": NEW_TOKENS}}
    return Reply(events(*chunks, usage, "[DONE]"), kind="text/event-stream")


def answer(asked: Asked) -> Reply:
    if asked.path == "/v1/models":
        return json_reply(MODELS)
    if asked.path == "/tokenize":
        return json_reply({"tokens": [ord(letter) for letter in asked.body["prompt"]]})
    if asked.path in ("/v1/completions", "/v1/chat/completions"):
        return stream("chat" in asked.path)
    return json_reply({"error": {"message": "no such route"}}, 404)


@pytest.fixture
def server() -> Iterator[CannedServer]:
    with CannedServer(answer) as serving:
        yield serving


@pytest.fixture
def serving() -> Iterator[Callable[[Callable[[Asked], Reply]], CannedServer]]:
    """Start servers that answer otherwise."""
    started: list[CannedServer] = []

    def start(of: Callable[[Asked], Reply]) -> CannedServer:
        started.append(CannedServer(of).__enter__())
        return started[-1]

    yield start
    for each in started:
        each.__exit__(None, None, None)


def load(server: CannedServer | str, *words: str | Path) -> Result:
    url = server if isinstance(server, str) else server.url
    return CliRunner().invoke(app, ["load", "--base-url", url, *map(str, words)])


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_counts_and_fields(server: CannedServer, tmp_path: Path, endpoint: str):
    file = tmp_path / "load.json"
    words = ("--endpoint", endpoint, "--max-concurrency", "2", "--num-prompts", "6", "--num-warmups", "3")
    done = load(server, *words, "--save-detailed", "--result-dir", tmp_path / "common", "--json", file)
    assert done.exit_code == 0, done.output
    result = json.loads(file.read_text())
    (level,) = result["levels"]
    assert result["complete"] and level["complete"] and level["completed"] == 6 and level["failed"] == 0
    assert level["total_input_tokens"] == 6 * PROMPT_TOKENS and level["total_output_tokens"] == 6 * NEW_TOKENS
    assert level["output_lens"] == [NEW_TOKENS] * 6 and level["generated_texts"] == ["abcdefg"] * 6
    assert [len(gaps) for gaps in level["itls"]] == [len(CHUNKS) - 1] * 6
    for ttft, latency, gaps in zip(level["ttfts"], level["latencies"], level["itls"], strict=True):
        assert 0 < ttft <= ttft + sum(gaps) <= latency + 1e-9
    tpots = [
        1000 * (latency - ttft) / (NEW_TOKENS - 1)
        for ttft, latency in zip(level["ttfts"], level["latencies"], strict=True)
    ]
    assert level["mean_tpot_ms"] == pytest.approx(sum(tpots) / 6)
    assert level["output_throughput"] == pytest.approx(6 * NEW_TOKENS / level["duration"])
    for metric in METRICS:
        for statistic in ("mean", "median", "std", "p50", "p95", "p99"):
            assert level[f"{statistic}_{metric}_ms"] >= 0
    asked = [one for one in server.seen if one.method == "POST"]
    assert len(asked) == 9, "six and three to warm up"
    (common,) = (tmp_path / "common").iterdir()
    assert "concurrency2-tiny" in common.name
    content = json.loads(common.read_text())
    assert content["model_id"] == "tiny" and content["ttfts"] == level["ttfts"]
    assert content["request_rate"] == "inf" and content["max_concurrency"] == 2


def test_nobody_else_is_asked_and_nothing_else(
    server: CannedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A proxy of the environment is not used; a key of the environment's is not sent."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-another-service")
    assert load(server, "--num-prompts", "2").exit_code == 0
    assert {one.path for one in server.seen} == {"/ready", "/v1/models", "/v1/completions", "/metrics"}
    assert not any("sk-of" in value for one in server.seen for value in one.headers.values())


def test_a_key_is_sent_as_a_bearer_token(server: CannedServer):
    assert load(server, "--num-prompts", "1", "--api-key", "sk-1").exit_code == 0
    sent = [{name.lower(): value for name, value in one.headers.items()} for one in server.seen]
    assert {headers.get("authorization") for headers in sent} == {"Bearer sk-1"}


def test_so_many_clients_are_in_flight_and_no_more(serving, tmp_path: Path):
    """The server answers nobody before three have asked."""
    three, now, most = threading.Barrier(3), [0], [0]
    lock = threading.Lock()

    def together(asked: Asked) -> Reply:
        if asked.path != "/v1/completions":
            return answer(asked)
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        three.wait(20)
        time.sleep(0.05)  # for one too many to come
        with lock:
            now[0] -= 1
        return stream()

    file = tmp_path / "load.json"
    done = load(serving(together), "--max-concurrency", "3", "--num-prompts", "9", "--json", file)
    assert done.exit_code == 0 and most[0] == 3, done.output
    assert json.loads(file.read_text())["levels"][0]["max_concurrent_requests"] == 3


def test_no_request_of_an_open_arrival_is_sent_before_its_time(server: CannedServer, tmp_path: Path):
    file = tmp_path / "load.json"
    words = ("--request-rate", "40", "--num-prompts", "8", "--seed", "5", "--save-detailed", "--result-dir", tmp_path)
    done = load(server, *words, "--json", file)
    assert done.exit_code == 0, done.output
    (level,) = json.loads(file.read_text())["levels"]
    planned = planned_times(Arrivals(rate=40.0), 8, seed=5)
    assert len(level["start_times"]) == 8 and level["p99_client_wait_ms"] >= 0
    assert all(sent >= due for sent, due in zip(level["start_times"], planned, strict=True))


def test_a_sweep_measures_every_number_of_clients(server: CannedServer, tmp_path: Path):
    file, table, plots = tmp_path / "load.json", tmp_path / "load.csv", tmp_path / "plots"
    done = load(server, "--sweep", "1,2,4", "--num-prompts", "4", "--json", file, "--csv", table, "--plots", plots)
    assert done.exit_code == 0, done.output
    result = json.loads(file.read_text())
    assert [level["max_concurrency"] for level in result["levels"]] == [1, 2, 4] and result["complete"]
    prompts = [one.body["prompt"] for one in server.seen if one.path == "/v1/completions"]
    assert len(set(prompts)) == 12, "no level profits from what another one asked"
    lines = table.read_text().splitlines()
    assert len(lines) == 4 and lines[0].startswith("max_concurrency,complete,duration")
    assert {path.name for path in plots.iterdir()} == {
        "latency-throughput.png", "ttft.png", "tpot.png", "itl.png", "e2el.png"
    }
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in plots.iterdir())


def test_two_results_are_held_against_each_other(tmp_path: Path):
    for name, rate in (("a", 100.0), ("b", 150.0)):
        levels = [
            {"max_concurrency": n, "output_throughput": rate * n, "median_tpot_ms": 1000 / rate} for n in (1, 2)
        ]
        (tmp_path / f"{name}.json").write_text(json.dumps({"levels": levels}))
    words = ("--compare", tmp_path / "a.json", tmp_path / "b.json", "--plots", tmp_path / "plots")
    refused(load("http://127.0.0.1:1", *words, "--csv", tmp_path / "c.csv"), "--compare writes pictures alone")
    done = load("http://127.0.0.1:1", *words)
    assert done.exit_code == 0, done.output
    assert done.stdout.count("1.50×") == 4, "throughput and time a token of both levels"
    assert (tmp_path / "plots" / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_acceptance_comes_from_the_servers_counters(serving, tmp_path: Path):
    """Ten drafts of three tokens a request, half of them accepted; what was counted before is not ours."""
    requests = [0]

    def counting(asked: Asked) -> Reply:
        if asked.path == "/metrics":
            n = 100 + 10 * requests[0]
            return Reply(COUNTERS.format(n, 3 * n, 1.5 * n, 0.75 * n).encode(), kind="text/plain")
        requests[0] += asked.path == "/v1/completions"
        return answer(asked)

    file = tmp_path / "load.json"
    done = load(serving(counting), "--num-prompts", "4", "--json", file)
    level = json.loads(file.read_text())["levels"][0]
    assert level["spec_decode_num_drafts"] == 40 and level["spec_decode_num_accepted_tokens"] == 60
    assert level["spec_decode_acceptance_length"] == 2.5 and level["spec_decode_acceptance_rate"] == 50.0
    assert "acceptance length 2.50, rate 50.0 %, by position 1: 75%" in " ".join(done.stdout.split())
    assert "acceptance length = 1 + accepted / drafts" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("limits", "share"), [(("ttft:60000", "e2el:60000"), 1.0), (("ttft:60000 e2el:0.0000001",), 0.0)]
)
def test_goodput(server: CannedServer, tmp_path: Path, limits: tuple[str, ...], share: float):
    file = tmp_path / "load.json"
    done = load(server, "--num-prompts", "3", "--json", file, "--goodput", *limits)
    assert done.exit_code == 0, done.output
    level = json.loads(file.read_text())["levels"][0]
    assert level["goodput_share"] == share
    assert level["request_goodput"] == pytest.approx(share * level["request_throughput"])


def test_prompts_of_so_many_tokens(server: CannedServer):
    done = load(server, "--num-prompts", "5", "--input-len", "16", "--output-len", "3", "--dataset", "prose")
    assert done.exit_code == 0, done.output
    asked = [one.body for one in server.seen if one.path == "/v1/completions"]
    assert all(len(body["prompt"]) == 16 and body["max_tokens"] == 3 for body in asked)


def test_of_a_text_that_a_server_finds_too_long_the_beginning_is_cut(serving):
    def narrow(asked: Asked) -> Reply:
        if asked.path == "/tokenize" and len(asked.body["prompt"]) > 100:
            return json_reply({"error": {"message": "the context has 100 tokens"}}, 400)
        return answer(asked)

    server = serving(narrow)
    done = load(server, "--num-prompts", "4", "--input-len", "40", "--dataset", "code")
    assert done.exit_code == 0, done.output
    assert [len(one.body["prompt"]) for one in server.seen if one.path == "/v1/completions"] == [40] * 4


def refused(result: Result, *parts: str) -> None:
    assert result.exit_code == 2, result.output
    sentence = " ".join(result.stderr[max(0, result.stderr.find("Error: ")) :].split())
    assert sentence.startswith("Error: ") and sentence.endswith((".", "?")) and "Traceback" not in sentence
    assert not sentence.endswith(("..", "?."))
    for part in parts:
        assert part in sentence, sentence


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
