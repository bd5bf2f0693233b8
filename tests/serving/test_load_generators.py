"""What load generators of other projects send, and what they read of the answers.

The programs themselves run in tests/serving/clients/test_load_generators.py, where they are installed.
"""

import asyncio
import socket
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from draftsmith.serving.run import listen
from tests.serving.toy import NAME, events_of, listening, make_service, plainly, text_of, with_client

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
STREAM: dict[str, Any] = {"model": NAME, "stream": True}
USAGE: dict[str, Any] = {"include_usage": True}
TALK = [{"role": "user", "content": [{"type": "text", "text": "one"}]}]
SENT: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm bench serve": (COMPLETION, {
        "prompt": "one", "repetition_penalty": 1.0, "max_tokens": 24, "logprobs": None, "stream_options": USAGE,
        "ignore_eos": True, "temperature": 0.0,
    }),
    "vllm bench serve, chat": (CHAT, {
        "messages": TALK, "max_completion_tokens": 24, "stream_options": USAGE, "ignore_eos": True, "temperature": 0.0,
    }),
    "guidellm": (COMPLETION, {
        "prompt": "one", "max_tokens": 24, "stop": None, "ignore_eos": True, "temperature": 0,
        "stream_options": {**USAGE, "continuous_usage_stats": True},
    }),
    "guidellm, chat": (CHAT, {
        "messages": TALK, "max_completion_tokens": 24, "stop": None, "ignore_eos": True, "temperature": 0,
        "stream_options": {**USAGE, "continuous_usage_stats": True},
    }),
    "aiperf": (COMPLETION, {
        "prompt": "one", "max_tokens": 24, "ignore_eos": True, "temperature": 0, "stream_options": USAGE,
    }),
}


def counted(exposition: str) -> dict[str, float]:
    """Return the counters of speculation, as `vllm bench serve` looks for them; those of a depth by its number."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name.startswith("vllm:spec_decode") and sample.name.endswith("_total"):
                name = sample.name.removeprefix("vllm:spec_decode_num_").removesuffix("_total")
                found[sample.labels.get("position", name)] = sample.value
    return found


@pytest.mark.parametrize("name", SENT)
def test_texts_tokens_and_acceptance_are_told(name: str):
    path, body = SENT[name]
    service = make_service(metrics="summary")

    async def work(client: httpx.AsyncClient) -> tuple[list[Any], dict[str, float]]:
        response = await client.post(path, json={**STREAM, **body})
        assert response.status_code == 200, response.text
        return events_of(response), counted((await client.get("/metrics")).text)

    events, counters = with_client(service, work)
    if path == COMPLETION:
        assert text_of(events) == plainly("one", max_tokens=24, ignore_eos=True).text
        assert counters["accepted_tokens"] > 0
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 24
    assert events[-1]["usage"]["prompt_tokens"] > 0
    if body["stream_options"].get("continuous_usage_stats"):
        so_far = [event["usage"]["completion_tokens"] for event in events]
        assert so_far == sorted(so_far) and so_far[0] >= 1
    # The counters that one of them reads, and what another reads with the answer, are of the same guesses.
    told = events[-1]["metrics"]["speculative_decoding"]
    assert len(told["acceptance_histogram"]) == told["num_spec_tokens"] + 1
    assert sum(told["acceptance_histogram"]) == told["num_spec_steps"] == counters["drafts"] > 0
    assert told["num_accepted_draft_tokens"] == counters["accepted_tokens"]
    assert told["num_draft_tokens"] == counters["draft_tokens"]
    deeper = [sum(told["acceptance_histogram"][depth:]) for depth in range(1, told["num_spec_tokens"] + 1)]
    assert [counters.get(str(depth), 0) for depth in range(len(deeper))] == deeper


def test_it_can_be_asked_whether_a_route_is_there_without_reading_it():
    with listening(make_service(keys=("k",))) as address, httpx.Client(base_url=address) as client:
        for path in ("/health", "/ready", "/v1/models", "/version", "/status", "/metrics"):
            response = client.head(path, headers={"x-api-key": "k"})
            assert response.status_code == 200 and response.content == b"", path
        assert client.head("/metrics").status_code == 401
        refused = client.delete("/health", headers={"x-api-key": "k"})
        assert refused.status_code == 405 and refused.headers["allow"] == "GET"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_small_pieces_of_a_stream_do_not_wait_for_the_one_before(host: str):
    """Nagle's algorithm is off where connections are let in: clients that keep theirs would get pieces 40 ms late."""
    async def main() -> int:
        let_in: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def came(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            own = writer.get_extra_info("socket")
            let_in.set_result(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(came, sock=listen(host, 0)) as server:
            address = server.sockets[0].getsockname()
            _, writer = await asyncio.open_connection(*address[:2])
            found = await let_in
            writer.close()
            return found

    if host == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("there is no IPv6 here")
    assert asyncio.run(main()) != 0
