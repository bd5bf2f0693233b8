"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's form of a conversation."""

import json
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from draftsmith.serving.answers import dumps, json_answer, streamed, unless_gone
from draftsmith.serving.call_readers import CallReader, Part, ToolCall
from draftsmith.serving.constraints import Form, form_of
from draftsmith.serving.deltas import deltas
from draftsmith.serving.errors import ApiError, bad
from draftsmith.serving.health import task_of
from draftsmith.serving.messages_fields import CountFields, MessageFields, as_chat
from draftsmith.serving.openai_answers import Whole
from draftsmith.serving.openai_fields import Generation
from draftsmith.serving.sampling import check_general, check_tools, sampling_params
from draftsmith.serving.service import Call, Service
from draftsmith.serving.speculation import drafting_of
from draftsmith.types import Completion


async def count_tokens(request: Request, service: Service, key: str) -> Response:
    """Answer how many tokens a conversation has, with the tools that its template shows."""
    fields = await service.bodies.read(request, CountFields)
    service.check_model(fields.model)
    _, prompt = await _read(fields, service, service.deadline(request.scope["state"]["began"]))
    return json_answer({"input_tokens": len(prompt)})


async def messages(request: Request, service: Service, key: str) -> Response:
    """Answer a request.

    Raises:
        ApiError: what the client gets instead.
    """
    settings = service.settings
    fields = await service.bodies.read(request, MessageFields)
    service.check_accepts()
    service.check_model(fields.model)
    if fields.thinking is not None and fields.thinking.get("type") != "disabled":
        raise bad("thinking is not served; leave it out.", "thinking")
    general = Generation(
        temperature=fields.temperature, top_p=fields.top_p, top_k=fields.top_k, stop=fields.stop_sequences
    )
    check_general(general, settings)
    drafting = drafting_of(fields.speculation, service.drafters, settings)
    deadline = service.deadline(request.scope["state"]["began"])
    form, prompt = await _read(fields, service, deadline)
    params = sampling_params(general, settings, form, fields.max_tokens, None, stops="stop_sequences")
    service.check_room(prompt, params.max_tokens, "max_tokens")
    told = request.scope["state"].setdefault("told", {})
    call = Call(
        [prompt], params, drafting, key, deadline, fields.smooth, told=told,
        task=task_of(fields.metadata),
    )
    answer = _Answer(service, call, params.stop, form.calls)
    if fields.stream:
        return await streamed(request, answer.events(), partial(_failure, request.scope["state"]["request_id"]))
    return json_answer(await unless_gone(request, answer.whole()))


async def _read(fields: CountFields, service: Service, deadline: float) -> tuple[Form, list[int]]:
    """Return the form that the answer must have, and the tokens of the conversation."""
    check_tools(fields.tools, service.settings)
    service.prompts.check_count(fields.messages)
    chat = as_chat(fields)
    form = form_of(chat, service.prompts.template)
    async with service.within(deadline):
        return form, await service.prompts.of_chat(chat.messages, None, form.tools, chat.continue_final_message)


class _Answer:
    """The answer to one request, in one piece or as a stream of Anthropic's events."""

    def __init__(
        self, service: Service, call: Call, stops: Sequence[str], calls: Callable[[], CallReader] | None
    ) -> None:
        self.service, self.call, self.stops = service, call, stops
        self.id = f"msg_{uuid.uuid4().hex}"
        self._reader = None if calls is None else calls()
        self._called = False

    def _parts(self, text: str, ends: bool) -> list[Part]:
        """Return the texts and the tool calls in the next piece of the answer."""
        if self._reader is None:
            return [text] if text else []
        parts = [*self._reader.feed(text), *(self._reader.end() if ends else ())]
        self._called = self._called or any(isinstance(part, ToolCall) for part in parts)
        return parts

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, stop: str | None, usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self.id, "type": "message", "role": "assistant", "model": self.service.settings.name,
            "content": content, "stop_reason": reason, "stop_sequence": stop, "usage": usage,
        }

    def _usage(self, written: int, completion: Completion | None = None) -> dict[str, Any]:
        """Return how many tokens were read and written; how many of the prompt were reused is known at the end."""
        cached = 0 if completion is None else completion.statistics.cached_tokens
        return {
            # Without those from the cache, as Anthropic counts.
            "input_tokens": len(self.call.prompts[0]) - cached, "output_tokens": written,
            "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached,
        }

    def _end(self, completion: Completion) -> tuple[str, str | None]:
        """Return why a message ended, and at which stop sequence."""
        if completion.finish_reason == "length":  # more calls may have followed
            return "max_tokens", None
        if self._called:
            return "tool_use", None
        stop = self._stop_of(completion)
        return ("stop_sequence", stop) if stop is not None else ("end_turn", None)

    def _stop_of(self, completion: Completion) -> str | None:
        """Return the stop sequence that ended a text: the longest one that directly follows the kept text."""
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
        blocks: list[dict[str, Any]] = []
        for part in self._parts(text.text, ends=True) or [""]:
            if isinstance(part, ToolCall):
                blocks.append(_use(part, json.loads(part.arguments)))
            elif blocks and blocks[-1]["type"] == "text":
                blocks[-1]["text"] += part
            else:
                blocks.append({"type": "text", "text": part})
        return self._message(blocks, *self._end(text.end), self._usage(len(text.tokens), text.end))

    async def events(self) -> AsyncGenerator[str, None]:
        """Yield the answer as a stream."""
        blocks, written, begun = _Blocks(), 0, False
        async with aclosing(deltas(self.service, self.call)) as found:
            async for delta in found:
                if not begun:
                    begun = True
                    yield _event("message_start", message=self._message([], None, None, self._usage(0)))
                    yield _event("ping")
                written += len(delta.tokens)
                for part in self._parts(delta.text, delta.completion is not None):
                    for event in blocks.take(part):
                        yield event
                if delta.completion is not None:
                    for event in blocks.end():
                        yield event
                    reason, stop = self._end(delta.completion)
                    yield _event(
                        "message_delta", delta={"stop_reason": reason, "stop_sequence": stop},
                        usage=self._usage(written, delta.completion),
                    )
        yield _event("message_stop")


class _Blocks:
    """The numbered content blocks of a streamed answer: one for every run of text and one for every call."""

    def __init__(self) -> None:
        self._count, self._open = 0, False

    def take(self, part: Part) -> Iterator[str]:
        """Yield the events of a part."""
        if isinstance(part, str):
            if not self._open:
                yield self._begin({"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": part})
            return
        if self._open:
            yield self._close()
        yield self._begin(_use(part, {}))
        yield self._delta({"type": "input_json_delta", "partial_json": part.arguments})
        yield self._close()

    def end(self) -> Iterator[str]:
        """Yield the events that close the last block; an empty answer becomes one empty text block."""
        if not self._open and not self._count:
            yield self._begin({"type": "text", "text": ""})
        if self._open:
            yield self._close()

    def _begin(self, block: dict[str, Any]) -> str:
        self._open = True
        return _event("content_block_start", index=self._count, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> str:
        return _event("content_block_delta", index=self._count, delta=delta)

    def _close(self) -> str:
        self._open, self._count = False, self._count + 1
        return _event("content_block_stop", index=self._count - 1)


def _use(call: ToolCall, given: Any) -> dict[str, Any]:
    """Return the block of a call; its id gets Anthropic's prefix."""
    return {"type": "tool_use", "id": call.id.replace("call_", "toolu_"), "name": call.name, "input": given}


def _event(kind: str, **more: Any) -> str:
    return f"event: {kind}\ndata: {dumps({'type': kind, **more})}\n\n"


def _failure(request_id: str, error: ApiError) -> str:
    return f"event: error\ndata: {dumps(error.anthropic(request_id))}\n\n"
