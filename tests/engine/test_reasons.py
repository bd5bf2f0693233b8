"""A policy says why: in words for whoever reads, by a few labels for whoever counts."""

from dataclasses import replace

import pytest

from draftsmith.engine import Engine
from draftsmith.engine.evidence import FIRST_WAIT, LONGEST_WAIT
from draftsmith.engine.fitted import Fitted
from draftsmith.engine.known import Known
from draftsmith.engine.policy import Fixed, OffAbove, RowHistory
from draftsmith.engine.profile import Profile
from draftsmith.engine.reasons import LABELS, Weighed, shape_in_words
from draftsmith.engine.settling import PATIENCE
from draftsmith.plan import NO_COPY, NO_DRAFT, Plan
from draftsmith.types import SamplingParams
from tests.helpers.oracle import oracle_for
from tests.helpers.profiles import CHAINS, go, load, profile
from tests.helpers.tiny import greedy_reference, prompts, tiny_model, tiny_target


def short(found: Profile) -> Profile:
    """Steps of milliseconds, where all rows do the same."""
    arms = tuple(replace(arm, seconds=tuple(0.001 * took for took in arm.seconds)) for arm in found.arms)
    return Profile(found.rows, arms)


def reason(policy: Fitted, history: RowHistory, rows: int = 1) -> Weighed:
    """Ask once, and return why."""
    policy.choose(load(rows), [history])
    (why,) = policy.reasons(load(rows), [history])
    assert isinstance(why, Weighed)
    return why


@pytest.mark.parametrize("made", [profile, lambda **options: short(profile(**options))])
def test_it_says_what_it_expects_of_a_draft(made):
    why = reason(Fitted(Known(made(cost=0.15))), RowHistory(False, 5))
    assert why.label == "pays"
    assert why.sentence() == "chain of 2: expects 2.0 tokens for 1.3 plain steps"


@pytest.mark.parametrize("made", [profile, lambda **options: short(profile(**options))])
def test_it_says_how_often_guesses_stay_and_what_would_pay(made):
    policy, history = Fitted(Known(made(cost=0.3))), RowHistory(False, 5)
    go(policy, history, 4 * FIRST_WAIT, 0)
    depths = go(policy, history, 8 * FIRST_WAIT, 0)
    while depths[-2] == 0 or depths[-1] > 0:  # until a pause begins
        depths += go(policy, history, 1, 0)
        assert len(depths) < 2000
    why = reason(policy, history)
    needed = why.would_pay()
    assert why.label == "does_not_pay" and needed is not None and why.stays < needed
    assert why.sentence() == (
        f"no draft: guesses of this text stay {why.stays:.2f} of the time, {needed:.2f} would pay"
    )
    # What is told is where the policy turns: a little more pays, a little less does not.
    arms = made(cost=0.3).arms

    def gain(first: float) -> float:
        odds = first / arms[1].survival[0]
        plain = arms[0].seconds[0]
        return max(arm.accepted(odds) - arm.seconds[0] / plain + 1 for arm in arms[1:]) - (PATIENCE - 1)

    assert gain(needed + 0.01) > 0 > gain(needed - 0.01)


def test_it_says_that_it_probes():
    policy, history = Fitted(Known(profile(cost=0.3))), RowHistory(False, 5)
    labels = []
    for _ in range(100):
        why = reason(policy, history)
        labels.append(why.label)
        depth = policy.choices[0].plan.depth if why.label == "does_not_pay" else why.arms[why.at].plan.depth
        history.note(0, depth, NO_DRAFT)
    assert labels.count("probing") >= 2 and labels[0] == "pays" and labels[-1] == "does_not_pay"
    assert "probing with a chain of" in next(
        why.sentence() for why in [reason(policy, history) for _ in range(LONGEST_WAIT)] if why.label == "probing"
    )


@pytest.mark.parametrize("made", [profile, lambda **options: short(profile(**options))])
def test_a_batch_that_is_too_large_is_told_from_a_text_that_is_too_hard(made):
    policy = Fitted(Known(made(cost=0.9, survival=(1.0, 1.0, 1.0, 1.0), rows=(1, 4)), rows=None))
    rows = [RowHistory(False, 5) for _ in range(4)]
    for _ in range(3):
        policy.choose(load(4), rows)
        told = policy.reasons(load(4), rows)
        assert [why.label for why in told] == ["batch_too_large"] * 4
    assert "a step of 4 texts" in told[0].sentence()


@pytest.mark.parametrize("made", [profile, lambda **options: short(profile(**options))])
def test_every_row_has_a_reason_of_this_step_whoever_comes_and_goes(made):
    """A row alone would gain by a draft if all guesses stayed, four rows would not."""
    policy = Fitted(Known(made(cost=0.7), hope=3.0))
    rows = [RowHistory(False, 5) for _ in range(4)]

    def labels(asked: list[RowHistory], decoding: int) -> list[str]:
        policy.choose(load(decoding), asked)
        return [why.label for why in policy.reasons(load(decoding), asked)]

    assert labels(rows[:1], 1) == ["does_not_pay"]
    assert labels([], 1) == [], "the only row drafts what its request expects"
    assert labels(rows[:1], 1) == ["does_not_pay"]
    assert labels(rows[:1], 4) == ["batch_too_large"], "the others bring plans of their own"
    assert labels(rows[:1], 4) == ["batch_too_large"]
    assert labels(rows, 4) == ["batch_too_large"] * 4
    assert labels(rows[:1], 1) == ["does_not_pay"]


def test_no_reason_is_left_over_where_rows_begin_or_end_to_draft_alike():
    """Of this target's steps those of one row are short, and those of four are long."""
    arms = tuple(
        replace(arm, seconds=(0.01 * arm.seconds[0], 4 * arm.seconds[1]))
        for arm in profile(cost=0.7).arms
    )
    policy = Fitted(Known(Profile((1, 4), arms), hope=3.0))
    rows = [RowHistory(False, 5) for _ in range(4)]
    for asked in (rows[:1], rows[:1], rows, rows[:1], rows[:1], rows):
        policy.choose(load(len(asked)), asked)
        told = policy.reasons(load(len(asked)), asked)
        assert [why.rows for why in told if isinstance(why, Weighed)] == [len(asked)] * len(asked)


def test_no_share_pays_where_the_dearest_neighbours_need_the_time():
    seconds = (1.0, 9.0, 9.0, 9.0, 9.0)
    why = Weighed("does_not_pay", profile().arms, seconds, 1, [1, 2, 3, 4], 0.5, 1.0, 1.0, 1.0, 1.0, 0.03, 2)
    assert why.would_pay() is None and why.sentence().endswith("no share would pay")


@pytest.mark.parametrize(("plan", "words"), [
    (NO_DRAFT, "none"), (Plan((1, 1)), "chain of 2"), (Plan((2, 1)), "tree of 4"),
    (Plan((1, 1), factor=0.5), "chain of up to 2 with 0.5 guesses for each matched token"),
    (Plan((2, 1), factor=1.0), "tree of up to 4 with 1 guess for each matched token"),
    (Plan((1, 1), factor=1.0, confidence=1.0), "chain of up to 2 with 1 guess for each matched token and no others"),
    (Plan((1, 1), factor=NO_COPY), "chain of up to 2 with nothing looked up"),
    (
        Plan((1, 1), factor=NO_COPY, confidence=0.1),
        "chain of up to 2 with nothing looked up and guesses at least 10 % likely",
    ),
])
def test_shapes_are_told_in_words(plan: Plan, words: str):
    assert shape_in_words(plan) == words


def test_fixed_policies_say_so_too():
    rows = [RowHistory(False, 5)] * 3
    assert [why.label for why in Fixed(CHAINS[0]).reasons(load(3), rows)] == ["fixed"] * 3
    (why, *_) = OffAbove(CHAINS[0], 2).reasons(load(3), rows)
    assert why.label == "batch_too_large"
    assert why.sentence() == "batch too large to draft: 3 texts are written, and drafts are made for up to 2"
    assert OffAbove(CHAINS[0], 3).reasons(load(3), rows)[0].label == "fixed"
    never = Fitted(Known(profile(cost=0.9)))
    never.choose(load(3), rows)
    assert {why.label for why in never.reasons(load(3), rows)} == {"never_pays"}


def test_every_step_carries_the_reason_of_its_row():
    questions, params = prompts(4), SamplingParams(max_tokens=12)
    policy = Fitted(Known(profile(cost=0.15)))
    engine = Engine(tiny_target(), oracle_for(tiny_model(), questions), policy=policy, max_batch=4)
    foreseen = replace(params, prediction=greedy_reference(tiny_model(), questions[3], 12))
    requests = [
        *engine.admit_call(questions[:1], params, Plan((1,))), *engine.admit_call(questions[1:2], params, NO_DRAFT),
        *engine.admit_call(questions[2:3], params), *engine.admit_call(questions[3:], foreseen),
    ]
    labels: dict[int, set[str]] = {engine.core.add(request): set() for request in requests}
    while engine.core.has_work:
        for one in engine.core.step():
            if one.made is not None:
                assert one.made.why is not None and one.made.why.label in LABELS
                labels[one.request.id].add(one.made.why.label)
    asked, plain, free, expected = labels.values()
    assert asked == plain == {"asked"}
    assert free and free <= {"pays", "does_not_pay", "probing"}
    assert "prediction" in expected
