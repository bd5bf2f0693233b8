"""The application: its routes, and the engine that starts and ends with it."""

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from draftsmith import __version__
from draftsmith.drafters.base import Drafter
from draftsmith.engine import Engine
from draftsmith.serving.access import Access
from draftsmith.serving.answers import error_answer, json_answer
from draftsmith.serving.body import Fields, Flag, Several
from draftsmith.serving.chat import chat
from draftsmith.serving.completions import completions
from draftsmith.serving.description import description
from draftsmith.serving.errors import ApiError, broken
from draftsmith.serving.messages import count_tokens, messages
from draftsmith.serving.messages_fields import CountFields, MessageFields
from draftsmith.serving.metrics import HttpMetrics, registry_of
from draftsmith.serving.openai_fields import ChatFields, CompletionFields, Message, Tool
from draftsmith.serving.page import FOLDER, Page, page_paths
from draftsmith.serving.sampling import check_tools
from draftsmith.serving.service import Service
from draftsmith.serving.settings import Settings

log = logging.getLogger("draftsmith.serving")
Endpoint = Callable[[Request, Service, str], Awaitable[Response]]


class TokenizeFields(Fields):
    """The body of `/tokenize`: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Several[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: Flag = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Several[Tool] | None = None
    return_token_strs: bool | None = None


class DetokenizeFields(Fields):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: Several[int]


async def tokenize(request: Request, service: Service, key: str) -> Response:
    """Answer with the tokens of a text or a conversation."""
    fields = await service.bodies.read(request, TokenizeFields)
    service.check_model(fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise ApiError(400, "give either prompt or messages.", param="prompt")
    async with service.within(service.deadline(request.scope["state"]["began"])):
        if fields.messages is not None:
            check_tools(fields.tools, service.settings)
            tools = [tool.model_dump(exclude_none=True) for tool in fields.tools or ()]
            tokens = await service.prompts.of_chat(
                fields.messages, fields.chat_template_kwargs, tools, fields.continue_final_message,
                fields.add_generation_prompt is False,
            )
        else:
            tokens = await service.prompts.of_text(fields.prompt or "", fields.add_special_tokens is not False)
    told: dict[str, Any] = {"count": len(tokens), "max_model_len": service.max_length, "tokens": tokens}
    if fields.return_token_strs:
        told["token_strs"] = [service.texts.text(token) for token in tokens]
    return json_answer(told)


async def detokenize(request: Request, service: Service, key: str) -> Response:
    """Answer with the text of tokens."""
    fields = await service.bodies.read(request, DetokenizeFields)
    service.check_model(fields.model)
    async with service.within(service.deadline(request.scope["state"]["began"])):
        return json_answer({"prompt": await service.prompts.texts(fields.tokens, service.texts.whole)})


async def models(request: Request, service: Service, key: str) -> Response:
    """Answer which models there are: one, by all its names, and who drafts for it."""
    settings = service.settings
    listed = [
        {
            "id": name, "object": "model", "created": request.app.state.started, "owned_by": "draftsmith",
            "root": settings.root, "parent": None, "max_model_len": service.max_length,
            "drafters": list(service.drafters),
        }
        for name in settings.names
    ]
    wanted = request.path_params.get("model")
    if wanted is None:
        return json_answer({"object": "list", "data": listed})
    service.check_model(wanted)
    return json_answer(next(one for one in listed if one["id"] == wanted))


async def health(request: Request, service: Service, key: str) -> Response:
    """Answer whether this process does its work; 503 once its engine has stopped for good, or hangs in a step."""
    return Response(status_code=200 if service.works else 503)


async def ready(request: Request, service: Service, key: str) -> Response:
    """Answer whether requests are let in."""
    return Response(status_code=200 if service.accepts else 503)


async def status(request: Request, service: Service, key: str) -> Response:
    """Answer how drafts do: acceptance by drafter and task, why steps drafted what they did, and alarms."""
    told = {"accepts": service.accepts, "texts": service.inside, "steps_by_reason": dict(service.meter.reasons)}
    return json_answer(told | service.health.told())


async def version(request: Request, service: Service, key: str) -> Response:
    """Answer which version this is."""
    return json_answer({"version": __version__})


BODIES: Mapping[str, tuple[Endpoint, type[BaseModel]]] = {
    "/v1/completions": (completions, CompletionFields),
    "/v1/chat/completions": (chat, ChatFields),
    "/v1/messages": (messages, MessageFields),
    "/v1/messages/count_tokens": (count_tokens, CountFields),
    "/tokenize": (tokenize, TokenizeFields),
    "/detokenize": (detokenize, DetokenizeFields),
}
QUESTIONS: Mapping[str, Endpoint] = {
    "/v1/models": models, "/v1/models/{model:path}": models, "/health": health, "/ready": ready, "/version": version,
    "/status": status,
}


def make_app(engine: Engine, settings: Settings, drafters: Mapping[str, Drafter] | None = None) -> ASGIApp:
    """Return the application that serves an engine.

    Args:
        engine: with all drafters, by name.
        drafters: those that requests may name.
    """
    return application(Service(engine, settings, drafters or {}))


def application(service: Service, page: Path = FOLDER) -> ASGIApp:
    """Return the application over a service, whose engine starts and ends with it; `page` is the folder of its page."""
    http = HttpMetrics()
    registry = registry_of(service.meter, http, service.health)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service.engine:
            with closing(service.bodies), closing(service.prompts):
                yield

    app = FastAPI(
        title="Draftsmith", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
        redirect_slashes=False,  # it would send clients wherever their Host header says
    )
    app.state.started = int(time.time())
    heads: list[Route] = []

    def route(path: str, endpoint: Endpoint, method: str) -> None:
        async def answer(request: Request) -> Response:
            state = request.scope["state"]
            try:
                return await endpoint(request, service, state["key"])
            except ApiError as error:
                return error_answer(error, request.scope)
            except Exception as error:  # the boundary of a request: whatever failed, other requests go on
                log.error("request %s failed", state["request_id"], exc_info=error)
                return error_answer(broken(), request.scope)

        app.add_api_route(
            path, answer, methods=[method], name=endpoint.__name__, response_model=None,
            summary=(endpoint.__doc__ or "").partition("\n")[0], operation_id=f"{endpoint.__name__}{len(app.routes)}",
        )
        if method == "GET":
            heads.append(Route(path, answer, methods=["HEAD"]))

    for path, (endpoint, _) in BODIES.items():
        route(path, endpoint, "POST")
    for path, endpoint in QUESTIONS.items():
        route(path, endpoint, "GET")

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    app.add_api_route("/metrics", metrics, methods=["GET"], response_model=None)
    # Load balancers and load generators use HEAD to ask whether something is there. GET routes come first, so that the
    # answer to a wrong method names GET as allowed.
    app.router.routes += [*heads, Route("/metrics", metrics, methods=["HEAD"])]

    async def as_told(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.scope["path"][:200]
        told = error_answer(ApiError(error.status_code, f"{error.detail}: {request.method} {path}."), request.scope)
        told.headers.update(error.headers or {})  # for 405: the allowed methods
        return told

    app.add_exception_handler(HTTPException, as_told)
    fields = {path: kind for path, (_, kind) in BODIES.items()}
    app.openapi = lambda: description(app, fields)  # type: ignore[method-assign]
    pages = page_paths(page)
    if pages:
        # One route for every file, so that any other path gets the same 404 as everywhere.
        files = Page(directory=page, html=True)
        app.router.routes += [Route(path, files, methods=["GET"]) for path in pages]
    return Access(app, service.settings, http, pages, [*BODIES, *QUESTIONS, "/metrics", "/"])
