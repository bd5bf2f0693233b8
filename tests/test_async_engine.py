"""The engine for asyncio: many tasks, one thread that steps, and texts that are those of a call by itself."""

import asyncio

import pytest

from draftsmith.engine import AsyncEngine, Engine
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


def test_bad_sizes_are_refused():
    with pytest.raises(DraftsmithError, match="max_waiting is 0"):
        AsyncEngine(engine(), max_waiting=0)
