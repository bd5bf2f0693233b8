"""Longer texts make steps longer, and guesses dearer or, beside what a plain step takes then, cheaper."""

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from draftsmith.drafters.registry import load_drafter
from draftsmith.engine import Choice, Engine, Load, Policy, RowHistory
from draftsmith.engine.arm import Arm
from draftsmith.engine.fitted import Fitted
from draftsmith.engine.known import Known
from draftsmith.engine.profile import LengthCost, Profile
from draftsmith.engine.reminders import REMINDERS
from draftsmith.engine.step_costs import StepCosts
from draftsmith.evaluation.measuring.length_costs import measure_length_cost
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.types import Context, Draft, SamplingParams
from tests.helpers.oracle import OracleDrafter
from tests.helpers.profiles import load, profile, tokens_found
from tests.helpers.tiny import CONTEXT, VOCABULARY, greedy_reference, prompts, tiny_model, tiny_target

CHAIN = Plan((1, 1))


def pair(drafted: float, cost: LengthCost, found: float | None = None, plain: float = 0.001) -> Profile:
    """Two guesses that always stay, in steps of so many seconds instead of a millisecond; of a lookup in some steps."""
    full = () if found is None else (plain + (drafted - plain) / found,)
    tokens = None if found is None else tokens_found(found, 2.0)
    return Profile((1,), (Arm(NO_DRAFT, (), (plain,)), Arm(CHAIN, (1.0, 1.0), (drafted,), tokens, full)), cost)


def costs(one: Profile) -> StepCosts:
    return StepCosts(one.arms, [one] * len(one.arms))


COST = LengthCost(measured_at=50, plain=0.001 / 1024, guess=0.0005 / 1024)
LONG = 50 + 1024


def test_every_token_beyond_those_of_the_measured_texts_is_paid_for():
    found = costs(pair(0.002, COST))
    assert found.of(1, 50).seconds == found.of(1, 20).seconds == found.of(1).seconds == [0.001, 0.002]
    assert found.of(1, LONG).seconds == pytest.approx([0.002, 0.004]), "reading it, and two guesses"
    assert found.of(8, LONG).seconds == pytest.approx([0.001 / 8 + 0.001, 0.002 / 8 + 0.002]), "each reads its own text"
    assert found.of(1, LONG).seconds == pytest.approx([0.002, 0.004]), "of so many rows again"


def test_a_lookup_pays_where_it_makes_guesses():
    one = pair(0.002, COST, found=0.25)
    short, long = costs(one).of(1), costs(one).of(1, LONG)
    assert short.grown([(1.0, 1.0), (4.0, 1.0)]) == pytest.approx([0.001, 0.005])
    assert long.grown([(1.0, 1.0), (1.0, 1.0)]) == pytest.approx([0.002, 0.002 + 0.001 + 0.25 * 0.001])
    assert long.of(1, (4.0, 1.0)) == pytest.approx(0.005 + 0.001 + 0.001), "guesses in every step"
    few = replace(one, arms=(one.arms[0], replace(one.arms[1], made=1, found=tokens_found(0.25, 1.0))))
    assert costs(few).of(1, LONG).of(1, (8.0, 1.0)) == pytest.approx(0.005 + 0.001 + 0.001), "two at every step"
    assert costs(few).of(1, LONG).of(1, (4.5, 1.0)) == pytest.approx(0.0035 + 0.001 + 4.5 / 8 * 0.001), "half way"


def test_who_could_measure_no_long_text_is_told_by_another_drafter():
    both = [pair(0.002, LengthCost(50)), pair(0.002, COST)]
    found = StepCosts([both[0].arms[0], both[1].arms[1]], both)
    assert found.of(1, LONG).seconds == pytest.approx([0.002, 0.004])


def test_it_is_kept_and_nonsense_is_not_taken():
    found = pair(0.002, LengthCost(50, 1e-6, 5e-7), found=0.25)
    written = json.loads(json.dumps(found.to_json()))
    assert Profile.from_json(written) == found
    good = written["length_cost"]
    for value in (-1e-9, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="plain is"):
            Profile.from_json({**written, "length_cost": {**good, "plain": value}})
    for damaged in (None, [], 3, {}, {"plain": 1e-6, "guess": 0.0}, {**good, "guess": None}):
        with pytest.raises((KeyError, TypeError)):
            Profile.from_json({**written, "length_cost": damaged})


def decode(policy: Fitted, rows: Sequence[RowHistory], steps: int, stays: int = 2) -> list[int]:
    """Ask about some rows and answer, all alike; return how deep the first one's drafts were."""
    depths = list[int]()
    for _ in range(steps):
        choices = policy.choose(load(len(rows)), rows)
        depths.append(choices[0].plan.depth)
        for row, choice in zip(rows, choices, strict=True):
            row.note(min(stays, choice.plan.depth), choice.plan.depth, NO_DRAFT)
            row.written += 1 + row.accepted[-1]
    return depths


def texts(count: int, tokens: int) -> list[RowHistory]:
    return [RowHistory(False, tokens) for _ in range(count)]


def test_guesses_that_pay_behind_a_short_text_do_not_behind_a_long_one():
    """A step with guesses takes 1.5 plain ones; behind 2,000 tokens 4.5 of 1."""
    policy = Fitted(Known(pair(0.0015, LengthCost(5, 0.0, 7.5e-7))))
    short, long = texts(1, 5), texts(1, 2005)
    assert decode(policy, short, 50)[-1] == 2
    assert decode(policy, long, 50) == [0] * 50
    policy.choose(load(1), long)
    [why] = policy.reasons(load(1), long)
    assert why.label == "text_too_long" and "text too long to draft" in why.sentence()
    depths = decode(policy, short, 2000)
    assert depths[200] == 2 and depths[-1] == 0, "its own tokens count too"
    assert decode(policy, texts(1, 5), 50)[-1] == 2


@pytest.mark.parametrize("count", [1, 6])
def test_guesses_that_do_not_pay_behind_a_short_text_do_behind_a_long_one(count: int):
    """A step with guesses takes 2.95 plain ones, for three tokens; behind 500,000 tokens most of either is reading."""
    cost = LengthCost(5, 2e-8, 0.0)
    assert Fitted(Known(pair(0.004, cost))).is_fixed, "what short texts cost decides whether it is ever asked"
    policy = Fitted(Known(pair(0.00295, cost)))
    assert decode(policy, texts(count, 5), 100).count(2) < 60, "tried again and again, since it nearly pays"
    assert decode(policy, texts(count, 500_005), 100)[10:] == [2] * 90


def test_rows_that_choose_for_themselves_pay_for_their_texts_too():
    """Long steps, so every row decides by itself, by how long the texts are on average."""
    policy = Fitted(Known(pair(1.5, LengthCost(5, 0.0, 7.5e-4), plain=1.0)))
    assert decode(policy, texts(3, 5), 20)[-1] == 2
    assert decode(policy, texts(3, 2005), 50) == [0] * 50
    assert decode(policy, [*texts(3, 5), *texts(1, 405)], 10)[-1] == 2
    assert decode(policy, [*texts(1, 5), *texts(3, 2005)], 50)[-1] == 0


def test_a_long_text_is_not_taken_for_a_slow_machine():
    """Plain steps take ten times as long behind it, as was measured: nothing is learnt that short texts suffer by."""
    cost = LengthCost(5, 1e-6, 0.0)
    chains = tuple(replace(arm, seconds=(0.001 * arm.seconds[0],)) for arm in profile(cost=0.3, rows=(1,)).arms)
    policy = Fitted(Known(Profile((1,), chains, cost)), learns_times=True)

    def go_on(row: RowHistory, steps: int) -> list[int]:
        found = []
        for _ in range(steps):
            found += decode(policy, [row], 1)
            policy.timed(0.001 * (1 + 0.3 * found[-1]) + 1e-6 * (row.prompt_tokens + row.written))
        return found

    go_on(RowHistory(False, 5), 200)  # all plans are timed once
    first = go_on(RowHistory(False, 5), 60)
    go_on(RowHistory(False, 9005), 200)
    again = go_on(RowHistory(False, 5), 60)
    for found in (first, again):
        assert sum(depth >= 3 for depth in found[20:]) >= 40 - 2 * REMINDERS, "it drafts deep, reminders left aside"


def test_what_a_prediction_brought_makes_a_text_longer():
    drafted = Choosing()
    engine = Engine(tiny_target(), load_drafter("ngram", tiny_target()), policy=drafted, max_length=CONTEXT)
    asked = prompts(1)[0]
    told = greedy_reference(tiny_model(), asked, 40)
    params = SamplingParams(max_tokens=40, ignore_eos=True, prediction=told[:30])
    [found] = engine.generate([asked], params)
    assert found.tokens == told
    assert drafted.lengths[-1] >= len(asked) + 30, "what was written by the prediction counts"


class Choosing(Policy):
    """Drafts nothing, and notes how long the texts were whenever it was asked."""

    def __init__(self) -> None:
        self.lengths = list[int]()

    @property
    def choices(self) -> tuple[Choice, ...]:
        return (Choice(NO_DRAFT), Choice(CHAIN))

    def choose(self, load: Load, rows: Sequence[RowHistory]) -> Sequence[Choice]:
        self.lengths += [row.prompt_tokens + row.written for row in rows]
        return [self.choices[0]] * len(rows)


class Slow(OracleDrafter):
    """Takes a second of a clock for every token of the text, and for each guess of a chain."""

    time = 0.0

    def propose(self, context: Context, plan: Plan) -> Draft:
        if plan.depth == CHAIN.depth:  # and not what only follows the text, in steps without drafts
            self.time += plan.depth * float(context.lengths_B.max())
        return super().propose(context, plan)


def test_guesses_are_charged_by_the_token_and_the_target_is_not():
    own = Slow([], VOCABULARY)
    found = measure_length_cost(
        tiny_target(), own, CHAIN, prompts(40, shortest=10, longest=10), short=4, long=CONTEXT, clock=lambda: own.time
    )
    assert found.measured_at == 4 and found.plain == 0
    assert found.guess == pytest.approx(1.0, rel=0.05), "a second a token and a guess; some guess may stay by chance"


def test_it_is_measured_where_the_target_takes_long_texts():
    target, asked = tiny_target(), prompts(40, shortest=10, longest=10)
    own = Slow([], VOCABULARY)

    def measured(plan: Plan, texts: Sequence[Sequence[int]], short: int) -> LengthCost:
        return measure_length_cost(target, own, plan, texts, short, CONTEXT, clock=lambda: own.time)

    assert measured(NO_DRAFT, asked, 4) == LengthCost(4), "the clock stands still without drafts"
    assert measured(CHAIN, asked[:1], 4) == LengthCost(4), "too few tokens"
    assert measured(CHAIN, asked, CONTEXT) == LengthCost(CONTEXT), "too short a context"
    assert measured(CHAIN, asked, 4).guess > 0
    [text] = Engine(target, own, plan=CHAIN).generate([asked[0]], SamplingParams(max_tokens=5, ignore_eos=True))
    assert text.tokens == greedy_reference(tiny_model(), asked[0], 5), "the drafter is free for others"


def test_what_is_not_clearly_more_counts_as_nothing():
    own, ticks = Slow([], VOCABULARY), iter(range(10**9))

    def jitter() -> float:
        """Steps of a second, of two, of a second: the same behind both texts."""
        return 0.5 * (next(ticks) * 3 % 7)

    found = measure_length_cost(
        tiny_target(), own, CHAIN, prompts(40, shortest=10, longest=10), short=4, long=CONTEXT, clock=jitter
    )
    assert found == LengthCost(4)
