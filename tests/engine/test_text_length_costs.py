"""Longer texts make steps longer, and guesses dearer or, beside what a plain step takes then, cheaper."""

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from draftsmith.drafters.registry import load_drafter
from draftsmith.engine.fitted import Fitted
from draftsmith.engine.known import Known
from draftsmith.engine.policy import RowHistory
from draftsmith.engine.profile import Arm, Profile, Reading
from draftsmith.engine.step_costs import StepCosts
from draftsmith.evaluation.measuring.reading import measure_reading
from draftsmith.plan import NO_DRAFT, Plan
from tests.engine.test_fitted import alike, go, load, profile
from tests.helpers.oracle import OracleDrafter
from tests.helpers.tiny import CONTEXT, VOCABULARY, prompts, tiny_target

CHAIN = Plan((1, 1))


def pair(drafted: float, reading: Reading, found: float | None = None) -> Profile:
    """Two guesses that always stay, in steps of so many milliseconds instead of one."""
    full = () if found is None else (0.001 + (drafted - 0.001) / found,)
    kept = (1.0 if found is None else found,) * 2
    return Profile((1,), (Arm(NO_DRAFT, (), (0.001,)), Arm(CHAIN, kept, (drafted,), found, full)), reading)


def costs(one: Profile) -> StepCosts:
    return StepCosts(one.arms, [one] * len(one.arms))


def test_every_token_beyond_those_of_the_measured_texts_is_paid_for():
    found = costs(pair(0.002, Reading(behind=50, plain=1e-6, guess=5e-7)))
    assert found.of(1, 50).seconds == found.of(1, 20).seconds == found.of(1).seconds == [0.001, 0.002]
    assert found.of(1, 1050).seconds == pytest.approx([0.002, 0.004]), "1,000 tokens, and two guesses"
    assert found.of(8, 1050).seconds == pytest.approx([0.001 / 8 + 0.001, 0.002 / 8 + 0.002]), "each reads its own text"


def test_a_lookup_pays_where_it_makes_guesses():
    found = costs(pair(0.002, Reading(behind=50, plain=1e-6, guess=5e-7), found=0.25))
    short, long = found.of(1), found.of(1, 1050)
    assert short.grown([1.0, 4.0]) == pytest.approx([0.001, 0.005])
    assert long.grown([1.0, 1.0]) == pytest.approx([0.002, 0.002 + 0.001 + 0.25 * 0.001])
    assert long.grown([1.0, 4.0]) == pytest.approx([0.002, 0.005 + 0.001 + 0.001]), "guesses in every step"


def test_it_is_kept_and_nonsense_is_not_taken():
    found = pair(0.002, Reading(behind=50, plain=1e-6, guess=5e-7))
    written = json.loads(json.dumps(found.to_json()))
    assert Profile.from_json(written) == found
    for value in (-1e-9, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="longer text"):
            Profile.from_json({**written, "reading": {"behind": 50, "plain": value, "guess": 0.0}})
    with pytest.raises(KeyError):
        Profile.from_json({name: value for name, value in written.items() if name != "reading"})


def test_guesses_that_pay_behind_a_short_text_do_not_behind_a_long_one():
    """A step with guesses takes 1.5 plain ones; behind 2,000 tokens 4.5 of 1."""
    policy = Fitted(Known(pair(0.0015, Reading(behind=5, guess=7.5e-7))))
    short, long = RowHistory(False, 5), RowHistory(False, 2005)
    assert go(policy, short, 50, 2)[-1] == 2
    assert go(policy, long, 50, 2) == [0] * 50
    policy.choose(load(1), [long])
    assert policy.reasons(load(1), [long])[0].label == "batch_too_large", "not even if all guesses stayed"
    depths = go(policy, short, 2000, 2)
    assert depths[200] == 2 and depths[-1] == 0, "its own tokens count too"
    assert go(policy, RowHistory(False, 5), 50, 2)[-1] == 2


@pytest.mark.parametrize("count", [1, 6])
def test_guesses_that_do_not_pay_behind_a_short_text_do_behind_a_long_one(count: int):
    """A step with guesses takes 2.9 plain ones; behind 50,000 tokens most of either is reading those."""
    reading = Reading(behind=5, plain=2e-7)
    assert Fitted(Known(pair(0.004, reading))).is_fixed, "what short texts cost decides whether it is ever asked"
    policy = Fitted(Known(pair(0.0029, reading)))

    def rows(tokens: int) -> Sequence[RowHistory]:
        return [RowHistory(False, tokens) for _ in range(count)]

    assert alike(policy, rows(5), 200).count(2) < 30
    assert alike(policy, rows(50_005), 50, 2)[-1] == 2


def test_a_long_text_is_not_taken_for_a_slow_machine():
    """Plain steps take ten times as long behind it, as was measured: nothing is learnt that short texts suffer by."""
    time, reading = 0.0, Reading(behind=5, plain=1e-6, guess=0.0)
    chains = tuple(replace(arm, seconds=(0.001 * arm.seconds[0],)) for arm in profile(cost=0.3, rows=(1,)).arms)
    policy = Fitted(Known(Profile((1,), chains, reading)), clock=lambda: time)

    def go_on(row: RowHistory, steps: int) -> list[int]:
        nonlocal time
        found = []
        for _ in range(steps):
            depth = go(policy, row, 1, 2)[0]
            tokens = row.prompt_tokens + len(row.accepted) + sum(row.accepted)
            time += 0.001 * (1 + 0.3 * depth) + 1e-6 * tokens
            found.append(depth)
        return found

    first = go_on(RowHistory(False, 5), 60)
    go_on(RowHistory(False, 9005), 200)
    assert go_on(RowHistory(False, 5), 60)[20:] == first[20:]


def test_it_is_measured_where_the_target_takes_long_texts():
    target = tiny_target()
    texts = prompts(40, shortest=10, longest=10)
    lookup = load_drafter("ngram", target)
    found = measure_reading(target, lookup, CHAIN, texts, short=4, long=CONTEXT)
    assert found.behind == 4 and min(found.plain, found.guess) >= 0
    assert measure_reading(target, lookup, NO_DRAFT, texts, short=4, long=CONTEXT).guess == 0
    assert measure_reading(target, lookup, CHAIN, texts[:1], short=4, long=CONTEXT) == Reading(4), "too few tokens"
    assert measure_reading(target, lookup, CHAIN, texts, short=CONTEXT, long=CONTEXT) == Reading(CONTEXT)


def test_a_drafter_is_free_for_others_when_it_was_measured():
    target = tiny_target()
    own = OracleDrafter([], VOCABULARY)
    for _ in range(2):
        measure_reading(target, own, CHAIN, prompts(40, shortest=10, longest=10), short=4, long=CONTEXT)
