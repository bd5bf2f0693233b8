"""Who is let in, how much at a time, and what the log and the metrics say of it."""

import asyncio
import json
import logging
import re
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from draftsmith.serving.app import application
from tests.serving.toy import NAME, get, listening, make_service, plainly, post, running, until

COMPLETION = "/v1/completions"
JSON = {"content-type": "application/json"}
ROUTES = (
    ("GET", "/v1/models"), ("GET", "/metrics"), ("POST", COMPLETION), ("POST", "/v1/chat/completions"),
    ("POST", "/v1/messages"), ("POST", "/tokenize"), ("GET", "/openapi.json"), ("GET", "/version"),
    ("GET", "/nowhere"), ("GET", "//health"), ("GET", "/health/"), ("POST", "/v1/completions/"),
)


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("host", ["toy", "toy/health?", "x@toy"])
def test_no_route_is_open_without_a_key(method: str, path: str, host: str):
    async def main() -> None:
        async with running(make_service(keys=("first", "second"))) as client:
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "first"}, {"x-api-key": ""}):
                # With the host in front, or "//health" would be a host and not a path.
                response = await client.request(method, f"http://toy{path}", headers={**headers, "host": host})
                assert response.status_code == 401
                assert "key is missing or wrong" in response.text
            assert (await client.get("/health")).status_code == (await client.get("/ready")).status_code == 200

    asyncio.run(main())


def test_a_request_line_may_name_the_whole_address():
    """Clients of proxies send it so. What stands before the path is no key to anything."""
    lines = {
        "GET http://host/health": 200, "GET HTTP://host:80/health?x=http://y/z": 200, "GET https://health/ready": 200,
        "GET http://toy/v1/models": 401, "GET http://toy/%76ersion": 401, "GET http://toy": 200, "GET http:": 401,
        "GET ftp://host/health": 401, "GET http://host/http://host/health": 401, "GET http://health": 200,
    }

    def status(host: str, port: int, line: str) -> int:
        with socket.create_connection((host, port), timeout=10) as asking:
            asking.sendall(f"{line} HTTP/1.1\r\nhost: toy\r\nconnection: close\r\n\r\n".encode())
            return int(asking.recv(12).split()[1])

    with listening(make_service(keys=("first",))) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        assert {line: status(host, int(port), line) for line in lines} == lines
        found = socket.create_connection((host, int(port)), timeout=10)
        with found:
            found.sendall(
                b"GET http://toy/v1/models HTTP/1.1\r\nhost: toy\r\nx-api-key: first\r\nconnection: close\r\n\r\n"
            )
            assert found.recv(12).split()[1] == b"200"


def test_every_key_opens():
    async def main() -> None:
        async with running(make_service(keys=("first", "second"))) as client:
            given = ({"authorization": "Bearer second"}, {"authorization": "bearer first"}, {"x-api-key": "first"})
            for headers in given:
                assert (await client.get("/v1/models", headers=headers)).status_code == 200

    asyncio.run(main())


def test_prompts_of_one_key_are_not_found_by_another():
    """Whether somebody else asked the same before shows neither in the count nor in the time."""
    prompt = [65] * 100

    async def main() -> list[int]:
        found = []
        async with running(make_service(keys=("first", "second"))) as client:
            for key in ("first", "first", "second", "second"):
                response = await client.post(
                    COMPLETION, json={"prompt": prompt, "max_tokens": 1}, headers={"x-api-key": key}
                )
                found.append(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        return found

    assert asyncio.run(main()) == [0, 64, 0, 64]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large(chunked: bool):
    async def pieces() -> Any:
        for _ in range(64):
            yield b" " * 1024

    async def main() -> httpx.Response:
        async with running(make_service(max_body_bytes=2048)) as client:
            return await client.post(COMPLETION, content=pieces() if chunked else b" " * 4096, headers=JSON)

    response = asyncio.run(main())
    assert response.status_code == 413 and "more than 2048 bytes" in response.json()["error"]["message"]


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "text/json"])
def test_other_sites_cannot_make_a_browser_ask(kind: str | None):
    """What a page may send to any address without asking that first is no request here."""
    async def main() -> httpx.Response:
        async with running(make_service()) as client:
            headers = {} if kind is None else {"content-type": kind}
            return await client.post(COMPLETION, content=b'{"prompt": "x"}', headers=headers)

    response = asyncio.run(main())
    assert response.status_code == 415 and "access-control-allow-origin" not in response.headers


def test_the_page_is_served_to_everybody_and_may_load_nothing_from_elsewhere(tmp_path: Path):
    (tmp_path / "index.html").write_text("<title>page</title>")
    (tmp_path / "app.js").write_text("1")
    secret = tmp_path.parent / "secret.txt"
    secret.write_text("hidden words")

    async def main() -> None:
        service = make_service(keys=("k",))
        async with service.engine:
            transport = httpx.ASGITransport(app=application(service, tmp_path))  # type: ignore[arg-type]
            async with httpx.AsyncClient(transport=transport, base_url="http://toy") as client:
                for path, kind in (("/", "text/html"), ("/index.html", "text/html"), ("/app.js", "text/javascript")):
                    response = await client.get(path)
                    assert response.status_code == 200 and response.headers["content-type"].startswith(kind)
                    assert "default-src 'none'" in response.headers["content-security-policy"]
                    assert response.headers["x-content-type-options"] == "nosniff"
                for path in ("/../secret.txt", "/%2e%2e/secret.txt", "/..%2fsecret.txt", "//etc/passwd", "/other.js"):
                    for headers, status in (({}, 401), ({"x-api-key": "k"}, 404)):
                        response = await client.get(path, headers=headers)
                        assert response.status_code == status and "hidden" not in response.text

    asyncio.run(main())


def test_the_description_of_the_routes_is_whole():
    told = get("/openapi.json").json()
    assert {COMPLETION, "/v1/chat/completions", "/v1/messages", "/tokenize"} <= set(told["paths"])
    schemas = told["components"]["schemas"]
    for name in re.findall(r'"#/components/schemas/(\w+)"', json.dumps(told)):
        assert name in schemas
    body = told["paths"][COMPLETION]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"prompt", "speculation", "explain", "smooth"} <= set(body["properties"])
    asked = [path["post"] for path in told["paths"].values() if "post" in path]
    assert len(asked) == 6 and all("429" in one["responses"] for one in asked), "large bodies may find no room"


def test_too_many_header_fields():
    headers = [(f"x-{number}", "1") for number in range(200)]
    response = asyncio.run(_with_headers(headers))
    assert response.status_code == 431


async def _with_headers(headers: list[tuple[str, str]]) -> httpx.Response:
    async with running(make_service()) as client:
        return await client.get("/health", headers=headers)


def test_heads_and_bodies_that_do_not_come_are_not_waited_for():
    with listening(make_service(head_seconds=0.3, body_seconds=0.3)) as address:
        host, port = address.removeprefix("http://").split(":")
        fields = b"host: x\r\ncontent-type: application/json\r\ncontent-length: 9"
        begun = b"POST /v1/completions HTTP/1.1\r\n" + fields + b"\r\n\r\n{"
        for sent in (b"GET /health HT", begun):
            with socket.create_connection((host, int(port)), timeout=10) as slow:
                slow.sendall(sent)
                assert slow.recv(4096).startswith(b"HTTP/1.1 408 ")
        assert httpx.get(f"{address}/health").status_code == 200


def test_who_finds_no_room_is_told_to_come_again():
    async def main() -> None:
        service = make_service(max_batch=1, max_waiting=1)
        async with running(service) as client:
            body = {"prompt": "one", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
            first = [asyncio.create_task(client.post(COMPLETION, json=body)) for _ in range(2)]
            while service.inside < 2:
                await asyncio.sleep(0)
            late = await client.post(COMPLETION, json=body)
            assert late.status_code == 429 and late.headers["retry-after"] == "1"
            assert late.json()["error"]["type"] == "rate_limit_error"
            # Otherwise many texts that find no room beside one look as if that one filled the server.
            assert "it has room for 2 texts, and 2 are in" in late.json()["error"]["message"]
            unread = await client.post(COMPLETION, json=body | {"prompt": "x" * 100_000})
            assert unread.status_code == 429, "that its prompt is too long is not found out before"
            for response in await asyncio.gather(*first):
                assert response.json()["choices"][0]["text"] == plainly(**body).text
            assert service.inside == 0
            assert (await client.post(COMPLETION, json=body)).status_code == 200

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_time_that_is_up_is_told(stream: bool):
    async def main() -> None:
        service = make_service(max_batch=1)
        async with running(service) as client:
            body = {"prompt": "one", "max_tokens": 4, "stream": stream, "timeout": 1e-9}
            response = await client.post(COMPLETION, json=body)
            assert response.status_code == 504 and response.json()["error"]["type"] == "timeout_error"
            assert service.inside == 0
            del body["timeout"]
            assert (await client.post(COMPLETION, json=body)).status_code == 200

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_who_hangs_up_is_written_for_no_longer(stream: bool):
    service = make_service(max_batch=1, request_timeout=60)
    with listening(service) as address:
        host, port = address.removeprefix("http://").split(":")
        body = json.dumps({"prompt": "one", "max_tokens": 120, "ignore_eos": True, "stream": stream, "n": 100}).encode()
        fields = f"host: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        head = f"POST {COMPLETION} HTTP/1.1\r\n{fields}\r\n\r\n".encode()
        with socket.create_connection((host, int(port)), timeout=10) as leaving:
            leaving.sendall(head + body)
            until(lambda: service.inside == 100)
            until(lambda: service.meter.new_tokens > 0)
        until(lambda: service.inside == 0 and not service.meter.core.has_work, 5)
        assert service.meter.finished["abort"] > 90
        told = httpx.post(f"{address}{COMPLETION}", json={"prompt": "one", "max_tokens": 5, "temperature": 0}).json()
        assert told["choices"][0]["text"] == plainly("one", max_tokens=5).text


def test_the_log_says_what_became_of_a_request_and_not_what_it_said(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "draftsmith.serving")
    asked = {"prompt": "secret words", "max_tokens": 5, "temperature": 0, "user": "somebody"}
    post(COMPLETION, asked, headers={"x-request-id": "r1"})
    (record,) = [record for record in caplog.records if record.getMessage() == "request"]
    told = record.fields  # type: ignore[attr-defined]
    assert told["request_id"] == "r1" and told["status"] == 200 and told["path"] == COMPLETION
    assert (told["prompt_tokens"], told["completion_tokens"]) == (12, 5)
    assert told["seconds"] >= 0 and told["first_token_s"] >= 0
    assert "secret" not in caplog.text and "somebody" not in caplog.text


def test_a_probe_is_logged_when_its_status_changes_and_not_every_few_seconds(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "draftsmith.serving")
    service = make_service()

    async def main() -> None:
        async with running(service) as client:
            for draining in (False, False, True, True, False):
                service.draining = draining
                for path in ("/health", "/ready", "/metrics", "/v1/models"):
                    await client.get(path)

    asyncio.run(main())
    told = [record.fields for record in caplog.records if record.getMessage() == "request"]  # type: ignore[attr-defined]
    statuses = {
        path: [one["status"] for one in told if one["path"] == path]
        for path in ("/health", "/ready", "/metrics", "/v1/models")
    }
    assert statuses == {"/health": [200], "/ready": [200, 503, 200], "/metrics": [200], "/v1/models": [200] * 5}


def metrics_of(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text) for sample in family.samples
    }


def test_metrics_have_the_names_that_dashboards_know():
    async def main() -> str:
        async with running(make_service()) as client:
            body = {"prompt": "zzz", "max_tokens": 30, "temperature": 0}
            for fields in (body, {**body, "stream": True}, {**body, "n": 0}):
                await client.post(COMPLETION, json=fields)
            return (await client.get("/metrics")).text

    text = asyncio.run(main())
    found = metrics_of(text)
    mine = (("engine", "0"), ("model_name", NAME))

    def value(name: str, **labels: str) -> float:
        return found[name, tuple(sorted((*mine, *labels.items())))]

    assert value("vllm:prompt_tokens_total") == 6 and value("vllm:generation_tokens_total") == 60
    assert value("vllm:request_success_total", finished_reason="length") == 2
    assert value("vllm:num_requests_running") == value("vllm:num_requests_waiting") == 0
    assert value("vllm:kv_cache_usage_perc") == 0
    steps, drafted, accepted = (
        value(f"vllm:spec_decode_num_{name}_total") for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    assert drafted == 6 * steps and steps + accepted == 58
    by_depth = [value("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(d)) for d in range(3)]
    assert sum(by_depth) == accepted and by_depth == sorted(by_depth, reverse=True)
    assert value("draftsmith_draft_accepted_total", drafter="oracle") == accepted
    assert value("draftsmith_plan_steps_total", drafter="oracle", plan="2,1,1") == steps
    assert value("draftsmith_step_reasons_total", reason="fixed") == steps
    assert value("draftsmith_step_reasons_total", reason="asked") == 0
    assert value("draftsmith_drafter_failures_total", drafter="oracle") == 0
    for part in ("target", "drafter", "rest", "prefill"):
        assert value("draftsmith_seconds_total", part=part) > 0
    for name in (
        "time_to_first_token_seconds", "e2e_request_latency_seconds", "request_time_per_output_token_seconds",
        "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
        "request_prompt_tokens", "request_generation_tokens",
    ):
        assert value(f"vllm:{name}_count") == value(f"vllm:{name}_bucket", le="+Inf") == 2
    assert value("vllm:inter_token_latency_seconds_count") == steps
    assert value("vllm:iteration_tokens_total_sum") == 60 + value("vllm:prompt_tokens_total")
    assert 'le="1.0"' in text and 'le="0.025"' in text
    http = {labels: count for (name, labels), count in found.items() if name == "http_requests_total"}
    assert http[(("handler", COMPLETION), ("method", "POST"), ("status", "2xx"))] == 2
    assert http[(("handler", COMPLETION), ("method", "POST"), ("status", "4xx"))] == 1


def test_routes_that_there_are_not_are_counted_together():
    async def main() -> str:
        async with running(make_service()) as client:
            for number in range(50):
                assert (await client.get(f"/nowhere/{number}")).status_code == 404
            return (await client.get("/metrics")).text

    text = asyncio.run(main())
    assert "nowhere" not in text and 'http_requests_total{handler="other",method="GET",status="4xx"} 50.0' in text


def test_plans_that_requests_bring_are_counted_together_from_some_number_on():
    plans = [f"{first},{second}" for first in range(1, 12) for second in range(1, 9)]

    async def main() -> None:
        service = make_service()
        async with running(service) as client:
            for plan in plans:
                body = {"prompt": "one", "temperature": 0, "max_tokens": 3, "speculation": {"plan": plan}}
                assert (await client.post(COMPLETION, json=body)).status_code == 200
            told = (await client.get("/metrics")).text
        counted = [line for line in told.splitlines() if line.startswith("draftsmith_plan_steps_total{")]
        assert len(plans) > 64 >= len(counted) - 1 and any('plan="other"' in line for line in counted)

    asyncio.run(main())


def test_a_path_with_a_slash_too_many_is_not_there_and_sends_nobody_elsewhere():
    async def main() -> None:
        async with running(make_service()) as client:
            response = await client.post(f"{COMPLETION}/", json={"prompt": "x"}, headers={"host": "evil.example"})
            assert response.status_code == 404 and "location" not in response.headers

    asyncio.run(main())


def test_health_and_readiness():
    service = make_service()
    assert get("/health").status_code == get("/ready").status_code == 200

    async def main() -> None:
        async with running(service) as client:
            service.draining = True
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/ready")).status_code == 503
            response = await client.post(COMPLETION, json={"prompt": "x"})
            assert response.status_code == 503 and "retry-after" in response.headers

    asyncio.run(main())
