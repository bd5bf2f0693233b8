"""Settles which plan a row takes, or several rows that take the same one: a small gain changes nothing."""

from collections.abc import Sequence

from draftsmith.engine.evidence import NOBODY, TRIAL, RowEvidence
from draftsmith.engine.expected import beats
from draftsmith.engine.pace import SEEN, SETTLES_PLAIN
from draftsmith.engine.trials import Offer, Trials

PATIENCE = 1.03
"""A change to another plan has to make decoding this many times as fast, and so does any draft against none."""
EARNED_BACK, EARNED_BACK_S = 48, 0.005
"""Within how many steps a change of plan must have paid for what it costs, or within as many as take so many seconds,
because very short steps pay for nothing. With a fourth of so many steps, sixteen rows were kept from drafts that would
have been a tenth faster, because a change costs every row something."""
LAID_ASIDE = SETTLES_PLAIN + SEEN
"""Steps before what was drafted for longer than a trial is tried again. If it was laid aside because plain steps were
thought to be faster than they are, it is known by then how long they take now."""


class Settling:
    """Weighs what plans are worth against what a change costs, and begins trials.

    Args:
        whose: the number of the guesser that decides each plan; the first plan drafts nothing.
        told: for each plan, the guessers that its steps give evidence about.
        trials: says which guesser is tried next, and pays for it.
    """

    def __init__(self, whose: Sequence[int], told: Sequence[Sequence[int]], trials: Trials) -> None:
        self._whose, self._told, self._trials = whose, told, trials

    def is_on_trial(self, row: RowEvidence) -> bool:
        """Whether a row drafts on trial, or has just begun to draft."""
        return row.arm > 0 and row.evidence[self._whose[row.arm]].trial > 0

    def will_go_on(self, row: RowEvidence) -> bool:
        """Whether a row drafts as before in the next step for that reason, whatever is best."""
        return row.arm > 0 and row.evidence[self._whose[row.arm]].will_go_on(max(1, row.passed))

    def settle(
        self, row: RowEvidence, offer: Offer, patience: float = PATIENCE, switch: float = PATIENCE, passed: int = 1
    ) -> int:
        """Return the plan of a row, or of several rows that take the same one; a small gain changes nothing.

        Args:
            patience: how many times as fast as plain decoding a plan has to be.
            switch: how many times as fast as the plan taken so far another one has to be.
            passed: steps since the last call.
        """
        values, price, spent = offer.values, offer.price, offer.spent
        best = max(range(1, len(values)), key=values.__getitem__)
        gained = passed * (values[row.arm] - values[0])
        self._trials.purse.earn(row.sampled, passed * offer.brings(row.arm), gained, offer.rows)
        within = max(EARNED_BACK, EARNED_BACK_S / (offer.rows * spent[row.arm]))
        earned = offer.change_s / (min(within, offer.left) * spent[row.arm])
        drafting = self._whose[row.arm]
        on_trial = drafting != NOBODY and row.evidence[drafting].goes_on(passed)
        if row.trying and row.settled:
            # Another draft was taken before the trial, and is taken again unless this one is clearly better.
            best = best if beats(values, price, spent, best, row.settled, switch) else row.settled
        elif row.arm and not beats(values, price, spent, best, row.arm, switch + earned):
            best = row.arm
        needed = patience if row.arm else patience + earned
        chosen = best if beats(values, price, spent, best, 0, needed) else 0
        if on_trial:
            chosen = row.arm
        for number, own in enumerate(row.evidence):
            taken = number in self._told[chosen]
            own.since = own.since + 1 if taken == (number in self._told[row.arm]) else 0
            if taken and own.since == 0 and number == self._whose[chosen]:
                own.begin()  # a few guesses that fail say little
            elif taken and own.since >= TRIAL and not on_trial:
                own.wait = LAID_ASIDE
        # How many more tokens drafts of several rows have to bring for a trial to lead to drafting.
        extra = 0.0 if chosen or offer.rows == 1 else (patience - 1) * offer.brings(0)
        row.tried = NOBODY
        tried = chosen if on_trial else self._trials.due(row, offer, chosen, extra)
        row.trying = tried != chosen or (on_trial and row.trying)
        if tried != chosen:
            row.settled = chosen
        return tried
