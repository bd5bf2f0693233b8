"""The engine for asyncio: many tasks add requests, one thread steps.

PyTorch runs in that thread only, so that no step holds up the event loop. A caller that stops listening (a cancelled
task, a closed stream) aborts its requests.
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

WAKE_S = 0.01
"""What several steps bring is handed out together if that takes no more than so many seconds: waking an event loop and
sending a piece of text costs about as much for ten tokens as for one, and no screen shows pieces that come more often.
Nobody waits for what is done, or has just begun."""


class ClosedError(DraftsmithError):
    """The engine was closed by its owner and decodes nothing any more."""


Inbox = asyncio.Queue[Chunk | BaseException]


@dataclass(frozen=True, eq=False)
class _Call:
    """The requests of one caller, and the inbox where it listens."""

    requests: list[Request]
    loop: asyncio.AbstractEventLoop
    inbox: Inbox

    def tell(self, what: Chunk | BaseException) -> None:
        _call_in(self.loop, lambda: self.inbox.put_nowait(what))


class AsyncEngine:
    """Serves many asyncio tasks with one engine, which it owns inside `async with AsyncEngine(engine) as served:`.

    A step that fails stops it for good, unless `spare_failures` are given: every caller gets the error, and the engine
    must not be used again.

    Args:
        engine: what decodes.
        max_waiting: most calls that are in at once, running or waiting for a slot. Further calls wait in `generate` or
            `stream` until one has ended, and are let in in order of arrival, whatever their priority.
        spare_failures: how many steps may fail without stopping it for good. Such a failure ends only the calls that
            are in at that moment, with its error; the count restarts whenever a text comes to its end.
        on_step: called in the thread that steps, with what every step brought; it must not raise.
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
        # By request id; only the thread that steps uses it, and the next two: pieces that were not handed out yet, and
        # when others were last.
        self._listeners: dict[int, _Call] = {}
        self._held: list[tuple[_Call, Progress]] = []
        self._handed = 0.0

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
        """Stop once the current step has ended; callers that still listen get `ClosedError`."""
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
        """Seconds for which the current step has been running; 0 between steps."""
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
            timeout: seconds from this call, which include compiling its constraint, tokenizing its prompt, and waiting
                for room. Then it ends with what it has and the `finish_reason` "deadline". None for no limit.

        Raises:
            DraftsmithError: for a request that the engine refuses, and when the engine is not running.
        """
        self._check_running()
        check_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        # Runs in another thread, because tokenizing a long prompt would hold up the event loop.
        def admitted() -> list[Request]:
            # Two threads must not call a fast tokenizer at once where truncation or padding is set.
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
        """Compile a constraint, so that requests with it need not wait for that; see `Grammars.compiled`.

        One at a time, in a thread of its own: a hard one takes a while, and the prompts of other calls must not wait.
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
        """Forget a call, and abort its requests if some are unfinished. Never raises."""
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
            # On reading this the caller parts (`_part`), which aborts those of its requests that were added.
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
            # No request is aborted: after a failed step, that may fail too.
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
            if commands:
                self._hand_out()
            for command in commands:
                command()
            begun = time.monotonic()
            progress = self._step()
            self._note(progress)  # first, so that a caller who has an answer finds it counted
            self._hold(progress)
            load, now = core.scheduler.load(), time.monotonic()
            busy = load.reading + load.waiting > 0  # so that the next step may take long
            # After one more step like this one it would be too late.
            is_time = now + (now - begun) - self._handed >= WAKE_S
            if busy or is_time or any(one.finished or one.made is None for one in progress):
                self._hand_out()

    def _step(self) -> list[Progress]:
        """Step the core. If that fails, tell the calls that were in, and go on unless too many steps have failed."""
        self._step_began = time.monotonic()
        try:
            progress = self.engine.core.step()
        except Exception as error:
            self._failures += 1
            if self._failures > self._spare_failures:
                raise
            log.exception("a step of the engine failed; all requests that were in have ended")
            self._hand_out()
            calls, open_ids = set(self._listeners.values()), set(self._listeners)
            self._listeners.clear()
            for call in calls:
                # Those that the step itself had finished too, as their callers hear of the error alone.
                self._note([Progress(request, [], True) for request in call.requests if request.id in open_ids])
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

    def _hold(self, progress: Iterable[Progress]) -> None:
        """Take in pieces that will be handed out."""
        for one in progress:
            call = self._listeners.get(one.request.id)
            if call is not None:
                self._held.append((call, one))
                if one.finished:
                    del self._listeners[one.request.id]

    def _hand_out(self) -> None:
        """Give every caller its pieces, waking each event loop only once."""
        if not self._held:
            return
        told: dict[asyncio.AbstractEventLoop, list[tuple[Inbox, Chunk | BaseException]]] = {}
        held, self._held, self._handed = self._held, [], time.monotonic()
        for call, one in held:
            try:
                piece: Chunk | BaseException = chunk_of(one)
            except Exception as error:  # a tokenizer is third-party code
                piece = error
            told.setdefault(call.loop, []).append((call.inbox, piece))
        for loop, pieces in told.items():
            _call_in(loop, partial(_deliver, pieces))

    def _tell_all(self, error: BaseException, loop: asyncio.AbstractEventLoop) -> None:
        """Tell every caller why nothing more will come, also those whose requests are not in the core yet."""
        self._hand_out()
        with self._work:
            calls, self._calls = self._calls, set()
        for call in calls:
            call.tell(error)
        # The first call that waits for room wakes up, finds the engine stopped, and by giving its place back wakes the
        # next.
        _call_in(loop, self._room.release)


def _deliver(pieces: Iterable[tuple[Inbox, Chunk | BaseException]]) -> None:
    for inbox, piece in pieces:
        inbox.put_nowait(piece)


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """Call a function in the thread of an event loop; does nothing once the loop has closed, as nobody listens then."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function)
