"""What a fitted policy has learnt about every row, and about all rows together for those that begin later."""

from bisect import bisect_left
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from draftsmith.engine.evidence import PRIOR, PRIOR_TOKENS, Evidence, RowEvidence, no_evidence
from draftsmith.engine.expected import Expected
from draftsmith.engine.known import ODDS, Guesser
from draftsmith.engine.policy import RowHistory
from draftsmith.engine.profile import Sampled

DECAY, COMMON_DECAY = 0.93, 0.999
"""By what a step's weight is multiplied at every further step: for its own row, and for rows that begin later."""
USUAL = ODDS.index(1.0)


class Learnt:
    """The evidence of every row, updated from its history when it is asked for.

    Args:
        guessers: those whose guesses are told apart.
        whose: the number of the guesser that decides each plan; the first plan drafts nothing.
        expected: how many guesses stay with each plan.
    """

    def __init__(self, guessers: Sequence[Guesser], whose: Sequence[int], expected: Expected) -> None:
        self._guessers, self._expected = guessers, expected
        self.told: list[tuple[int, ...]] = [
            (at - 1, at) if plan and guessers[at].behind else (at,) if plan else () for plan, at in enumerate(whose)
        ]
        """For each plan, the guessers that its steps give evidence about: the deciding one, and a lookup before it."""
        self._rows: WeakKeyDictionary[RowHistory, RowEvidence] = WeakKeyDictionary()
        # Over all rows: greedy and sampled ones apart, since fewer guesses stay in sampled ones.
        self._common = {sampled: [no_evidence(USUAL) for _ in guessers] for sampled in (False, True)}

    def knows(self, history: RowHistory) -> bool:
        """Return whether `of` was asked about a row before."""
        return history in self._rows

    def of(self, history: RowHistory) -> RowEvidence:
        """Return what is known about a row, its last steps included."""
        row, steps = self._rows.get(history), len(history.accepted)
        if row is None:
            evidence = [self._begin(number, history.sampled) for number in range(len(self._guessers))]
            row = self._rows[history] = RowEvidence(evidence, steps, sampled=history.sampled)
        elif steps > row.seen:
            for number in self.told[row.arm]:
                self._learn(number, row, history)
            row.seen = steps
        return row

    def _learn(self, number: int, row: RowEvidence, history: RowHistory) -> None:
        """Take in how a guesser did in the last steps of a row."""
        behind, own, common = self._guessers[number].behind, row.evidence[number], self._common[history.sampled][number]
        table, arm = self._table(number, row.arm), self._expected.arms[row.arm]
        kept = table[USUAL]
        if not kept:
            return
        for stayed, drafted, whose in history.steps(row.seen):
            if whose == behind:
                own.guessed, own.hit = own.guessed or drafted > 0, own.hit or stayed > 0
        for evidence, decay in ((own, DECAY), (common, COMMON_DECAY)):
            if behind:
                evidence.of_steps_behind(history, row.seen, arm, kept, decay)
            else:
                evidence.of_steps(history, row.seen, arm, kept, decay)
        own.odds = _odds_of(table, own.accepted / own.expected * kept)

    def _table(self, number: int, arm: int) -> Sequence[float]:
        """Return how many guesses of a guesser stay under a plan, at each of the odds."""
        expected = self._expected
        return expected.kept_behind[arm] if self._guessers[number].behind else expected.kept[arm]

    def _begin(self, number: int, sampled: bool) -> Evidence:
        """Return the evidence that a guesser begins a new text with, from what was measured and from other texts."""
        guesser, common = self._guessers[number], self._common[sampled][number]
        measured = guesser.known.profile.sampled if sampled else Sampled()
        usually = measured.behind if guesser.behind else measured.stayed
        stayed = (common.accepted + PRIOR * usually) / (common.expected + PRIOR)
        growth = (common.found + PRIOR_TOKENS * measured.found) / (common.tokens + PRIOR_TOKENS)
        length = (common.length_of_finds + PRIOR * measured.length) / (common.finds + PRIOR)
        tables = [self._table(number, arm) for arm, told in enumerate(self.told) if number in told]
        table = max(tables, key=lambda kept: kept[USUAL], default=())
        odds = _odds_of(table, stayed * table[USUAL]) if table else USUAL
        return Evidence(PRIOR * stayed, PRIOR, odds, PRIOR_TOKENS * growth, length_of_finds=PRIOR * length)


def _odds_of(table: Sequence[float], kept: float) -> int:
    """Return the index of the lowest odds at which at least `kept` guesses are accepted, by a table for all odds."""
    return min(bisect_left(table, kept), len(ODDS) - 1)
