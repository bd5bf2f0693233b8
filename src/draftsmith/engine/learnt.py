"""What a fitted policy has learnt about every row, and about all rows together for those that begin later."""

from bisect import bisect_left
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from draftsmith.engine.evidence import (
    PRIOR,
    PRIOR_TOKENS,
    Evidence,
    Lessons,
    RowEvidence,
    lessons_behind,
    lessons_of,
    no_evidence,
)
from draftsmith.engine.expected import Expected
from draftsmith.engine.known import ODDS, Guesser
from draftsmith.engine.policy import RowHistory
from draftsmith.engine.profile import Sampled

DECAY, LOOKUP_DECAY, COMMON_DECAY = 0.96, 0.98, 0.993
"""By what a step's weight is multiplied at every further step: for its own row, for a lookup in it, and for rows that
begin later. Those count about the last 140 steps with drafts, of all rows together, because texts of another kind may
follow. A lookup finds guesses in some steps only, and either many of them stay or none. So of a few steps little can be
said, and whoever forgets the others takes the plan that happened to do well."""
COUNTS = 6.0
"""How many guesses or steps count as much, for rows that begin later, as what was measured."""
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
        self.told: list[tuple[int, ...]] = [_told(guessers, at) if plan else () for plan, at in enumerate(whose)]
        """For each plan, the guessers that its steps give evidence about: first its lookup, or else who decides it."""
        # The same, each with whether it drafts behind a lookup there, and a table of how many of its guesses stay at
        # each of the odds; and for every guesser the one of its tables that keeps most.
        self._taught = [
            [(number, *self._table(number, plan)) for number in told] for plan, told in enumerate(self.told)
        ]
        self._tables = [
            max(
                (table for taught in self._taught for whose, _, table in taught if whose == number),
                key=lambda kept: kept[USUAL], default=(),
            )
            for number in range(len(guessers))
        ]
        self._decays = [LOOKUP_DECAY if guesser.looks_up else DECAY for guesser in guessers]
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
            self._learn(row, history)
            row.seen = steps
        return row

    def _learn(self, row: RowEvidence, history: RowHistory) -> None:
        """Take in how the guessers did in the last steps of a row."""
        arm, common = self._expected.arms[row.arm], self._common[history.sampled]
        found = dict[bool, Lessons]()
        for number, behind, table in self._taught[row.arm]:
            kept, own = table[USUAL], row.evidence[number]
            if not kept:
                continue
            if behind not in found:
                found[behind] = (lessons_behind if behind else lessons_of)(history, row.seen, arm, kept)
            lessons = found[behind]
            own.learn(lessons, self._decays[number])
            common[number].learn(lessons, COMMON_DECAY)
            own.odds = _odds_of(table, own.accepted / own.expected * kept)
            for stayed, drafted, whose in history.steps(row.seen):
                if whose == behind:
                    own.guessed, own.hit = own.guessed or drafted > 0, own.hit or stayed > 0

    def _table(self, number: int, plan: int) -> tuple[bool, Sequence[float]]:
        """Return whether a guesser drafts only where a plan's lookup finds nothing, and how many guesses stay then."""
        guesser = self._guessers[number]
        behind = self._expected.arms[plan].behind is not None and (guesser.behind or guesser.unaided)
        return behind, (self._expected.kept_behind if behind else self._expected.kept)[plan]

    def _begin(self, number: int, sampled: bool) -> Evidence:
        """Return the evidence that a guesser begins a new text with, from what was measured and from other texts."""
        guesser, common = self._guessers[number], self._common[sampled][number]
        measured = guesser.known.profile.sampled if sampled else Sampled()
        usually = measured.behind if guesser.behind or guesser.unaided else measured.stayed
        stayed = (common.accepted + COUNTS * usually) / (common.expected + COUNTS)
        growth = (common.found + PRIOR_TOKENS * measured.found) / (common.tokens + PRIOR_TOKENS)
        # In sampled rows, how many guesses a confidence leaves is not known, see `RowHistory.tells_any`.
        usual = 1.0 if guesser.behind or guesser.unaided else measured.length
        length = (common.length_of_finds + COUNTS * usual) / (common.finds + COUNTS)
        table = self._tables[number]
        odds = _odds_of(table, stayed * table[USUAL]) if table else USUAL
        return Evidence(PRIOR * stayed, PRIOR, odds, PRIOR_TOKENS * growth, length_of_finds=PRIOR * length)


def _told(guessers: Sequence[Guesser], at: int) -> tuple[int, ...]:
    """Return the guessers that the steps of a plan say something about, if `at` is the one that decides it.

    A drafter that guesses behind a lookup, and by itself, is known from both; and the lookup from steps of both.
    """
    if guessers[at].behind:
        unaided = at + 1 < len(guessers) and guessers[at + 1].unaided
        return (at - 1, at, at + 1) if unaided else (at - 1, at)
    return (at, at - 1) if guessers[at].unaided and guessers[at - 1].behind else (at,)


def _odds_of(table: Sequence[float], kept: float) -> int:
    """Return the index of the lowest odds at which at least `kept` guesses are accepted, by a table for all odds."""
    return min(bisect_left(table, kept), len(ODDS) - 1)
