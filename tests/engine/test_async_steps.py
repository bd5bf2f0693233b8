"""The engine for asyncio, step by step: who is told of steps that fail, and when tokens are handed out."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from draftsmith.engine import AsyncEngine, Engine, async_engine
from draftsmith.engine.engine import Chunk
from draftsmith.engine.policy import Choice, Fixed
from draftsmith.plan import Plan
from draftsmith.targets import Target
from draftsmith.types import Completion, Context, Draft, DraftsmithError, SamplingParams
from tests.engine.test_async_engine import CHAIN, asked, check_prompts_one_by_one
from tests.helpers.oracle import OracleDrafter, oracle_for
from tests.helpers.tiny import greedy_reference, prompts, tiny_model, tiny_target, tiny_tokenizer


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
