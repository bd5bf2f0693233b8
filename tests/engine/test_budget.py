"""One budget for all rows: how many guesses a step has room for decides which rows draft how much."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch import nn

from draftsmith.engine.arm import Arm
from draftsmith.engine.budget import Budget, Wish
from draftsmith.engine.fitted import Fitted
from draftsmith.engine.known import Known
from draftsmith.engine.policy import RowHistory
from draftsmith.engine.profile import Costs, Profile, WidthCost
from draftsmith.evaluation.measuring.width_costs import WIDTHS, measure_width_cost, rising
from draftsmith.plan import NO_DRAFT, Plan
from tests.helpers.profiles import load
from tests.helpers.tiny import prompts, tiny_target

JUMP = WidthCost((1, 14, 15, 28, 29, 42), (1.0, 1.0, 1.5, 2.0, 2.5, 3.0))
"""Up to fourteen tokens cost what one costs; beyond them every one costs a little, and the first one much."""
ALONE = Arm(NO_DRAFT, (), (1.0,) * 4)
ROWS = (1, 2, 4, 8)


def arm(depth: int, stay: float, drafter_s: float = 0.0) -> Arm:
    """A chain whose steps take as long as `JUMP` says if all rows draft so, and what the drafter takes."""
    seconds = tuple(JUMP.of(rows * (1 + depth)) + drafter_s for rows in ROWS)
    return Arm(Plan((1,) * depth), tuple(stay ** (at + 1) for at in range(depth)), seconds)


def budget(rows: int, arms: Sequence[Arm], width: WidthCost = JUMP) -> Budget:
    return Budget(arms, Costs([arm.seconds[ROWS.index(rows)] / rows for arm in arms], [], []), width, rows)


def test_as_many_rows_draft_as_there_is_room_for():
    """Eight rows and six guesses fill the fourteen tokens that cost nothing; who has drafted before goes on."""
    arms = [ALONE, arm(1, 0.7)]
    found = budget(8, arms)
    assert found.shared_out([Wish([1.0, 1.7], [0.0, 1.0], 0)] * 8).price == pytest.approx((8 + 6 * 0.7) / 1.0)
    for drafting in (set(range(6)), {0, 2, 3, 5, 6, 7}):
        wishes = [Wish([1.0, 1.7], [0.0, 1.0], int(row in drafting)) for row in range(8)]
        shares = found.shared_out(wishes)
        for row in range(8):
            none, guess = shares.spent(row)
            added = guess - none
            assert added == pytest.approx(0.0) if row in drafting else added > 0.49
    better = [Wish([1.0, 1.9 if row > 1 else 1.7], [0.0, 1.0], int(row < 6)) for row in range(8)]
    shares = found.shared_out(better)
    assert [shares.spent(row)[1] - shares.spent(row)[0] > 0.49 for row in range(8)] == [True] * 2 + [False] * 6


def test_a_row_that_takes_another_plan_leaves_or_takes_room():
    found = budget(4, [ALONE, arm(1, 0.9), arm(5, 0.9)])
    wishes = [Wish([1.0, 1.9, 3.0], [0.0, 1.0, 5.0], 0)] * 4
    shares = found.shared_out(wishes)
    for plans, added in (((0, 0, 0), 0.0), ((1, 2, 0), 0.5), ((2, 2, 0), 0.5 + 4 / 26)):
        for row, plan in enumerate(plans):
            shares.take(row, plan)
        spent = shares.spent(3)
        assert spent[2] - spent[0] == pytest.approx(added), "five guesses more than the others make"
    assert shares.hoped(3, [0.0, 1.0, 18.0], 2) == pytest.approx(spent[0] + 1.5 + 3 / 26), "a jump more"


@pytest.mark.parametrize("seed", range(40))
def test_what_is_shared_out_is_nearly_the_best_of_all(seed: int):
    """Against all ways of giving four rows one of four plans."""
    rng = random.Random(seed)
    arms = [ALONE, *(arm(depth, 0.5, rng.uniform(0, 0.1)) for depth in (1, 3, 6))]
    found, wishes = budget(4, arms), list[Wish]()
    for _ in range(4):
        stay = rng.uniform(0.1, 0.95)
        kept = [sum(stay ** (at + 1) for at in range(depth)) for depth in (0, 1, 3, 6)]
        wishes.append(Wish([1 + some for some in kept], [0.0, 1.0, 3.0, 6.0], rng.randrange(4)))

    def speed(plans: Sequence[int]) -> float:
        tokens = sum(wish.brings[plan] for wish, plan in zip(wishes, plans, strict=True))
        guesses = sum(wish.guesses[plan] for wish, plan in zip(wishes, plans, strict=True))
        drafter = sum(arms[plan].seconds[2] - JUMP.of(4 * (1 + arms[plan].plan.depth)) for plan in plans if plan) / 4
        return tokens / (JUMP.of(4 + guesses) + drafter)

    best = max(map(speed, itertools.product(range(4), repeat=4)))
    assert best >= found.shared_out(wishes).price * (1 - 1e-9), "no more than is possible"
    assert found.shared_out(wishes).price >= 0.93 * best


def test_without_widths_a_guess_costs_what_its_plan_says():
    arms = [ALONE, Arm(Plan((1, 1)), (0.9, 0.8), (1.2, 1.2, 1.4, 1.4))]
    found = budget(4, arms, WidthCost((1, 2), (1.0, 1.0)))
    shares = found.shared_out([Wish([1.0, 2.7], [0.0, 2.0], 0)] * 4)
    assert shares.price == pytest.approx(4 * 2.7 / 1.4)
    assert shares.spent(1) == pytest.approx([0.25, 0.35])


def test_six_of_eight_texts_draft_and_stay_with_it():
    """All are alike. With all of them drafting a step would take 1.5 times as long, which brings less."""
    profile = replace(Profile(ROWS, (ALONE, arm(1, 0.7))), width_cost=JUMP)
    policy, histories = Fitted(Known(profile)), [RowHistory(False, 5) for _ in range(8)]
    drafting = list[frozenset[int]]()
    for step in range(300):
        choices = policy.choose(load(8), histories)
        drafting.append(frozenset(row for row, choice in enumerate(choices) if choice.plan.depth))
        for row, (history, choice) in enumerate(zip(histories, choices, strict=True)):
            history.note(int(choice.plan.depth > 0 and (7 * step + 3 * row) % 10 < 7), choice.plan.depth, choice.plan)
    late = drafting[50:]
    assert sum(len(rows) == 6 for rows in late) > 0.8 * len(late)
    assert sum(one != other for one, other in itertools.pairwise(late)) < 0.2 * len(late), "they hardly take turns"


def test_what_a_step_costs_by_its_width_lies_on_lines_and_goes_on():
    assert [JUMP.of(width) for width in (1, 7, 14.5, 15, 21.5)] == [1.0, 1.0, 1.25, 1.5, 1.75]
    assert JUMP.of(63) == pytest.approx(3.0 + 21 * (3.0 - 2.0) / (42 - 28)), "as over the last half, and no jump"
    found = replace(Profile((1,), (replace(ALONE, seconds=(1.0,)),)), width_cost=JUMP)
    written = found.to_json()
    assert Profile.from_json(written) == found
    for damaged in ([1, 14, 14, 28, 29, 42], [0, 14, 15, 28, 29, 42], [1, 14]):
        with pytest.raises(ValueError):
            Profile.from_json({**written, "width_cost": {**written["width_cost"], "widths": damaged}})
    for seconds in ([1.0, 1.0, 1.5, 2.0, 1.9, 3.0], [0.0] * 6, [1.0, 1.0, 1.5, 2.0, 2.5, float("inf")]):
        with pytest.raises(ValueError):
            Profile.from_json({**written, "width_cost": {**written["width_cost"], "seconds": seconds}})


def test_measured_widths_never_cost_less_than_narrower_ones():
    assert rising([0.0, -1.0, 2.0, 1.0, 5.0]) == [0.0, 0.0, 1.5, 1.5, 5.0]
    assert rising([0.0, 3.0, 3.0, 1.5, 4.0]) == [0.0, 2.5, 2.5, 2.5, 4.0]


def test_a_step_is_timed_at_every_width():
    """A clock that stands still but for the target, which takes a second, and one more for every token beyond ten."""
    target, now = tiny_target(), [0.0]

    def read(_: nn.Module, given: tuple[object, ...], named: dict[str, object]) -> None:
        tokens = named["input_ids"] if "input_ids" in named else given[0]
        width = tokens.numel()  # type: ignore[attr-defined]
        now[0] += 1.0 + max(0, width - 10)

    hook = target.model.register_forward_pre_hook(read, with_kwargs=True)
    try:
        found = measure_width_cost(target, prompts(1)[0], clock=lambda: now[0])
    finally:
        hook.remove()
    assert found is not None and found.widths == (1, *WIDTHS[: len(found.widths) - 1]) and found.widths[-1] >= 14
    assert found.seconds == tuple(1.0 + max(0, width - 10) for width in found.widths)
    assert measure_width_cost(target, [3] * (target.max_length - 15)) is None, "no room for guesses"
