"""How long steps take now, compared with what was measured: learnt from the steps themselves, plan by plan."""

from collections.abc import Sequence

from draftsmith.engine.policy import Load, RowHistory

MEASURED = 1
"""How many timed steps count as much as what was measured before."""
HALVED = 16
"""After so many lessons, of whatever plan, a timed step counts half as much: a machine is slower at some times than at
others, and a plan that is seldom taken must not be judged by how it was long ago."""
HICCUP = 2.0
"""A step counts as at most this many times as long as the median of those that are learnt with it."""
SEEN = 3
"""A plan's steps are known once so many were timed: fewer say little, above all of a lookup, whose steps differ."""
SHARED = 0.5
"""The exponent with which a change learnt of one plan is applied to all others: a machine that is busy, or that was
measured at a better time, seldom spares a single plan."""
MOST_SLOWER, MOST_FASTER = 1.5, 0.5
"""A step counts as at most and at least this many times as long as such steps take by the estimate. If it took longer,
the cause was something else, such as another program."""
COLD_STEPS = 10
"""So many steps behind a prompt find the processor's caches full of other data, and are not counted. Plain steps of a
small target take up to twice as long then, steps with many guesses hardly longer."""
SETTLES, SETTLES_PLAIN = 1, COLD_STEPS
"""So many steps of one drafter, or without one, are not counted for the same reason, and because a lookup that has
waited takes in all tokens since: that is the cost of a change, not of further steps."""
LESSON = 8
"""Up to so many steps between two questions are one lesson; more are accordingly more."""
FORGOTTEN = 1024
"""After how many lessons from other plans what was learnt of a plan is forgotten, as if it was never taken, so that one
that was too slow to be tried is tried again."""


class Pace:
    """Learns from the seconds of the steps between two questions to a policy whose rows all take the same plan.

    Numbers of rows are grouped by powers of two. A plan that was never taken with so many rows counts as slowed as much
    as the last plan that was. Plain decoding counts as slowed less until it is timed, so that it is tried where all
    drafts are slow; and as no slower than a draft that was, because a machine that was slow when all was measured would
    otherwise seem faster for drafts alone.

    Args:
        whose: which drafter each plan belongs to; the first plan drafts nothing.
        learns: whether to learn at all; otherwise the measured costs hold for ever.
    """

    def __init__(self, whose: Sequence[int], learns: bool) -> None:
        self._whose, self._learns = tuple(whose), learns
        self._slower: dict[int, list[float]] = {}
        self._taken: dict[int, list[int]] = {}  # timed steps
        self._lessons = 0.0
        # How many lessons there were when a plan was learnt from last, and for how many steps its estimate counted.
        self._newest: dict[int, list[float]] = {}
        self._weight: dict[int, list[float]] = {}
        # The rows of the last question, if the steps after it do nothing else, and the seconds of these steps.
        self._rows: list[RowHistory] | None = None
        self._took: list[float] = []
        self._youngest = 0  # how many steps the youngest of them had behind it
        # Which drafter drafted at the last question, and for how many steps in a row.
        self._drafter: int | None = None
        self._run = 0

    @property
    def is_timing(self) -> bool:
        """Whether something is learnt from the steps after the last question, soon if not at once.

        They do nothing but decode these rows, and no row's prompt was read just now.
        """
        return self._rows is not None and self._youngest >= COLD_STEPS // 2

    @property
    def is_warm(self) -> bool:
        """Whether the prompts of all rows of the last question were read long before it."""
        return self._youngest >= COLD_STEPS

    def has_seen(self, count: int, plan: int) -> bool:
        """Whether enough steps of a plan were timed with about so many rows."""
        return self._taken.get(count.bit_length(), (0,) * len(self._whose))[plan] >= SEEN

    def slower(self, count: int) -> list[float]:
        """Return how many times as long as measured a step takes now with so many rows, for every plan."""
        return self._slower.setdefault(count.bit_length(), [1.0] * len(self._whose))

    def pause(self) -> None:
        """Note that nothing can be learnt from the coming steps, because not all rows take the same plan."""
        self._rows = self._drafter = None
        self._took.clear()

    def begin(self, load: Load, rows: Sequence[RowHistory]) -> None:
        """Note that the coming steps are those of these rows, which all take the same plan."""
        self._took.clear()
        self._rows = list(rows) if self._learns and load.reading == 0 and len(rows) == load.decoding else None
        self._youngest = min((len(row.accepted) for row in rows), default=0)

    def timed(self, seconds: float) -> None:
        """Take in how long a step took."""
        if self._rows is not None:
            self._took.append(seconds)

    @property
    def took(self) -> Sequence[float]:
        """The seconds of the steps since the last question, if they did nothing but decode its rows."""
        return self._took

    def heard(self, plan: int) -> tuple[list[RowHistory], list[float]] | None:
        """Return the rows of the last question, and the seconds of those of their last steps that tell something.

        Args:
            plan: which of the plans these rows have all taken since.
        """
        if self._rows is None or not self._took:
            return None
        before = self._run if self._drafter == self._whose[plan] else 0
        self._drafter, self._run = self._whose[plan], before + len(self._took)
        settles = SETTLES if plan else SETTLES_PLAIN
        counted = self._took[max(0, settles - before, COLD_STEPS - self._youngest):]
        return (self._rows, counted) if counted else None

    def learn(self, count: int, plan: int, took: Sequence[float], seconds: float) -> None:
        """Take in how long steps took.

        Args:
            count: rows that decoded.
            plan: which of the plans they all took.
            took: seconds of each step.
            seconds: of a row's share of such a step, by the measured costs.
        """
        most = HICCUP * sorted(took)[(len(took) - 1) // 2]
        ratio = sum([min(one, most) for one in took]) / (len(took) * count * seconds)
        found, size = self.slower(count), count.bit_length()
        taken = self._taken.setdefault(size, [0] * len(self._whose))
        newest = self._newest.setdefault(size, [0.0] * len(self._whose))
        weight = self._weight.setdefault(size, [0.0] * len(self._whose))
        self._lessons += max(1.0, len(took) / LESSON)
        known = weight[plan] * 0.5 ** ((self._lessons - newest[plan]) / HALVED)
        taken[plan] += len(took)
        newest[plan], weight[plan] = self._lessons, known + len(took)
        rate = len(took) / (MEASURED + weight[plan])
        before = found[plan]
        found[plan] += rate * (min(max(ratio, MOST_FASTER * before), MOST_SLOWER * before) - before)
        shared = (found[plan] / before) ** SHARED
        for other in range(len(taken)):
            if other == plan:
                continue
            if self._lessons - newest[other] > FORGOTTEN:
                taken[other] = 0
            found[other] = found[plan] if other and not taken[other] else found[other] * shared
        if not taken[0]:
            found[0] = min(found[0], found[plan])
