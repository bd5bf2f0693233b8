"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's form of a conversation."""

import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from draftsmith.serving.answers import dumps, json_answer, streamed, unless_gone
from draftsmith.serving.body import Fields, read_fields
from draftsmith.serving.constraints import Form
from draftsmith.serving.deltas import deltas
from draftsmith.serving.errors import ApiError, bad
from draftsmith.serving.openai_answers import Whole
from draftsmith.serving.openai_fields import Generation, Message, Speculation, TextPart
from draftsmith.serving.prompts import plain_text
from draftsmith.serving.sampling import check_general, sampling_params
from draftsmith.serving.service import Call, Service
from draftsmith.serving.speculation import drafting_of
from draftsmith.types import Completion

Content = str | list[TextPart]


class Turn(Fields):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Content


class CountFields(Fields):
    """The body of `/v1/messages/count_tokens`."""

    model: str
    messages: list[Turn]
    system: Content | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None


class MessageFields(CountFields):
    """The body of `/v1/messages`."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    speculation: Speculation | None = None
    smooth: bool = False


async def count_tokens(request: Request, service: Service, key: str) -> Response:
    """Answer how many tokens a conversation has."""
    fields = await read_fields(request, CountFields, service.settings)
    service.check_model(fields.model)
    return json_answer({"input_tokens": len(await _prompt_of(fields, service))})


async def messages(request: Request, service: Service, key: str) -> Response:
    """Answer a request.

    Raises:
        ApiError: what it is told instead.
    """
    settings = service.settings
    fields = await read_fields(request, MessageFields, settings)
    service.check_accepts()
    service.check_model(fields.model)
    if fields.thinking is not None and fields.thinking.get("type") != "disabled":
        raise bad("thinking is not served; leave it out.", "thinking")
    general = Generation(
        temperature=fields.temperature, top_p=fields.top_p, top_k=fields.top_k, stop=fields.stop_sequences
    )
    check_general(general, settings)
    drafting = drafting_of(fields.speculation, service.drafters, settings)
    prompt = await _prompt_of(fields, service)
    params = sampling_params(general, settings, Form(), fields.max_tokens, None)
    service.check_room(prompt, params.max_tokens, "max_tokens")
    told = request.scope["state"].setdefault("told", {})
    call = Call([prompt], params, drafting, key, service.deadline(None), fields.smooth, told=told)
    answer = _Answer(service, call, params.stop)
    if fields.stream:
        return await streamed(request, answer.events(), _failure)
    return json_answer(await unless_gone(request, answer.whole()))


async def _prompt_of(fields: CountFields, service: Service) -> list[int]:
    if fields.tools:
        raise bad("tools are not served yet; leave them out.", "tools")
    turns: list[Message] = []
    if fields.system is not None:
        turns.append(Message(role="system", content=plain_text(fields.system, "system")))
    for number, turn in enumerate(fields.messages):
        turns.append(Message(role=turn.role, content=plain_text(turn.content, f"message {number}")))
    return await service.prompts.of_chat(turns)


class _Answer:
    """The answer to one request, in one piece or as a stream of Anthropic's events."""

    def __init__(self, service: Service, call: Call, stops: Sequence[str]) -> None:
        self.service, self.call, self.stops = service, call, stops
        self.id = f"msg_{uuid.uuid4().hex}"

    def _message(self, content: list[dict[str, Any]], reason: str | None, stop: str | None, written: int) -> Any:
        return {
            "id": self.id, "type": "message", "role": "assistant", "model": self.service.settings.name,
            "content": content, "stop_reason": reason, "stop_sequence": stop,
            "usage": {
                "input_tokens": len(self.call.prompts[0]), "output_tokens": written,
                "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
            },
        }

    def _end(self, completion: Completion) -> tuple[str, str | None]:
        """Return why a message ended, and at which stop sequence."""
        if completion.finish_reason == "length":
            return "max_tokens", None
        stop = self._stop_of(completion)
        return ("stop_sequence", stop) if stop is not None else ("end_turn", None)

    def _stop_of(self, completion: Completion) -> str | None:
        """Return the stop sequence that ended a text: the one that stands behind what was kept of it."""
        if not self.stops:
            return None
        whole = "".join(self.service.texts.pieces(completion.prompt_tokens).read(completion.tokens, last=True))
        behind = whole[len(completion.text) :]
        found = [stop for stop in self.stops if behind.startswith(stop)]
        return max(found, key=len, default=None)

    async def whole(self) -> dict[str, Any]:
        """Return the answer in one piece."""
        text = Whole()
        async with aclosing(deltas(self.service, self.call)) as found:
            async for delta in found:
                text.take(delta)
        message: dict[str, Any] = self._message(
            [{"type": "text", "text": text.text}], *self._end(text.end), len(text.tokens)
        )
        return message

    async def events(self) -> AsyncGenerator[str, None]:
        """Yield the answer as a stream."""
        written = 0
        begun = False
        async with aclosing(deltas(self.service, self.call)) as found:
            async for delta in found:
                if not begun:
                    begun = True
                    yield _event("message_start", message=self._message([], None, None, 0))
                    yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
                    yield _event("ping")
                written += len(delta.tokens)
                if delta.text:
                    said = {"type": "text_delta", "text": delta.text}
                    yield _event("content_block_delta", index=0, delta=said)
                if delta.completion is not None:
                    reason, stop = self._end(delta.completion)
                    yield _event("content_block_stop", index=0)
                    yield _event(
                        "message_delta", delta={"stop_reason": reason, "stop_sequence": stop},
                        usage={"output_tokens": written},
                    )
        yield _event("message_stop")


def _event(kind: str, **more: Any) -> str:
    return f"event: {kind}\ndata: {dumps({'type': kind, **more})}\n\n"


def _failure(error: ApiError) -> str:
    return f"event: error\ndata: {dumps(error.anthropic())}\n\n"
