"""What `/openapi.json` says: routes, the fields of their bodies, the answers, and every possible status."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

JSON, EVENTS = "application/json", "text/event-stream"
ANTHROPIC = "/v1/messages"
STATUSES = {
    400: "Something that the request says is wrong, or not served.",
    401: "The API key is missing or wrong.",
    404: "The model is not served here.",
    408: "The request did not come in time.",
    413: "The body is too large.",
    415: "The body does not say that it is JSON.",
    429: "The server is full; try again after `retry-after` seconds.",
    431: "There are too many header fields.",
    500: "The server failed on this request.",
    503: "The server is about to end, or its engine has stopped.",
    504: "The time for the request is up.",
}
OF_EVERY_ROUTE = (401, 408, 431, 500)
OF_BODIES = (400, 404, 408, 413, 415, 429)
OF_TEXTS = (503, 504)
ANSWERS: Mapping[str, tuple[str, ...]] = {
    "/v1/completions": ("id", "object", "created", "model", "choices", "usage"),
    "/v1/chat/completions": ("id", "object", "created", "model", "choices", "usage"),
    "/v1/messages": ("id", "type", "role", "content", "model", "stop_reason", "usage"),
    "/v1/messages/count_tokens": ("input_tokens",),
    "/tokenize": ("count", "max_model_len", "tokens"),
    "/detokenize": ("prompt",),
    "/v1/models": ("object", "data"),
    "/v1/models/{model}": ("id", "object", "created", "owned_by", "root", "max_model_len", "drafters"),
    "/version": ("version",),
}
"""The fields that an answer always has, by route; answers that are streams have none of them."""
STREAMED = ("/v1/completions", "/v1/chat/completions", "/v1/messages")
OPENAI_ERROR: dict[str, Any] = {
    "type": "object", "required": ["error"],
    "properties": {"error": {
        "type": "object", "required": ["message", "type", "param", "code"],
        "properties": {
            "message": {"type": "string"}, "type": {"type": "string"}, "param": {"type": ["string", "null"]},
            "code": {"type": ["string", "null"]},
        },
    }},
}
ANTHROPIC_ERROR: dict[str, Any] = {
    "type": "object", "required": ["type", "error"],
    "properties": {"type": {"const": "error"}, "error": {
        "type": "object", "required": ["type", "message"],
        "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
    }},
}


def description(app: FastAPI, bodies: Mapping[str, type[BaseModel]]) -> dict[str, Any]:
    """Return the description of an application whose routes read these bodies."""
    told = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas: dict[str, Any] = told.setdefault("components", {}).setdefault("schemas", {})
    schemas |= {"OpenAIError": OPENAI_ERROR, "AnthropicError": ANTHROPIC_ERROR}
    for path, kind in bodies.items():
        schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        body = {"required": True, "content": {JSON: {"schema": schema}}}
        told["paths"][path]["post"]["requestBody"] = body
    for path, operations in told["paths"].items():
        for operation in operations.values():
            operation["responses"] = _responses(path, path in bodies)
    if "/v1/models/{model}" in told["paths"]:
        told["paths"]["/v1/models/{model}"]["get"]["parameters"] = [
            {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    return told


def _responses(path: str, has_body: bool) -> dict[str, Any]:
    """Return every status that a route may answer with, and in which form."""
    if path in ("/health", "/ready"):
        bad = "It does not."
        return {"200": {"description": "It does."}, "503": {"description": bad}} | _errors(path, (408, 431, 500))
    statuses = (*OF_EVERY_ROUTE, *(OF_BODIES if has_body else ()), *(OF_TEXTS if path in STREAMED else ()))
    if path == "/v1/models/{model}":
        statuses = (*statuses, 404)
    if path == "/metrics":
        content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    else:
        content = {JSON: {"schema": {"type": "object", "required": list(ANSWERS.get(path, ()))}}}
    if path in STREAMED:
        content[EVENTS] = {"schema": {"type": "string"}}
    return {"200": {"description": "The answer.", "content": content}} | _errors(path, statuses)


def _errors(path: str, statuses: tuple[int, ...]) -> dict[str, Any]:
    name = "AnthropicError" if path.startswith(ANTHROPIC) else "OpenAIError"
    content = {JSON: {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    return {str(status): {"description": STATUSES[status], "content": content} for status in sorted(set(statuses))}
