"""Policies decide who drafts how much. A policy is asked before every step, unless its last answer stands, and may
answer differently for every row.

Exactness does not depend on the answers, as long as a policy keeps to one rule, *non-anticipation*: its answer about
the next tokens of a row may depend only on what was known before them. It is given nothing else, except how long steps
took. A policy that looked at the noise of tokens to come, or at guesses already drawn, could favour some tokens over
others.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from draftsmith.engine.reasons import FIXED, Crowded, Reason
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.types import DraftsmithError


@dataclass(frozen=True)
class Choice:
    """What one row drafts in the next step: `drafter` is the name of one of the engine's drafters, None the first."""

    plan: Plan
    drafter: str | None = None


@dataclass(eq=False)
class RowHistory:
    """What is known about a row before a step; a row has the same object at all its steps.

    Args:
        sampled: whether its temperature is above 0.
        prompt_tokens: length of its prompt.
        written: tokens after the prompt, those of the last step included.
        accepted: for each step so far that followed the policy's choice, how many guesses stayed.
        drafted: for each of these steps, how many guesses were verified, or only whether any was, see `tells_any`.
        behind: for each of these steps, whether another part of the drafter guessed because its lookup found nothing.
        constrained: whether it has a constraint.
        most: tokens after the prompt at which it ends at the latest; infinite if there is no such number.
        call: what all rows of one call have in common, and no others; None for a request made by hand.
    """

    sampled: bool
    prompt_tokens: int
    written: int = field(default=0, kw_only=True)
    accepted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    behind: list[bool] = field(default_factory=list)
    constrained: bool = field(default=False, kw_only=True)
    most: float = field(default=math.inf, kw_only=True)
    call: object | None = field(default=None, kw_only=True)

    @property
    def left(self) -> float:
        """How many tokens it may still write, at least 1."""
        return max(1, self.most - self.written)

    def tells_any(self, plan: Plan, behind: bool = False) -> bool:
        """Whether `drafted` only says if a draft of this plan had guesses, and not how many.

        The number of guesses that a constraint left says which of them it forbids. In a sampled row, the number that a
        confidence left, or that a lookup added behind other guesses, says what was drawn for these guesses. All depend
        on the noise of tokens to come, which a policy must not learn. What a plan with a factor looks up does not.
        """
        return self.constrained or (self.sampled and (behind or not plan.factor))

    def note(self, accepted: int, drafted: int, plan: Plan, behind: bool = False) -> None:
        """Record a step."""
        self.accepted.append(accepted)
        self.drafted.append(min(1, drafted) if self.tells_any(plan, behind) else drafted)
        self.behind.append(behind)

    def steps(self, seen: int) -> Iterator[tuple[int, int, bool]]:
        """Give `accepted`, `drafted` and `behind` of every step from number `seen` on; a negative one counts back."""
        return zip(self.accepted[seen:], self.drafted[seen:], self.behind[seen:], strict=True)

    def guesses(self, drafted: int, plan: Plan, usual: float, behind: bool = False) -> float:
        """Return how many guesses an entry of `drafted` stands for, by the usual number where it only says whether any.

        Args:
            usual: how many there are on average: over all steps if a confidence bounds the guesses, otherwise over the
                steps that made some.
        """
        if not self.tells_any(plan, behind):
            return drafted
        return usual if _by_confidence(plan, behind) else usual * drafted


def _by_confidence(plan: Plan, behind: bool) -> bool:
    """Return whether a confidence bounds the guesses; if the plan has a factor too, it bounds only those `behind`."""
    return plan.confidence is not None and (behind or not plan.factor)


@dataclass(frozen=True)
class Load:
    """How busy the engine is: rows that decode, prompts being read, requests that wait, and its most rows."""

    decoding: int
    reading: int
    waiting: int
    max_batch: int


class Policy(ABC):
    """Chooses the draft of every row, step by step."""

    @property
    @abstractmethod
    def choices(self) -> tuple[Choice, ...]:
        """Everything that it may ever choose, so that room is kept for the largest."""

    @property
    def is_fixed(self) -> bool:
        """Whether it has only one choice, so that it need not be asked."""
        return False

    @property
    def holds(self) -> int:
        """For how many steps after the next one its last answer stands, so that it need not be asked.

        The answer stands only while no row comes or goes, no row has a prediction, and no prompt is being read.
        """
        return 0

    @abstractmethod
    def choose(self, load: Load, rows: Sequence[RowHistory]) -> Sequence[Choice]:
        """Return one of `choices` for each row; the rows are those that have no plan of their own."""

    def timed(self, seconds: float) -> None:  # noqa: B027
        """Hear how long a step took that followed the last answer, without the answer and what was read beside it."""

    def reasons(self, load: Load, rows: Sequence[RowHistory]) -> Sequence[Reason]:
        """Return, row by row, why `choose` has just answered as it did about these rows; () gives no reasons."""
        return ()


class Fixed(Policy):
    """The same draft for every row at every step."""

    def __init__(self, plan: Plan, drafter: str | None = None) -> None:
        self._choice = Choice(plan, drafter)

    @property
    def choices(self) -> tuple[Choice, ...]:
        return (self._choice,)

    @property
    def is_fixed(self) -> bool:
        return True

    def choose(self, load: Load, rows: Sequence[RowHistory]) -> Sequence[Choice]:
        return [self._choice] * len(rows)

    def reasons(self, load: Load, rows: Sequence[RowHistory]) -> Sequence[Reason]:
        return [FIXED] * len(rows)


class OffAbove(Policy):
    """Drafts while at most `rows` rows decode; a busier engine has no idle arithmetic to check guesses with."""

    def __init__(self, plan: Plan, rows: int, drafter: str | None = None) -> None:
        if rows < 0:
            raise DraftsmithError(f"draft_rows is {rows}; use 0 (never draft) or a positive number.")
        self._rows = rows
        self._on, self._off = Choice(plan, drafter), Choice(NO_DRAFT, drafter)

    @property
    def choices(self) -> tuple[Choice, ...]:
        return self._on, self._off

    def choose(self, load: Load, rows: Sequence[RowHistory]) -> Sequence[Choice]:
        return [self._on if load.decoding <= self._rows else self._off] * len(rows)

    def reasons(self, load: Load, rows: Sequence[RowHistory]) -> Sequence[Reason]:
        why = FIXED if load.decoding <= self._rows else Crowded(load.decoding, self._rows)
        return [why] * len(rows)
