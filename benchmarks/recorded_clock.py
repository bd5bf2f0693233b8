"""The computed clock of `recorded.py`: how long a step takes whose rows draft so, from what a fit has measured."""

import math
import random
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from draftsmith.engine.profile import Profile, WidthCost

NOISE = 0.04
"""The standard deviation of the logarithm of a step's time."""


@dataclass(frozen=True)
class Outcome:
    """Of a draft: how many guesses stayed, how many were verified, how deep they were, and see `RowHistory.behind`."""

    stayed: int
    drafted: int
    depth: int
    behind: bool


NOTHING = Outcome(0, 0, 0, False)


class Machine:
    """Tells how long steps take.

    Args:
        profile: what a fit measured.
        width: what the target takes by the number of tokens.
        rng: by which every step takes a little more or less.
    """

    def __init__(self, profile: Profile, width: WidthCost, rng: random.Random) -> None:
        self._profile, self._width, self._rng = profile, width, rng
        arms, numbers = profile.arms, range(len(profile.rows))
        # Fewer rows never take longer: if they seem to, something else slowed them.
        plain = [min(arms[0].seconds[at:]) for at in numbers]
        self._around_s = [max(0.0, took - self._width.of(rows)) for rows, took in zip(profile.rows, plain, strict=True)]
        steady = [arm for arm in arms if arm.plan.is_chain and arm.plan.depth and arm.is_steady]
        # Where every plan makes as many guesses as it finds: their costs when all that fit are made.
        drafting = steady or [arm for arm in arms if arm.full]
        self._first_s, self._level_s = list[float](), list[float]()
        for at, rows in enumerate(profile.rows):
            took = [(arm.seconds if steady else arm.full)[at] for arm in drafting]
            points = [
                (arm.plan.depth, spent - self._around_s[at] - self._width.of(rows * (1 + arm.plan.max_nodes)))
                for arm, spent in zip(drafting, took, strict=True)
            ]
            alike = len({depth for depth, _ in points}) <= 1
            level = 0.0 if alike else statistics.linear_regression(*zip(*points, strict=True)).slope
            self._level_s.append(max(0.0, level))
            first = statistics.mean(more - self._level_s[-1] * depth for depth, more in points) if points else 0.0
            self._first_s.append(max(0.0, first))

    def seconds(self, outcomes: Sequence[Outcome]) -> float:
        """Return the seconds of a step whose rows draft so."""
        took = self._width.of(len(outcomes) + sum(one.drafted for one in outcomes))
        for depth in range(1, 1 + max(one.depth for one in outcomes)):
            took += self._of_rows(self._level_s, sum(one.depth >= depth for one in outcomes))
        took += self._of_rows(self._around_s, len(outcomes))
        if any(one.depth for one in outcomes):
            took += self._of_rows(self._first_s, sum(one.depth > 0 for one in outcomes))
        return took * math.exp(NOISE * self._rng.gauss(0, 1))

    def _of_rows(self, seconds: Sequence[float], rows: int) -> float:
        """Return the seconds of so many rows, from those of the measured numbers of rows."""
        known = self._profile.rows
        right = min(bisect_left(known, rows), len(known) - 1)
        if known[right] == rows or right == 0:
            return seconds[right]
        left = right - 1
        return seconds[left] + (seconds[right] - seconds[left]) * (rows - known[left]) / (known[right] - known[left])
