"""One budget of guesses for rows that each take a plan of their own.

What a guess costs depends on all guesses of the step together: up to some number of tokens a processor verifies them at
about the price of one, and the next one may need the weights a second time. So a row's plan is weighed by how much
longer the step takes with it, beside what the other rows draft.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from draftsmith.engine.arm import Arm, Times
from draftsmith.engine.expected import values_of
from draftsmith.engine.profile import Costs, WidthCost

KEPT = 1.05
"""Guesses of the plan that a row took last count this many times, so that equal rows do not take turns."""
FEWEST = 1e-6
"""No plan counts as making fewer guesses, so that there is something to divide by."""


class Wish(NamedTuple):
    """What every plan brings a row, the guesses that it makes there, and which of the plans the row took last."""

    brings: Sequence[float]
    guesses: Sequence[float]
    taken: int


class Budget:
    """What steps of a number of rows take, by the guesses of all of them.

    Args:
        arms: all plans, the first of which drafts nothing.
        costs: what each of them costs one of `rows` rows if all rows take it.
        width: what the target's steps take by the number of tokens.
    """

    def __init__(self, arms: Sequence[Arm], costs: Costs, width: WidthCost, rows: int) -> None:
        self._rows, self._width = rows, width
        self._scale = rows * costs.plain / width.of(rows)
        self._usual = [(arm.usual, arm.usual_behind) if arm.plan.depth else (0.0, 0.0) for arm in arms]
        # What is not the target's is the drafter's; a row's share of it, for each guess.
        self._each = [
            max(0.0, took - self.step_s(rows * sum(usual)) / rows) / max(FEWEST, sum(usual))
            for took, usual in zip(costs.seconds, self._usual, strict=True)
        ]

    def guesses(self, times: Sequence[Times]) -> list[float]:
        """Return how many guesses a row's plans make, given how many times as many as measured they make."""
        return [
            looked_up * first + behind * second
            for (looked_up, behind), (first, second) in zip(self._usual, times, strict=True)
        ]

    def step_s(self, guesses: float) -> float:
        """Return the seconds in which the target verifies so many guesses, all rows together."""
        return self._scale * self._width.of(self._rows + guesses)

    def added_s(self, others: float, arm: int, guesses: float) -> float:
        """Return what a plan costs a row: its share of a step without that row's guesses, and what these add to it.

        Args:
            others: the guesses of all other rows.
            guesses: those that the plan makes.
        """
        without = self.step_s(others)
        return without / self._rows + self.step_s(others + guesses) - without + self._each[arm] * guesses

    def shared_out(self, wishes: Sequence[Wish]) -> "Shares":
        """Return the plans of all rows that together bring most tokens a second.

        Guesses are taken in the order of what each of them brings, as many as pay.
        """
        price, found = self._rows / self.step_s(0.0), [0] * len(wishes)
        for _ in range(2):  # what drafters cost is weighed by the price, which is known only then
            found, price = self._taken_in_order(wishes, price)
        return Shares(self, wishes, found, price)

    def _taken_in_order(self, wishes: Sequence[Wish], price: float) -> tuple[list[int], float]:
        offered = list[tuple[float, int, int, int]]()  # what a guess brings, row, plan before, plan
        for row, wish in enumerate(wishes):
            spent = [each * count for each, count in zip(self._each, wish.guesses, strict=True)]
            net = values_of(wish.brings, price, spent)
            path = _worth_taking(net, wish.guesses)
            kept = wish.guesses[wish.taken]
            for before, arm in pairwise([0, *path]):
                more = (net[arm] - net[before]) / max(FEWEST, wish.guesses[arm] - wish.guesses[before])
                offered.append((more * KEPT if wish.guesses[arm] <= kept else more, row, before, arm))
        offered.sort(key=lambda one: -one[0])
        tokens, guesses, drafting_s = float(self._rows), 0.0, 0.0
        speeds = [tokens / self.step_s(0.0)]
        for _, row, before, arm in offered:
            wish = wishes[row]
            tokens += wish.brings[arm] - wish.brings[before]
            guesses += wish.guesses[arm] - wish.guesses[before]
            drafting_s += self._each[arm] * wish.guesses[arm] - self._each[before] * wish.guesses[before]
            speeds.append(tokens / (self.step_s(guesses) + drafting_s))
        best = speeds.index(max(speeds))
        found = [0] * len(wishes)
        for _, row, _, arm in offered[:best]:
            found[row] = arm
        return found, speeds[best]


class Shares:
    """The guesses of every row in the coming step.

    Args:
        plans: those that together bring most; a row may take another one.
        price: the tokens a second that they bring.
    """

    def __init__(self, budget: Budget, wishes: Sequence[Wish], plans: Sequence[int], price: float) -> None:
        self.price = price
        self._budget, self._wishes = budget, wishes
        self._guesses = [wish.guesses[plan] for wish, plan in zip(wishes, plans, strict=True)]
        self._total = sum(self._guesses)

    def spent(self, row: int) -> list[float]:
        """Return what each plan costs a row beside the others' guesses, see `Budget.added_s`."""
        others = self._total - self._guesses[row]
        return [self._budget.added_s(others, arm, made) for arm, made in enumerate(self._wishes[row].guesses)]

    def hoped(self, row: int, most: Sequence[float], arm: int) -> float:
        """Return the same for one plan in the best case, in which plans make as many guesses as `most` says."""
        return self._budget.added_s(self._total - self._guesses[row], arm, most[arm])

    def take(self, row: int, plan: int) -> None:
        """Note the plan that a row takes."""
        made = self._wishes[row].guesses[plan]
        self._total += made - self._guesses[row]
        self._guesses[row] = made


def _worth_taking(net: Sequence[float], guesses: Sequence[float]) -> list[int]:
    """Return the plans that bring more for more guesses than any mixture of others, those of few guesses first."""
    path = [0]
    for arm in sorted(range(1, len(net)), key=lambda at: (guesses[at], -net[at])):
        if net[arm] <= net[path[-1]]:
            continue
        while len(path) > 1 and _slope(net, guesses, path[-2], arm) >= _slope(net, guesses, path[-2], path[-1]):
            path.pop()
        path.append(arm)
    return path[1:]


def _slope(net: Sequence[float], guesses: Sequence[float], before: int, arm: int) -> float:
    return (net[arm] - net[before]) / max(FEWEST, guesses[arm] - guesses[before])
