"""What a fitted policy knows about a text: how often the guesses of every drafter stayed, and when to try it again."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from draftsmith.engine.arm import EVERYWHERE, Arm
from draftsmith.engine.known import USUAL
from draftsmith.engine.policy import RowHistory

PRIOR, PRIOR_TOKENS = 16.0, 16.0
"""How much evidence (guesses or steps, and tokens) a new row begins with, from what was measured or other rows met."""
LEAST_PRIOR = 1e-6
"""What a prior counts at least, so that there is something to divide by in a text where nothing was expected for long.
"""
DOUBTED = 6.0
"""How much of what was known (guesses or steps) is kept when a guesser that failed is tried again."""
FIRST_WAIT, LONGEST_WAIT = 4, 384
"""Steps without a drafter before it is tried; the pauses grow as long as no trial leads to drafting."""
LONGER = 2
"""How many times as long as the last pause the next one is."""
TRIAL, HOPELESS = 4, 3
"""Steps that a trial lasts, and after which it ends early if guesses were made and none has stayed. One guess says next
to nothing, and the first steps do not show yet what a step costs."""
NOBODY = -1
"""No guesser."""
GROWTHS = tuple(2 ** (at / 8) for at in range(-40, 65))
"""The growths that are told apart, see `Arm.share`."""
USUAL_GROWTH = GROWTHS.index(1.0)
QUARTERS, MOST = 4, 16
"""Lengths are rounded to quarters, see `Arm.accepted`, and do not go above `MOST`."""


Step = tuple[int, int, bool]
"""`accepted`, `drafted` and `behind` of a step, see `RowHistory`."""
OneStand = tuple[int, int, int]
"""Of a guesser: the index of its odds in `ODDS`, that of its growth in `GROWTHS`, and its length in quarters."""


class Stand(NamedTuple):
    """How the guesses of every guesser do in a text, and whether the tokens of the text are drawn."""

    guessers: tuple[OneStand, ...]
    sampled: bool


@dataclass(frozen=True, slots=True)
class Lessons:
    """What steps of a text, all with one plan, teach about a guesser, in the order of the steps.

    Args:
        guesses: of each step that could make guesses (for a lookup: that found some), how many stayed, and how many
            were expected to.
        looks: of each step that looked for guesses: what its tokens add to `Evidence.found` and to `Evidence.missed`.
        lengths: of each step with guesses that a match or a confidence bounds: how many times as many as usual, and 1.
    """

    guesses: Sequence[tuple[float, float]] = ()
    looks: Sequence[tuple[float, float]] = ()
    lengths: Sequence[tuple[float, float]] = ()


def lessons_of(history: RowHistory, steps: Sequence[Step], arm: Arm, kept: float) -> Lessons:
    """Return what steps of a text teach that all drafted by the plan of `arm`.

    Args:
        kept: how many guesses a step of this plan accepts if it makes some, as measured.
    """
    looks = list[tuple[float, float]]()
    if arm.found:
        found = min(arm.found, EVERYWHERE)
        looks = [
            ((1 + stayed) / found, 0.0) if drafted > 0 and not behind else (0.0, (1 + stayed) / (1 - found))
            for stayed, drafted, behind in steps
        ]
        steps = [step for step in steps if step[1] > 0 and not step[2]]
    if not (arm.varies or (arm.plan.factor is not None and arm.found is not None)):
        return Lessons([(stayed, kept) for stayed, _, _ in steps], looks)
    lengths = [history.guesses(drafted, arm.plan, arm.guesses) / arm.guesses for _, drafted, _ in steps]
    expected = [kept] * len(lengths) if arm.varies else [kept * length for length in lengths]
    guesses = [(step[0], usual) for step, usual in zip(steps, expected, strict=True)]
    return Lessons(guesses, looks, [(length, 1.0) for length in lengths])


def lessons_behind(history: RowHistory, steps: Sequence[Step], arm: Arm, kept: float) -> Lessons:
    """Return what those of the same steps teach in which the lookup found nothing, so that another drafter guessed.

    Args:
        kept: how many guesses such a step accepts, as measured.
    """
    assert arm.behind is not None
    usual, steps = arm.behind.made, [step for step in steps if step[2]]
    lengths = [(history.guesses(drafted, arm.plan, usual, True) / usual, 1.0) for _, drafted, _ in steps]
    return Lessons([(stayed, kept) for stayed, _, _ in steps], lengths=lengths)


@dataclass(slots=True)
class Tally:
    """How much came and how much was expected; older steps count less and less.

    Args:
        came, expected: sums over steps.
        prior: how much counts what is known from elsewhere, on the scale of `expected`; it fades like a step.
    """

    came: float = 0.0
    expected: float = 0.0
    prior: float = 0.0

    def learn(self, steps: Sequence[tuple[float, float]], decay: float) -> None:
        """Take in what came and what was expected in steps, one after the other; what was before fades."""
        came_so_far, expected_so_far, prior = self.came, self.expected, self.prior
        for came, expected in steps:
            came_so_far, expected_so_far = decay * came_so_far + came, decay * expected_so_far + expected
            prior *= decay
        self.came, self.expected, self.prior = came_so_far, expected_so_far, prior

    def ratio(self, usual: float) -> float:
        """Return how much comes for what is expected; elsewhere it is `usual`."""
        return self.beside(usual, max(self.prior, LEAST_PRIOR))

    def beside(self, usual: float, counts: float) -> float:
        """Return the same, where what is known from elsewhere `counts` as much as so much that was expected."""
        return (self.came + counts * usual) / (self.expected + counts)

    def doubt(self, most: float) -> None:
        """Let what is known count at most as much as this."""
        known = max(self.came, self.expected) + self.prior
        if known > most:
            self.came, self.expected, self.prior = (
                part * most / known for part in (self.came, self.expected, self.prior)
            )


class Usual(NamedTuple):
    """What is known of a guesser from elsewhere: the ratios of `Evidence`."""

    stayed: float
    found: float
    length: float


@dataclass(slots=True)
class Evidence:
    """How a guesser's guesses do in a text.

    Args:
        odds: how often its guesses stay, as an index of `ODDS`.
        growth: for a lookup, how many times as high as measured the odds of tokens of steps that find guesses are, as
            an index of `GROWTHS`.
        length: how many times as many guesses as measured are made by a step that makes some, in quarters.
        stayed: guesses that stayed, and guesses that were expected to.
        found: for a lookup: tokens of steps that found guesses, divided by their share as measured; and the same for
            the tokens of steps that looked for guesses and found none.
        made: for plans whose drafts are bounded by a match or a confidence: guesses of the steps that made some,
            each step's relative to what it usually makes; and these steps (with a confidence, all steps).
        since: steps since the guesser was last taken up or laid aside.
        wait: steps without it before it is tried.
        trial: steps left of a trial, 0 if there is none.
        guessed, hit: whether a guess was made since the last trial began, and whether one has stayed.
        apart, known: how far its odds were from the usual when something was learnt last, as a logarithm, and how
            much was known of them then, from 0 to 1; see `Apart`.
    """

    odds: int = USUAL
    growth: int = USUAL_GROWTH
    length: int = QUARTERS
    stayed: Tally = field(default_factory=lambda: Tally(prior=PRIOR))
    found: Tally = field(default_factory=lambda: Tally(prior=PRIOR_TOKENS))
    made: Tally = field(default_factory=lambda: Tally(prior=PRIOR))
    since: int = 0
    wait: int = FIRST_WAIT
    trial: int = 0
    guessed: bool = False
    hit: bool = False
    apart: float = 0.0
    known: float = 0.0

    def learn(self, lessons: Lessons, decay: float) -> None:
        """Take in what steps taught; what was before fades."""
        if lessons.guesses:
            self.stayed.learn(lessons.guesses, decay)
        if lessons.looks:
            self.found.learn(lessons.looks, decay)
        if lessons.lengths:
            self.made.learn(lessons.lengths, decay)

    def settle(self, usual: Usual, table: Sequence[float]) -> None:
        """Let `odds`, `growth` and `length` follow from what is known.

        Args:
            usual: what is known from elsewhere.
            table: how many guesses stay with a plan at each of the `ODDS`.
        """
        kept = self.stayed.ratio(usual.stayed) * table[USUAL]
        self.odds = min(bisect_left(table, kept), len(table) - 1)
        found = self.found.ratio(usual.found)
        growth = round(8 * math.log2(found)) + USUAL_GROWTH if found > 0 else 0
        self.growth = min(max(0, growth), len(GROWTHS) - 1)
        self.length = min(max(1, round(QUARTERS * self.made.ratio(usual.length))), QUARTERS * MOST)

    @property
    def unknown(self) -> float:
        """How much of what decides how often its guesses stay is not from this text, from 1 to 0."""
        return PRIOR / (PRIOR + self.stayed.expected)

    @property
    def is_untried(self) -> bool:
        """Whether nothing was learnt of it in this text."""
        return not (self.stayed.expected or self.found.came or self.found.expected)

    @property
    def stand(self) -> OneStand:
        """How often its guesses stay here, how often it makes some, and how many."""
        return self.odds, self.growth, self.length

    def begin(self) -> None:
        """Begin to draft, for at least as long as a trial lasts."""
        self.trial, self.guessed, self.hit = TRIAL, False, False

    def doubt(self) -> None:
        """Begin a trial: what is known is old, and so counts little."""
        self.stayed.doubt(DOUBTED)
        self.found.doubt(PRIOR_TOKENS)
        self.made.doubt(DOUBTED)
        self.guessed = self.hit = False

    @property
    def until_judged(self) -> int:
        """Steps until a trial may end, 0 if there is none."""
        return self.trial - (TRIAL - HOPELESS) if self.trial > TRIAL - HOPELESS else self.trial

    def will_go_on(self, steps: int) -> bool:
        """Return whether a trial goes on after so many steps, without counting them."""
        return self._left_after(steps) > 0

    def goes_on(self, steps: int = 1) -> bool:
        """Count steps of a trial; return whether the trial goes on."""
        self.trial = self._left_after(steps)
        return self.trial > 0

    def _left_after(self, steps: int) -> int:
        """Return how many steps of a trial are left after so many; after `HOPELESS` none if all guesses failed."""
        left = max(0, self.trial - steps)
        return 0 if self.guessed and not self.hit and TRIAL - left >= HOPELESS else left


def no_evidence() -> Evidence:
    """Return the evidence of no steps, and of nothing that was known before."""
    return Evidence(stayed=Tally(), found=Tally(), made=Tally())


@dataclass(slots=True)
class RowEvidence:
    """A row's evidence of every guesser, how many of its steps were `seen`, and its last plan (`arm`, 0 is plain).

    `passed` is how many of them were new when they were looked at last.

    `usual` is what is known of every guesser from other texts.
    `trying` says that this plan was a trial, to see whether guesses stay now, and `settled` is the plan before that;
    `tried` is the guesser whose trial begins with it, if one does; `sampled` says that the row's tokens are drawn.
    `interrupted` is the settled plan while a step without guesses interrupts it, otherwise 0.
    """

    evidence: list[Evidence]
    seen: int
    arm: int = 0
    trying: bool = False
    settled: int = 0
    sampled: bool = False
    tried: int = NOBODY
    usual: list[Usual] = field(default_factory=list)
    interrupted: int = 0
    passed: int = 0

    def catch_up(self) -> None:
        """Count the steps for which nobody asked about it: all but the last of those that have passed."""
        for own in self.evidence:
            own.since += max(0, self.passed - 1)

    def start_anew(self, arm: int) -> None:
        """Take a plan, on no trial, whatever was taken before."""
        self.arm, self.settled, self.interrupted = arm, 0, 0
        self.trying = False
        for own in self.evidence:
            own.trial = 0

    def interrupt(self) -> None:
        """Draft nothing in the next step, whatever is settled."""
        self.arm, self.interrupted = 0, self.arm

    def resume(self) -> None:
        """Go on with the plan that was interrupted, if one was."""
        self.arm, self.interrupted = self.interrupted or self.arm, 0

    @property
    def stand(self) -> Stand:
        """For every guesser: how often its guesses stay here, how often it makes some, and how many; see `Stand`."""
        return Stand(tuple([one.stand for one in self.evidence]), self.sampled)
