"""Trials: a few steps with drafts that do not pay now, to see whether guesses stay by now."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from draftsmith.engine.closing import END_S
from draftsmith.engine.evidence import FIRST_WAIT, LONGER, LONGEST_WAIT, TRIAL, RowEvidence
from draftsmith.engine.purse import LENT, LENT_LITTLE, Purse, share_lost

HELD = 31
"""Steps without a draft for which a policy need not be asked again, where no row drafts."""
SHORT = 4 * TRIAL
"""Where no row can write more tokens than so many, nothing is tried: there is no time left to gain by it."""
CALL = 2.0
"""Trials of the rows of a call are taken to lose this many times as much as expected: they make the rows end apart."""
CHANGE_S, CHANGE_ROW_S = 0.0003, 0.0001
"""About how many seconds a change of plan takes, and how many more for each row, whatever the target: with what is
asked and computed for it, and the steps after it, which find other data in the processor's caches."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What every plan is worth now to a row, or to several rows that take the same one.

    Args:
        values: tokens that every plan brings, minus its time at the price.
        price: tokens a second that all rows together can have.
        spent: a row's share of the seconds of a step, for every plan.
        hoped: the same in the best case.
        left: the most tokens that any of the rows may still write.
        rows: how many rows there are.
        ends: how many of them end by themselves once one of them has got a guess.
        tried: the values on trial, in which other rows may join; empty means those of `values`.
        closes: whether the rows are all that is left of a call.
    """

    values: Sequence[float]
    price: float
    spent: Sequence[float]
    hoped: Sequence[float]
    left: float
    rows: int = 1
    ends: int = 0
    tried: Sequence[float] = ()
    closes: bool = False

    @property
    def change_s(self) -> float:
        """A row's share of the seconds that a change of the plan costs."""
        return CHANGE_S / self.rows + CHANGE_ROW_S

    def brings(self, arm: int) -> float:
        """Return the tokens that a step of a plan brings a row."""
        return self.values[arm] + self.price * self.spent[arm]


class Trials:
    """Says which guesser is tried next in a text, and by which plan.

    Args:
        whose: the number of the guesser that decides each plan; the first plan drafts nothing.
        told: for each plan, the guessers that its steps give evidence about.
        guessers: how many there are.
        most: for every plan, the tokens that a step brings at best.
    """

    def __init__(
        self, whose: Sequence[int], told: Sequence[Sequence[int]], guessers: int, most: Sequence[float]
    ) -> None:
        self.purse = Purse()
        """Pays for them."""
        self._whose, self._told, self._most = whose, told, most
        self._paid = 0.0  # what the steps of the last trial were expected to lose
        self._telling = [[at for at, those in enumerate(told) if number in those] for number in range(guessers)]

    def charge(self, sampled: bool, steps: int, lost: float, rows: int) -> None:
        """Pay for steps of the last trial what they lost, in tokens of each row, beyond what was expected.

        The first drafts of a text may take longer than later ones: a lookup reads the text then, and the processor's
        caches hold other data.
        """
        self.purse.charge(sampled, max(0.0, lost) - self._paid * steps / TRIAL, rows)

    def due(self, row: RowEvidence, offer: Offer, chosen: int, extra: float) -> int:
        """Return a plan of a guesser whose trial is due, or else `chosen`; none is tried that could not pay at best.

        Args:
            extra: how many more tokens a plan has to bring to be taken up.
        """
        if offer.left <= SHORT:
            return chosen
        for number, own in enumerate(row.evidence):
            if own.since < own.wait or number in self._told[chosen]:
                continue
            # A plan that brings nothing, not even the target's own token, does not suit this text.
            telling = [arm for arm in self._telling[number] if offer.brings(arm) != 0]
            worth, values = offer.values[chosen], offer.tried or offer.values
            highest = max((self._most[arm] - offer.price * offer.hoped[arm] for arm in telling), default=worth)
            if highest <= worth + extra:
                # The next question comes after as long a pause, and does not shorten how long an answer holds.
                own.since, own.wait = 0, max(own.wait, HELD + 1)
                continue
            best = max(telling, key=values.__getitem__)
            # What nearly pays is tried more often: its trial costs little, and without it much could be missed.
            changes_s = 2 * offer.change_s + offer.ends * END_S / offer.rows
            expected = TRIAL * max(0.0, worth - values[best])
            loss = (CALL if offer.closes else 1.0) * (expected + offer.price * changes_s)
            lent = 0.0 if row.sampled else LENT_LITTLE if chosen or offer.rows > 1 else LENT
            if not self.purse.pay(row.sampled, loss, lent, offer.rows):
                tokens = self.purse.tokens_until(row.sampled, loss, lent, offer.rows)
                later = min(LONGEST_WAIT, max(HELD + 1, ceil(tokens / offer.brings(chosen))))
                own.wait = max(own.wait, later)
                own.since = own.wait - later
                continue
            row.tried, self._paid = number, expected
            longest = max(FIRST_WAIT, round(loss / share_lost(row.sampled, offer.rows)))
            # The same steps tell others whether theirs would pay, so that they need no trial of their own soon.
            for told in {number, *self._told[best]}:
                other = row.evidence[told]
                later = min(LONGER * other.wait, LONGEST_WAIT, longest)
                other.wait = later if told == number else max(other.wait, later)
            own.since = 0
            own.doubt()
            row.evidence[self._whose[best]].begin()
            return best
        return chosen
