"""A tiny target behind the server: byte by byte, in float64, with a drafter that knows some of its texts."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from typing import Any, TypeVar

import httpx
import uvicorn

from draftsmith.drafters.base import Drafter
from draftsmith.engine import Engine, Fixed, Policy
from draftsmith.engine.guarded import Guarded
from draftsmith.plan import Plan
from draftsmith.serving.app import application
from draftsmith.serving.protocol import patient_for
from draftsmith.serving.run import Server, listen
from draftsmith.serving.service import Service
from draftsmith.serving.settings import Settings
from draftsmith.targets import Target
from draftsmith.types import Completion, SamplingParams
from tests.helpers.oracle import OracleDrafter, oracle_for
from tests.helpers.tiny import TOKENIZER_EOS, TOKENIZER_SIZE, tiny_model, tiny_tokenizer

T = TypeVar("T")
NAME = "toy"
TREE = Plan((2, 1, 1))
TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% if tone %}{{ tone }}{% endif %}{% endif %}"
)
PROMPTS = ("one", "Once upon", "def f(x):", "To be, or", "né", "12 + 3", "zzz", "The end")
"""Texts whose continuations the drafter knows."""


def model() -> Any:
    """Return the model, for somebody to wrap; none of the texts of these tests comes to its end token by itself."""
    return tiny_model(vocabulary=TOKENIZER_SIZE, eos_token_id=TOKENIZER_EOS, seed=2)


@cache
def target(template: str | None = TEMPLATE) -> Target:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return Target(model(), tokenizer, name=NAME)


def tokens_of(text: str) -> list[int]:
    return list(target().tokenizer(text)["input_ids"])  # type: ignore[misc]


def oracle(error_rate: float = 0.3, kind: type[OracleDrafter] = OracleDrafter) -> OracleDrafter:
    asked = [tokens_of(text) for text in PROMPTS]
    return oracle_for(model(), asked, 40, kind, error_rate=error_rate)


def make_service(
    *, drafts: bool = True, max_batch: int = 4, max_length: int | None = None, drafter: Drafter | None = None,
    policy: Policy | None = None, of: Target | None = None, **settings: Any,
) -> Service:
    """Return a service of its own, not running yet."""
    known: dict[str, Drafter] = {"oracle": Guarded(drafter or oracle(), "oracle", TOKENIZER_SIZE)} if drafts else {}
    chosen = policy if policy is not None or not drafts else Fixed(TREE)
    engine = Engine(of or target(), known or None, policy=chosen, max_batch=max_batch, max_length=max_length)
    return Service(engine, Settings(**{"names": (NAME,), "root": "somewhere/toy", **settings}), known)


def plainly(prompt: str | list[int], **params: Any) -> Completion:
    """Return what the target says by itself, without a server and without drafts."""
    asked = {"max_tokens": 16, **params}
    return Engine(target()).generate([prompt], SamplingParams(**asked))[0]


@asynccontextmanager
async def running(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    """Run a service, and give a client that talks to it without a network."""
    async with service.engine:
        transport = httpx.ASGITransport(app=application(service))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://toy", timeout=30) as client:
            yield client


def with_client(service: Service, work: Callable[[httpx.AsyncClient], Awaitable[T]]) -> T:
    """Let a coroutine talk to a service, and return what it comes to."""
    async def main() -> T:
        async with running(service) as client:
            return await asyncio.wait_for(work(client), 60)

    return asyncio.run(main())


def post(path: str, body: Any, service: Service | None = None, **options: Any) -> httpx.Response:
    """Send one request to a service of its own."""
    return with_client(service or make_service(), lambda client: client.post(path, json=body, **options))


def get(path: str, service: Service | None = None, **options: Any) -> httpx.Response:
    return with_client(service or make_service(), lambda client: client.get(path, **options))


def events_of(response: httpx.Response) -> list[Any]:
    """Return the events of an OpenAI stream, which has to end as one."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    *lines, last, empty = response.text.split("\n\n")
    assert (last, empty) == ("data: [DONE]", "")
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def text_of(events: list[Any], index: int = 0) -> str:
    """Return the text of one choice of a stream."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice.get("text", choice.get("delta", {}).get("content")) or "" for choice in choices)


@contextmanager
def listening(service: Service) -> Iterator[str]:
    """Run a service behind a real socket, in a thread of its own; give its address."""
    bound = listen("127.0.0.1", 0)
    with server_of(service, bound):
        host, port = bound.getsockname()
        yield f"http://{host}:{port}"


@contextmanager
def server_of(service: Service, bound: socket.socket) -> Iterator[Server]:
    """Run a service at a socket, which is closed at the end, in a thread of its own."""
    ready = threading.Event()
    config = uvicorn.Config(
        application(service), log_config=None, access_log=False, http=patient_for(service.settings),
        ws="none", lifespan="on", timeout_graceful_shutdown=1,
    )
    server = Server(config, service, ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        assert ready.wait(20)
        yield server
    finally:
        server.should_exit = True
        thread.join(20)
        bound.close()
        assert not thread.is_alive()


def until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not become so"
        time.sleep(0.005)
