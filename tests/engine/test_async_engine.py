"""The engine for asyncio: many tasks, one thread that steps, and texts that are those of a call by itself."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from transformers import BatchEncoding, PreTrainedTokenizerFast

from draftsmith.engine import AsyncEngine, Engine, async_engine
from draftsmith.engine.engine import Chunk
from draftsmith.engine.policy import Choice, Fixed
from draftsmith.plan import Plan
from draftsmith.targets import Target
from draftsmith.types import Completion, Context, Draft, DraftsmithError, SamplingParams
from tests.helpers.oracle import OracleDrafter, oracle_for
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


class Failing(OracleDrafter):
    """An oracle on a device that goes away: in the middle of a step, and when rows are to be forgotten.

    Args:
        guessing: what guessing raises, None for nothing.
        forgetting: whether forgetting raises.
    """

    guessing: Exception | None = None
    forgetting = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.forgotten: list[int] = []
        self.longest = 0  # text, so far

    def propose(self, context: Context, plan: Plan) -> Draft:
        self.longest = max(self.longest, *context.lengths_B.tolist())
        if self.guessing is not None:
            raise self.guessing
        return super().propose(context, plan)

    def reset_rows(self, rows: list[int]) -> None:
        self.forgotten += rows
        if self.forgetting:
            raise RuntimeError("the device is gone")
        super().reset_rows(rows)


class Gate(Failing):
    """Holds the next step of its engine until it is opened, then lets it go on, or fail."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.reached, self.open = threading.Event(), threading.Event()

    def propose(self, context: Context, plan: Plan) -> Draft:
        self.reached.set()
        assert self.open.wait(20)
        return super().propose(context, plan)


def test_a_step_that_fails_is_told_to_everybody():
    async def main() -> None:
        drafter = oracle_for(tiny_model(), prompts(8), kind=Failing)
        drafter.guessing = RuntimeError("the device is gone")
        async with AsyncEngine(Engine(tiny_target(), drafter, plan=CHAIN)) as served:
            with pytest.raises(RuntimeError, match="the device is gone"):
                await asyncio.wait_for(served.generate(prompts(1)[0], SamplingParams(max_tokens=4)), 10)
            with pytest.raises(DraftsmithError, match="the engine has stopped: the device is gone"):
                await served.generate(prompts(1)[0], SamplingParams(max_tokens=4))

    asyncio.run(main())


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.001)


def check_prompts_one_by_one() -> None:
    """Let calls of this event loop be checked by a single thread, so that `asked` can tell when they are through."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))


async def asked() -> None:
    """Return when all calls that were made before are in, or wait for room: the thread that checks them got to us."""
    await asyncio.sleep(0)  # they begin
    await asyncio.to_thread(int)


async def told_together(served: AsyncEngine, gate: Gate, close: bool, params: SamplingParams) -> list[BaseException]:
    """Ask twice, the second time while a step of the first is held; close or let the step fail; return what is told."""
    check_prompts_one_by_one()
    first = asyncio.create_task(served.generate(prompts(2)[0], params))
    await until(gate.reached.is_set)
    second = asyncio.create_task(served.generate(prompts(2)[1], params))
    await asked()
    closing = asyncio.create_task(served.close() if close else asyncio.sleep(0))
    await asyncio.sleep(0)  # it begins
    gate.open.set()
    told = await asyncio.wait_for(asyncio.gather(first, second, return_exceptions=True), 10)
    await closing
    return [one for one in told if isinstance(one, BaseException)]


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_that_is_not_in_the_core_yet_is_told_as_well(fails: bool):
    async def main() -> list[BaseException]:
        gate = oracle_for(tiny_model(), prompts(8), kind=Gate)
        gate.guessing = RuntimeError("the device is gone") if fails else None
        async with AsyncEngine(Engine(tiny_target(), gate, plan=CHAIN)) as served:
            return await told_together(served, gate, not fails, SamplingParams(max_tokens=90))

    told = asyncio.run(main())
    assert len(told) == 2
    for one in told:
        assert isinstance(one, RuntimeError if fails else DraftsmithError)
        assert str(one) == "the device is gone" if fails else "closed before" in str(one)


@pytest.mark.parametrize("fails", [False, True])
def test_an_abort_that_fails_keeps_nobody_from_being_told(fails: bool):
    async def main() -> tuple[list[BaseException], list[int]]:
        gate = oracle_for(tiny_model(), prompts(8), kind=Gate)
        gate.guessing, gate.forgetting = RuntimeError("the step failed") if fails else None, True
        async with AsyncEngine(Engine(tiny_target(), gate, plan=CHAIN)) as served:
            return await told_together(served, gate, not fails, SamplingParams(max_tokens=90, n=2)), gate.forgotten

    told, forgotten = asyncio.run(main())
    assert len(told) == 2 and len({str(one) for one in told}) == 1
    assert ("the step failed" if fails else "closed before") in str(told[0])
    assert len(forgotten) == 2  # both copies of the call that was in, though forgetting the first raised


class RefusesTheSecond(Fixed):
    """Raises when a request comes in behind another one, for which it has to say what it may choose."""

    asked: int | None = None

    @property
    def choices(self) -> tuple[Choice, ...]:
        if self.asked is not None:
            self.asked += 1
            if self.asked == 2:
                raise ValueError("no second one")
        return super().choices


def test_a_request_that_the_core_refuses_harms_nobody():
    """The first copy of the call is in by then, and is taken out."""
    async def main() -> tuple[list[Completion], int]:
        gate, policy = oracle_for(tiny_model(), prompts(8), kind=Gate), RefusesTheSecond(CHAIN)
        own = Engine(tiny_target(), gate, policy=policy, max_batch=3)
        policy.asked = 0
        async with AsyncEngine(own) as served:
            with pytest.raises(ValueError, match="no second one"):
                await asyncio.wait_for(served.generate(prompts(1)[0], SamplingParams(max_tokens=90, n=2)), 10)
            call = asyncio.create_task(served.generate(prompts(1)[0], SamplingParams(max_tokens=6, n=2)))
            gate.open.set()
            found = await asyncio.wait_for(call, 10)
            await until(lambda: not own.core.has_work)
            return found, gate.longest

    found, longest = asyncio.run(main())
    assert [one.tokens for one in found] == [greedy_reference(tiny_model(), prompts(1)[0], 6)] * 2
    assert longest < len(prompts(1)[0]) + 30


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


def readable(max_batch: int = 2, kind: type[OracleDrafter] = OracleDrafter) -> tuple[Engine, OracleDrafter]:
    """An engine whose texts can be read, and its drafter, which is always right."""
    drafter = oracle_for(tiny_model(), prompts(8), kind=kind)
    return Engine(Target(tiny_model(), tiny_tokenizer()), drafter, plan=CHAIN, max_batch=max_batch), drafter


def test_what_short_steps_bring_is_handed_out_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(async_engine, "WAKE_S", 1e9)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    (whole,) = readable()[0].generate([prompts(1)[0]], params)

    async def main() -> list[Chunk]:
        async with AsyncEngine(readable()[0]) as served:
            return [chunk async for chunk in served.stream(prompts(1)[0], params)]

    first, *others = asyncio.run(main())
    assert len(first.tokens) == 1 and len(others) > 8
    assert [token for chunk in (first, *others) for token in chunk.tokens] == whole.tokens
    # Text is read when pieces are handed out, so the first of those that go together has that of all.
    assert first.text + others[0].text == whole.text and not any(chunk.text for chunk in others[1:])


def test_nothing_is_kept_back_while_another_call_waits_for_its_place(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(async_engine, "WAKE_S", 1e9)

    async def main() -> list[Chunk]:
        own, gate = readable(max_batch=1, kind=Gate)
        assert isinstance(gate, Gate)
        async with AsyncEngine(own) as served:
            check_prompts_one_by_one()

            async def first() -> list[Chunk]:
                params = SamplingParams(max_tokens=90, ignore_eos=True)
                return [chunk async for chunk in served.stream(prompts(2)[0], params)]

            running = asyncio.create_task(first())
            await until(gate.reached.is_set)
            other = asyncio.create_task(served.generate(prompts(2)[1], SamplingParams(max_tokens=4)))
            await asked()
            gate.open.set()
            chunks, _ = await asyncio.gather(running, other)
            return chunks

    chunks = asyncio.run(main())
    assert [token for one in chunks for token in one.tokens] == greedy_reference(tiny_model(), prompts(2)[0], 90)
    assert sum(bool(one.text) for one in chunks) > 8


class Tiring(Failing):
    """An oracle whose device goes away behind some tokens."""

    def propose(self, context: Context, plan: Plan) -> Draft:
        draft = super().propose(context, plan)
        if self.longest > 60:
            raise RuntimeError("the device is gone")
        return draft


def test_what_came_before_a_step_that_failed_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(async_engine, "WAKE_S", 1e9)

    async def main() -> list[int]:
        tokens = list[int]()
        async with AsyncEngine(readable(kind=Tiring)[0]) as served:
            with pytest.raises(RuntimeError, match="the device is gone"):
                async for chunk in served.stream(prompts(1)[0], SamplingParams(max_tokens=90, ignore_eos=True)):
                    tokens.extend(chunk.tokens)
        return tokens

    tokens = asyncio.run(main())
    assert len(tokens) > 10 and tokens == greedy_reference(tiny_model(), prompts(1)[0], len(tokens))
