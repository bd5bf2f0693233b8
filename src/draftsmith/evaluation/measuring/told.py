"""A policy for measuring: every row takes the plan that it is told."""

from collections.abc import Iterable, Sequence

from draftsmith.engine import Choice, Load, Policy, RowHistory
from draftsmith.plan import Plan


class Told(Policy):
    """Takes the plan whose index is `taken`, at first the first one, for every row at every step."""

    def __init__(self, plans: Iterable[Plan]) -> None:
        self._choices = tuple(Choice(plan) for plan in plans)
        self.taken = 0

    @property
    def choices(self) -> tuple[Choice, ...]:
        return self._choices

    def choose(self, load: Load, rows: Sequence[RowHistory]) -> Sequence[Choice]:
        return [self._choices[self.taken]] * len(rows)
