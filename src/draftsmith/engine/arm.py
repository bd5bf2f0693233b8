"""A plan with what was measured of it: how many guesses it makes, how many of them stay, and what its steps take."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from draftsmith.plan import Plan

MOST_ODDS = 3.0
"""Guesses are taken to stay at most this many times as often as measured."""
EVERYWHERE = 0.98
"""If this share of the tokens or more come from steps whose lookup found something, every step is taken to find
something. The few other tokens could be many steps among steps of many tokens, but they are not known so exactly."""
Times = tuple[float, float]
"""How many times as many guesses as measured a plan makes, and the same for those `Behind` a lookup."""


@dataclass(frozen=True)
class Behind:
    """What another drafter guesses at the steps in which the lookup before it finds nothing.

    Args:
        survival: the share of those steps that accepted at least 1, 2, … of its guesses.
        made: how many guesses it made, on average over those steps.
        each: seconds that a step takes longer for one more such guess in every row, for each number of rows.
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
    what holds for a text under every plan, as far as anything does, is how much higher than measured the odds are that
    a token comes from a step whose lookup found something: two plans find different shares in the same text, but in
    other texts the odds of both change alike. The share of such steps follows from how many tokens each kind of step
    brings.

    Args:
        survival: the share of steps that accepted at least 1, 2, … guesses; for a lookup, of the steps that found some.
        seconds: of a step, all rows together, for each number of rows of the profile.
        found: for a lookup, the share of the tokens that came from steps that found guesses; None stands for all.
        made: how many guesses a step makes, on average over the steps that made some; for a plan with a confidence,
            over all steps. None stands for as many as the plan allows.
        full: for a lookup or a plan with a confidence, seconds of a step in which every row makes as many guesses as
            the plan allows.
        behind: for a lookup with another drafter behind it, what that drafter guesses.
        suits_draws: whether it may serve texts whose tokens are drawn. There, guesses by the target's own noise stay
            far more often than the likeliest ones, see `Drafter.can_sample`.
    """

    plan: Plan
    survival: tuple[float, ...]
    seconds: tuple[float, ...]
    found: float | None = None
    full: tuple[float, ...] = ()
    made: float | None = None
    behind: Behind | None = None
    suits_draws: bool = True

    def kept(self, odds: float = 1.0) -> float:
        """Return how many guesses are accepted, on average over steps that made some, without those `behind`.

        Args:
            odds: how many times as often as measured a guess stays if all guesses before it did. It applies once for
                every level, so deeper guesses lose or gain most.
        """
        total = sum(_survival(self.survival, odds))
        return total if self.varies else min(total, self.guesses)

    def kept_behind(self, odds: float = 1.0) -> float:
        """Return how many guesses a step accepts whose lookup found none; 0 without another drafter behind it."""
        return 0.0 if self.behind is None else self.behind.kept(odds)

    @cached_property
    def varies(self) -> bool:
        """Whether every step makes as many guesses as its drafter is sure of, which differs from text to text."""
        return self.plan.confidence is not None and self.found is None

    @cached_property
    def is_steady(self) -> bool:
        """Whether every step makes as many guesses, in every text."""
        return self.found is None and not self.varies

    @cached_property
    def guesses(self) -> float:
        """How many guesses a step makes, on average over steps that make some, without those `behind`."""
        return self.plan.max_nodes if self.made is None else self.made

    @cached_property
    def usual_share(self) -> float:
        """The share of steps that make guesses, as measured, without those `behind`."""
        return self.share()

    @cached_property
    def usual(self) -> float:
        """How many guesses a step makes, on average over all steps, without those `behind`."""
        return self.usual_share * self.guesses

    @cached_property
    def usual_behind(self) -> float:
        """How many guesses are made behind a lookup that found none, on average over all steps of both kinds."""
        return 0.0 if self.behind is None else (1 - self.usual_share) * self.behind.made

    def share(self, growth: float = 1.0, kept: float | None = None, behind: float | None = None) -> float:
        """Return the share of steps that make guesses, without those `behind`.

        Args:
            growth: how many times as high as measured the odds are that a token comes from a step whose lookup found
                something.
            kept: how many guesses such a step accepts; by default as measured.
            behind: the same for a step whose lookup found nothing.
        """
        if self.found is None:
            return 1.0
        if growth == math.inf:
            return 1.0
        found = min(self.found, EVERYWHERE)
        tokens = found * growth / (1 - found + found * growth)
        if tokens >= EVERYWHERE:
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
            growth: see `share`; by default the same as `odds`.
            length: how many times as many guesses as measured are made by a step that finds some, see `stretched`.
            behind: how many times as often as measured guesses behind a lookup stay; by default the same as `odds`.
        """
        kept, others = self.stretched(length, self.kept(odds)), self.kept_behind(odds if behind is None else behind)
        share = self.share(odds if growth is None else growth, kept, others)
        return share * kept + (1 - share) * others

    def stretched(self, length: float, kept: float) -> float:
        """Return how many guesses a step that makes some accepts: `length` times as many if a match bounds them.

        Where an arm varies, a longer draft only adds guesses that its drafter is hardly sure of, and no more stay. And
        a drafter that guesses because nothing is looked up makes as many guesses at every step.

        Args:
            kept: how many are accepted when as many guesses are made as measured.
        """
        bounded = self.found is not None and self.plan.factor is not None
        return min(self.plan.depth, min(length, self.most_length) * kept) if bounded else min(self.plan.depth, kept)

    def made_times(self, share: float, length: float, behind: float = 1.0) -> Times:
        """Return how many times as many guesses as measured it makes, over all steps; no more than it can.

        Args:
            share: of the steps that make guesses, see `share`.
            length: how many times as many are made by a step that makes some.
            behind: the same where another drafter makes them.
        """
        times = share / self.usual_share * (1.0 if self.is_steady else min(length, self.most_length))
        if not self.usual_behind:
            return times, 1.0
        return times, (1 - share) / (1 - self.usual_share) * min(behind, self.most_behind)

    def times_at(self, odds: float) -> Times:
        """Return how many times as many guesses it makes in a text whose guesses stay `odds` times as often."""
        share = self.share(odds, self.kept(odds), self.kept_behind(odds))
        return self.made_times(share, odds if self.varies else 1.0, odds)

    @cached_property
    def most_length(self) -> float:
        """How many times as many guesses as measured it can make in a step that makes some."""
        return self.plan.max_nodes / self.guesses if self.varies or self.plan.factor is not None else 1.0

    @cached_property
    def most_behind(self) -> float:
        """How many times as many guesses as measured can be made behind its lookup when that finds none."""
        return 1.0 if self.behind is None else self.plan.max_nodes / self.behind.made


def _survival(shares: Sequence[float], odds: float) -> Iterator[float]:
    """Give the shares of steps in which the first, the second, … guess stays; no share is above the one before it."""
    factor, before = 1.0, 1.0
    for survived in shares:
        factor *= odds
        before = min(before, survived * factor)
        yield before
