"""What a fitted policy knows about a text: how often the guesses of every drafter stayed, and when to try it again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from draftsmith.engine.arm import Arm
from draftsmith.engine.policy import RowHistory

PRIOR, PRIOR_TOKENS = 12.0, 16.0
"""How much evidence (guesses or steps, and tokens) a new row begins with, from what was measured or other rows met."""
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
SIXTEENTHS, QUARTERS, MOST = 16, 4, 16
"""Growths are rounded to sixteenths and lengths to quarters, see `Arm.accepted`; neither goes above `MOST`."""


OneStand = tuple[int, int, int]
"""Of a guesser: the index of its odds in `ODDS`, its growth in sixteenths, and its length in quarters."""


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
        looks: of each step that looked for guesses: how many tokens the step adds to `Evidence.found`, and its tokens.
        lengths: of each step with guesses that a match or a confidence bounds: how many times as many as usual.
    """

    guesses: Sequence[tuple[int, float]] = ()
    looks: Sequence[tuple[float, int]] = ()
    lengths: Sequence[float] = ()


def lessons_of(history: RowHistory, seen: int, arm: Arm, kept: float) -> Lessons:
    """Return what the steps of a text after the first `seen` teach, which all drafted by the plan of `arm`.

    Args:
        kept: how many guesses a step of this plan accepts if it makes some, as measured.
    """
    steps, looks = list(history.steps(seen)), list[tuple[float, int]]()
    if arm.found:
        looks = [
            ((1 + stayed) / arm.found if drafted > 0 and not behind else 0.0, 1 + stayed)
            for stayed, drafted, behind in steps
        ]
        steps = [step for step in steps if step[1] > 0 and not step[2]]
    if not (arm.varies or (arm.plan.factor is not None and arm.found is not None)):
        return Lessons([(stayed, kept) for stayed, _, _ in steps], looks)
    lengths = [history.guesses(drafted, arm.plan, arm.guesses) / arm.guesses for _, drafted, _ in steps]
    expected = [kept] * len(lengths) if arm.varies else [kept * length for length in lengths]
    return Lessons([(step[0], usual) for step, usual in zip(steps, expected, strict=True)], looks, lengths)


def lessons_behind(history: RowHistory, seen: int, arm: Arm, kept: float) -> Lessons:
    """Return what those of the same steps teach in which the lookup found nothing, so that another drafter guessed.

    Args:
        kept: how many guesses such a step accepts, as measured.
    """
    assert arm.behind is not None
    usual, steps = arm.behind.made, [step for step in history.steps(seen) if step[2]]
    lengths = [history.guesses(drafted, arm.plan, usual, True) / usual for _, drafted, _ in steps]
    return Lessons([(stayed, kept) for stayed, _, _ in steps], lengths=lengths)


@dataclass(slots=True)
class Evidence:
    """How a guesser's guesses do in a text. All sums fade: older steps count less and less.

    Args:
        accepted, expected: guesses that stayed, and guesses that were expected to stay.
        tokens: for a lookup: tokens of all steps that looked for guesses.
        found: for a lookup: tokens of the steps that found some, divided by the share of such tokens as measured.
        finds: for plans whose drafts are bounded by a match or a confidence: steps that found guesses (with a
            confidence, all steps).
        length_of_finds: for these steps, the sum of the guesses made, each step's relative to what it usually makes.
        odds: the index in `ODDS` that follows from `accepted` and `expected`.
        since: steps since the guesser was last taken up or laid aside.
        wait: steps without it before it is tried.
        trial: steps left of a trial, 0 if there is none.
        guessed, hit: whether a guess was made since the last trial began, and whether one has stayed.
    """

    accepted: float
    expected: float
    odds: int
    found: float = PRIOR_TOKENS
    tokens: float = PRIOR_TOKENS
    length_of_finds: float = PRIOR
    finds: float = PRIOR
    since: int = 0
    wait: int = FIRST_WAIT
    trial: int = 0
    guessed: bool = False
    hit: bool = False

    @property
    def growth(self) -> int:
        """How many times as many tokens as measured come from steps that found guesses, in sixteenths."""
        return min(round(SIXTEENTHS * self.found / self.tokens), SIXTEENTHS * MOST)

    @property
    def length(self) -> int:
        """How many times as many guesses as measured are made by a step that makes some, in quarters."""
        return min(max(1, round(QUARTERS * self.length_of_finds / self.finds)), QUARTERS * MOST)

    def learn(self, lessons: Lessons, decay: float) -> None:
        """Take in what steps taught; what was before fades."""
        for stayed, expected in lessons.guesses:
            self.accepted, self.expected = decay * self.accepted + stayed, decay * self.expected + expected
        for found, tokens in lessons.looks:
            self.found, self.tokens = decay * self.found + found, decay * self.tokens + tokens
        for length in lessons.lengths:
            self.length_of_finds, self.finds = decay * self.length_of_finds + length, decay * self.finds + 1

    @property
    def untold(self) -> int:
        """Steps that are left of a trial before the first one that may end it."""
        return max(0, HOPELESS - 1 - (TRIAL - self.trial))

    def begin(self) -> None:
        """Begin to draft, for at least as long as a trial lasts."""
        self.trial, self.guessed, self.hit = TRIAL, False, False

    def doubt(self) -> None:
        """Begin a trial: what is known is old, and so counts little."""
        if self.expected > DOUBTED:
            self.accepted, self.expected = self.accepted * DOUBTED / self.expected, DOUBTED
        if self.tokens > PRIOR_TOKENS:
            self.found, self.tokens = self.found * PRIOR_TOKENS / self.tokens, PRIOR_TOKENS
        if self.finds > DOUBTED:
            self.length_of_finds, self.finds = self.length_of_finds * DOUBTED / self.finds, DOUBTED
        self.guessed = self.hit = False

    def goes_on(self, steps: int = 1) -> bool:
        """Count steps of a trial; return whether the trial goes on."""
        self.trial = max(0, self.trial - steps)
        if self.guessed and not self.hit and TRIAL - self.trial >= HOPELESS:
            self.trial = 0
        return self.trial > 0


def no_evidence(odds: int) -> Evidence:
    """Return the evidence of no steps, at these odds."""
    return Evidence(0.0, 0.0, odds, 0.0, 0.0, 0.0, 0.0)


@dataclass(slots=True)
class RowEvidence:
    """A row's evidence of every guesser, how many of its steps were `seen`, and its last plan (`arm`, 0 is plain).

    `trying` says that this plan was a trial, to see whether guesses stay now, and `settled` is the plan before that;
    `tried` is the guesser whose trial begins with it, if one does; `sampled` says that the row's tokens are drawn.
    """

    evidence: list[Evidence]
    seen: int
    arm: int = 0
    trying: bool = False
    settled: int = 0
    sampled: bool = False
    tried: int = NOBODY

    @property
    def stand(self) -> Stand:
        """For every guesser: how often its guesses stay here, how often it makes some, and how many; see `Stand`."""
        return Stand(tuple([(one.odds, one.growth, one.length) for one in self.evidence]), self.sampled)
