"""What a fitted policy has learnt about every row, and about all rows together for those that begin later."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from draftsmith.engine.apart import Apart
from draftsmith.engine.evidence import (
    PRIOR_TOKENS,
    Evidence,
    Lessons,
    OneStand,
    RowEvidence,
    Usual,
    lessons_behind,
    lessons_of,
    no_evidence,
)
from draftsmith.engine.expected import Expected
from draftsmith.engine.known import ODDS, USUAL, Guesser
from draftsmith.engine.policy import RowHistory
from draftsmith.engine.profile import Sampled

DECAY, LOOKUP_DECAY, COMMON_DECAY = 0.96, 0.98, 0.993
"""By what a step's weight is multiplied at every further step: for its own row, for a lookup in it, and for rows that
begin later. Those count about the last 140 steps with drafts, of all rows together, because texts of another kind may
follow. A lookup finds guesses in some steps only, and either many of them stay or none. So of a few steps little can be
said, and whoever forgets the others takes the plan that happened to do well."""
COUNTS = 6.0
"""How many guesses or steps count as much, for rows that begin later, as what was measured."""



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
        self._common = {sampled: [no_evidence() for _ in guessers] for sampled in (False, True)}
        self._apart = {sampled: [Apart() for _ in guessers] for sampled in (False, True)}
        # For every guesser, greedy and sampled: what was known of it when `_stand` was asked last, and the answer.
        self._stands: dict[tuple[int, bool], tuple[Usual, OneStand]] = {}

    def deviations(self, sampled: bool) -> list[float]:
        """Return for every guesser how far apart texts are in how often its guesses stay, see `Apart`."""
        return [one.deviation for one in self._apart[sampled]]

    def knows(self, history: RowHistory) -> bool:
        """Return whether `of` was asked about a row before."""
        return history in self._rows

    def of_all(self, rows: Sequence[RowHistory]) -> list[RowEvidence]:
        """Return what is known about rows that decode together, see `of`.

        What each of them shows counts for the others at once, and not only for rows that begin later: for those that
        show something themselves, or else their mean would be as cautious as each of them is by itself, and for those
        in which a guesser was never tried. Where it was tried, and failed, it waits for the next trial.
        """
        if len(rows) == 1:
            return [self.of(rows[0])]
        running = [(row, history) for history in rows if (row := self._rows.get(history)) is not None]
        taught = [row for row, history in running if self._take_in(row, history)]
        told = {row.sampled for row in taught}
        kinds = told if len(running) == len(rows) else {history.sampled for history in rows}
        usual = {sampled: self._usual(sampled) for sampled in kinds}
        for row, _ in running:
            if row.sampled in told:
                self._hear(row, usual[row.sampled])
        for row in taught:  # what it showed itself is among what all have shown, which makes it a little less cautious
            row.usual = usual[row.sampled]
            self._settle(row)
        if len(running) == len(rows):
            return [row for row, _ in running]
        return [self._rows.get(history) or self._begin(history, usual[history.sampled]) for history in rows]

    def of(self, history: RowHistory) -> RowEvidence:
        """Return what is known about a row, its last steps included."""
        row = self._rows.get(history)
        if row is None:
            row = self._begin(history, self._usual(history.sampled))
        elif self._take_in(row, history):
            self._settle(row)
        return row

    def _hear(self, row: RowEvidence, usual: list[Usual]) -> None:
        """Expect of guessers that were never tried in a row what is known of them by now, if that has changed."""
        for number, own in enumerate(row.evidence):
            if own.is_untried and row.usual[number] != usual[number]:
                row.usual = [*row.usual[:number], usual[number], *row.usual[number + 1 :]]
                own.odds, own.growth, own.length = self._stand(number, usual[number], row.sampled)

    def _stand(self, number: int, usual: Usual, sampled: bool) -> OneStand:
        """Return what is expected of a guesser in a text in which it was never tried."""
        known = self._stands.get((number, sampled))
        if known is None or known[0] != usual:
            own = Evidence()
            own.settle(usual, self._tables[number] or ODDS)
            known = self._stands[number, sampled] = usual, own.stand
        return known[1]

    def _begin(self, history: RowHistory, usual: list[Usual]) -> RowEvidence:
        """Return the evidence of a row that nothing is known of but what holds for all."""
        evidence = [Evidence(*self._stand(number, one, history.sampled)) for number, one in enumerate(usual)]
        row = self._rows[history] = RowEvidence(
            evidence, len(history.accepted), sampled=history.sampled, usual=usual
        )
        return row

    def _take_in(self, row: RowEvidence, history: RowHistory) -> bool:
        """Take in how the guessers did in the last steps of a row; return whether something was to be learnt."""
        steps = list(history.steps(row.seen))
        row.seen += len(steps)
        row.passed = len(steps)
        if not steps or not row.arm:
            if steps:
                row.resume()
            return False
        arm, found = self._expected.arms[row.arm], dict[bool, Lessons]()
        for number, behind, table in self._taught[row.arm]:
            if not table[USUAL]:
                continue
            if behind not in found:
                found[behind] = (lessons_behind if behind else lessons_of)(history, steps, arm, table[USUAL])
            own = row.evidence[number]
            own.learn(found[behind], self._decays[number])
            self._common[row.sampled][number].learn(found[behind], COMMON_DECAY)
            for stayed, drafted, whose in steps:
                if whose == behind:
                    own.guessed, own.hit = own.guessed or drafted > 0, own.hit or stayed > 0
        return True

    def _settle(self, row: RowEvidence) -> None:
        """Let what a row is expected to do follow from what was learnt of it and of others."""
        for number, _, table in self._taught[row.arm]:
            if table[USUAL]:
                own, usual = row.evidence[number], row.usual[number]
                own.settle(usual, table)
                self._apart[row.sampled][number].note(own, usual, table)

    def _table(self, number: int, plan: int) -> tuple[bool, Sequence[float]]:
        """Return whether a guesser drafts only where a plan's lookup finds nothing, and how many guesses stay then."""
        guesser = self._guessers[number]
        behind = self._expected.arms[plan].behind is not None and (guesser.behind or guesser.unaided)
        return behind, (self._expected.kept_behind if behind else self._expected.kept)[plan]

    def _usual(self, sampled: bool) -> list[Usual]:
        """Return what is known of the guessers from what was measured and from all texts, those that run included."""
        return [self._usual_of(number, sampled) for number in range(len(self._guessers))]

    def _usual_of(self, number: int, sampled: bool) -> Usual:
        guesser, common = self._guessers[number], self._common[sampled][number]
        measured = guesser.known.profile.sampled if sampled else Sampled()
        stayed, length = measured.stayed, measured.length
        if guesser.behind or guesser.unaided:
            # In sampled rows, how many guesses a confidence leaves is not known, see `RowHistory.tells_any`.
            stayed, length = measured.behind, 1.0
        return Usual(
            common.stayed.beside(stayed, COUNTS), common.found.beside(measured.found, PRIOR_TOKENS),
            common.made.beside(length, COUNTS),
        )


def _told(guessers: Sequence[Guesser], at: int) -> tuple[int, ...]:
    """Return the guessers that the steps of a plan say something about, if `at` is the one that decides it.

    A drafter that guesses behind a lookup, and by itself, is known from both; and the lookup from steps of both.
    """
    if guessers[at].behind:
        unaided = at + 1 < len(guessers) and guessers[at + 1].unaided
        return (at - 1, at, at + 1) if unaided else (at - 1, at)
    return (at, at - 1) if guessers[at].unaided and guessers[at - 1].behind else (at,)
