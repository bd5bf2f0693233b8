"""The server's state: the engine that decodes, the requests that are in, and whether more are let in."""

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from draftsmith.constraints import UnmetError
from draftsmith.drafters.base import Drafter
from draftsmith.engine import AsyncEngine, Chunk, ClosedError, Engine
from draftsmith.serving.body import Bodies
from draftsmith.serving.errors import WAIT_S, ApiError, bad, broken, full, late
from draftsmith.serving.health import NO_TASK, Health
from draftsmith.serving.meter import Meter
from draftsmith.serving.prompts import Prompts
from draftsmith.serving.sampling import from_engine
from draftsmith.serving.settings import Settings
from draftsmith.serving.speculation import Drafting
from draftsmith.serving.streams import merged
from draftsmith.serving.token_texts import TokenTexts
from draftsmith.types import Constraint, DraftsmithError, SamplingParams

SPARE_FAILURES = 3
"""Steps that may fail with no text finished in between; one more failure stops the engine, and with it the server."""


@dataclass(frozen=True)
class Call:
    """What one request wants from the engine.

    Args:
        prompts: the tokens of each prompt; each prompt is continued `params.n` times.
        drafting: its own plan and drafter, if any.
        key: the API key it came with; only requests with the same key share the beginnings of their prompts.
        deadline: when it is given up, by `time.monotonic`.
        smooth: whether a piece of several tokens is spread over the time of a step.
        explain: whether answers say who guessed which token.
        told: what the log says about it; filled in while it runs.
        task: the task that it names for itself; acceptance is counted by task.
    """

    prompts: Sequence[list[int]]
    params: SamplingParams
    drafting: Drafting
    key: str
    deadline: float
    smooth: bool = False
    explain: bool = False
    told: dict[str, Any] = field(default_factory=dict)
    task: str = NO_TASK

    @property
    def texts(self) -> int:
        """How many texts it asks for."""
        return len(self.prompts) * self.params.n


class Piece(NamedTuple):
    """A piece of the text of one choice; choices are counted prompt by prompt."""

    choice: int
    chunk: Chunk


class Service:
    """One engine and everything else that endpoints need.

    Args:
        engine: what decodes, with its drafters by name.
        settings: names, keys and limits.
        drafters: those that requests may name; empty where the engine decodes without drafts.
    """

    def __init__(self, engine: Engine, settings: Settings, drafters: Mapping[str, Drafter]) -> None:
        self.settings, self.target, self.drafters = settings, engine.target, dict(drafters)
        # An engine may be given room for fewer tokens than one text of its context has.
        self.max_length = min(engine.max_length, engine.core.limits.max_tokens)
        self.meter = Meter(engine.core, settings.name)
        self.health = Health()
        # The engine has room for every text that is let in here, even where one request alone is larger than the queue.
        self.most = engine.max_batch + settings.max_waiting
        self.engine = AsyncEngine(
            engine, self.most + settings.max_texts, spare_failures=SPARE_FAILURES, on_step=self.meter.note
        )
        self.prompts = Prompts(engine.target, self.max_length, settings, self.most)
        self.bodies = Bodies(settings, self.most)
        self.texts = TokenTexts(engine.target.tokenizer)
        self.inside = 0
        """How many texts the requests that are in have together."""
        self.draining = False
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def accepts(self) -> bool:
        """Whether requests are let in."""
        return not self.draining and self.engine.failure is None

    @property
    def works(self) -> bool:
        """Whether the engine has not stopped and its current step has not run for more than `stall_seconds`."""
        return self.engine.failure is None and self.engine.step_s <= self.settings.stall_seconds

    def check_accepts(self, texts: int = 1) -> None:
        """Raise ApiError if the server lets no requests in any more, or has no room for `texts` more texts.

        Called also before a prompt is tokenized, so that a refused request does not wait for the tokenizer.
        """
        if self.engine.failure is not None:
            raise ApiError(503, "the engine has stopped; the server has to be started again.")
        if self.draining:
            raise ApiError(503, "the server is about to end; ask another one.", retry_after=WAIT_S)
        # A request that is alone may be larger than the queue.
        if self.inside and self.inside + texts > self.most:
            more = f", and this request has {texts}" if texts > 1 else ""
            raise full(f"it has room for {self.most} texts, and {self.inside} are in{more}")

    def check_model(self, name: str | None) -> None:
        """Raise ApiError for a model that is not served."""
        if name is not None and name not in self.settings.names:
            raise ApiError(
                404, f"the model {name[:200]!r} is not served here; there is {', '.join(self.settings.names)}.",
                param="model", code="model_not_found",
            )

    def check_room(self, prompt: Sequence[int], max_tokens: int, param: str) -> None:
        """Raise ApiError for a text that does not fit into the context."""
        room = self.max_length - len(prompt)
        if max_tokens > room:
            if room > 0:
                rest = f" and the answer may have {max_tokens}; shorten the prompt or lower max_tokens to {room}."
            else:
                rest = ", which leaves no room for an answer; shorten the prompt."
            # Clients recognise this error by its first words, and shorten the conversation.
            raise bad(
                f"This model's maximum context length is {self.max_length} tokens, "
                f"but the prompt has {len(prompt)}{rest}", param, "context_length_exceeded",
            )

    def deadline(self, began: float, asked: float | None = None) -> float:
        """Return when a request that began at `began` is given up; `asked` is its own limit in seconds, if any."""
        limit = self.settings.request_timeout
        return began + (limit if asked is None else min(asked, limit))

    @asynccontextmanager
    async def within(self, deadline: float) -> AsyncIterator[None]:
        """Stop the block at the deadline of its request, with ApiError 504."""
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                yield
        except TimeoutError:
            raise late() from None

    async def drained(self, seconds: float) -> bool:
        """Let no more requests in, and wait for the others to end; return whether they did so within `seconds`."""
        self.draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    async def cut_short(self, seconds: float) -> None:
        """Close the engine, then wait for open requests to get their errors; each waits at most `seconds`."""
        closing = asyncio.ensure_future(self.engine.close())
        await asyncio.wait([closing], timeout=seconds)
        await self.drained(seconds)

    async def run(self, call: Call) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of all texts of a request as they come.

        Raises:
            ApiError: 429 where there is no room, 400 for what the engine refuses, 504 when time is up, 500 or 503 for
                failures of the server. Closing the generator early takes the request out.
        """
        self.check_accepts(call.texts)
        self.inside += call.texts
        self._empty.clear()
        begun, told = time.monotonic(), call.told
        compiling: Constraint | None = None
        told["prompt_tokens"], told["completion_tokens"] = sum(map(len, call.prompts)), 0
        try:
            compiling = call.params.constraint
            if compiling is not None:
                # Once for all texts of the request, and within its deadline.
                async with self.within(call.deadline):
                    await self.engine.compile(compiling)
                compiling = None
            streams = [self._stream(call, number) for number in range(len(call.prompts))]
            async with aclosing(merged(streams)) as pieces:
                async for piece in pieces:
                    if "first_token_s" not in told:
                        told["first_token_s"] = round(time.monotonic() - begun, 4)
                    told["completion_tokens"] += len(piece.chunk.tokens)
                    yield piece
        except ApiError as error:
            told["failed"] = error.status
            raise
        except DraftsmithError as error:
            if self.engine.failure is not None or isinstance(error, ClosedError):
                told["failed"] = 503
                if self.draining and self.engine.failure is None:
                    raise ApiError(503, "the server ended before this text did; ask another one.") from error
                raise ApiError(503, "the engine has stopped; the server has to be started again.") from error
            told["failed"] = 400
            blamed = call.params.constraint if isinstance(error, UnmetError) else compiling
            raise from_engine(error, None if blamed is None else blamed.origin or None) from error
        finally:
            self.inside -= call.texts
            if not self.inside:
                self._empty.set()

    async def _stream(self, call: Call, number: int) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of one prompt's texts."""
        prompt, params = call.prompts[number], call.params
        left = call.deadline - time.monotonic()
        if left <= 0:
            raise late()
        chunks = self.engine.stream(
            prompt, params, call.drafting.plan, timeout=left, drafter=call.drafting.drafter,
            namespace=namespace_of(call.key), shows_drafts=call.explain,
        )
        watches = [self.health.watch(call.task) for _ in range(params.n)]
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    check_end(chunk, params)
                    if watches[chunk.index].take(chunk):
                        call.told["repeating"] = call.told.get("repeating", 0) + 1
                    yield Piece(number * params.n + chunk.index, chunk)
        finally:
            for watch in watches:
                watch.end()


def check_end(chunk: Chunk, params: SamplingParams) -> None:
    """Raise ApiError for a text that ended early: at its deadline, taken out, or after an error."""
    reason = None if chunk.completion is None else chunk.completion.finish_reason
    if reason == "deadline":
        raise late()
    if reason == "abort":
        raise ApiError(503, "the request was taken out before its end.")
    if reason == "error":
        assert chunk.completion is not None
        if chunk.completion.is_unfit:
            raise ApiError(400, str(chunk.completion.error), code="constraint")
        raise broken()


def namespace_of(key: str) -> bytes:
    """Return the namespace that keeps the prompts of one key apart from those of others."""
    return hashlib.sha256(key.encode()).digest()
