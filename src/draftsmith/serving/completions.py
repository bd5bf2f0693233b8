"""`/v1/completions`: texts or tokens in, their continuations out."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from draftsmith.serving.constraints import form_of
from draftsmith.serving.delta import Delta
from draftsmith.serving.errors import bad
from draftsmith.serving.health import task_of
from draftsmith.serving.logprobs import CompletionLogprobs
from draftsmith.serving.openai_answers import Answer, Frame, Whole, finish_reason
from draftsmith.serving.openai_fields import CompletionFields
from draftsmith.serving.sampling import check_copies, check_general, check_logprobs, given_whole, sampling_params
from draftsmith.serving.service import Call, Service
from draftsmith.serving.speculation import drafting_of
from draftsmith.types import Completion, TokenLogprob

DEFAULT_TOKENS = 16
KIND = "text_completion"


async def completions(request: Request, service: Service, key: str) -> Response:
    """Answer a request.

    Raises:
        ApiError: what the client gets instead.
    """
    settings = service.settings
    fields = await service.bodies.read(request, CompletionFields)
    service.check_accepts()
    service.check_model(fields.model)
    check_general(fields, settings)
    form = form_of(fields)
    copies = given_whole(fields.n, 1)
    if fields.best_of is not None and fields.best_of != copies:
        raise bad(f"best_of is {fields.best_of}, which is served only where it equals n.", "best_of")
    logprobs = check_logprobs(fields.logprobs, "logprobs", settings)
    field = "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens"
    limit = getattr(fields, field)
    asked = given_whole(limit, DEFAULT_TOKENS)
    echo = bool(fields.echo)
    if asked < (0 if echo else 1):
        raise bad(f"{field} is {asked}; it must be at least 1, or 0 with echo.", field)
    # A request that only scores its prompt still writes one token, which is not shown.
    params = sampling_params(
        fields, settings, form, max(1, asked), None if asked == 0 else logprobs, logprobs if echo else None
    )
    drafting = drafting_of(fields.speculation, service.drafters, settings)
    deadline = service.deadline(request.scope["state"]["began"], fields.timeout)
    async with service.within(deadline):
        prompts, texts = await service.prompts.of_texts(fields.prompt)
    check_copies(len(prompts) * copies, settings)
    if limit is None:  # prompts near the end of the context get what room there is
        asked = max(1, min(asked, service.max_length - max(map(len, prompts), default=0)))
        params = replace(params, max_tokens=asked)
    for prompt in prompts:
        if asked == 0 and len(prompt) == service.max_length:
            raise bad(
                f"This model's maximum context length is {service.max_length} tokens, and to score a prompt takes one "
                f"more than it has; give at most {service.max_length - 1}.", "prompt", "context_length_exceeded",
            )
        service.check_room(prompt, params.max_tokens, "prompt")
    call = Call(
        prompts, params, drafting, key, deadline, fields.smooth, fields.explain,
        request.scope["state"].setdefault("told", {}), task_of(fields.metadata),
    )
    frame = Frame.of(service, call, fields, "cmpl", KIND)
    return await _Answer(frame, fields, asked, texts).respond(request)


class _Answer(Answer):
    """The answer to one request.

    Args:
        asked: tokens that the client wants to see; 0 only scores the prompt.
        texts: the prompts' texts; None for a prompt that was given as tokens.
    """

    def __init__(self, frame: Frame, fields: CompletionFields, asked: int, texts: Sequence[str | None]) -> None:
        super().__init__(frame, fields)
        self.asked, self.texts = asked, texts
        self.echo, self.scored = bool(fields.echo), fields.logprobs is not None
        self.collectors = [
            CompletionLogprobs(frame.service.texts, () if self.echo else frame.call.prompts[at // frame.call.params.n])
            for at in range(frame.call.texts if self.scored else 0)
        ]

    def count(self, tokens: Sequence[int]) -> int:
        return len(tokens) if self.asked else 0

    def choice(self, at: int, text: Whole) -> dict[str, Any]:
        tokens, prompt = self._prompt_of(at) if self.echo else ([], "")
        logprobs = None
        if self.scored:
            before = text.end.prompt_logprobs or []
            entries = [*before, *(text.logprobs if self.asked else [])]
            logprobs = self.collectors[at].take(entries, tokens[0] if tokens else None)
        return {
            "index": at, "text": prompt + (text.text if self.asked else ""), "logprobs": logprobs,
            "finish_reason": self._reason(text.end),
        }

    def pieces(self, delta: Delta, begins: bool) -> list[dict[str, Any]]:
        pieces: list[dict[str, Any]] = []
        if begins and self.echo:
            tokens, prompt = self._prompt_of(delta.choice)
            pieces.append(self._piece(delta, prompt, delta.prompt_logprobs or [], tokens[0]))
        text, entries = (delta.text, delta.logprobs or []) if self.asked else ("", [])
        if text or entries or (delta.explained is not None and delta.tokens):
            pieces.append(self._piece(delta, text, entries))
        if delta.completion is not None:
            reason = self._reason(delta.completion)
            pieces.append({"index": delta.choice, "text": "", "logprobs": None, "finish_reason": reason})
        return pieces

    def _piece(
        self, delta: Delta, text: str, entries: Sequence[TokenLogprob], first: int | None = None
    ) -> dict[str, Any]:
        logprobs = self.collectors[delta.choice].take(entries, first) if self.scored else None
        return {"index": delta.choice, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _prompt_of(self, choice: int) -> tuple[list[int], str]:
        """Return the tokens of a choice's prompt and its text."""
        number = choice // self.call.params.n
        tokens, text = self.call.prompts[number], self.texts[number]
        return tokens, self.service.texts.whole(tokens) if text is None else text

    def _reason(self, completion: Completion) -> str:
        return finish_reason(completion) if self.asked else "length"
