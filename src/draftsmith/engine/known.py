"""What a fitted policy was told of a drafter, and which of its plans may ever pay."""

from dataclasses import dataclass
from functools import cached_property

from draftsmith.engine.arm import MOST_ODDS, Arm
from draftsmith.engine.profile import Profile

ODDS = tuple(at / 20 for at in range(round(20 * MOST_ODDS) + 1))
"""How many times as often as measured a guess may stay; see `Arm.accepted`."""
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of rows for which plans are compared beforehand."""
NEARLY = 0.95
"""A plan is kept that is somewhere so near to the best: which of them is, is only learnt while they are used."""


@dataclass(frozen=True)
class Known:
    """One of the engine's drafters, with what was measured of it.

    Args:
        name: by which the engine has it; None is its first.
        hope: it never drafts, and so costs nothing at all, where nothing would be gained even with these odds, see
            `Arm.accepted`.
        rows: nor where nothing would be gained with so many rows; None asks whether there is any number of rows.
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
        """Those whose guesses are told apart; the first of two is the lookup."""
        with_others = tuple(arm for arm in self.useful if arm.behind is not None)
        alone = tuple(arm for arm in self.useful if arm.behind is None)
        return Guesser(self, alone), *([Guesser(self, with_others, True)] if with_others else ())


@dataclass(frozen=True)
class Guesser:
    """A drafter or, of one that looks up first, the lookup or who guesses behind it.

    Args:
        arms: the plans for which its guesses decide: those of a lookup alone or, of who is behind it, those of both.
        behind: it guesses where the guesser before it finds nothing.
    """

    known: Known
    arms: tuple[Arm, ...]
    behind: bool = False
