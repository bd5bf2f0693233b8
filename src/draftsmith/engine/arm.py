"""A plan with what was measured of it: how many guesses it makes, how many of them stay, and what its steps take."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from draftsmith.plan import Plan

MOST_ODDS = 3.0
"""Guesses count as staying at most so many times as often as measured."""
EVERYWHERE = 0.98
"""A lookup counts as finding something at every step where so many tokens come from steps that did: a few between steps
of many tokens each would be many steps, and so finely that is not known."""
Times = tuple[float, float]
"""How many times as many guesses as measured a plan makes, and how many times as many `Behind` a lookup."""


@dataclass(frozen=True)
class Behind:
    """What another drafter guesses at the steps in which the lookup before it finds nothing.

    Args:
        survival: the share of those steps that accepted at least 1, 2, … of its guesses.
        made: how many it made, on average over those steps.
        each: seconds by which a step takes longer if every row makes one such guess more, for each number of rows.
    """

    survival: tuple[float, ...]
    made: float
    each: tuple[float, ...]

    def kept(self, odds: float = 1.0) -> float:
        """Return how many guesses one of those steps accepts on average; see `Arm.kept`."""
        return sum(_survival(self.survival, odds))


@dataclass(frozen=True)
class Arm:
    """One plan, measured.

    Whether a lookup finds something depends on where in its text a row is, and a step that guesses well goes far. So
    what is told of a text, whatever its plan, is the share of its tokens that come from steps whose lookup found
    something; how many steps these are follows from how far each kind of step goes.

    Args:
        survival: the share of steps that accepted at least 1, 2, … guesses; of a lookup, of the steps that found some.
        seconds: of a step, all rows together, for each number of rows of the profile.
        found: of a lookup, the share of the tokens that came from steps that found guesses; None stands for all.
        made: how many guesses a step made that made some, on average; of a plan with a confidence, on average over all
            steps. None stands for as many as the plan allows.
        full: of both, seconds of a step in which every row makes as many guesses as the plan allows.
        behind: of a lookup with another drafter behind it, what that guesses.
    """

    plan: Plan
    survival: tuple[float, ...]
    seconds: tuple[float, ...]
    found: float | None = None
    full: tuple[float, ...] = ()
    made: float | None = None
    behind: Behind | None = None

    def kept(self, odds: float = 1.0) -> float:
        """Return how many guesses are accepted, on average, by a step that made some, those `behind` left aside.

        Args:
            odds: how many times as often as measured a guess stays whose predecessors did; so the deeper guesses
                suffer, or gain, most.
        """
        total = sum(_survival(self.survival, odds))
        return total if self.varies else min(total, self.guesses)

    def kept_behind(self, odds: float = 1.0) -> float:
        """Return how many guesses a step accepts that found none itself; none where no other drafter is behind."""
        return 0.0 if self.behind is None else self.behind.kept(odds)

    @cached_property
    def varies(self) -> bool:
        """Whether every step makes as many guesses as its drafter is sure of, more in one text than in another."""
        return self.plan.confidence is not None and self.found is None

    @cached_property
    def guesses(self) -> float:
        """How many guesses a step makes that makes some, those `behind` left aside."""
        return self.plan.max_nodes if self.made is None else self.made

    @cached_property
    def usual_share(self) -> float:
        """The share of steps that make guesses, those `behind` left aside, as measured."""
        return self.share()

    @cached_property
    def usual(self) -> float:
        """How many guesses a step makes, on average over all steps, those `behind` left aside."""
        return self.usual_share * self.guesses

    @cached_property
    def usual_behind(self) -> float:
        """How many guesses are made behind a lookup that found none, on average over all steps."""
        return 0.0 if self.behind is None else (1 - self.usual_share) * self.behind.made

    def share(self, growth: float = 1.0, kept: float | None = None, behind: float | None = None) -> float:
        """Return the share of steps that make guesses, those `behind` left aside.

        Args:
            growth: how many times as many tokens as measured come from steps whose lookup found something.
            kept, behind: how many guesses such a step accepts, and one that found nothing; as measured by default.
        """
        if self.found is None:
            return 1.0
        tokens = self.found * growth
        if tokens > EVERYWHERE:
            return 1.0
        found = tokens / (1 + (self.kept() if kept is None else kept))
        missed = (1 - tokens) / (1 + (self.kept_behind() if behind is None else behind))
        return found / (found + missed)

    def accepted(
        self, odds: float = 1.0, growth: float | None = None, length: float = 1.0, behind: float | None = None
    ) -> float:
        """Return how many guesses a step accepts on average.

        Args:
            odds: see `kept`.
            growth: see `share`; without one, a lookup finds as many times as much as guesses stay.
            length: a step that finds some makes so many times as many as measured, see `stretched`.
            behind: how many times as often as measured guesses behind a lookup stay; as those of the lookup without it.
        """
        kept, others = self.stretched(length, self.kept(odds)), self.kept_behind(odds if behind is None else behind)
        share = self.share(odds if growth is None else growth, kept, others)
        return share * kept + (1 - share) * others

    def stretched(self, length: float, kept: float) -> float:
        """Return how many guesses are accepted where some are made: more of more, where a match bounds them.

        Of an arm that varies, guesses that its drafter is hardly sure of may be more, and no more of them stay.

        Args:
            kept: as many as are where as many are made as measured.
        """
        bounded = not self.varies and self.plan.factor is not None
        return min(self.plan.depth, min(length, self.most_length) * kept) if bounded else min(self.plan.depth, kept)

    def made_times(self, share: float, length: float, behind: float = 1.0) -> Times:
        """Return how many times as many guesses as measured it makes, over all steps; no more than it can.

        Args:
            share: of the steps, see above.
            length: how many times as many where some are made, `behind` where another drafter makes them.
        """
        times = share / self.usual_share * min(length, self.most_length)
        if not self.usual_behind:
            return times, 1.0
        return times, (1 - share) / (1 - self.usual_share) * min(behind, self.most_behind)

    def times_at(self, odds: float) -> Times:
        """Return how many times as many guesses it makes in a text whose guesses stay so many times as often."""
        share = self.share(odds, self.kept(odds), self.kept_behind(odds))
        return self.made_times(share, odds if self.varies else 1.0, odds)

    @cached_property
    def most_length(self) -> float:
        """How many times as many guesses as measured it can make in a step that makes some."""
        return self.plan.max_nodes / self.guesses if self.varies or self.plan.factor is not None else 1.0

    @cached_property
    def most_behind(self) -> float:
        """How many times as many guesses as measured can be made behind its lookup."""
        return 1.0 if self.behind is None else self.plan.max_nodes / self.behind.made


def _survival(shares: Sequence[float], odds: float) -> Iterator[float]:
    """Give the shares of steps in which the first guess stays, the second, …; none stays whose predecessor did not."""
    factor, before = 1.0, 1.0
    for survived in shares:
        factor *= odds
        before = min(before, survived * factor)
        yield before
