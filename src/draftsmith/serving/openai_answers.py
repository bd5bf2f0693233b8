"""What the answers of completions and chats have in common: ids, usage, and how choices are put together."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from draftsmith.serving.answers import data, dumps, json_answer, streamed, unless_gone
from draftsmith.serving.delta import Delta
from draftsmith.serving.deltas import deltas
from draftsmith.serving.errors import ApiError
from draftsmith.serving.openai_fields import Generation
from draftsmith.serving.service import Call, Service
from draftsmith.serving.settings import Detail
from draftsmith.types import Completion, TokenLogprob

DONE = "data: [DONE]\n\n"
NULL_USAGE = ',"usage":null'


@dataclass
class Whole:
    """One text put together from its pieces."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    explained: list[dict[str, Any]] = field(default_factory=list)
    completion: Completion | None = None
    last: Delta | None = None

    def take(self, delta: Delta) -> None:
        """Add a piece."""
        self.text += delta.text
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs or []
        if delta.explained is not None:
            self.explained.append(delta.explained)
        self.completion, self.last = delta.completion, delta

    @property
    def end(self) -> Completion:
        """The completion; to be read only once the text is whole."""
        assert self.completion is not None
        return self.completion


@dataclass(frozen=True)
class Frame:
    """What every chunk of one answer begins with, and how tokens and drafts are reported in it.

    Args:
        kind: the `object` of its chunks.
        detail: how much is reported about its drafts.
    """

    service: Service
    call: Call
    id: str
    kind: str
    detail: Detail
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, service: Service, call: Call, fields: Generation, prefix: str, kind: str) -> "Frame":
        """Return the frame of a request's answer."""
        detail = fields.spec_decode_metrics or service.settings.metrics
        return cls(service, call, f"{prefix}-{uuid.uuid4().hex}", kind, detail)

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Return a chunk, or the whole answer."""
        return {
            "id": self.id, "object": self.kind, "created": self.created, "model": self.service.settings.name,
            "choices": choices, **more,
        }

    @cached_property
    def _head(self) -> str:
        """The JSON of a chunk up to its choices, the same for all chunks of an answer."""
        return dumps(self.chunk([])).removesuffix("[]}")

    def event(self, choice: dict[str, Any], null_usage: bool) -> str:
        """Return the event of a chunk that holds one choice and nothing else, as most do, but perhaps a usage of null.

        OpenAI's API has that in every chunk before the one with the usage.
        """
        return f"data: {self._head}[{dumps(choice)}]{NULL_USAGE if null_usage else ''}}}\n\n"

    def usage(self, counts: Mapping[int, int], ends: Sequence[Delta] | None = None) -> dict[str, Any]:
        """Return how many tokens were read and written; every prompt counts once.

        Args:
            counts: tokens written, by choice.
            ends: the last pieces of all texts; None while they are not all there.
        """
        read, written = sum(map(len, self.call.prompts)), sum(counts.values())
        usage: dict[str, Any] = {
            "prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written,
        }
        if ends is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": cached_of(ends, self.call.params.n)}
        if ends is not None and self.call.params.prediction is not None:
            done = [end.completion.statistics for end in ends if end.completion is not None]
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": sum(one.accepted_prediction or 0 for one in done),
                "rejected_prediction_tokens": sum(one.rejected_prediction or 0 for one in done),
            }
        return usage

    def metrics(self, ends: Sequence[Delta]) -> dict[str, Any]:
        """Return the statistics of the drafts, if they are reported; like vLLM's, only for a single text."""
        if self.detail == "none" or len(ends) != 1:
            return {}
        return {"metrics": ends[0].tally.metrics(self.detail)}


class Answer(ABC):
    """The answer to one request, in one piece or as a stream.

    Args:
        frame: what its chunks begin with.
        fields: the request.
    """

    def __init__(self, frame: Frame, fields: Generation) -> None:
        self.frame, self.call, self.service, self.fields = frame, frame.call, frame.service, fields

    @abstractmethod
    def choice(self, at: int, text: Whole) -> dict[str, Any]:
        """Return the choice that a whole text becomes in the answer."""

    @abstractmethod
    def pieces(self, delta: Delta, begins: bool) -> list[dict[str, Any]]:
        """Return the choices that a piece of a text becomes, one for each chunk; the last of all says why it ended."""

    def count(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens the client asked for."""
        return len(tokens)

    async def respond(self, request: Request) -> Response:
        """Return the response; ApiError for an error that the client gets instead."""
        if self.fields.stream:
            return await streamed(request, self.events(), failure)
        return json_answer(await unless_gone(request, self.whole()))

    async def whole(self) -> dict[str, Any]:
        """Return the answer in one piece."""
        texts = [Whole() for _ in range(self.call.texts)]
        async with aclosing(deltas(self.service, self.call)) as found:
            async for delta in found:
                texts[delta.choice].take(delta)
        ends = [text.last for text in texts if text.last is not None]
        counts = {at: self.count(text.tokens) for at, text in enumerate(texts)}
        usage = self.frame.usage(counts, ends)
        choices = []
        for at, text in enumerate(texts):
            told = self.choice(at, text)
            choices.append(told | {"draftsmith": text.explained} if self.call.explain else told)
        return self.frame.chunk(choices, usage=usage, **self.frame.metrics(ends))

    async def events(self) -> AsyncGenerator[str, None]:
        """Yield the answer as a stream."""
        options = self.fields.stream_options
        running = options is not None and options.continuous_usage_stats
        counted = options is not None and options.include_usage
        before_usage: dict[str, Any] = {"usage": None} if counted else {}
        counts: dict[int, int] = {}
        ends: list[Delta] = []
        async with aclosing(deltas(self.service, self.call)) as found:
            async for delta in found:
                begins = delta.choice not in counts
                counts[delta.choice] = counts.get(delta.choice, 0) + self.count(delta.tokens)
                if delta.completion is not None:
                    ends.append(delta)
                pieces = self.pieces(delta, begins)
                # The explanation goes with the last chunk before the final one: the first may be the echoed prompt.
                speaking = [at for at, choice in enumerate(pieces) if choice["finish_reason"] is None]
                for at, choice in enumerate(pieces):
                    more: dict[str, Any] = {"usage": self.frame.usage(counts)} if running else {}
                    if delta.explained is not None and at in speaking[-1:]:
                        more["draftsmith"] = delta.explained
                    if more:
                        yield data(self.frame.chunk([choice], **before_usage | more))
                    else:
                        yield self.frame.event(choice, null_usage=counted)
        if counted:
            usage = self.frame.usage(counts, ends)
            yield data(self.frame.chunk([], usage=usage, **self.frame.metrics(ends)))
        yield DONE


def cached_of(ends: Sequence[Delta], copies: int) -> int:
    """Return how many prompt tokens had been read before and were reused; copies of one prompt count once."""
    first = [end for end in ends if end.choice % copies == 0]
    return sum(end.completion.statistics.cached_tokens for end in first if end.completion is not None)


def finish_reason(completion: Completion) -> str:
    """Return why a text ended in the words of OpenAI's API: "stop" or "length"."""
    return "length" if completion.finish_reason == "length" else "stop"


def failure(error: ApiError) -> str:
    """Return the last events of a stream that failed in the middle."""
    return data(error.openai()) + DONE
