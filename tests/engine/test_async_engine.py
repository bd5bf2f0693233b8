"""The engine for asyncio: many tasks, one thread that steps, and texts that are those of a call by itself."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from transformers import BatchEncoding, PreTrainedTokenizerFast

from draftsmith.engine import AsyncEngine, Engine
from draftsmith.plan import Plan
from draftsmith.targets import Target
from draftsmith.types import Completion, DraftsmithError, SamplingParams
from tests.helpers.oracle import oracle_for
from tests.helpers.tiny import TOKENIZER_SIZE, greedy_reference, prompts, tiny_model, tiny_target, tiny_tokenizer

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
            begun = asyncio.Event()

            async def forever() -> None:
                async for _ in served.stream(prompts(2)[1], SamplingParams(max_tokens=90)):
                    begun.set()
                    await asyncio.Event().wait()

            left = asyncio.create_task(forever())
            await begun.wait()
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


def check_prompts_one_by_one() -> None:
    """Let calls of this event loop be checked by a single thread, so that `asked` can tell when they are through."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))


async def asked() -> None:
    """Return when all calls that were made before are in, or wait for room: the thread that checks them got to us."""
    await asyncio.sleep(0)  # they begin
    await asyncio.to_thread(int)


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
        check_prompts_one_by_one()
        async with AsyncEngine(engine(), max_waiting=1) as served:
            first = served.stream(prompts(1)[0], SamplingParams(max_tokens=90))
            await anext(first)
            params = SamplingParams(max_tokens=4)
            waiting = [asyncio.create_task(served.generate(prompts(1)[0], params)) for _ in range(3)]
            await asked()
            await served.close()
            # `first` still holds its place, because nobody reads on.
            for one in await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 10):
                assert isinstance(one, DraftsmithError) and "closed" in str(one)
            await first.aclose()

    asyncio.run(main())


class SlowTokenizer(PreTrainedTokenizerFast):
    """Takes its time, and notes how many texts it is at."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.inside, self.most = list[str](), 0

    def __call__(self, text: str, **options: Any) -> BatchEncoding:
        self.inside.append(text)
        self.most = max(self.most, len(self.inside))
        time.sleep(0.02)
        self.inside.pop()
        return super().__call__(text, **options)


def test_prompts_are_tokenized_one_at_a_time():
    tokenizer = SlowTokenizer(tokenizer_object=tiny_tokenizer().backend_tokenizer)
    target = Target(tiny_model(vocabulary=TOKENIZER_SIZE), tokenizer, name="slow to read")

    async def main() -> None:
        async with AsyncEngine(Engine(target)) as served:
            params = SamplingParams(max_tokens=2)
            await asyncio.gather(*(served.generate(text, params) for text in ("one", "two", "three", "four")))

    asyncio.run(main())
    assert tokenizer.most == 1


def test_bad_sizes_are_refused():
    with pytest.raises(DraftsmithError, match="max_waiting is 0"):
        AsyncEngine(engine(), max_waiting=0)
