"""What was measured of a drafter for a fitted policy, and which of its plans may ever pay."""

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal

from draftsmith.engine.arm import MOST_ODDS, Arm, Times
from draftsmith.engine.profile import Profile
from draftsmith.plan import NO_COPY

ODDS = tuple(at / 20 for at in range(round(20 * MOST_ODDS) + 1))
"""The odds that are told apart: how many times as often as measured guesses may stay; see `Arm.accepted`."""
Part = Literal["lookup", "behind"]
"""A part of a drafter that looks guesses up first."""
USUAL = ODDS.index(1.0)
"""The odds as measured."""
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of rows for which plans are compared beforehand."""
LENGTHS = (1.0, 3.0)
"""Lengths of matches, relative to those measured, for which plans are compared beforehand."""
ENOUGH = 0.98
"""Plans are kept until, for every number of rows and all odds, one of them is this near to the best. More would only be
compared at every step, and each is one more that may look better than it is."""


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
        """A few of its plans, one of which is the best, or nearly, for any number of rows and any odds."""
        profile, asked = self.profile, COUNTS if self.rows is None else (self.rows,)
        arms = profile.arms
        if all(profile.best(count, self.hope) is arms[0] for count in asked):
            return ()
        costs = [profile.costs(arms, count) for count in COUNTS]
        # Where the drafter behind a lookup may draft by itself, it is best where matches mislead; and the lookup is
        # best by itself where that drafter fails.
        failing: list[Part | None] = [None]
        failing += ["lookup"] if any(arm.plan.factor == NO_COPY for arm in arms) else []
        failing += ["behind"] if any(arm.behind is not None for arm in arms) else []
        every, drawn = tuple(True for _ in arms), tuple(arm.suits_draws for arm in arms)
        left = list[list[float]]()  # where no kept plan is near enough: all speeds, as shares of the best
        for odds, fails, length in product(ODDS, failing, LENGTHS):
            met = [_met(arm, odds, fails, length) for arm in arms]
            for cost in costs:
                speeds = [brings / took for (brings, _), took in zip(met, cost.grown([t for _, t in met]), strict=True)]
                for some in {every, drawn}:
                    counted = [speed if counts else 0.0 for speed, counts in zip(speeds, some, strict=True)]
                    best = max(counted)
                    if best > speeds[0]:
                        left.append([speed / best for speed in counted])
        kept = set[int]()
        while left:
            # The plan that is near enough most often; of several, the faster one on the whole.
            chosen = max(
                range(1, len(arms)),
                key=lambda at: (sum(speeds[at] >= ENOUGH for speeds in left), sum(speeds[at] for speeds in left)),
            )
            kept.add(chosen)
            left = [speeds for speeds in left if speeds[chosen] < ENOUGH]
        return tuple(arms[at] for at in sorted(kept))

    @property
    def guessers(self) -> tuple["Guesser", ...]:
        """The guessers whose guesses are told apart: one; or a lookup, the one behind it, and that one by itself."""
        with_others = tuple(arm for arm in self.useful if arm.behind is not None)
        unaided = tuple(arm for arm in self.useful if arm.plan.factor == NO_COPY)
        alone = tuple(arm for arm in self.useful if arm.behind is None and arm.plan.factor != NO_COPY)
        others = Guesser(self, with_others, behind=True), Guesser(self, unaided, unaided=True)
        return Guesser(self, alone), *(guesser for guesser in others if guesser.arms)


def _met(arm: Arm, odds: float, fails: Part | None, length: float) -> tuple[float, Times]:
    """Return the tokens a step brings at these odds, and how many times as many guesses it makes.

    Args:
        fails: whose guesses never stay, those of a lookup or those of the drafter behind it, so that the odds are those
            of the other one's alone.
        length: how many times as long as measured the matches of a lookup are.
    """
    if arm.found is None:
        own = 0.0 if fails == "behind" else odds
        return 1 + arm.accepted(own), arm.times_at(own)
    if fails == "behind":
        share = arm.share(odds, arm.stretched(length, arm.kept(odds)), 0.0)
        return 1 + arm.accepted(odds, length=length, behind=0.0), arm.made_times(share, length)
    if fails is None:
        share = arm.share(odds, arm.stretched(length, arm.kept(odds)), arm.kept_behind(odds))
        return 1 + arm.accepted(odds, length=length), arm.made_times(share, length, odds)
    share = arm.share(1.0, 0.0, arm.kept_behind(odds))
    return 1 + arm.accepted(0.0, 1.0, behind=odds), arm.made_times(share, 1.0, odds)


@dataclass(frozen=True)
class Guesser:
    """A drafter; or, of a drafter that looks up first, either its lookup or the part that guesses behind it.

    Args:
        arms: the plans that are decided by its guesses: for a lookup, those where it drafts alone; for the part behind
            it, those where both draft, or those where nothing is looked up.
        behind: whether it guesses where the guesser before it finds nothing.
        unaided: whether it is such a part, and guesses at every step because nothing is looked up.
    """

    known: Known
    arms: tuple[Arm, ...]
    behind: bool = False
    unaided: bool = False

    @property
    def looks_up(self) -> bool:
        """Whether it guesses only where a lookup finds something."""
        return not (self.behind or self.unaided) and any(arm.found is not None for arm in self.known.useful)
