"""How long steps take now, compared with what was measured: learnt from the steps themselves, plan by plan."""

from collections.abc import Callable, Sequence

from draftsmith.engine.policy import Load, RowHistory

RATE, FIRST_RATE = 0.05, 0.5
"""The weight of one step in the estimate of how long such steps take: the least, and that of a plan's first step."""
SHARED = 0.5
"""The exponent with which a change learnt of one plan is applied to all others: a machine that is busy, or that was
measured at a better time, seldom spares a single plan."""
MOST_SLOWER, MOST_FASTER = 1.5, 0.5
"""A step counts as at most and at least this many times as long as such steps take by the estimate. If it took longer,
the cause was something else, such as a client that is slow to read."""
SETTLES = 3
"""After so many steps of one drafter, or without one, the next steps are timed. The first ones find the processor's
caches full of other data, a lookup that has waited takes in all tokens since, and groups of rows are rebuilt: that is
the cost of a change, not of further steps. It is no larger, because a trial lasts only one step longer."""
STALE, FORGOTTEN = 64, 1024
"""After how many lessons from other plans what was learnt of a plan is old, so that its next step counts like a first
one; and after how many it is forgotten, as if never taken, so that a plan that was too slow to be tried is tried again.
"""


class Pace:
    """Times the steps between two questions to a policy whose rows all take the same plan.

    Numbers of rows are grouped by powers of two. A plan that was never taken with so many rows counts as slowed as much
    as the last plan that was. Plain decoding counts as slowed less until it is timed, so that it is tried where all
    drafts are slow.

    Args:
        whose: which drafter each plan belongs to; the first plan drafts nothing.
        clock: returns seconds; None relies on the measured costs for ever.
    """

    def __init__(self, whose: Sequence[int], clock: Callable[[], float] | None) -> None:
        self._whose, self._clock = tuple(whose), clock
        self._slower: dict[int, list[float]] = {}
        self._taken: dict[int, list[int]] = {}
        self._lessons = 0  # how often something was learnt
        self._newest: dict[int, list[int]] = {}  # when a plan was learnt from last
        self._last: tuple[float, list[RowHistory]] | None = None
        # Which drafter drafted at the last question, and for how many steps in a row.
        self._drafter: int | None = None
        self._run = 0

    @property
    def is_timing(self) -> bool:
        """Whether the steps after the last question can be timed: there is a clock, and they do nothing else."""
        return self._last is not None

    def has_seen(self, count: int, plan: int) -> bool:
        """Whether a step of a plan was ever timed with about so many rows."""
        return self._taken.get(count.bit_length(), (0,) * len(self._whose))[plan] > 0

    def pause(self) -> None:
        """Note that the coming time must not be counted, because it belongs to no step that was asked about."""
        self._last = self._drafter = None

    def slower(
        self, load: Load, rows: Sequence[RowHistory], count: int, plan: int, seconds: float, steps: int = 1
    ) -> list[float]:
        """Return how many times as long as measured a step takes now, for every plan.

        The time since the last question is learnt from if the rows are the same and no prompt was read beside them.

        Args:
            count: rows that decode.
            plan: which of the plans they have all taken since.
            seconds: a row's share of such a step, by the measured costs.
            steps: how many were taken since.
        """
        size = count.bit_length()
        found = self._slower.setdefault(size, [1.0] * len(self._whose))
        if self._clock is None:
            return found
        now, last = self._clock(), self._last
        self._last = (now, list(rows)) if load.reading == 0 and len(rows) == load.decoding else None
        if last is not None and self._last is not None and last[1] == self._last[1]:
            before = self._run if self._drafter == self._whose[plan] else 0
            if before >= SETTLES:
                self._learn(size, plan, (now - last[0]) / (steps * count * seconds))
            self._drafter, self._run = self._whose[plan], before + steps
        return found

    def _learn(self, size: int, plan: int, ratio: float) -> None:
        """Take in that a step of this plan took `ratio` times as long as measured."""
        found, taken = self._slower[size], self._taken.setdefault(size, [0] * len(self._whose))
        newest = self._newest.setdefault(size, [0] * len(self._whose))
        if self._lessons - newest[plan] > STALE:
            taken[plan] = 0
        rate = max(RATE, FIRST_RATE / (1 + FIRST_RATE * taken[plan]))
        taken[plan] += 1
        self._lessons += 1
        newest[plan] = self._lessons
        before = found[plan]
        found[plan] += rate * (min(max(ratio, MOST_FASTER * before), MOST_SLOWER * before) - before)
        shared = (found[plan] / before) ** SHARED
        for other in range(len(taken)):
            if other == plan:
                continue
            if self._lessons - newest[other] > FORGOTTEN:
                taken[other] = 0
            found[other] = found[plan] if other and not taken[other] else found[other] * shared
