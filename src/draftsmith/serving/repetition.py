"""Finds texts that loop: drafts guess such a text almost perfectly, but nobody wants to read it."""

from collections import deque
from collections.abc import Sequence

from draftsmith.engine.made import Made

LONGEST = 64
"""Tokens of the longest loop that is looked for."""
TAIL = 3 * LONGEST
"""Tokens at the end of a text that must be nothing but repetition."""
NEARLY_ALL, NEWEST = 0.95, 0.1
"""The share of guesses that must stay before a loop is looked for, and the weight of the newest step in that share."""
EVERY = 16
"""Steps between two searches."""


class Repetition:
    """Looks for a loop in one text; memory and time are bounded, and it searches only while nearly all guesses stay."""

    def __init__(self) -> None:
        self._tail: deque[int] = deque(maxlen=TAIL)
        self._share, self._steps = 0.0, 0
        self.period: int | None = None
        """Tokens of the loop, once one was found."""

    def note(self, tokens: Sequence[int]) -> None:
        """Note tokens of the text, without searching."""
        self._tail.extend(tokens)

    def take(self, tokens: Sequence[int], made: Made) -> bool:
        """Note a step; return whether it completed a loop, which is reported once in a text."""
        self.note(tokens)
        reached = reach(made)
        if not reached or self.period is not None:
            return False
        self._share += NEWEST * (made.accepted / reached - self._share)
        self._steps += 1
        if self._share < NEARLY_ALL or self._steps % EVERY or len(self._tail) < TAIL:
            return False
        period = smallest_period(list(self._tail))
        if period > LONGEST:
            return False
        self.period = period
        return True


def reach(made: Made) -> int:
    """Return how many guesses a step could have accepted; lookups often find fewer than their plan asks for."""
    return min(made.plan.depth, made.drafted)


def smallest_period(tokens: Sequence[int]) -> int:
    """Return the least number of tokens after which all of them repeat; their own number if they never do."""
    # For every beginning of the list: the longest shorter beginning that is also its end (Knuth, Morris and Pratt).
    borders = [0]
    for token in tokens[1:]:
        border = borders[-1]
        while border and tokens[border] != token:
            border = borders[border - 1]
        borders.append(border + 1 if tokens[border] == token else 0)
    return len(tokens) - borders[-1]
