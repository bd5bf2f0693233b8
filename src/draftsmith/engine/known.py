"""What was measured of a drafter for a fitted policy, and which of its plans may ever pay."""

from dataclasses import dataclass
from functools import cached_property

from draftsmith.engine.arm import MOST_ODDS, Arm
from draftsmith.engine.profile import Profile

ODDS = tuple(at / 20 for at in range(round(20 * MOST_ODDS) + 1))
"""The odds that are told apart: how many times as often as measured guesses may stay; see `Arm.accepted`."""
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of rows for which plans are compared beforehand."""
NEARLY = 0.95
"""A plan is kept if it is somewhere this near to the best; which of them is really best is only learnt in use."""


@dataclass(frozen=True)
class Known:
    """One of the engine's drafters, with what was measured of it.

    Args:
        name: its name in the engine; None is the engine's first.
        hope: if nothing would be gained even at these odds (see `Arm.accepted`), it never drafts, and so costs nothing.
        rows: the number of rows with which it has to gain something; for None, a gain with any number is enough.
    """

    profile: Profile
    name: str | None = None
    hope: float = 1.0
    rows: int | None = None

    @cached_property
    def useful(self) -> tuple[Arm, ...]:
        """Its plans that are the best, or nearly, for some number of rows and some odds."""
        profile, asked = self.profile, COUNTS if self.rows is None else (self.rows,)
        arms = profile.arms
        if all(profile.best(count, self.hope) is arms[0] for count in asked):
            return ()
        kept, costs = set[int](), [profile.costs(arms, count) for count in COUNTS]
        for odds in ODDS:
            tokens, times = [1 + arm.accepted(odds) for arm in arms], [arm.times_at(odds) for arm in arms]
            for cost in costs:
                speeds = [brings / took for brings, took in zip(tokens, cost.grown(times), strict=True)]
                enough = max(speeds[0], NEARLY * max(speeds))
                kept.update(at for at, speed in enumerate(speeds) if at and speed >= enough)
        return tuple(arms[at] for at in sorted(kept))

    @property
    def guessers(self) -> tuple["Guesser", ...]:
        """The guessers whose guesses are told apart: one, or a lookup and then the one behind it."""
        with_others = tuple(arm for arm in self.useful if arm.behind is not None)
        alone = tuple(arm for arm in self.useful if arm.behind is None)
        return Guesser(self, alone), *([Guesser(self, with_others, True)] if with_others else ())


@dataclass(frozen=True)
class Guesser:
    """A drafter; or, of a drafter that looks up first, either its lookup or the part that guesses behind it.

    Args:
        arms: the plans that are decided by its guesses: for a lookup, those where it drafts alone; for the part behind
            it, those where both draft.
        behind: whether it guesses where the guesser before it finds nothing.
    """

    known: Known
    arms: tuple[Arm, ...]
    behind: bool = False
