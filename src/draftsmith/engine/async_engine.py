"""The engine for asyncio: many tasks add requests, one thread steps.

PyTorch works in that thread alone; the event loop is never held up by a step. Whoever stops listening (a cancelled
task, a closed stream) takes the request out.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import TracebackType

from draftsmith.engine.admission import Prompt
from draftsmith.engine.engine import Chunk, Engine
from draftsmith.engine.request import Request
from draftsmith.plan import Plan
from draftsmith.types import Completion, DraftsmithError, SamplingParams

log = logging.getLogger(__name__)

Inbox = asyncio.Queue[Chunk | BaseException]


class AsyncEngine:
    """Use as `async with AsyncEngine(engine) as served:`; the engine belongs to it until then.

    Args:
        engine: what decodes.
        max_waiting: most calls that are in at once, running or waiting; who comes then waits in `generate` or `stream`
            until one has ended.
    """

    def __init__(self, engine: Engine, max_waiting: int = 1024) -> None:
        if max_waiting < 1:
            raise DraftsmithError(f"max_waiting is {max_waiting}; use at least 1.")
        self.engine = engine
        self._room = asyncio.Semaphore(max_waiting)
        self._work = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._listeners: dict[int, tuple[asyncio.AbstractEventLoop, Inbox]] = {}
        self._stopping = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="draftsmith-engine", daemon=True)

    async def __aenter__(self) -> "AsyncEngine":
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop at the next step; whoever still listens gets an error."""
        with self._work:
            self._stopping = True
            self._work.notify()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, plan: Plan | None = None, priority: int = 0,
        timeout: float | None = None,
    ) -> list[Completion]:
        """Continue one prompt and return its `n` continuations; see `stream`."""
        done: dict[int, Completion] = {}
        async for chunk in self.stream(prompt, params, plan, priority, timeout):
            if chunk.completion is not None:
                done[chunk.index] = chunk.completion
        return [done[index] for index in sorted(done)]

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, plan: Plan | None = None, priority: int = 0,
        timeout: float | None = None,
    ) -> AsyncIterator[Chunk]:
        """Yield pieces of the continuations of one prompt as they are committed.

        Args:
            plan: shape of its drafts; None leaves it to the engine's policy.
            priority: the larger, the sooner its turn comes.
            timeout: seconds after which it ends with what it has, `finish_reason` being "deadline"; None for none.

        Raises:
            DraftsmithError: for a request that the engine refuses, and when the engine is closed.
        """
        loop, inbox = asyncio.get_running_loop(), Inbox()
        # Tokenizers take long enough over a long prompt to keep the loop from others.
        requests = await asyncio.to_thread(self.engine.admit_call, [prompt], params, plan, priority, timeout)
        async with self._room:
            left = len(requests)
            self._tell(lambda: self._enter(requests, loop, inbox))
            try:
                while left:
                    chunk = await inbox.get()
                    if isinstance(chunk, BaseException):
                        raise chunk
                    left -= chunk.completion is not None
                    yield chunk
            finally:
                if left and not self._stopping:
                    self._tell(lambda: self._leave(requests))

    # ---- the thread that steps

    def _tell(self, command: Callable[[], None]) -> None:
        with self._work:
            if self._failure is not None:
                raise DraftsmithError(f"the engine has stopped: {self._failure}") from self._failure
            if self._stopping:
                raise DraftsmithError("the engine is closed; open another one.")
            self._commands.append(command)
            self._work.notify()

    def _enter(self, requests: list[Request], loop: asyncio.AbstractEventLoop, inbox: Inbox) -> None:
        for request in requests:
            self._listeners[self.engine.core.add(request)] = loop, inbox

    def _leave(self, requests: list[Request]) -> None:
        for request in requests:
            self._listeners.pop(request.id, None)
            self.engine.core.abort(request.id)

    def _run(self) -> None:
        core = self.engine.core
        try:
            while True:
                with self._work:
                    while not (self._commands or self._stopping or core.has_work):
                        self._work.wait()
                    if self._stopping:
                        break
                    commands, self._commands = self._commands, deque()
                for command in commands:
                    command()
                for progress in core.step():
                    request = progress.request
                    listener = self._listeners.get(request.id)
                    if listener is None:
                        continue
                    done = request.completion() if progress.finished else None
                    if done is not None:
                        del self._listeners[request.id]
                    _hand_over(listener, Chunk(request.index, progress.tokens, request.text.take(), done))
            self._end(DraftsmithError("the engine was closed before this text was finished."))
        except BaseException as error:
            with self._work:
                self._failure, self._stopping = error, True
            log.exception("the engine has stopped")
            self._end(error)

    def _end(self, error: BaseException) -> None:
        """Tell everybody who still listens why nothing more will come."""
        for id, listener in list(self._listeners.items()):
            self.engine.core.abort(id)
            _hand_over(listener, error)
        self._listeners.clear()


def _hand_over(listener: tuple[asyncio.AbstractEventLoop, Inbox], what: Chunk | BaseException) -> None:
    loop, inbox = listener
    if not loop.is_closed():
        loop.call_soon_threadsafe(inbox.put_nowait, what)
