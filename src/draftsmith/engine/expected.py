"""What every plan is expected to bring in a text, from what is known about the text."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from draftsmith.engine.arm import Arm, Times
from draftsmith.engine.evidence import GROWTHS, QUARTERS, OneStand, Stand
from draftsmith.engine.known import ODDS

MOST_STANDS = 4096
"""How many stands of guessers are remembered, with what follows from them."""


class Expected:
    """The tokens that plans bring a row, and how many guesses they make in it; see `Arm.accepted`.

    Args:
        arms: all plans, the first of which drafts nothing.
        whose: the number of the guesser that decides each plan; where that one is behind a lookup, the lookup is the
            guesser before it.
    """

    def __init__(self, arms: Sequence[Arm], whose: Sequence[int]) -> None:
        self.arms = arms
        self.kept = [[arm.kept(odds) for odds in ODDS] for arm in arms]
        """For every plan, how many guesses stay where some are made, at each of the odds."""
        self.kept_behind = [[arm.kept_behind(odds) for odds in ODDS] for arm in arms]
        """The same for guesses behind a lookup, where it finds none."""
        best = [_at_best(arm) for arm in arms]
        self.most = [tokens for tokens, _ in best]
        """For every plan, the tokens that a step brings at best."""
        self.most_times = [times for _, times in best]
        """How many times as many guesses as measured it makes at best."""
        # For every guesser: whose stand decides what stays where its plans look something up, itself or the lookup
        # before it; and its own plans.
        self._groups = [
            (number if arms[plans[0]].behind is None else number - 1, number, plans)
            for number, plans in _plans_of(whose)
        ]
        # Of one guesser, because in most steps little is learnt about the others; and whether tokens are drawn.
        self._stands: dict[tuple[int, OneStand, OneStand, bool], tuple[list[float], list[Times]]] = {}
        # Of what rows `average` was asked last, and the answer: mostly nothing was learnt since.
        self._asked: list[Stand] = []
        self._average: tuple[list[float], list[Times]] = [], []

    def of(self, stand: Stand) -> tuple[list[float], list[Times]]:
        """Return the tokens a step that each plan brings in such a text, and its guesses relative to those measured.

        Plans that do not suit texts whose tokens are drawn bring nothing there.
        """
        brings, times = [1.0], [(1.0, 1.0)]
        for first, number, plans in self._groups:
            key = number, stand.guessers[first], stand.guessers[number], stand.sampled
            found = self._stands.get(key)
            if found is None:
                if len(self._stands) == MOST_STANDS:
                    self._stands.clear()
                found = self._stands[key] = self._with(plans, *key[1:])
            brings += found[0]
            times += found[1]
        return brings, times

    def _with(
        self, plans: Sequence[int], first: OneStand, own: OneStand, sampled: bool
    ) -> tuple[list[float], list[Times]]:
        """Return the same for some plans of one guesser.

        Args:
            first: how guesses do that are looked up, or those of a drafter that looks nothing up.
            own: the same of those that are made behind a lookup, if some are.
        """
        brings, times = list[float](), list[Times]()
        (odds, growth, length), (behind_odds, _, behind) = first, own
        for at in plans:
            arm = self.arms[at]
            kept, others = arm.stretched(length / QUARTERS, self.kept[at][odds]), self.kept_behind[at][behind_odds]
            share = arm.share(GROWTHS[growth], kept, others)
            brings.append(0.0 if sampled and not arm.suits_draws else 1 + share * kept + (1 - share) * others)
            times.append(arm.made_times(share, length / QUARTERS, behind / QUARTERS))
        return brings, times

    def average(self, stands: Sequence[Stand]) -> tuple[list[float], list[Times]]:
        """Return the same, on average over these rows; it may be returned again, so it is not to be changed."""
        if len(stands) == 1:
            return self.of(stands[0])
        if stands != self._asked:
            self._asked, self._average = list(stands), self._mean(stands)
        return self._average

    def _mean(self, stands: Sequence[Stand]) -> tuple[list[float], list[Times]]:
        (stand, most), *others = Counter(stands).items()
        brings, times = self.of(stand)
        if others:
            share = most / len(stands)
            brings, times = [share * one for one in brings], [(share * one, share * two) for one, two in times]
        for stand, count in others:
            share, (own, made) = count / len(stands), self.of(stand)
            brings = [total + share * one for total, one in zip(brings, own, strict=True)]
            times = [
                (first + share * one, second + share * two)
                for (first, second), (one, two) in zip(times, made, strict=True)
            ]
        return brings, times


def _plans_of(whose: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Return every guesser's number with those of its plans, which follow each other; the first plan is nobody's."""
    return [(number, list(plans)) for number, plans in groupby(range(1, len(whose)), whose.__getitem__)]


def _at_best(arm: Arm) -> tuple[float, Times]:
    """Return the tokens that a step brings at the highest odds, and how many times as many guesses it makes then."""
    odds, length = ODDS[-1], arm.most_length
    found = 1 + arm.accepted(odds, math.inf, length), arm.made_times(1.0, length)
    if arm.behind is None:
        return found
    return max(found, (1 + arm.accepted(odds, 0.0), arm.made_times(0.0, 1.0, arm.most_behind)))


def at_most(brings: Sequence[float], left: float) -> Sequence[float]:
    """Return the tokens that plans bring a text that may write so many more."""
    return brings if left >= max(brings) else [min(tokens, left) for tokens in brings]


def values_of(brings: Sequence[float], price: float, spent: Sequence[float]) -> list[float]:
    """Return the tokens that every plan brings, minus its time at a price in tokens a second."""
    return [tokens - price * took for tokens, took in zip(brings, spent, strict=True)]


def beats(
    values: Sequence[float], price: float, spent: Sequence[float], one: int, other: int, times: float
) -> bool:
    """Return whether plan `one` is more than `times` as fast as plan `other`."""
    return values[one] - values[other] > (times - 1) * (values[other] + price * spent[other])
