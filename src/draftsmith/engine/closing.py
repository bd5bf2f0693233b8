"""What drafts bring a batch in which no row takes the place of one that has ended.

The rows of one call, with no other request in the engine, all begin together, and the call is over when the last of
them is. Guesses bring some rows more than others, so with drafts the rows end apart, and the last ones decode in steps
that are hardly cheaper for being of fewer rows. So what counts is not the mean of what a step brings, but how much
sooner the last row ends.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from statistics import NormalDist

from draftsmith.engine.apart import moved
from draftsmith.engine.arm import Times
from draftsmith.engine.evidence import RowEvidence, Stand
from draftsmith.engine.expected import Expected
from draftsmith.engine.learnt import Learnt
from draftsmith.engine.pace import Pace
from draftsmith.engine.policy import Load, RowHistory
from draftsmith.engine.step_costs import StepCosts

END_S = 0.0005
"""About how many seconds it costs that a row ends by itself and not together with others: those that are left are put
together anew, and decode in a smaller batch, whose steps are hardly cheaper."""


def is_closing(load: Load, rows: Sequence[RowHistory]) -> bool:
    """Whether these several rows are all that is left of one call, and nothing else is in the engine."""
    alone = len(rows) == load.decoding > 1 and load.waiting == load.reading == 0
    call = rows[0].call
    return alone and call is not None and all(row.call is call and math.isfinite(row.most) for row in rows)


class Closing:
    """Tells what plans bring such rows, all of which take the same one.

    Args:
        expected: what each plan brings a row.
        costs: what steps of each plan take, as measured.
        pace: how long they take now.
        learnt: how far apart texts are.
    """

    def __init__(self, expected: Expected, costs: StepCosts, pace: Pace, learnt: Learnt) -> None:
        self._expected, self._costs, self._pace, self._learnt = expected, costs, pace, learnt
        # What `_each_brings` was asked last, and the answer: where nothing is drafted, nothing is learnt between texts.
        self._asked: tuple[list[Stand], list[list[float]], dict[bool, list[float]]] | None = None
        self._answer: list[list[float]] = []

    def brings(
        self, known: Sequence[RowEvidence], left: Sequence[float], brings: Sequence[float], times: Sequence[Times],
        spent: Sequence[float], tokens: float,
    ) -> tuple[list[float], list[float]]:
        """Return the tokens a step that plans bring, as if each row got as many: those that bring the end as near.

        Return the same for plans that are soon given up, too: these bring what they bring the row that gains least.

        Plans that are not faster than plain decoding in a full batch are not looked at: they bring what they did.

        Args:
            known: about each row.
            left: tokens that each of them has still to write.
            brings, times: of every plan, on average over the rows; see `Expected.average`.
            spent: a row's share of the seconds of a step, for every plan.
            tokens: the length of the rows' texts, on average.
        """
        count, ends_s, each = len(left), ends_apart(left) * END_S, self._each_brings(known)
        plain_s, found = count * spent[0], list(brings)
        for arm in range(1, len(found)):
            if brings[arm] * spent[0] <= spent[arm]:
                continue
            rates = [max(1.0, own[arm]) for own in each]  # in sampled rows, a plan that does not suit them brings 0
            later = cache(partial(self._later, arm, times[arm], last_first(left, rates), tokens))
            plainly_s = seconds_left(left, [1.0] * count, plain_s, later)
            drafting_s = seconds_left(left, rates, count * spent[arm], later) + ends_s
            found[arm] = plainly_s / drafting_s * spent[arm] / spent[0]
        return found, [min(own) for own in zip(*each, strict=True)]

    def _later(self, arm: int, times: Times, rates: Sequence[float], tokens: float, rows: int) -> float:
        """Return the seconds in which the last `rows` rows get a token each, with a plan or without drafts.

        Args:
            times: see `Expected.of`.
            rates: tokens that a step of the plan brings each row, those of the last row first.
            tokens: the length of the rows' texts.
        """
        costs, slower = self._costs.of(rows, tokens), self._pace.slower(len(rates))
        # Fewer rows may never have been timed; what is known of these says most then.
        if self._pace.has_seen(rows, 0) and self._pace.has_seen(rows, arm):
            slower = self._pace.slower(rows)
        drafting_s = costs.of(arm, times) * slower[arm] * rows / sum(rates[:rows])
        return rows * min(costs.plain * slower[0], drafting_s)

    def _each_brings(self, known: Sequence[RowEvidence]) -> list[list[float]]:
        """Return what every plan brings each row, if the rows turn out as far apart as texts usually do.

        Of a row of which much is known, less is left to turn out otherwise. What is returned may be returned again, so
        it is not to be changed.
        """
        deviations = {sampled: self._learnt.deviations(sampled) for sampled in {row.sampled for row in known}}
        stands = [row.stand for row in known]
        asked = stands, [[own.unknown for own in row.evidence] for row in known], deviations
        if asked == self._asked:
            return self._answer
        order = sorted(range(len(known)), key=stands.__getitem__)
        found: list[list[float]] = [[]] * len(known)
        for at, away in zip(order, _deviations(len(known)), strict=True):
            row = known[at]
            guessers = tuple(
                (moved(own.odds, away * deviation * math.sqrt(own.unknown)), own.growth, own.length)
                for own, deviation in zip(row.evidence, deviations[row.sampled], strict=True)
            )
            found[at], _ = self._expected.of(Stand(guessers, row.sampled))
        self._asked, self._answer = asked, found
        return found


def last_first(left: Sequence[float], rates: Sequence[float]) -> list[float]:
    """Return the rates, those of the row first that ends last."""
    return [rates[at] for at in sorted(range(len(left)), key=lambda at: rates[at] / left[at])]


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


@cache
def _deviations(count: int) -> tuple[float, ...]:
    """Return where so many draws from a standard normal distribution lie, about, in rising order."""
    return tuple(NormalDist().inv_cdf((at + 0.5) / count) for at in range(count))
