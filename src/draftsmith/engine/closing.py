"""What drafts gain for a batch in which no row takes the place of one that has ended.

The rows of one call, with no other request in the engine, all begin together, and the call is over when the last of
them is. Guesses bring some rows more than others, so with drafts the rows end apart, and the last ones decode in steps
that are hardly cheaper for being of fewer rows. So drafts have to gain more than they would in a full batch.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from statistics import NormalDist

from draftsmith.engine.policy import Load, RowHistory

END_S = 0.0005
"""About how many seconds it costs that a row ends by itself and not together with others: those that are left are put
together anew, and decode in a smaller batch, whose steps are hardly cheaper."""
SPREAD = 0.3
"""How far apart texts of one kind are taken to be in the number of guesses that stay: the standard deviation, relative
to the mean."""


def is_closing(load: Load, rows: Sequence[RowHistory]) -> bool:
    """Whether these several rows are all that is left of one call, and nothing else is in the engine."""
    alone = len(rows) == load.decoding > 1 and load.waiting == load.reading == 0
    call = rows[0].call
    return alone and call is not None and all(row.call is call and math.isfinite(row.most) for row in rows)


def lost_at_the_end(
    left: Sequence[float], rates: Sequence[float], step_s: float, plain_s: float, later: Callable[[int], float]
) -> float:
    """Return how many times less drafts gain in a batch whose rows end apart than in a full one; at least 1.

    Args:
        left: tokens that each row may still write.
        rates: tokens that a step with drafts is expected to bring each of them.
        step_s: its seconds.
        plain_s: those of a step without drafts.
        later: see `seconds_left`.
    """
    plainly = seconds_left(left, [1.0] * len(left), plain_s, later)
    drafting = seconds_left(left, spread(rates), step_s, later) + ends_apart(left) * END_S
    return max(1.0, drafting / plainly * sum(rates) / len(rates) * plain_s / step_s)


def ends_apart(left: Sequence[float]) -> int:
    """Return how many rows end by themselves only because of drafts."""
    return len(left) - len(set(left))


def seconds_left(left: Sequence[float], rates: Sequence[float], now: float, later: Callable[[int], float]) -> float:
    """Return the seconds until the last row has written what is left of it.

    Args:
        left: tokens that each row has still to write.
        rates: tokens that a step brings each row until the first of them has ended.
        now: seconds of such a step.
        later: returns, for a smaller number of rows, the seconds in which each of them gets one token.
    """
    steps = min(tokens / rate for tokens, rate in zip(left, rates, strict=True))
    rest = sorted(max(0.0, tokens - steps * rate) for tokens, rate in zip(left, rates, strict=True))
    took, before = steps * now, rest[0]
    for ended, tokens in enumerate(rest[1:], start=1):
        if tokens > before:
            took += (tokens - before) * later(len(rest) - ended)
            before = tokens
    return took


def spread(rates: Sequence[float]) -> list[float]:
    """Return rates that lie as far apart as those of so many texts usually do, in the same order.

    Each is at least 1: every step brings a token.
    """
    order = sorted(range(len(rates)), key=rates.__getitem__)
    found = list(rates)
    for at, deviation in zip(order, _deviations(len(rates)), strict=True):
        found[at] = 1 + max(0.0, rates[at] - 1) * (1 + SPREAD * deviation)
    return found


@cache
def _deviations(count: int) -> tuple[float, ...]:
    """Return where so many draws from a standard normal distribution lie, about, in rising order."""
    return tuple(NormalDist().inv_cdf((at + 0.5) / count) for at in range(count))
