"""The engine for asyncio: many tasks, one thread that steps, and texts that are those of a call by itself."""

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from draftsmith.engine import AsyncEngine, Engine
from draftsmith.engine.core import Progress
from draftsmith.engine.request import Request
from draftsmith.plan import Plan
from draftsmith.types import Completion, DraftsmithError, SamplingParams
from oracle import oracle_for
from tiny import greedy_reference, prompts, tiny_model, tiny_target

CHAIN = Plan((1, 1, 1))


def engine(max_batch: int = 3) -> Engine:
    return Engine(tiny_target(), oracle_for(tiny_model(), prompts(8)), plan=CHAIN, max_batch=max_batch)


def test_many_tasks_get_their_own_texts():
    async def ask(served: AsyncEngine, question: list[int], tokens: int) -> list[Completion]:
        return await served.generate(question, SamplingParams(max_tokens=tokens))

    async def main() -> list[list[Completion]]:
        async with AsyncEngine(engine(), max_waiting=4) as served:
            asked = [ask(served, question, 5 + 3 * n) for n, question in enumerate(prompts(8))]
            return await asyncio.gather(*asked)

    for n, (question, (found,)) in enumerate(zip(prompts(8), asyncio.run(main()), strict=True)):
        assert found.tokens == greedy_reference(tiny_model(), question, 5 + 3 * n)


def test_a_stream_is_what_generate_returns_and_copies_come_in_order():
    params = SamplingParams(max_tokens=9, temperature=1.0, seed=4, n=3)
    expected = [completion.tokens for completion in engine().generate([prompts(1)[0]], params)]

    async def main() -> tuple[dict[int, list[int]], list[list[int]]]:
        async with AsyncEngine(engine()) as served:
            streamed: dict[int, list[int]] = {0: [], 1: [], 2: []}
            async for chunk in served.stream(prompts(1)[0], params):
                streamed[chunk.index] += chunk.tokens
            return streamed, [completion.tokens for completion in await served.generate(prompts(1)[0], params)]

    streamed, whole = asyncio.run(main())
    assert list(streamed.values()) == whole == expected


def test_who_stops_listening_leaves_the_others_alone():
    async def main() -> tuple[list[int], bool]:
        own = engine(max_batch=2)
        async with AsyncEngine(own) as served:
            async def forever() -> None:
                async for _ in served.stream(prompts(2)[1], SamplingParams(max_tokens=90)):
                    pass

            left = asyncio.create_task(forever())
            await asyncio.sleep(0.05)
            left.cancel()
            with pytest.raises(asyncio.CancelledError):
                await left
            (found,) = await served.generate(prompts(1)[0], SamplingParams(max_tokens=30))
            for _ in range(200):
                if not own.core.has_work:
                    break
                await asyncio.sleep(0.01)
            return found.tokens, own.core.has_work

    tokens, busy = asyncio.run(main())
    assert tokens == greedy_reference(tiny_model(), prompts(1)[0], 30)
    assert not busy


def test_what_is_refused_is_told_and_harms_nobody():
    async def main() -> list[int]:
        async with AsyncEngine(engine()) as served:
            with pytest.raises(DraftsmithError, match="prompt 0 is empty"):
                await served.generate([])
            with pytest.raises(DraftsmithError, match="timeout is -1"):
                await served.generate([1], timeout=-1)
            (late,) = await served.generate(prompts(1)[0], SamplingParams(max_tokens=90), timeout=1e-9)
            assert late.finish_reason == "deadline"
            (found,) = await served.generate(prompts(1)[0], SamplingParams(max_tokens=4))
            return found.tokens

    assert asyncio.run(main()) == greedy_reference(tiny_model(), prompts(1)[0], 4)


def test_closing_tells_who_still_listens():
    async def main() -> None:
        served = AsyncEngine(engine())
        async with served:
            stream = served.stream(prompts(1)[0], SamplingParams(max_tokens=90))
            await anext(stream)
            await served.close()
            with pytest.raises(DraftsmithError, match="closed before"):
                async for _ in stream:
                    pass
        with pytest.raises(DraftsmithError, match="closed"):
            await served.generate(prompts(1)[0], SamplingParams(max_tokens=4))

    asyncio.run(main())


def test_a_step_that_fails_is_told_to_everybody():
    async def main() -> None:
        own = engine()
        async with AsyncEngine(own) as served:
            def broken() -> None:
                raise RuntimeError("the device is gone")

            own.core.step = broken  # type: ignore[assignment,method-assign]
            with pytest.raises(RuntimeError, match="the device is gone"):
                await served.generate(prompts(1)[0], SamplingParams(max_tokens=4))
            with pytest.raises(DraftsmithError, match="the engine has stopped: the device is gone"):
                await served.generate(prompts(1)[0], SamplingParams(max_tokens=4))

    asyncio.run(main())


class Gate:
    """Holds the next step of an engine until it is opened, then lets it run, or fail with an error."""

    def __init__(self, own: Engine, error: Exception | None = None) -> None:
        self.reached, self.open, real = threading.Event(), threading.Event(), own.core.step

        def held() -> list[Progress]:
            self.reached.set()
            assert self.open.wait(20)
            if error is not None:
                raise error
            return real()

        own.core.step = held  # type: ignore[method-assign]


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_that_is_not_in_the_core_yet_is_told_as_well(fails: bool):
    async def main() -> list[list[Completion] | BaseException]:
        own = engine()
        gate = Gate(own, RuntimeError("the device is gone") if fails else None)
        async with AsyncEngine(own) as served:
            async def ask(question: list[int]) -> list[Completion]:
                return await served.generate(question, SamplingParams(max_tokens=90))

            first = asyncio.create_task(ask(prompts(2)[0]))
            await until(gate.reached.is_set)
            second = asyncio.create_task(ask(prompts(2)[1]))
            await until(lambda: bool(served._commands))
            closing = asyncio.create_task(asyncio.sleep(0) if fails else served.close())
            await until(lambda: fails or served._stopping)
            gate.open.set()
            told = await asyncio.wait_for(asyncio.gather(first, second, return_exceptions=True), 10)
            await closing
            return told

    for told in asyncio.run(main()):
        assert isinstance(told, RuntimeError if fails else DraftsmithError)
        assert ("the device is gone" if fails else "closed before") in str(told)


@pytest.mark.parametrize("fails", [False, True])
def test_an_abort_that_fails_keeps_nobody_from_being_told(fails: bool):
    async def main() -> tuple[str, list[int]]:
        own, aborted = engine(), list[int]()

        def broken(id: int) -> None:
            aborted.append(id)
            raise RuntimeError("the device is gone")

        async with AsyncEngine(own) as served:
            gate = Gate(own, RuntimeError("the step failed") if fails else None)
            own.core.abort = broken  # type: ignore[method-assign]
            params = SamplingParams(max_tokens=90, n=2)
            waiting = [asyncio.create_task(served.generate(prompts(2)[0], params))]
            await until(gate.reached.is_set)
            waiting.append(asyncio.create_task(served.generate(prompts(2)[1], params)))
            await until(lambda: bool(served._commands))
            closing = asyncio.create_task(asyncio.sleep(0) if fails else served.close())
            await until(lambda: fails or served._stopping)
            gate.open.set()
            told = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 10)
            await closing
            assert len({str(one) for one in told}) == 1
            return str(told[0]), aborted

    told, aborted = asyncio.run(main())
    assert ("the step failed" if fails else "closed before") in told
    assert bool(aborted) is not fails


def test_a_request_that_the_core_refuses_harms_nobody():
    async def main() -> list[list[Completion] | BaseException]:
        own = engine()
        add, seen = own.core.add, list[Request]()

        def refuses_the_second(request: Request) -> int:
            seen.append(request)
            if len(seen) == 2:
                raise ValueError("no second one")
            return add(request)

        own.core.add = refuses_the_second  # type: ignore[method-assign]
        async with AsyncEngine(own) as served:
            params = SamplingParams(max_tokens=6, n=2)
            asked = [served.generate(prompts(1)[0], params), served.generate(prompts(1)[0], params)]
            told = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 10)
            await until(lambda: not own.core.has_work)
            return told

    told = asyncio.run(main())
    assert [str(one) for one in told if isinstance(one, ValueError)] == ["no second one"]
    (found,) = [one for one in told if not isinstance(one, BaseException)]
    assert [one.tokens for one in found] == [greedy_reference(tiny_model(), prompts(1)[0], 6)] * 2


def test_an_engine_that_was_not_entered_says_so():
    async def main() -> None:
        served = AsyncEngine(engine())
        with pytest.raises(DraftsmithError, match="not running; use it inside `async with"):
            await asyncio.wait_for(served.generate(prompts(1)[0]), 5)
        async with served:
            pass
        with pytest.raises(DraftsmithError, match="only once"):
            await served.__aenter__()

    asyncio.run(main())


def test_the_deadline_holds_while_the_engine_is_full():
    async def main() -> tuple[list[Completion], list[int]]:
        async with AsyncEngine(engine(), max_waiting=1) as served:
            first = served.stream(prompts(2)[1], SamplingParams(max_tokens=90))
            await anext(first)
            params = SamplingParams(max_tokens=4, n=2)
            late = await asyncio.wait_for(served.generate(prompts(1)[0], params, timeout=0.05), 10)
            await first.aclose()
            (found,) = await asyncio.wait_for(served.generate(prompts(1)[0], SamplingParams(max_tokens=4)), 10)
            return late, found.tokens

    late, tokens = asyncio.run(main())
    assert [(one.finish_reason, one.tokens, one.text) for one in late] == [("deadline", [], "")] * 2
    assert tokens == greedy_reference(tiny_model(), prompts(1)[0], 4)


def test_closing_tells_who_waits_for_room():
    async def main() -> None:
        async with AsyncEngine(engine(), max_waiting=1) as served:
            first = served.stream(prompts(1)[0], SamplingParams(max_tokens=90))
            await anext(first)
            params = SamplingParams(max_tokens=4)
            waiting = [asyncio.create_task(served.generate(prompts(1)[0], params)) for _ in range(3)]
            await until(lambda: len(served._room._waiters or ()) == 3)
            await served.close()
            # `first` still holds its place, because nobody reads on.
            for one in await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 10):
                assert isinstance(one, DraftsmithError) and "closed" in str(one)
            await first.aclose()

    asyncio.run(main())


def test_prompts_are_tokenized_one_at_a_time():
    async def main() -> int:
        own = engine()
        admit, inside, most = own.admit_call, list[int](), list[int]()

        def slow(*args, **options) -> list[Request]:
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.02)
            inside.pop()
            return admit(*args, **options)

        own.admit_call = slow  # type: ignore[method-assign]
        async with AsyncEngine(own) as served:
            params = SamplingParams(max_tokens=2)
            await asyncio.gather(*(served.generate(question, params) for question in prompts(4)))
        return max(most)

    assert asyncio.run(main()) == 1


def test_bad_sizes_are_refused():
    with pytest.raises(DraftsmithError, match="max_waiting is 0"):
        AsyncEngine(engine(), max_waiting=0)
