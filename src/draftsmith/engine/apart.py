"""How far apart texts are in how often a drafter's guesses stay, learnt from those that were decoded."""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from draftsmith.engine.evidence import Evidence, Usual
from draftsmith.engine.known import ODDS, USUAL

USUALLY, COUNTS = 0.2, 8.0
"""The standard deviation of the logarithm of the odds, see `Arm.kept`, before any text was decoded, and how many texts
count as much as that."""
LATEST = 48
"""So many texts are remembered, since others may follow that are more alike, or less."""


class Apart:
    """The latest texts in which a guesser was tried, and how far from the usual it was in each of them."""

    def __init__(self) -> None:
        self._latest = deque[Evidence](maxlen=LATEST)
        self._deviation: float | None = None  # of these, once it was asked for

    def note(self, own: Evidence, usual: Usual, kept: Sequence[float]) -> None:
        """Take in what is known of the guesser in a text by now, in place of what was known before.

        Args:
            usual: what was expected of it.
            kept: how many guesses stay at each of the `ODDS`, with the plan that it drafts by.
        """
        self._deviation = None
        expected = min(bisect_left(kept, usual.stayed * kept[USUAL]), len(kept) - 1)
        if not own.known:
            self._latest.append(own)
        own.known = 1 - own.unknown
        own.apart = math.log(max(ODDS[1], ODDS[own.odds]) / max(ODDS[1], ODDS[expected]))

    @property
    def deviation(self) -> float:
        """The standard deviation of the logarithm of the odds in different texts.

        What is known of a text is drawn towards the usual, by as much as is not known of it.
        """
        if self._deviation is None:
            squares, texts = COUNTS * USUALLY**2, COUNTS
            for own in self._latest:
                squares += own.apart**2
                texts += own.known**2
            self._deviation = math.sqrt(squares / texts)
        return self._deviation


def moved(odds: int, deviation: float) -> int:
    """Return the index of the odds that lie so many natural logarithms from those of index `odds`."""
    return min(len(ODDS) - 1, max(0, round(odds * math.exp(deviation))))
