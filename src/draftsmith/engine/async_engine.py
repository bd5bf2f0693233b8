"""The engine for asyncio: many tasks add requests, one thread steps.

PyTorch works in that thread alone; the event loop is never held up by a step. Whoever stops listening (a cancelled
task, a closed stream) takes the request out.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import TracebackType

from draftsmith.engine.core import Progress
from draftsmith.engine.engine import Chunk, Engine, check_timeout, chunk_of
from draftsmith.engine.requests.admission import Prompt
from draftsmith.engine.requests.request import Request
from draftsmith.plan import Plan
from draftsmith.targets import Namespace
from draftsmith.types import Completion, Constraint, DraftsmithError, SamplingParams, Statistics

log = logging.getLogger(__name__)


class ClosedError(DraftsmithError):
    """Nothing is decoded any more: whoever owns the engine has closed it."""

Inbox = asyncio.Queue[Chunk | BaseException]


@dataclass(frozen=True, eq=False)
class _Call:
    """The requests of one caller, and where it listens."""

    requests: list[Request]
    loop: asyncio.AbstractEventLoop
    inbox: Inbox

    def tell(self, what: Chunk | BaseException) -> None:
        _call_in(self.loop, lambda: self.inbox.put_nowait(what))


class AsyncEngine:
    """Use as `async with AsyncEngine(engine) as served:`; the engine belongs to it until then.

    A step that fails stops it for good, unless `spare_failures` are given: every caller gets the error, and the engine
    must not be used again.

    Args:
        engine: what decodes.
        max_waiting: most calls that are in at once, running or waiting; who comes then waits in `generate` or `stream`
            until one has ended, and they are let in in the order in which they came, whatever their priority.
        spare_failures: so many steps may fail before it stops for good. Then only those calls get the error that were
            in; others go on, and once a text has come to its end the count begins anew.
        on_step: is called in the thread that steps with what every step brought; it must not raise.
    """

    def __init__(
        self,
        engine: Engine,
        max_waiting: int = 1024,
        spare_failures: int = 0,
        on_step: Callable[[Sequence[Progress]], None] | None = None,
    ) -> None:
        if max_waiting < 1:
            raise DraftsmithError(f"max_waiting is {max_waiting}; use at least 1.")
        self.engine = engine
        self._spare_failures, self._failures = spare_failures, 0
        self._on_step = on_step
        self._room = asyncio.Semaphore(max_waiting)
        self._admitting = threading.Lock()
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="draftsmith-grammars")
        self._thread: threading.Thread | None = None
        # `_work` guards these four.
        self._work = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._calls: set[_Call] = set()
        self._stopping = False
        self._failure: BaseException | None = None
        self._step_began: float | None = None  # None between steps
        # By the id of a request; of the thread that steps alone.
        self._listeners: dict[int, _Call] = {}

    async def __aenter__(self) -> "AsyncEngine":
        if self._thread is not None:
            raise DraftsmithError("an AsyncEngine can be entered only once; make another one.")
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, args=(loop,), name="draftsmith-engine", daemon=True)
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
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        self._compiling.shutdown(wait=False, cancel_futures=True)

    @property
    def failure(self) -> BaseException | None:
        """Why it has stopped for good, if it has."""
        return self._failure

    @property
    def step_s(self) -> float:
        """For how many seconds the step that runs now has been running; 0 where none runs."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, plan: Plan | None = None, priority: int = 0,
        timeout: float | None = None, *, drafter: str | None = None, namespace: Namespace = 0,
        shows_drafts: bool = False,
    ) -> list[Completion]:
        """Continue one prompt and return its `n` continuations; see `stream`."""
        done: dict[int, Completion] = {}
        async for chunk in self.stream(
            prompt, params, plan, priority, timeout, drafter=drafter, namespace=namespace, shows_drafts=shows_drafts
        ):
            if chunk.completion is not None:
                done[chunk.index] = chunk.completion
        return [done[index] for index in sorted(done)]

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, plan: Plan | None = None, priority: int = 0,
        timeout: float | None = None, *, drafter: str | None = None, namespace: Namespace = 0,
        shows_drafts: bool = False,
    ) -> AsyncGenerator[Chunk, None]:
        """Yield pieces of the continuations of one prompt as they are committed.

        Args:
            plan, drafter: shape of its drafts and who makes them; None leaves it to the engine's policy.
            namespace, shows_drafts: see `Engine.admit_call`.
            priority: among the calls that are in, the larger, the sooner its turn comes; see `max_waiting`.
            timeout: seconds from this call, also while its constraint is compiled, its prompt made into tokens, and it
                waits for room, after which it ends with what it has, `finish_reason` being "deadline"; None for none.

        Raises:
            DraftsmithError: for a request that the engine refuses, and when the engine is not running.
        """
        self._check_running()
        check_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        # Tokenizers take long enough over a long prompt to keep the loop from others.
        def admitted() -> list[Request]:
            # Fast tokenizers must not be called by two threads at once where truncation or padding is set.
            with self._admitting:
                return self.engine.admit_call(
                    [prompt], params, plan, priority, timeout,
                    drafter=drafter, namespace=namespace, shows_drafts=shows_drafts,
                )

        try:
            async with asyncio.timeout(timeout):
                if params is not None and params.constraint is not None:
                    await self.compile(params.constraint)
                requests = await asyncio.to_thread(admitted)
        except TimeoutError:
            for index in range(1 if params is None else params.n):
                yield Chunk(index, [], "", Completion([], [], "", "deadline", Statistics(), []))
            return
        for request in requests:
            request.deadline = deadline
        if not await self._find_room(deadline):
            for request in requests:
                request.finish("deadline")
                yield Chunk(request.index, [], request.text.take(), request.completion())
            return
        left, call = len(requests), _Call(requests, asyncio.get_running_loop(), Inbox())
        try:
            self._join(call)
            while left:
                chunk = await call.inbox.get()
                if isinstance(chunk, BaseException):
                    raise chunk
                left -= chunk.completion is not None
                yield chunk
        finally:
            self._part(call, unfinished=left > 0)
            self._room.release()

    async def compile(self, constraint: Constraint) -> None:
        """Make a constraint ready, so that requests with it need not wait for that; see `Grammars.compiled`.

        One at a time, in a thread of its own: a hard one takes a while, and nobody else's prompt shall wait for it.
        """
        if self.engine.grammars.is_ready(constraint):
            return
        try:
            compiling = self._compiling.submit(self.engine.grammars.compiled, constraint)
        except RuntimeError:
            raise ClosedError("the engine is closed; open another one.") from None
        try:
            await asyncio.wrap_future(compiling)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if compiling.cancelled() and task is not None and not task.cancelling():  # by `close`, not by the caller
                raise ClosedError("the engine was closed before this text was begun.") from None
            raise

    async def _find_room(self, deadline: float | None) -> bool:
        """Take a place among `max_waiting`; return whether there was one before the deadline."""
        try:
            async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()):
                await self._room.acquire()
        except TimeoutError:
            return False
        return True

    def _check_running(self) -> None:
        if self._failure is not None:
            raise DraftsmithError(f"the engine has stopped: {self._failure}") from self._failure
        if self._stopping:
            raise ClosedError("the engine is closed; open another one.")
        if self._thread is None:
            raise DraftsmithError("the engine is not running; use it inside `async with AsyncEngine(engine)`.")

    def _join(self, call: _Call) -> None:
        with self._work:
            self._check_running()
            self._calls.add(call)
            self._commands.append(lambda: self._enter(call))
            self._work.notify()

    def _part(self, call: _Call, unfinished: bool) -> None:
        """Forget a call, and take out what it has unfinished. Never raises."""
        with self._work:
            self._calls.discard(call)
            if unfinished and not self._stopping:
                self._commands.append(lambda: self._leave(call))
                self._work.notify()

    # ---- the thread that steps

    def _enter(self, call: _Call) -> None:
        try:
            for request in call.requests:
                self._listeners[self.engine.core.add(request)] = call
        except Exception as error:
            # It parts when it reads this, and takes out those of its requests that are in.
            call.tell(error)

    def _leave(self, call: _Call) -> None:
        for request in call.requests:
            self._listeners.pop(request.id, None)
            ended = request.finish_reason is not None
            try:
                self.engine.core.abort(request.id)
            except Exception:
                log.exception("request %d could not be taken out", request.id)
            if not ended and request.finish_reason is not None:
                self._note([Progress(request, [], True)])

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self._serve()
        except BaseException as error:
            with self._work:
                self._failure, self._stopping = error, True
            log.exception("the engine has stopped")
            # Nothing is taken out of the core: after a failed step it may not even be able to.
            self._tell_all(error, loop)
            return
        self._tell_all(ClosedError("the engine was closed before this text was finished."), loop)
        for call in set(self._listeners.values()):
            self._leave(call)

    def _serve(self) -> None:
        """Step while there is work, until the engine is closed."""
        core = self.engine.core
        while True:
            with self._work:
                while not (self._commands or self._stopping or core.has_work):
                    self._work.wait()
                if self._stopping:
                    return
                commands, self._commands = self._commands, deque()
            for command in commands:
                command()
            progress = self._step()
            self._note(progress)  # first, so that whoever has an answer finds it counted
            self._hand_out(progress)

    def _step(self) -> list[Progress]:
        """Advance everybody. If that fails, tell who was in, and go on as long as failures are spared."""
        self._step_began = time.monotonic()
        try:
            progress = self.engine.core.step()
        except Exception as error:
            self._failures += 1
            if self._failures > self._spare_failures:
                raise
            log.exception("a step of the engine failed; all requests that were in have ended")
            calls = set(self._listeners.values())
            self._listeners.clear()
            for call in calls:
                self._note([Progress(request, [], True) for request in call.requests if request.error is not None])
                call.tell(error)
            return []
        finally:
            self._step_began = None
        if self._failures and any(one.finished for one in progress):
            self._failures = 0
        return progress

    def _note(self, progress: Sequence[Progress]) -> None:
        if self._on_step is not None:
            self._on_step(progress)

    def _hand_out(self, progress: Iterable[Progress]) -> None:
        """Give every caller its pieces; an event loop is woken once for all that listen there."""
        told: dict[asyncio.AbstractEventLoop, list[tuple[Inbox, Chunk | BaseException]]] = {}
        for one in progress:
            call = self._listeners.get(one.request.id)
            if call is None:
                continue
            if one.finished:
                del self._listeners[one.request.id]
            try:
                piece: Chunk | BaseException = chunk_of(one)
            except Exception as error:  # a tokenizer is a program of somebody else's
                piece = error
            told.setdefault(call.loop, []).append((call.inbox, piece))
        for loop, pieces in told.items():
            _call_in(loop, partial(_deliver, pieces))

    def _tell_all(self, error: BaseException, loop: asyncio.AbstractEventLoop) -> None:
        """Tell every caller, also those that were not in the core yet, why nothing more will come."""
        with self._work:
            calls, self._calls = self._calls, set()
        for call in calls:
            call.tell(error)
        # The first of those who wait for room wakes up, is told that the engine is closed, and so wakes the next.
        _call_in(loop, self._room.release)


def _deliver(pieces: Iterable[tuple[Inbox, Chunk | BaseException]]) -> None:
    for inbox, piece in pieces:
        inbox.put_nowait(piece)


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """Call a function in the thread of an event loop, unless that has closed, and nobody listens there any more."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function)
