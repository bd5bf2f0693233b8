"""Who drafts how much: a policy is asked before every step, unless its last answer stands, and may answer differently
for every row.

Exactness does not depend on the answers, as long as a policy keeps to one rule, *non-anticipation*: what it answers for
the next tokens of a row may depend only on what was known before them, which is all that it is handed. A policy that
looked at the noise of tokens to come, or at guesses already drawn, could favour some tokens over others.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from draftsmith.engine.reasons import FIXED, Crowded, Reason
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.types import DraftsmithError


@dataclass(frozen=True)
class Choice:
    """What one row does in the next step: `drafter` is the name of one of the engine's, None the first of them."""

    plan: Plan
    drafter: str | None = None


@dataclass(eq=False)
class RowHistory:
    """What is known of a row before a step; the same object at every step of it.

    Args:
        sampled: whether its temperature is above 0.
        prompt_tokens: length of its prompt.
        written: tokens behind it, those of the last step included.
        accepted: of every step so far in which the policy's choice was drafted, how many guesses stayed.
        drafted: of the same steps, how many guesses were verified, or whether any was, see `tells_any`.
        behind: of the same steps, whether a drafter's other part guessed because its lookup found nothing.
        constrained: whether it has a constraint.
    """

    sampled: bool
    prompt_tokens: int
    written: int = field(default=0, kw_only=True)
    accepted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    behind: list[bool] = field(default_factory=list)
    constrained: bool = field(default=False, kw_only=True)

    def tells_any(self, plan: Plan, behind: bool = False) -> bool:
        """Whether `drafted` only tells whether a draft of this plan had guesses.

        How many a constraint left tells which it forbids, and how many a confidence left of a sampled row's draft tells
        what was drawn for the first of them: both go by the noise of tokens to come. What a lookup finds does not.
        """
        return self.constrained or (self.sampled and _by_confidence(plan, behind))

    def note(self, accepted: int, drafted: int, plan: Plan, behind: bool = False) -> None:
        """Write down a step."""
        self.accepted.append(accepted)
        self.drafted.append(min(1, drafted) if self.tells_any(plan, behind) else drafted)
        self.behind.append(behind)

    def steps(self, seen: int) -> Iterator[tuple[int, int, bool]]:
        """Give `accepted`, `drafted` and `behind` of every step after the first so many."""
        return zip(self.accepted[seen:], self.drafted[seen:], self.behind[seen:], strict=True)

    def guesses(self, drafted: int, plan: Plan, usual: float, behind: bool = False) -> float:
        """Return how many guesses an entry of `drafted` stands for: the usual number where it only tells of any.

        Args:
            usual: of guesses that a confidence bounds, on average over all steps; of others, over those that made some.
        """
        if not self.tells_any(plan, behind):
            return drafted
        return usual if _by_confidence(plan, behind) else usual * drafted


def _by_confidence(plan: Plan, behind: bool) -> bool:
    """Return whether a confidence bounds guesses: of a plan that has both bounds, those `behind` a lookup."""
    return plan.confidence is not None and (behind or plan.factor is None)


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
        """All that it may ever choose, so that room is kept for the largest."""

    @property
    def is_fixed(self) -> bool:
        """Whether it always chooses the only one of its `choices`, so that nobody need ask it."""
        return False

    @property
    def holds(self) -> int:
        """For how many steps after the next one its last answer stands, so that nobody need ask it.

        That is as long as no row comes or goes, none has a prediction, and nothing is read beside them.
        """
        return 0

    @abstractmethod
    def choose(self, load: Load, rows: Sequence[RowHistory]) -> Sequence[Choice]:
        """Return one of `choices` for each row; asked about the rows that bring no plan of their own."""

    def reasons(self, load: Load, rows: Sequence[RowHistory]) -> Sequence[Reason]:
        """Return why `choose`, just asked about these rows, answered as it did, row by row; () tells nothing."""
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
