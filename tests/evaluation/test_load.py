"""The parts of a load measurement: what is counted of an answer, when requests are due, what they hold."""

import asyncio
import json
from collections import Counter
from math import inf
from pathlib import Path

import numpy as np
import pytest

from draftsmith.evaluation.load.arrivals import planned_times
from draftsmith.evaluation.load.drive import Level
from draftsmith.evaluation.load.events import Events
from draftsmith.evaluation.load.metrics import detailed, summarise
from draftsmith.evaluation.load.records import Record
from draftsmith.evaluation.load.results import as_csv, differences, read_result
from draftsmith.evaluation.load.settings import Arrivals, LoadSettings, Server, Workload, read_goodput
from draftsmith.evaluation.load.speculation import acceptance, read_counters
from draftsmith.evaluation.load.workload import Windows, body_of, gather_requests, read_texts
from draftsmith.types import DraftsmithError

SERVER = Server("http://127.0.0.1:1")


def record(sent: float, chunks: list[tuple[float, str]], tokens: int, prompt: int = 10) -> Record:
    """A request whose text arrived in these chunks, with the end two seconds after the last of them."""
    found = Record(sent)
    for now, text in chunks:
        found.take({"choices": [{"text": text}]}, now)
    found.take({"choices": [{"text": "", "finish_reason": "length"}]}, chunks[-1][0] + 2)
    found.take({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": tokens}}, chunks[-1][0] + 9)
    found.close(True)
    return found


def test_times_and_tokens_of_one_answer():
    """Tokens are the usage chunk's, whatever the chunks; its own arrival, after the last choice, counts nowhere."""
    one = record(100.0, [(103.0, "a b c"), (104.0, "d"), (106.0, "e f")], tokens=7)
    assert one.ok and one.finish_reason == "length"
    assert (one.ttft, one.e2el, one.gaps, one.output_tokens) == (3.0, 8.0, [1.0, 2.0], 7)
    assert one.tpot == (8.0 - 3.0) / 6


def test_a_role_or_an_empty_delta_is_not_the_first_token():
    one = Record(0.0)
    one.take({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, 1.0)
    one.take({"choices": [{"delta": {"content": "Hi"}}], "usage": None}, 2.0)
    one.take({"choices": [{"delta": {"reasoning_content": "hm"}}]}, 4.0)
    one.take({"choices": [{"delta": {"tool_calls": [{"function": {"arguments": "{"}}]}}]}, 4.5)
    assert one.ttft == 2.0 and one.gaps == [2.0, 0.5] and "".join(one.text) == "Hihm{"


def test_an_answer_without_text_has_no_time_of_its_first_token_and_keeps_no_limit_of_it():
    silent = Record(0.0)
    silent.take({"choices": [{"text": "", "finish_reason": "length"}]}, 4.0)
    silent.take({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 8}}, 4.0)
    silent.close(True)
    assert silent.ok and silent.ttft is silent.tpot is None and silent.e2el == 4.0
    level = level_of(silent, record(0.0, [(1.0, "a")], tokens=2))
    found = summarise(level, LoadSettings(SERVER, goodput={"tpot": 9000.0}))
    assert found["without_text"] == 1 and found["completed"] == 2 and found["goodput_share"] == 0.5
    assert found["mean_ttft_ms"] == 1000.0 and found["mean_tpot_ms"] == 2000.0


@pytest.mark.parametrize(
    ("chunks", "finished", "told"),
    [
        ([{"choices": [{"text": "a"}]}], False, "broke off"),
        ([{"choices": [{"text": "a", "finish_reason": "stop"}]}], True, "no usage chunk"),
        ([{"error": {"message": "out of memory\nat line 3"}}], True, "in mid-stream: out of memory"),
        ([{"error": {"message": "out of memory."}}], True, "in mid-stream: out of memory"),
    ],
)
def test_an_answer_that_cannot_be_counted_has_failed(chunks: list[dict[str, object]], finished: bool, told: str):
    one = Record(0.0)
    for chunk in chunks:
        one.take(chunk, 1.0)
    one.close(finished)
    assert not one.ok and told in one.error and "line 3" not in one.error
    assert not one.error.endswith("."), "it becomes part of a sentence"


def test_events_are_the_same_however_the_bytes_are_cut():
    stream = b'data: {"a": 1}\n\n: a comment\nevent: x\r\ndata: {"b":\r\ndata: 2}\r\n\r\ndata:[DONE]'
    for size in range(1, len(stream) + 1):
        events = Events()
        found = [e for at in range(0, len(stream), size) for e in events.feed(stream[at : at + size])]
        assert [*found, *events.end()] == [b'{"a": 1}', b'{"b":\n2}', b"[DONE]"], size


def level_of(*records: Record) -> Level:
    return Level(2, list(records), began=100.0, ended=120.0, peak=2)


def test_the_numbers_of_a_level():
    failed = Record(100.0)
    failed.error = "the server answered 500: no"
    level = level_of(
        record(100.0, [(101.0, "a"), (103.0, "b")], tokens=5), record(101.0, [(104.0, "x"), (105.0, "y")], tokens=1),
        failed,
    )
    limits = read_goodput(["ttft:1500", "e2el:5000.5"])
    found = summarise(level, LoadSettings(SERVER, goodput=limits, percentiles=(50.0, 99.9)))
    assert (found["completed"], found["failed"], found["duration"]) == (2, 1, 20.0)
    assert (found["total_output_tokens"], found["total_input_tokens"]) == (6, 20)
    assert found["output_throughput"] == 6 / 20 and found["total_token_throughput"] == 26 / 20
    assert found["request_throughput"] == 2 / 20
    assert found["mean_ttft_ms"] == found["median_ttft_ms"] == found["p50_ttft_ms"] == 2000.0
    assert found["std_ttft_ms"] == 1000.0 and found["p99.9_ttft_ms"] == pytest.approx(2998.0)
    assert found["mean_tpot_ms"] == 1000.0, "one token has no pace"
    assert found["mean_itl_ms"] == 1500.0
    assert found["mean_e2el_ms"] == 5500.0
    assert found["request_goodput"] == 1 / 20 and found["goodput_share"] == 1 / 3
    assert found["failures"] == {"the server answered 500: no": 1}
    raw = detailed(level)
    assert raw["output_lens"] == [5, 0, 1] and raw["itls"] == [[2.0], [], [1.0]]
    assert raw["generated_texts"] == ["ab", "", "xy"] and raw["errors"] == ["", "the server answered 500: no", ""]


def test_a_csv_has_a_line_a_level_and_single_numbers_only():
    one = {"max_concurrency": 1, "output_throughput": 2.5, "rates": [1], "failures": {"a": 1}}
    assert as_csv([one, {"max_concurrency": 2, "more": 3}]) == "max_concurrency,output_throughput,more\n1,2.5,\n2,,3\n"


EXPOSITION = """# HELP vllm:spec_decode_num_drafts_total drafts
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a, b"} %d
vllm:spec_decode_num_drafts_total{engine="1",model_name="a, b"} 1
vllm:spec_decode_num_drafts_created{engine="0"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0"} %d 1700000000000
vllm:spec_decode_num_accepted_tokens_total{engine="0"} %d.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} %d
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1",engine="0"} %d
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="2",engine="0"} 0
http_requests_total{handler="/v1/completions"} 7
"""


@pytest.mark.parametrize("prefix", ["vllm:", "llamacpp:"])
def test_acceptance_is_what_the_counters_gained(prefix: str):
    told = EXPOSITION.replace("vllm:", prefix)
    before, after = (read_counters(told % numbers) for numbers in ((10, 40, 20, 9, 4), (20, 80, 35, 17, 11)))
    found = acceptance(before, after)
    assert found["spec_decode_num_drafts"] == 10 and found["spec_decode_num_draft_tokens"] == 40
    assert found["spec_decode_acceptance_length"] == 1 + 15 / 10
    assert found["spec_decode_acceptance_rate"] == 100 * 15 / 40
    assert found["spec_decode_per_position_acceptance_rates"] == [0.8, 0.7]


def test_nothing_is_said_of_drafts_where_none_were_counted():
    counted = read_counters(EXPOSITION % (1, 2, 3, 4, 5))
    assert read_counters("http_requests_total 7\n") is read_counters("other:spec_decode_num_drafts_total 7\n") is None
    assert acceptance(counted, counted) == acceptance(None, counted) == acceptance(counted, None) == {}
    assert acceptance(read_counters(EXPOSITION % (9, 9, 9, 9, 9)), counted) == {}, "a server that was started anew"


def test_arrivals_are_planned_by_the_seed():
    poisson = Arrivals(rate=50.0)
    times = planned_times(poisson, 4000, seed=3)
    assert times[0] == 0.0 and times == sorted(times) == planned_times(poisson, 4000, seed=3)
    assert times != planned_times(poisson, 4000, seed=4)
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(1 / 50, rel=1e-9) and gaps.std() == pytest.approx(1 / 50, rel=0.12)
    even = np.diff(planned_times(Arrivals(rate=50.0, burstiness=1e6), 100, seed=3))
    assert even == pytest.approx(1 / 50, rel=0.02)
    bursts = np.diff(planned_times(Arrivals(rate=50.0, burstiness=0.1), 4000, seed=3))
    assert bursts.std() > 2 * gaps.std()
    assert np.diff(planned_times(Arrivals(rate=50.0, burstiness=inf), 9, seed=3)) == pytest.approx(1 / 50)
    assert planned_times(poisson, 1, seed=3) == [0.0]
    assert planned_times(Arrivals(), 3, seed=0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("strategy", "middle"), [("linear", 50.5), ("exponential", 10.0)])
def test_a_ramp_rises_from_its_start_to_its_end(strategy: str, middle: float):
    ramp = Arrivals(burstiness=1e8, ramp=strategy, ramp_start=1.0, ramp_end=100.0)  # type: ignore[arg-type]
    rates = 1 / np.diff(planned_times(ramp, 201, seed=0))
    assert rates[99] == pytest.approx(middle, rel=0.01) and rates[-1] == pytest.approx(100, rel=0.01)
    assert rates[0] == pytest.approx(1, rel=0.6)


async def by_letter(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def made(workload: Workload, count: int, endpoint: str = "completions"):
    async def all_of_them():
        texts = read_texts(workload)
        return (await gather_requests(workload, endpoint, texts, by_letter)).make(count)  # type: ignore[arg-type]

    return asyncio.run(all_of_them())


def test_no_two_clients_get_the_same_prompt_while_there_are_others():
    windows = Windows(["abcdef", "xyz"])
    pieces = [windows.take(2) for _ in range(5)]
    assert sorted(piece for piece, _ in pieces[:4]) == ["ab", "cd", "ef", "xy"]
    assert [repeated for _, repeated in pieces] == [False] * 4 + [True]
    with pytest.raises(DraftsmithError, match="no text has 7 tokens"):
        windows.take(7)


@pytest.mark.parametrize("task", ["code", "prose", "dialogue", "mixed"])
def test_embedded_prompts_have_the_length_that_is_asked_for(task: str):
    found = made(Workload(task, input_lens=(32,), output_lens=(5,)), 20)
    assert all(len(request.prompt) == 32 and request.output_len == 5 for request in found)
    assert len({tuple(request.prompt) for request in found}) == 20
    again = made(Workload(task, input_lens=(32,), output_lens=(5,)), 20)
    assert found == again != made(Workload(task, input_lens=(32,), output_lens=(5,), seed=1), 20)


def test_heterogeneous_clients_draw_their_lengths():
    work = Workload("random", input_lens=(8, 40), output_lens=(3, 9, 27), vocab_size=50, ignore_eos=True)
    found = made(work, 120)
    assert not work.homogeneous
    assert set(Counter(len(request.prompt) for request in found)) == {8, 40}
    assert set(Counter(request.output_len for request in found)) == {3, 9, 27}
    tokens = {token for request in found for token in request.prompt}
    assert min(tokens) == 0 and max(tokens) == 49


def test_random_ids_are_ids_that_the_server_knows():
    found = made(Workload("random"), 3)
    assert all(len(request.prompt) == 64 for request in found), "homogeneous by default"
    known = {token for prompt in read_texts(Workload()) for token in asyncio.run(by_letter(prompt.text))}
    assert {token for request in found for token in request.prompt} <= known


def test_a_file_of_the_users_is_sent_whole(tmp_path: Path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "one"}\n{"prompt": "and another"}\n')
    assert {request.prompt for request in made(Workload(str(file)), 2)} == {"one", "and another"}
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    assert made(Workload(str(chats)), 1, "chat")[0].prompt == [{"role": "user", "content": "Hi"}]
    with pytest.raises(DraftsmithError, match="take --endpoint chat"):
        made(Workload(str(chats)), 1)


def test_what_is_sent():
    work = Workload(output_lens=(9,), ignore_eos=True, extra_body={"top_p": 0.5, "temperature": 1.5})
    (request,) = made(work, 1)
    body = body_of(request, work, "completions", "m")
    assert body == {
        "model": "m", "prompt": request.prompt, "max_tokens": 9, "temperature": 1.5, "top_p": 0.5, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }
    chat = body_of(request, Workload(), "chat", "m")
    assert chat["messages"] == [{"role": "user", "content": request.prompt}]
    assert body_of(request, Workload(), "chat", "m", is_ours=True) == chat | {"spec_decode_metrics": "summary"}
    assert chat["max_completion_tokens"] == 9 and "prompt" not in chat and "ignore_eos" not in chat


@pytest.mark.parametrize("given", ["http://h:80", "http://h:80/", "http://h:80/v1", "http://h:80/v1/"])
def test_an_address_may_end_in_v1(given: str):
    assert Server(given).base_url == "http://h:80"


@pytest.mark.parametrize("given", ["localhost:8000", "ftp://h", "http://", "http://h:99999", "http://u:p@h", "http://h/?q"])
def test_an_address_that_is_none_is_refused(given: str):
    with pytest.raises(DraftsmithError, match="--base-url"):
        Server(given)


def test_a_key_is_in_no_representation():
    assert "sk-secret" not in repr(LoadSettings(Server("http://h", api_key="sk-secret")))


def test_a_result_without_levels_is_no_result(tmp_path: Path):
    file = tmp_path / "a.json"
    file.write_text('{"levels": [{"output_throughput": 1.0}]}')
    with pytest.raises(DraftsmithError, match="holds no level with"):
        read_result(file)
    file.write_text('{"output_throughput": 1.0, "median_tpot_ms": 2.0}')
    assert read_result(file).levels[0]["median_tpot_ms"] == 2.0, "another benchmark's file is a level by itself"


def test_what_two_results_do_not_have_in_common_is_told(tmp_path: Path):
    levels, files = [{"output_throughput": 1.0, "median_tpot_ms": 2.0}], []
    for name, rate, whole in (("a", 2.0, True), ("b", 8.0, False)):
        files.append(tmp_path / name)
        settings = {"base_url": name, "request_rate": rate, "seed": 0}
        files[-1].write_text(json.dumps({"levels": levels, "settings": settings, "complete": whole}))
    one, other = map(read_result, files)
    assert differences(one, other) == ["B was interrupted.", "request_rate is 2.0 in A and 8.0 in B."]
    assert differences(one, one) == []
