"""Steps now and then that show what another plan costs, where all rows have drafted by one plan for long."""

from collections import Counter
from collections.abc import Sequence

from draftsmith.engine.evidence import LONGEST_WAIT
from draftsmith.engine.expected import beats
from draftsmith.engine.pace import SEEN, SETTLES_PLAIN, Pace

REMINDERS, EARLY_WAIT, NARROW_WAIT = SETTLES_PLAIN + 2 * SEEN, 64, 192
"""Where all rows take the same plan and have drafted for `LONGEST_WAIT` steps, `REMINDERS` steps without a draft come
next, to see what those cost now. They come after twice as many steps if drafts gain much, after `NARROW_WAIT` if they
gain little, and after `EARLY_WAIT` if too few plain steps were timed with so many rows or steps with drafts have become
shorter than plain ones seemed to be. After `EARLY_WAIT` come the drafter's other plans, too, that would be at least
`NEARLY` as fast, until each was timed, because their costs may not be those that were measured."""
NEARLY, NARROWLY, CLEARLY = 0.95, 1.2, 1.5
"""A plan that seems `CLEARLY` times as fast as plain decoding is only checked late: few measurements are that wrong.
One that seems less than `NARROWLY` times as fast is checked more often, because no machine is that steady."""


class Reminders:
    """Counts the steps that all rows have drafted, and says which plan they take now.

    Args:
        pace: knows which plans were timed.
        whose: which drafter each plan belongs to; the first plan drafts nothing.
    """

    def __init__(self, pace: Pace, whose: Sequence[int]) -> None:
        self._pace, self._whose = pace, tuple(whose)
        # Steps with a draft since one without, by the number of rows, grouped as in `Pace`: rows that end leave fewer,
        # which may decode plainly, and that says nothing about more rows. And the group of the last question.
        self._drafting = Counter[int]()
        self._size = 0
        # After how many of those a reminder follows; which plan it takes, and the steps left of it.
        self._until, self._other, self._left = LONGEST_WAIT, 0, 0

    @property
    def due_in(self) -> int:
        """How many more steps can be drafted before the next reminder; many while none could teach anything."""
        return max(0, self._until - self._drafting[self._size]) if self._pace.is_timing else LONGEST_WAIT

    @property
    def left(self) -> int:
        """How many steps of a reminder are still to come; 0 if there is none."""
        return self._left

    def passed(self, steps: int, drafting: bool) -> None:
        """Note that so many steps were taken without a question: of a reminder, or as before, `drafting` or not."""
        if self._left:
            self._left = max(0, self._left - steps)
        elif drafting:
            self._drafting[self._size] += steps

    def plan(
        self, arm: int, on_trial: bool, count: int, values: Sequence[float], price: float, spent: Sequence[float]
    ) -> int:
        """Return the plan that all rows take now: the settled one, or another as a reminder.

        Args:
            arm: the settled plan.
            on_trial: whether it is on trial, which counts its steps.
            count: rows that decode.
            values, price, spent: see `beats`.
        """
        self._size = count.bit_length()
        drafting = self._drafting[self._size]
        if not arm or on_trial or not self._pace.is_timing:
            self._left = 0
        elif not self._left:
            self._until, other = self._next(arm, count, values, price, spent)
            if drafting >= self._until:
                self._left, self._other, self._drafting[self._size] = REMINDERS, other, 0
        if self._left:
            self._left -= 1
            return self._other
        self._drafting[self._size] = drafting + 1 if arm else 0
        return arm

    def _next(
        self, arm: int, count: int, values: Sequence[float], price: float, spent: Sequence[float]
    ) -> tuple[int, int]:
        """Return the next reminder: after how many steps of drafting, and with which plan."""
        pace, gains_much = self._pace, beats(values, price, spent, arm, 0, NARROWLY)
        if not pace.has_seen(count, 0) or spent[arm] < spent[0]:
            # A step with a draft is a plain one and more, so in the second case plain ones must have become shorter.
            return EARLY_WAIT, 0
        # A plan is slower by as much as it brings less after paying for its time.
        unseen = [
            one for one, whose in enumerate(self._whose)
            if whose == self._whose[arm] and one != arm and not pace.has_seen(count, one)
            and values[one] - values[arm] > (NEARLY - 1) * price * spent[one]
        ]
        if unseen:
            return EARLY_WAIT, max(unseen, key=values.__getitem__)
        if beats(values, price, spent, arm, 0, CLEARLY):
            return 2 * LONGEST_WAIT, 0
        return LONGEST_WAIT if gains_much else NARROW_WAIT, 0
