"""A policy whose answer stands for a while is not asked until then, unless somebody comes, goes or is being read."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from draftsmith.engine import Engine
from draftsmith.engine.evidence import LONGEST_WAIT
from draftsmith.engine.fitted import Fitted
from draftsmith.engine.known import Known
from draftsmith.engine.policy import Choice, Load, Policy, RowHistory
from draftsmith.engine.profile import Profile
from draftsmith.engine.settling import LAID_ASIDE
from draftsmith.engine.trials import HELD
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.types import SamplingParams
from tests.helpers.oracle import OracleDrafter
from tests.helpers.profiles import profile
from tests.helpers.tiny import VOCABULARY, greedy_reference, prompts, tiny_model, tiny_target

CHAIN = Plan((1, 1))


class Alternating(Policy):
    """Drafts, then does not for four steps, and so on; it tells beforehand that the latter stands."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.holds_now = 0

    @property
    def choices(self) -> tuple[Choice, ...]:
        return Choice(CHAIN), Choice(NO_DRAFT)

    @property
    def holds(self) -> int:
        return self.holds_now

    def choose(self, load: Load, rows: Sequence[RowHistory]) -> Sequence[Choice]:
        self.asked.append(len(rows))
        self.holds_now = 0 if len(self.asked) % 2 else 3
        return [self.choices[self.holds_now > 0]] * len(rows)


def test_it_is_asked_again_when_its_answer_is_over():
    model, given = tiny_model("llama"), prompts(1)
    expected = greedy_reference(model, given[0], 41)
    policy = Alternating()
    engine = Engine(
        tiny_target("llama"), OracleDrafter([given[0] + expected], VOCABULARY, plan=CHAIN), policy=policy, max_batch=1
    )
    (done,) = engine.generate(given, SamplingParams(max_tokens=41, ignore_eos=True))
    assert done.tokens == expected
    assert [own for own in done.accepted_lengths if own] == [2] * 5
    drafted = [at for at, own in enumerate(done.accepted_lengths) if own]
    assert {later - before for before, later in pairwise(drafted)} == {5}, "each answer stands for four steps"
    assert len(policy.asked) < done.statistics.steps / 2


@pytest.mark.parametrize("rows", [1, 3])
def test_whoever_comes_or_goes_makes_it_ask(rows: int):
    model, given = tiny_model("llama"), prompts(4)
    policy = Alternating()
    texts = [prompt + greedy_reference(model, prompt, 12 + 3 * at) for at, prompt in enumerate(given)]
    engine = Engine(tiny_target("llama"), OracleDrafter(texts, VOCABULARY, plan=CHAIN), policy=policy, max_batch=rows)
    params = [SamplingParams(max_tokens=12 + 3 * at, ignore_eos=True) for at in range(4)]
    done = engine.generate(given, params)
    assert [prompt + one.tokens for prompt, one in zip(given, done, strict=True)] == texts
    assert max(policy.asked) == rows


def test_rows_with_plans_of_their_own_are_not_asked_about_at_every_step():
    model, given, policy = tiny_model("llama"), prompts(2), Alternating()
    texts = [prompt + greedy_reference(model, prompt, 20) for prompt in given]
    engine = Engine(tiny_target("llama"), OracleDrafter(texts, VOCABULARY, plan=CHAIN), policy=policy, max_batch=2)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    for plan in (NO_DRAFT, CHAIN):
        policy.asked.clear()
        done = engine.generate(given, params, plan=plan)
        assert [prompt + one.tokens for prompt, one in zip(given, done, strict=True)] == texts
        assert 0 < len(policy.asked) <= 2 and not any(policy.asked), "only when one of them begins"
    engine.generate(given, params)
    assert len(policy.asked) > 4


def test_a_fitted_policy_counts_the_steps_that_nobody_asked_about():
    long = profile(cost=0.3)
    arms = tuple(replace(arm, seconds=tuple(0.001 * took for took in arm.seconds)) for arm in long.arms)
    policy, row, load = Fitted(Known(Profile(long.rows, arms))), RowHistory(False, 5), Load(1, 0, 0, 1)
    depths, asked = [], 0
    while len(depths) < 2000:
        (choice,) = policy.choose(load, [row])
        asked += 1
        for _ in range(1 + policy.holds):
            depths.append(choice.plan.depth)
            row.note(0, choice.plan.depth, NO_DRAFT)
    assert sum(policy.steps) == len(depths), "those that nobody asked about too, as soon as they are taken"
    pauses = "".join("d" if depth else "." for depth in depths).strip(".").replace("d", " ").split()
    assert len(pauses[0]) == LAID_ASIDE, "no trial comes late"
    assert asked < len(depths) / 20, "trials are asked about more often than every other answer's time is over"


def test_short_texts_one_after_another_lose_no_steps():
    long = profile(cost=0.3)
    arms = tuple(replace(arm, seconds=tuple(0.001 * took for took in arm.seconds)) for arm in long.arms)
    policy, load, depths = Fitted(Known(Profile(long.rows, arms))), Load(1, 0, 0, 1), list[int]()
    while len(depths) < 2000:
        row, left = RowHistory(False, 5), 8
        while left:
            (choice,) = policy.choose(load, [row])
            steps = min(left, 1 + policy.holds)
            left -= steps
            for _ in range(steps):
                depths.append(choice.plan.depth)
                row.note(0, choice.plan.depth, NO_DRAFT)
        policy.choose(Load(0, 0, 0, 1), [])  # a moment without rows
    pauses = "".join("d" if depth else "." for depth in depths).strip(".").replace("d", " ").split()
    assert max(map(len, pauses)) < LONGEST_WAIT + HELD + 8 and sum(policy.steps) == len(depths)
