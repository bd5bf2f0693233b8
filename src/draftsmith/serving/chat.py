"""`/v1/chat/completions`: a conversation in, the assistant's next message out."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from draftsmith.serving.call_readers import ToolCall
from draftsmith.serving.constraints import Form, form_of
from draftsmith.serving.delta import Delta
from draftsmith.serving.errors import bad
from draftsmith.serving.health import task_of
from draftsmith.serving.logprobs import chat_logprobs
from draftsmith.serving.openai_answers import Answer, Frame, Whole, finish_reason
from draftsmith.serving.openai_fields import ChatFields
from draftsmith.serving.sampling import (
    check_copies,
    check_general,
    check_logprobs,
    check_tools,
    given_whole,
    sampling_params,
)
from draftsmith.serving.service import Call, Service
from draftsmith.serving.speculation import drafting_of
from draftsmith.types import Completion

KIND = "chat.completion"
REFUSED = ("chat_template", "functions", "function_call", "audio")


async def chat(request: Request, service: Service, key: str) -> Response:
    """Answer a request.

    Raises:
        ApiError: what the client gets instead.
    """
    settings = service.settings
    fields = await service.bodies.read(request, ChatFields)
    service.check_accepts()
    service.check_model(fields.model)
    check_general(fields, settings)
    check_tools(fields.tools, settings)
    form = form_of(fields, service.prompts.template)
    for name in REFUSED:
        if getattr(fields, name) is not None:
            raise bad(f"{name} is not taken from requests; leave it out.", name)
    if fields.modalities is not None and fields.modalities != ["text"]:
        raise bad("modalities other than text are not served.", "modalities")
    top = check_logprobs(fields.top_logprobs, "top_logprobs", settings)
    if top and not fields.logprobs:
        raise bad("top_logprobs needs logprobs; set that to true.", "top_logprobs")
    drafting = drafting_of(fields.speculation, service.drafters, settings)
    check_copies(given_whole(fields.n, 1), settings)
    if fields.add_generation_prompt is fields.continue_final_message:
        raise bad(
            "an answer either begins a message of its own or goes on with the last one; set one of "
            "add_generation_prompt and continue_final_message.", "continue_final_message",
        )
    deadline = service.deadline(request.scope["state"]["began"], fields.timeout)
    async with service.within(deadline):
        prompt = await service.prompts.of_chat(
            fields.messages, fields.chat_template_kwargs, form.tools, fields.continue_final_message
        )
    service.check_room(prompt, 1, "messages")
    asked = fields.max_completion_tokens if fields.max_completion_tokens is not None else fields.max_tokens
    if fields.max_completion_tokens is not None and fields.max_completion_tokens < 1:
        # The engine would blame max_tokens, which the request need not have.
        raise bad(
            f"max_completion_tokens is {fields.max_completion_tokens}; it must be at least 1.", "max_completion_tokens"
        )
    # Where the request sets no limit, an answer may be as long as the context allows.
    most = service.max_length - len(prompt) if asked is None else asked
    params = sampling_params(fields, settings, form, most, (top or 0) if fields.logprobs else None)
    service.check_room(prompt, params.max_tokens, "messages")
    call = Call(
        [prompt], params, drafting, key, deadline, fields.smooth, fields.explain,
        request.scope["state"].setdefault("told", {}), task_of(fields.metadata),
    )
    frame = Frame.of(service, call, fields, "chatcmpl", f"{KIND}.chunk" if fields.stream else KIND)
    return await _Answer(frame, fields, form).respond(request)


class _Answer(Answer):
    """The answer to one request; in a stream the role comes with the first token, and the end with an empty delta."""

    def __init__(self, frame: Frame, fields: ChatFields, form: Form) -> None:
        super().__init__(frame, fields)
        self.scored = bool(fields.logprobs)
        self.readers = [form.calls() for _ in range(self.call.texts)] if form.calls is not None else []
        self.called = [0] * self.call.texts

    def choice(self, at: int, text: Whole) -> dict[str, Any]:
        said, calls = self._read(at, text.text, ends=True)
        # An empty answer has the content ""; an answer of calls alone, whole or cut off, has None.
        content = said if said or not text.text else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["tool_calls"] = [call.told() for call in calls]
        return {
            "index": at, "message": message,
            "logprobs": chat_logprobs(self.service.texts, text.logprobs) if self.scored else None,
            "finish_reason": self._reason(at, text.end),
        }

    def pieces(self, delta: Delta, begins: bool) -> list[dict[str, Any]]:
        logprobs = None
        if self.scored and delta.logprobs:
            logprobs = chat_logprobs(self.service.texts, delta.logprobs)
        first = self.called[delta.choice]
        text, calls = self._read(delta.choice, delta.text, ends=delta.completion is not None)
        pieces: list[dict[str, Any]] = []
        if begins or text or logprobs is not None or (delta.explained is not None and delta.tokens):
            said = {"role": "assistant", "content": text} if begins else {"content": text}
            pieces.append({"index": delta.choice, "delta": said, "logprobs": logprobs, "finish_reason": None})
        for number, call in enumerate(calls, first):
            told = {"tool_calls": [{"index": number, **call.told()}]}
            pieces.append({"index": delta.choice, "delta": told, "logprobs": None, "finish_reason": None})
        if delta.completion is not None:
            reason = self._reason(delta.choice, delta.completion)
            pieces.append({"index": delta.choice, "delta": {}, "logprobs": None, "finish_reason": reason})
        return pieces

    def _read(self, choice: int, text: str, ends: bool) -> tuple[str, list[ToolCall]]:
        """Return the text in a piece of an answer, and the tool calls that the piece completes."""
        if not self.readers:
            return text, []
        reader = self.readers[choice]
        parts = [*reader.feed(text), *(reader.end() if ends else ())]
        calls = [part for part in parts if isinstance(part, ToolCall)]
        self.called[choice] += len(calls)
        return "".join(part for part in parts if isinstance(part, str)), calls

    def _reason(self, choice: int, completion: Completion) -> str:
        reason = finish_reason(completion)
        return "tool_calls" if self.called[choice] and reason != "length" else reason
