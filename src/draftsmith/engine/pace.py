"""How long steps take now, compared with what was measured: learnt from the steps themselves, plan by plan."""

from collections.abc import Callable, Sequence

from draftsmith.engine.policy import Load, RowHistory

RATE, FIRST_RATE = 0.05, 0.5
"""How much one step counts for how long such steps take now: the first of a plan most, later ones less and less."""
SHARED = 0.5
"""So much of what is learnt of a plan, as a power, is taken to hold for all others: a machine that is busy, or was
measured at a better time, seldom spares a single plan."""
MOST_SLOWER, MOST_FASTER = 1.5, 0.5
"""A step counts as at most and at least so many times as long as such steps take. What took longer was something else,
such as a client that is slow to read."""
SETTLES = 3
"""After so many steps of one drafter, or of none, the next are timed. The first find the processor's caches full of
other things, a lookup that has waited takes note of all tokens since, and rows are put together anew: that is what a
change costs, and not what steps cost that go on. No more than these, since trials last one step longer."""
STALE, FORGOTTEN = 64, 1024
"""So often has to be learnt from others before what was learnt of a plan is old, and is learnt anew, and before it is
forgotten: it may be as if it had never been taken, and what was too slow to be tried is tried again."""


class Pace:
    """Times the steps between two questions of a policy whose rows all do the same.

    Numbers of rows are taken together by powers of two. A plan that was never taken with so many rows counts as slowed
    as the last one that was. Plain decoding counts as less slowed until it is timed, so that it is tried where all
    drafts are slow.

    Args:
        whose: of which drafter every plan is; the first drafts nothing.
        clock: tells seconds; None takes what was measured for ever.
    """

    def __init__(self, whose: Sequence[int], clock: Callable[[], float] | None) -> None:
        self._whose, self._clock = tuple(whose), clock
        self._slower: dict[int, list[float]] = {}
        self._taken: dict[int, list[int]] = {}
        self._lessons = 0  # how often something was learnt
        self._newest: dict[int, list[int]] = {}  # when a plan was learnt from last
        self._last: tuple[float, list[RowHistory]] | None = None
        # Who drafted in the step whose time was taken last, and for how many steps in a row.
        self._drafter: int | None = None
        self._run = 0

    @property
    def is_timing(self) -> bool:
        """Whether what follows the last question can be timed: there is a clock, and nothing else in the steps."""
        return self._last is not None

    def has_seen(self, count: int, plan: int) -> bool:
        """Whether a step of a plan was ever timed with about so many rows."""
        return self._taken.get(count.bit_length(), (0,) * len(self._whose))[plan] > 0

    def pause(self) -> None:
        """Note that what follows belongs to no step that was asked about."""
        self._last = self._drafter = None

    def slower(
        self, load: Load, rows: Sequence[RowHistory], count: int, plan: int, seconds: float, steps: int = 1
    ) -> list[float]:
        """Return how many times as long as measured a step takes now, for every plan.

        What was done since the last question tells, if it had the same rows and nothing was read beside them.

        Args:
            count: of rows that decode.
            plan: which of the plans they all took since.
            seconds: that a row's share of what was done in such a step took when it was measured.
            steps: taken since.
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
        """Take in how many times as long as measured a step of this plan took."""
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
