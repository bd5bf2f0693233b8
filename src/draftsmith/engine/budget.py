"""One budget of guesses for rows that each take a plan of their own.

What a guess costs depends on all guesses of the step together: up to some number of tokens a processor verifies them at
about the price of one, and the next ones cost clearly more. So a row's plan is weighed by how much longer the step
takes with it, beside what the other rows draft. That holds for plans that make as many guesses at every step. How many
a lookup makes, or a chain that ends where its drafter is unsure, differs from step to step, and so does whether there
is room for them. These plans cost what was measured of them, whatever other rows draft.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from draftsmith.engine.expected import values_of
from draftsmith.engine.profile import WidthCost

KEPT = 1.1
"""Guesses of the plan that a row took last count this many times when it is decided whose are taken first, so that
equal rows do not take turns."""
FEWEST = 1e-6
"""No plan counts as making fewer guesses than this more than another, so that there is something to divide by."""


class Plans(NamedTuple):
    """What every plan brings and costs a row.

    Args:
        brings: tokens of a step.
        guesses: those that it makes at every step; 0 for plans that make more or fewer of them from step to step.
        alike: a row's share of the seconds of a step, if all rows take the plan.
        drafting: the part of these that is not the target's.
    """

    brings: Sequence[float]
    guesses: Sequence[float]
    alike: Sequence[float]
    drafting: Sequence[float]


class Wish(NamedTuple):
    """A row's plans, the one that it took last, and whether it takes this one again whatever is best."""

    plans: Plans
    taken: int
    held: bool = False


class Budget:
    """What steps of a number of rows take, by the guesses of all of them.

    Args:
        width: what the target's steps take by the number of tokens.
        plain: a row's share of the seconds of a step without guesses.
        plain_short: the same behind texts as short as those that `width` was measured with.
        rows: how many rows there are.
    """

    def __init__(self, width: WidthCost, plain: float, plain_short: float, rows: int) -> None:
        self.rows = rows
        self._width, self._plain_s, self._narrowest = width, rows * plain, width.of(rows)
        # Other rows and another time than those of the measurement; what longer texts cost comes on top.
        self._scale = rows * plain_short / self._narrowest

    def step_s(self, guesses: float) -> float:
        """Return the seconds in which the target verifies so many guesses, all rows together."""
        return self._plain_s + self._scale * (self._width.of(self.rows + guesses) - self._narrowest)

    def plans(self, brings: Sequence[float], guesses: Sequence[float], alike: Sequence[float]) -> Plans:
        """Return what plans bring and cost, see `Plans`."""
        drafting = [
            max(0.0, took - self.step_s(self.rows * made) / self.rows)
            for took, made in zip(alike, guesses, strict=True)
        ]
        return Plans(brings, guesses, alike, drafting)

    def beside(self, plans: Plans, others: float = 0.0) -> list[float]:
        """Return what plans cost a row: its share of a step without guesses, and what its own add to the step.

        Args:
            others: the guesses of all other rows.
        """
        without = self.step_s(others)
        shared = self.step_s(0.0) / self.rows - without
        each = zip(plans.guesses, plans.drafting, strict=True)
        return [shared + self.step_s(others + made) + took for made, took in each]

    def shared_out(self, wishes: Sequence[Wish]) -> "Shares":
        """Return plans of all rows that together bring nearly the most tokens a second.

        Guesses are taken in the order of what each of them brings, as many as pay, and of the others those that still
        pay then.
        """
        found, price = [0] * len(wishes), self.rows / self.step_s(0.0)
        for _ in range(2):  # what drafters cost is weighed by the price, which is known only then
            found, price = self._taken_in_order(wishes, price)
        return Shares(self, wishes, found, price)

    def _taken_in_order(self, wishes: Sequence[Wish], price: float) -> tuple[list[int], float]:
        found = [wish.taken if wish.held else 0 for wish in wishes]
        offered, paths = list[tuple[float, int, int]](), dict[tuple[int, int], list[tuple[float, int]]]()
        for row, wish in enumerate(wishes):
            if wish.held:
                continue
            key = id(wish.plans), wish.taken  # most rows are like another one
            if key not in paths:
                paths[key] = _path(wish, price)
            offered += [(worth, row, arm) for worth, arm in paths[key]]
        offered.sort(key=lambda one: -one[0])
        sums = [self.rows - len(wishes) + 0.0, 0.0, 0.0]  # tokens, guesses, seconds of the drafter
        for wish, arm in zip(wishes, found, strict=True):
            sums = _exchanged(sums, wish.plans, None, arm)
        speed = self._speed(sums)
        best, taken, count = speed, sums, 0
        plans = found.copy()
        for at, (_, row, arm) in enumerate(offered, start=1):
            sums = _exchanged(sums, wishes[row].plans, plans[row], arm)
            plans[row] = arm
            speed = self._speed(sums)
            if speed > best:
                best, taken, count = speed, sums, at
        for _, row, arm in offered[:count]:
            found[row] = arm
        for _, row, arm in offered[count:]:  # what is too much for one row may be less for another
            sums = _exchanged(taken, wishes[row].plans, found[row], arm)
            speed = self._speed(sums)
            if speed > best:
                best, taken, found[row] = speed, sums, arm
        return found, best

    def _speed(self, sums: Sequence[float]) -> float:
        """Return tokens a second."""
        tokens, guesses, drafting_s = sums
        return tokens / (self.step_s(guesses) + drafting_s)


def _exchanged(sums: Sequence[float], plans: Plans, before: int | None, arm: int) -> list[float]:
    """Return tokens, guesses and seconds of the drafter with another plan of one row, or with one where it had none."""
    each = plans.brings, plans.guesses, plans.drafting
    return [
        total + some[arm] - (0.0 if before is None else some[before]) for total, some in zip(sums, each, strict=True)
    ]


def _path(wish: Wish, price: float) -> list[tuple[float, int]]:
    """Return the plans worth taking one after the other, those of few guesses first, each with what a guess brings.

    None of them brings less for its guesses than a mixture of others.
    """
    guesses = wish.plans.guesses
    net = values_of(wish.plans.brings, price, wish.plans.drafting)

    def each(before: int, arm: int) -> float:
        return (net[arm] - net[before]) / max(FEWEST, guesses[arm] - guesses[before])

    path = [0]
    for arm in sorted(range(1, len(net)), key=lambda at: (guesses[at], -net[at])):
        if net[arm] <= net[path[-1]]:
            continue
        while len(path) > 1 and each(path[-2], arm) >= each(path[-2], path[-1]):
            path.pop()
        path.append(arm)
    kept = guesses[wish.taken]
    return [
        (each(before, arm) * (KEPT if guesses[arm] <= kept else 1.0), arm) for before, arm in pairwise(path)
    ]


class Shares:
    """The guesses of every row in the coming step.

    Args:
        found: plans that together bring nearly the most; a row may take another one.
        price: the tokens a second that they bring.
    """

    def __init__(self, budget: Budget, wishes: Sequence[Wish], found: Sequence[int], price: float) -> None:
        self.price = price
        self._budget, self._wishes = budget, wishes
        self._guesses = [wish.plans.guesses[plan] for wish, plan in zip(wishes, found, strict=True)]
        self._total = sum(self._guesses)

    def spent(self, row: int, plans: Plans) -> list[float]:
        """Return what plans cost a row beside the guesses of the others, see `Budget.beside`."""
        return self._budget.beside(plans, self._total - self._guesses[row])

    def take(self, row: int, plan: int) -> None:
        """Note the plan that a row takes."""
        made = self._wishes[row].plans.guesses[plan]
        self._total += made - self._guesses[row]
        self._guesses[row] = made
