"""Acceptance by drafter, task and depth, in bounded memory; alarms come when they should and not otherwise."""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from draftsmith.drafters.lookup.ngram import NgramConfig, NgramDrafter
from draftsmith.engine import Chunk, Fixed
from draftsmith.engine.made import Made
from draftsmith.engine.reasons import EXPECTED
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.serving.health import (
    BLOCK,
    ENOUGH_RECENT,
    FORGOTTEN,
    MOST,
    NO_TASK,
    OTHER,
    RECENT,
    Acceptance,
    Health,
    task_of,
)
from draftsmith.serving.repetition import LONGEST, TAIL, smallest_period
from draftsmith.targets import Target
from draftsmith.types import Completion, Statistics
from tests.helpers.tiny import tiny_tokenizer
from tests.serving.toy import NAME, PROMPTS, get, make_service, model, oracle, post, running, tokens_of

CHAIN = Plan((1, 1, 1))
COMPLETION = "/v1/completions"


def piece(accepted: int, tokens: Sequence[int] = (1,), drafter: str = "mlp", plan: Plan = CHAIN) -> Chunk:
    return Chunk(0, list(tokens), "", None, made=Made(drafter, plan, plan.max_nodes, accepted))


def write(
    health: Health, task: str, steps: int, stays: Callable[[], int], texts: int = 8, drafter: str = "mlp"
) -> None:
    """Write some texts of so many steps in all; `stays` says how many guesses of a step stay."""
    for _ in range(texts):
        watch = health.watch(task)
        for _ in range(steps // texts):
            watch.take(piece(stays(), drafter=drafter))
        watch.end()


def bursts(*shares: float) -> Callable[[], int]:
    """Guesses that stay so often, depth by depth, given that those before them did."""
    rng = random.Random(4)

    def stays() -> int:
        found = 0
        while found < len(shares) and rng.random() < shares[found]:
            found += 1
        return found

    return stays


def test_acceptance_is_told_by_drafter_task_and_depth():
    health = Health()
    write(health, "code", 400, lambda: 2)
    write(health, "prose", 400, lambda: 0)
    write(health, "prose", 400, lambda: 3, drafter="ngram")
    told = {(one["drafter"], one["task"]): one for one in health.told()["acceptance"]}
    assert told["mlp", "code"]["recent"] == [1.0, 1.0, 0.0] and told["mlp", "code"]["steps"] == 400
    assert told["mlp", "prose"]["recent"] == [0.0] and told["ngram", "prose"]["recent"] == [1.0] * 3
    assert health.told()["alarms"] == []


def test_a_guess_counts_where_its_depth_was_reached_and_those_before_it_stayed():
    one = Acceptance("ngram", NO_TASK)
    for _ in range(10):
        one.take(3, 1, 1)
        one.take(1, 1, 1)  # a lookup that found one token
    assert [(share.guesses, share.stayed) for share in one.recent()[:4]] == [(20, 20), (10, 0), (0, 0), (0, 0)]


def test_steps_without_guesses_and_the_last_of_a_text_do_not_count():
    health = Health()
    watch = health.watch("code")
    watch.take(Chunk(0, [1], "", None))
    watch.take(piece(0, plan=NO_DRAFT))
    ended = Completion([1], [1, 1], "", "length", Statistics(), [0, 0])
    watch.take(replace(piece(1), completion=ended))
    assert list(health) == []
    watch.take(piece(1))
    assert [one.steps for one in health] == [1]


def test_a_collapse_is_told_once_and_its_end_too(caplog: pytest.LogCaptureFixture):
    health, good, bad = Health(), bursts(0.7, 0.7, 0.7), bursts(0.2, 0.2, 0.2)
    caplog.set_level(logging.WARNING, "draftsmith.serving")
    write(health, "code", 5000, good)
    assert health.collapses() == []
    write(health, "code", (RECENT + 1) * BLOCK, bad)
    (alarm,) = health.collapses()
    assert (alarm.drafter, alarm.task) == ("mlp", "code") and alarm.recent < 0.5 * alarm.usual
    write(health, "code", (RECENT + 1) * BLOCK, good)
    assert health.collapses() == [] and health.alarms["collapse"] == 1
    began, ended = caplog.records
    assert began.getMessage() == "fewer guesses stay than usual"
    assert ended.getMessage() == "the alarm of fewer guesses than usual has ended"
    assert began.fields["drafter"] == "mlp" and began.fields["position"] < 3  # type: ignore[attr-defined]


def test_a_collapse_of_deep_guesses_alone_is_found():
    health = Health()
    write(health, "code", 5000, bursts(0.8, 0.8, 0.8))
    write(health, "code", (RECENT + 1) * BLOCK, bursts(0.8, 0.1, 0.8))
    assert [alarm.position for alarm in health.collapses()] == [1]


def test_a_collapse_ends_when_its_depth_is_hardly_drafted_any_more_and_not_before():
    health, shorter = Health(), Plan((1, 1))
    write(health, "code", 5000, bursts(0.9, 0.9, 0.9))
    write(health, "code", (RECENT + 1) * BLOCK, bursts(0.9, 0.9, 0.1))
    assert [alarm.position for alarm in health.collapses()] == [2]
    watch, stays = health.watch("code"), bursts(0.9, 0.9)
    held = []
    for _ in range((RECENT + 1) * BLOCK):
        watch.take(piece(stays(), plan=shorter))
        (one,) = health
        held.append((one.recent()[2].guesses, bool(health.collapses())))
    assert held[0][1] and held[-1] == (0, False)
    assert all(on for guesses, on in held if guesses >= ENOUGH_RECENT)


@pytest.mark.parametrize(
    ("before", "now", "texts"),
    [
        ((0.7, 0.7, 0.7), (0.7, 0.7, 0.7), 8),  # nothing changed
        ((0.7, 0.7, 0.7), (0.5, 0.5, 0.5), 8),  # worse, by less than half
        ((0.7, 0.7, 0.7), (0.1, 0.1, 0.1), 1),  # one hard text is no collapse
        ((0.02, 0.5, 0.5), (0.0, 0.5, 0.5), 8),  # too rare to tell
    ],
)
def test_no_alarm_without_need(before: tuple[float, ...], now: tuple[float, ...], texts: int):
    health = Health()
    write(health, "code", 5000, bursts(*before))
    write(health, "code", (RECENT + 1) * BLOCK, bursts(*now), texts)
    assert health.collapses() == []


def test_a_short_history_gives_no_alarm():
    health = Health()
    write(health, "code", 400, bursts(0.9, 0.9, 0.9))
    write(health, "code", (RECENT + 1) * BLOCK, bursts(0.1, 0.1, 0.1))
    assert health.collapses() == []


def test_what_stays_as_bad_becomes_usual():
    health = Health()
    write(health, "code", 5000, bursts(0.7, 0.7, 0.7))
    write(health, "code", 24_000, bursts(0.2, 0.2, 0.2), 200)
    assert health.collapses() == [] and health.alarms["collapse"] == 1


def test_tasks_are_bounded_and_those_of_long_ago_make_room():
    health = Health()
    for number in range(10 * MOST):
        health.watch(f"task {number}").take(piece(1))
    pairs = [(one.drafter, one.task) for one in health]
    assert len(pairs) <= MOST + 1 and ("mlp", OTHER) in pairs
    kept = health.watch("task 0")
    for _ in range(FORGOTTEN + 1):
        kept.take(piece(1))
    health.watch("new").take(piece(1))
    assert {"new", "task 0"} <= {one.task for one in health} and len(list(health)) <= MOST + 1


def test_a_history_needs_no_more_memory_the_longer_it_is():
    one = Acceptance("mlp", NO_TASK)
    for step in range(5 * BLOCK * RECENT):
        one.take(3, step % 4, step)
    held = [len(block.counts) + len(block.texts) for block in one._blocks]
    assert len(held) == RECENT and max(held) <= BLOCK + 4


@pytest.mark.parametrize("period", [1, 5, LONGEST])
def test_a_text_that_goes_round_in_circles_is_found_once(period: int, caplog: pytest.LogCaptureFixture):
    health = Health()
    watch, text = health.watch("code"), list(range(300)) + list(range(period)) * 3 * LONGEST
    found = [watch.take(piece(3, text[at : at + 4])) for at in range(0, 300 + 2 * TAIL, 4)]
    assert found.count(True) == 1 and found.index(True) * 4 > 300 + TAIL - 2 * LONGEST
    assert health.looping == 1 and health.told()["alarms"] == [{"alarm": "loop", "texts": 1}]
    assert caplog.records[-1].fields["period"] == period  # type: ignore[attr-defined]
    watch.end()
    assert health.looping == 0 and health.told()["alarms"] == [] and health.alarms["loop"] == 1


def test_neither_repetition_nor_acceptance_alone_is_a_loop():
    health = Health()
    fresh, refused = health.watch("code"), health.watch("code")
    assert not any(fresh.take(piece(3, range(at, at + 4))) for at in range(0, 2000, 4)), "foreseen, and new"
    assert not any(refused.take(piece(at % 3, [7] * 4)) for at in range(500)), "the same again, and not foreseen"


def test_what_a_prediction_brought_stands_between_what_drafters_guessed():
    health = Health()
    watch = health.watch("code")
    for at in range(0, 2000, 4):
        assert not watch.take(piece(3, [7] * 4))
        expected = Made("prediction", CHAIN, 3, 3, why=EXPECTED)
        assert not watch.take(Chunk(0, list(range(at, at + 4)), "", None, made=expected))
    assert [one.drafter for one in health] == ["mlp"]


def test_periods():
    assert smallest_period([1, 2, 3] * 5) == 3 and smallest_period([1, 2, 3] * 5 + [1]) == 3
    assert smallest_period([4] * 9) == 1 and smallest_period([1, 2, 3, 4]) == 4 and smallest_period([1]) == 1
    rng = random.Random(1)
    for _ in range(200):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 12))]
        slow = next(p for p in range(1, len(tokens) + 1) if tokens[p:] == tokens[: len(tokens) - p])
        assert smallest_period(tokens) == slow


@pytest.mark.parametrize(
    ("metadata", "task"),
    [
        ({"task": "code/review-2.1"}, "code/review-2.1"), (None, NO_TASK), ({}, NO_TASK), ({"task": 5}, NO_TASK),
        ({"task": "x" * 65}, NO_TASK), ({"task": 'a"b\n'}, NO_TASK), ({"task": ""}, NO_TASK),
    ],
)
def test_tasks_are_short_names(metadata: dict[str, Any] | None, task: str):
    assert task_of(metadata) == task


@pytest.mark.parametrize("path", [COMPLETION, "/v1/chat/completions"])
def test_a_request_says_what_it_is_for_and_the_server_tells_how_that_goes(path: str):
    async def main() -> tuple[Any, str]:
        async with running(make_service(drafter=oracle(error_rate=0.0))) as client:
            chat = {"messages": [{"role": "user", "content": "one"}]}
            body = {"prompt": PROMPTS[1]} if path == COMPLETION else chat
            fields = {"max_tokens": 30, "temperature": 0, "metadata": {"task": "fables"}}
            assert (await client.post(path, json={**body, **fields})).status_code == 200
            return (await client.get("/status")).json(), (await client.get("/metrics")).text

    status, metrics = asyncio.run(main())
    (one,) = status["acceptance"]
    assert (one["drafter"], one["task"]) == ("oracle", "fables") and one["recent"]
    assert status["accepts"] and status["texts"] == 0 and status["alarms"] == []
    assert status["steps_by_reason"]["fixed"] >= one["steps"]
    found = {
        (sample.name, sample.labels.get("task"), sample.labels.get("position")): sample.value
        for family in text_string_to_metric_families(metrics) for sample in family.samples
        if sample.name.startswith("draftsmith_") and sample.labels["model_name"] == NAME
    }
    assert found["draftsmith_acceptance_recent", "fables", "0"] == pytest.approx(one["recent"][0], abs=1e-4)
    assert found["draftsmith_acceptance_collapsed", "fables", None] == 0
    assert found["draftsmith_alarms_total", None, None] == found["draftsmith_texts_repeating", None, None] == 0


def test_a_loop_is_in_the_log_without_its_words(caplog: pytest.LogCaptureFixture):
    """A bias lets the target write one letter for ever; a lookup soon foresees that."""
    caplog.set_level(logging.INFO, "draftsmith.serving")
    roomy = model()
    roomy.config.max_position_embeddings = 4 * TAIL
    target = Target(roomy, tiny_tokenizer(), name=NAME)
    service = make_service(of=target, drafter=NgramDrafter(NgramConfig()), policy=Fixed(CHAIN))
    body = {"prompt": "zzz", "max_tokens": 2 * TAIL, "temperature": 0, "logit_bias": {str(tokens_of("q")[0]): 100}}
    assert post(COMPLETION, body, service).json()["choices"][0]["text"] == "q" * 2 * TAIL
    loop, request = caplog.records
    assert loop.getMessage() == "a text repeats itself" and loop.fields["period"] == 1  # type: ignore[attr-defined]
    assert request.getMessage() == "request" and request.fields["repeating"] == 1  # type: ignore[attr-defined]
    assert "qq" not in caplog.text and service.health.looping == 0


def test_the_state_is_for_those_with_a_key():
    service = make_service(keys=("k",))
    assert get("/status", service).status_code == 401
