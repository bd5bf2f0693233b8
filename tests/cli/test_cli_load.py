"""`draftsmith load` against a server that streams known chunks with known counts."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from draftsmith.cli import app
from draftsmith.evaluation.load.arrivals import planned_times
from draftsmith.evaluation.load.settings import METRICS, Arrivals
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


def load(server: CannedServer | str, *words: str | Path) -> Result:
    url = server if isinstance(server, str) else server.url
    return CliRunner().invoke(app, ["load", "--base-url", url, *map(str, words)])


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_counts_and_fields(server: CannedServer, tmp_path: Path, endpoint: str):
    file = tmp_path / "load.json"
    words = ("--endpoint", endpoint, "--max-concurrency", "2", "--num-prompts", "6", "--num-warmups", "3")
    done = load(server, *words, "--save-detailed", "--result-dir", tmp_path / "common", "--json", file)
    assert done.exit_code == 0, done.output
    assert "now: warming up, 1 of 3" in done.stderr
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
