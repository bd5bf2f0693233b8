"""One budget for all rows: how many guesses a step has room for decides which rows draft how much."""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch import nn

from draftsmith.engine.arm import Arm
from draftsmith.engine.budget import Budget, Plans, Shares, Wish
from draftsmith.engine.fitted import Fitted
from draftsmith.engine.known import Known
from draftsmith.engine.policy import RowHistory
from draftsmith.engine.profile import Profile, WidthCost
from draftsmith.evaluation.measuring.width_costs import WIDTHS, measure_width_cost, rising
from draftsmith.plan import NO_DRAFT, Plan
from tests.helpers.profiles import load
from tests.helpers.tiny import prompts, tiny_target

JUMP = WidthCost((1, 14, 15, 28, 29, 42), (1.0, 1.0, 1.5, 2.0, 2.5, 3.0))
"""Up to fourteen tokens cost what one costs; beyond them every one costs a little, and the first one much."""
ROWS = (1, 2, 4, 8, 16)
ALONE = Arm(NO_DRAFT, (), tuple(map(JUMP.of, ROWS)))


def arm(depth: int, stay: float, drafter_s: float = 0.0) -> Arm:
    """A chain whose steps take as long as `JUMP` says if all rows draft so, and what the drafter takes."""
    seconds = tuple(JUMP.of(rows * (1 + depth)) + drafter_s for rows in ROWS)
    return Arm(Plan((1,) * depth), tuple(stay ** (at + 1) for at in range(depth)), seconds)


def budget(rows: int, width: WidthCost = JUMP) -> Budget:
    return Budget(width, 1 / rows, 1 / rows, rows)


def plans(found: Budget, arms: Sequence[Arm], brings: Sequence[float]) -> Plans:
    alike = [arm.seconds[ROWS.index(found.rows)] / found.rows for arm in arms]
    return found.plans(brings, [float(arm.plan.depth) for arm in arms], alike, [0.0] * len(arms))


GUESS = [ALONE, arm(1, 0.7)]


def test_as_many_rows_draft_as_there_is_room_for():
    """Eight rows and six guesses fill the fourteen tokens that cost nothing; who has drafted before goes on."""
    found = budget(8)
    alike, better = plans(found, GUESS, [1.0, 1.7]), plans(found, GUESS, [1.0, 1.9])
    for drafting in (set(range(6)), {0, 2, 3, 5, 6, 7}):
        shares = found.shared_out([Wish(alike, int(row in drafting)) for row in range(8)])
        assert shares.price == pytest.approx(8 + 6 * 0.7)
        assert drafting == rows_with_room(shares, alike)
    shares = found.shared_out([Wish(better if row > 1 else alike, int(row < 6)) for row in range(8)])
    assert rows_with_room(shares, alike) == set(range(2, 8)), "those whose guesses stay more often"


def rows_with_room(shares: Shares, some: Plans) -> set[int]:
    """Return the rows of which another guess costs nothing."""
    spent = [shares.spent(row, some) for row in range(8)]
    assert all(one == pytest.approx(none) or one > none + 0.49 for none, one, *_ in spent)
    return {row for row, (none, one, *_) in enumerate(spent) if one < none + 0.49}


def test_a_row_that_takes_another_plan_leaves_or_takes_room():
    found = budget(4)
    some = plans(found, [ALONE, arm(1, 0.9), arm(5, 0.9)], [1.0, 1.9, 3.0])
    shares, spent = found.shared_out([Wish(some, 0)] * 4), list[float]()
    for taken, added in (((0, 0, 0), 0.0), ((1, 2, 0), 0.5), ((2, 2, 0), 0.5 + 4 / 26)):
        for row, plan in enumerate(taken):
            shares.take(row, plan)
        spent = shares.spent(3, some)
        assert spent[2] - spent[0] == pytest.approx(added), "five guesses more than the others make"
    most = shares.spent(3, some._replace(guesses=[0.0, 1.0, 18.0]))
    assert most[2] == pytest.approx(spent[0] + 1.5 + 3 / 26), "a jump more"


def test_rows_on_trial_keep_their_guesses_and_others_what_is_left():
    found = budget(8)
    some = plans(found, [ALONE, arm(1, 0.9), arm(5, 0.1)], [1.0, 1.9, 1.1])
    shares = found.shared_out([Wish(some, 2, held=True), *[Wish(some, 0)] * 7])
    assert shares.price == pytest.approx(7 + 1.1 + 0.9), "five guesses on trial, and one more"


@pytest.mark.parametrize("seed", range(40))
def test_what_is_shared_out_is_nearly_the_best_of_all(seed: int):
    """Against all ways of giving four rows one of four plans."""
    rng = random.Random(seed)
    arms = [ALONE, *(arm(depth, 0.5, rng.uniform(0, 0.1)) for depth in (1, 3, 6))]
    found, wishes = budget(4), list[Wish]()
    for _ in range(4):
        stay = rng.uniform(0.1, 0.95)
        kept = [sum(stay ** (at + 1) for at in range(depth)) for depth in (0, 1, 3, 6)]
        wishes.append(Wish(plans(found, arms, [1 + some for some in kept]), rng.randrange(4)))

    def speed(taken: Sequence[int]) -> float:
        tokens = sum(wish.plans.brings[plan] for wish, plan in zip(wishes, taken, strict=True))
        guesses = sum(wish.plans.guesses[plan] for wish, plan in zip(wishes, taken, strict=True))
        drafter = sum(arms[plan].seconds[2] - JUMP.of(4 * (1 + arms[plan].plan.depth)) for plan in taken if plan) / 4
        return tokens / (JUMP.of(4 + guesses) + drafter)

    best = max(map(speed, itertools.product(range(4), repeat=4)))
    assert best >= found.shared_out(wishes).price * (1 - 1e-9), "no more than is possible"
    assert found.shared_out(wishes).price >= 0.95 * best


@pytest.mark.parametrize("seed", range(40))
def test_what_a_drafter_takes_once_for_all_rows_is_shared_out_among_them(seed: int):
    """Against all ways of giving four rows one of four plans, the last of which makes now more and now fewer guesses.

    A copy of the target reads its weights once for every guess of a step, for one row as for four.
    """
    rng, found, wishes = random.Random(seed), budget(4), list[Wish]()
    alone, each = rng.uniform(0.1, 0.4), rng.uniform(0.01, 0.1)
    depths, guesses, varying = (0, 1, 4, 9), [0.0, 1.0, 4.0, 0.0], [0.0, 0.0, 0.0, 7.0]
    begun, drafting = [depth * alone for depth in depths], [depth * each for depth in depths]
    alike = [0.25 + (took + 4 * more) / 4 for took, more in zip(begun, drafting, strict=True)]
    for _ in range(4):
        stay = rng.uniform(0.5, 0.99)
        brings = [1 + sum(stay ** (at + 1) for at in range(depth)) for depth in depths]
        wishes.append(Wish(Plans(brings, guesses, varying, alike, drafting, begun), 0))

    def speed(taken: Sequence[int]) -> float:
        tokens = sum(wish.plans.brings[plan] for wish, plan in zip(wishes, taken, strict=True))
        verified_s = found.step_s(sum(guesses[plan] for plan in taken), sum(varying[plan] for plan in taken))
        return tokens / (verified_s + sum(drafting[plan] for plan in taken) + sum(begun[plan] for plan in set(taken)))

    best = max(map(speed, itertools.product(range(4), repeat=4)))
    shares = found.shared_out(wishes)
    assert shares.price == pytest.approx(speed(shares.plans)) and shares.price >= 0.95 * best


def test_rows_go_on_as_before_unless_other_plans_are_clearly_faster():
    found = budget(4, WidthCost((1, 2), (1.0, 1.0)))
    for faster, changed in ((1.01, False), (1.1, True)):
        some = plans(found, [ALONE, arm(1, 0.9), arm(1, 0.9)], [1.0, 1.9, 1.9 * faster])
        shares = found.shared_out([Wish(some, 1)] * 4)
        assert shares.plans == [1 + changed] * 4


def test_without_widths_a_guess_costs_what_its_plan_says():
    arms = [ALONE, Arm(Plan((1, 1)), (0.9, 0.8), (1.2, 1.2, 1.4, 1.4, 1.4))]
    found = budget(4, WidthCost((1, 2), (1.0, 1.0)))
    some = plans(found, arms, [1.0, 2.7])
    shares = found.shared_out([Wish(some, 0)] * 4)
    assert shares.price == pytest.approx(4 * 2.7 / 1.4)
    assert shares.spent(1, some) == pytest.approx([0.25, 0.35])


def test_longer_texts_add_to_a_step_and_do_not_widen_its_jumps():
    long = Budget(JUMP, 2 / 8, 1 / 8, 8)
    assert [long.step_s(guesses) for guesses in (0, 6, 7, 20)] == pytest.approx([2.0, 2.0, 2.5, 3.0])


def test_a_drafter_that_reads_its_weights_is_paid_for_once():
    """It takes 0.4 s for one row and as long for eight, so it does not pay for one row, and does for all of them."""
    found = budget(8, WidthCost((1, 2), (1.0, 1.0)))
    good = found.plans([1.0, 2.5], [0.0, 3.0], [1 / 8, 1.4 / 8], [0.0, 0.4])
    poor = found.plans([1.0, 1.1], [0.0, 3.0], [1 / 8, 1.4 / 8], [0.0, 0.4])
    assert (good.drafting[1], good.begun[1]) == pytest.approx((0.0, 0.4))
    assert found.shared_out([Wish(good, 0)] + [Wish(poor, 0)] * 7).price == pytest.approx(8.0), "one alone loses"
    shares = found.shared_out([Wish(good, 0)] * 4 + [Wish(poor, 0)] * 4)
    assert shares.price == pytest.approx((4 * 2.5 + 4 * 1.1) / 1.4), "the others draft for nothing then"
    assert shares.spent(0, good) == pytest.approx([1 / 8, 1 / 8]), "others have begun"
    for row in range(1, 8):
        shares.take(row, 0)
    assert shares.spent(0, good) == pytest.approx([1 / 8, 1 / 8 + 0.4])


class Jumping:
    """Rows that all accept as often as they are told, and the time that their steps take by `JUMP`."""

    def __init__(self, rows: int, depths: Sequence[int]) -> None:
        found = Profile(ROWS, (ALONE, *(arm(depth, 0.6) for depth in depths)))
        self.policy = Fitted(Known(replace(found, width_cost=JUMP)))
        self.histories = [RowHistory(False, 5) for _ in range(rows)]
        self.rng, self.drafting = random.Random(1), list[frozenset[int]]()

    def run(self, stay: float, steps: int) -> float:
        """Decode; return how many times as fast as plain decoding."""
        tokens, seconds, count = 0, 0.0, len(self.histories)
        for _ in range(steps):
            choices = self.policy.choose(load(count), self.histories)
            made = [choice.plan.depth for choice in choices]
            self.drafting.append(frozenset(row for row, depth in enumerate(made) if depth))
            for history, choice in zip(self.histories, choices, strict=True):
                stayed = 0
                while stayed < choice.plan.depth and self.rng.random() < stay:
                    stayed += 1
                history.note(stayed, choice.plan.depth, choice.plan)
                tokens += 1 + stayed
            seconds += JUMP.of(count + sum(made))
        return tokens / seconds * JUMP.of(count) / count


def test_six_of_eight_texts_draft_and_stay_with_it():
    """All are alike. With all of them drafting a step would take 1.5 times as long, which brings less."""
    world = Jumping(8, [1])
    assert world.run(0.7, 300) == pytest.approx(1 + 6 / 8 * 0.7, rel=0.02)
    late = world.drafting[100:]
    assert sum(len(rows) == 6 for rows in late) > 0.97 * len(late), "but for a few trials"
    assert sum(one != other for one, other in itertools.pairwise(late)) < 0.25 * len(late), "they seldom take turns"


def best(rows: int, depths: Sequence[int], stay: float) -> float:
    """Return how many times as fast as plain decoding it is that some rows draft, all alike."""
    kept = {depth: sum(stay ** (at + 1) for at in range(depth)) for depth in depths}
    return max(
        (1 + drafting * kept[depth] / rows) / JUMP.of(rows + drafting * depth) * JUMP.of(rows)
        for depth in depths for drafting in range(rows + 1)
    )


CROWDS = [(4, [1, 2, 3, 4]), (8, [1]), (8, [4]), (8, [1, 2, 3, 4]), (12, [3]), (13, [2]), (14, [1, 2, 4]), (16, [1, 3])]


@pytest.mark.parametrize(("rows", "depths"), CROWDS)
def test_at_no_share_of_guesses_is_there_a_cliff(rows: int, depths: list[int]):
    for stay in (0.0, 0.3, 0.7, 1.0):
        world = Jumping(rows, depths)
        assert world.run(stay, 60) > 0.88, "while it learns that fewer stay than were measured"
        found = world.run(stay, 400)
        assert found > 0.97 and found > 0.88 * best(rows, depths, stay), stay


@pytest.mark.parametrize(("rows", "depths"), [crowd for crowd in CROWDS if crowd[0] != 12])
def test_where_the_room_ends_drafts_that_failed_are_taken_up_again(rows: int, depths: list[int]):
    """One row by itself would pay for the jump that all of them share."""
    world = Jumping(rows, depths)
    world.run(0.3, 60)
    world.run(1.0, 60)
    assert world.run(1.0, 400) > 0.83 * best(rows, depths, 1.0)


def test_a_row_without_a_draft_hears_from_others_that_guesses_stay():
    """Its place comes once another row ends, and a row that drafted keeps what it has shown itself."""
    world = Jumping(8, [1])
    world.run(0.95, 40)
    [waiting, *_] = set(range(8)) - world.drafting[-1]
    [ended, *_] = world.drafting[-1]
    rest = [history for at, history in enumerate(world.histories) if at != ended]
    choices = dict(zip(map(id, rest), world.policy.choose(load(7), rest), strict=True))
    assert choices[id(world.histories[waiting])].plan.depth == 1


def test_a_text_that_finds_much_costs_what_was_measured_of_such_steps():
    """Of a lookup that seldom finds something, the time of a step says nothing of steps in which all rows find some."""
    arms = (
        replace(ALONE, seconds=(1.0,) * 5),
        Arm(Plan((1,) * 8), (0.5,) * 8, (1.02,) * 5, found=0.01, full=(1.5,) * 5),
    )
    policy, histories = Fitted(Known(Profile(ROWS, arms), hope=9.0)), [RowHistory(False, 5) for _ in range(8)]
    for _ in range(100):
        choices = policy.choose(load(8), histories)
        for history, choice in zip(histories, choices, strict=True):
            history.note(choice.plan.depth, choice.plan.depth, choice.plan)
    assert all(choice.plan.depth == 8 for choice in choices), "nine tokens for one and a half steps"


def test_the_reason_is_that_there_is_no_room():
    world = Jumping(8, [1])
    world.run(0.7, 50)
    reasons = world.policy.reasons(load(8), world.histories)
    assert [reason.label for reason in reasons].count("no_room") == 2
    drafts, none = (next(one for one in reasons if one.label == kind) for kind in ("pays", "no_room"))
    assert drafts.sentence().startswith("chain of 1: expects 1.")
    assert none.sentence() == "no draft: guesses of other texts bring more, and no more of them pay in one step"


def test_what_a_step_costs_by_its_width_lies_on_lines_and_goes_on():
    assert [JUMP.of(width) for width in (1, 7, 14.5, 15, 21.5)] == [1.0, 1.0, 1.25, 1.5, 1.75]
    assert JUMP.of(63) == pytest.approx(3.0 + 21 * (3.0 - 2.0) / (42 - 28)), "as over the last half, and no jump"
    found = replace(Profile((1,), (replace(ALONE, seconds=(1.0,)),)), width_cost=JUMP)
    written = found.to_json()
    assert Profile.from_json(written) == found
    assert WidthCost((1, 40), (1.0, 2.0)).of(79) == 3.0
    for damaged in ([1, 14, 14, 28, 29, 42], [0, 14, 15, 28, 29, 42], [5, 14, 15, 28, 29, 42], [1, 14]):
        with pytest.raises(ValueError):
            Profile.from_json({**written, "width_cost": {**written["width_cost"], "widths": damaged}})
    falling, endless = [1.0, 1.0, 1.5, 2.0, 1.9, 3.0], [1.0, 1.0, 1.5, 2.0, 2.5, math.inf]
    for seconds in (falling, endless, [0.0] * 6, [1.0, math.nan] * 3):
        with pytest.raises(ValueError):
            Profile.from_json({**written, "width_cost": {**written["width_cost"], "seconds": seconds}})


def test_measured_widths_never_cost_less_than_narrower_ones():
    assert rising([0.0, -1.0, 2.0, 1.0, 5.0]) == [0.0, 0.0, 1.5, 1.5, 5.0]
    assert rising([0.0, 3.0, 3.0, 1.5, 4.0]) == [0.0, 2.5, 2.5, 2.5, 4.0]
    assert rising([0.0, -0.4, 0.2, -0.1, 0.9]) == [0.0, 0.0, 0.05, 0.05, 0.9], "chance falls on both sides of nothing"


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
    assert measure_width_cost(target, [3] * (target.max_length - 11)) is None, "no room for guesses"


def test_guesses_whose_number_differs_leave_less_room_for_others():
    """Four rows: three take a plan that makes three guesses on average, and the fourth weighs one guess, and five."""
    found = budget(4)
    brings, alike = [1.0, 3.0, 1.9, 3.0], [0.25, 0.28, 0.25, JUMP.of(24) / 4]
    some = found.plans(brings, [0.0, 0.0, 1.0, 5.0], alike, [0.0] * 4, [0.0, 3.0, 0.0, 0.0])
    shares = found.shared_out([Wish(some, 1, held=True)] * 3 + [Wish(some, 0)])
    spent = shares.spent(3, some)
    assert spent[1] - spent[0] == pytest.approx(0.03), "as measured, whatever the others draft"
    assert spent[2] - spent[0] == pytest.approx(0.0), "fourteen tokens"
    assert spent[3] - spent[0] == pytest.approx(JUMP.of(18) - JUMP.of(13)), "four more, beyond the jump"
