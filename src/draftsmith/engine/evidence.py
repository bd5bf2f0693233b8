"""What a fitted policy knows of a text: how often the guesses of every drafter stayed, and when to try again."""

from dataclasses import dataclass

from draftsmith.engine.policy import RowHistory
from draftsmith.engine.profile import Arm

PRIOR = 6.0
"""Guesses, and steps: so much evidence stands for what was measured, or for what other rows met, when a row begins."""
FIRST_WAIT, LONGEST_WAIT = 4, 384
"""Steps without a drafter before it is tried; they grow as long as no trial leads to more."""
LONGER, SAMPLED_LONGER = 2, 4
"""So many times as long they are the next time. Greedy texts fall into loops; of a sampled one the first trials tell
what comes."""
TRIAL, HOPELESS = 4, 3
"""Steps that a trial lasts, and after which it ends if guesses were made and none has stayed; one guess tells next to
nothing, and what a step costs is not seen at the first ones."""
QUARTERS, MOST_GROWTH = 4, 16
"""Growths and lengths, see `Arm.accepted`, are told apart in quarters, and none is above so much."""


Stand = tuple[tuple[int, int, int], ...]
"""For every drafter, which of the odds, which growth and which length, the latter in quarters."""


@dataclass(slots=True)
class Evidence:
    """How a drafter's guesses do in a text: those that stayed and that were expected to, both fading.

    Args:
        steps, found: of a lookup, steps that looked for guesses, and those that found some, each of which counts for
            as many as find some once where that was measured; fading too.
        finds, length_of_finds: of plans that more than their length bounds, steps that found some (of a drafter that
            knows how likely its guesses are, all), and how many times as many guesses as such a step usually makes they
            made together, see `Arm.length_of`; fading too.
        odds: which of `ODDS` follows.
        since: steps since it was taken up, or laid aside.
        wait: steps without it before it is tried.
        trial: steps that are left of a trial, 0 where there is none.
        guessed, hit: whether a guess was made since the last trial began, and whether one has stayed.
    """

    accepted: float
    expected: float
    odds: int
    found: float = PRIOR
    steps: float = PRIOR
    length_of_finds: float = PRIOR
    finds: float = PRIOR
    since: int = 0
    wait: int = FIRST_WAIT
    trial: int = 0
    guessed: bool = False
    hit: bool = False

    @property
    def growth(self) -> int:
        """How many times as often as measured guesses are found, in quarters."""
        return min(round(QUARTERS * self.found / self.steps), QUARTERS * MOST_GROWTH)

    @property
    def length(self) -> int:
        """How many times as many as measured are made where some are, in quarters; see `Arm.length_of`."""
        return min(max(1, round(QUARTERS * self.length_of_finds / self.finds)), QUARTERS * MOST_GROWTH)

    def looked(self, found: float, decay: float) -> None:
        """Take in a step of a lookup, and what it counts for; what was before fades."""
        self.found, self.steps = decay * self.found + found, decay * self.steps + 1

    def made(self, length: float, decay: float) -> None:
        """Take in how many times as many guesses as usual a step made; what was before fades."""
        self.length_of_finds, self.finds = decay * self.length_of_finds + length, decay * self.finds + 1

    def guess(self, stayed: int, expected: float, decay: float) -> None:
        """Take in guesses of which so many stayed and were expected to; what was before fades."""
        self.accepted, self.expected = decay * self.accepted + stayed, decay * self.expected + expected

    def of_steps(self, history: RowHistory, seen: int, arm: Arm, kept: float, decay: float) -> None:
        """Take in the steps of a text behind the first so many, in all of which a plan was drafted.

        Args:
            kept: how many guesses a step of the plan that makes some accepts, as measured.
        """
        bounded = arm.varies or (arm.plan.factor is not None and arm.found is not None)
        for stayed, drafted in zip(history.accepted[seen:], history.drafted[seen:], strict=True):
            length = arm.length_of(history.guesses(drafted, arm.plan, arm.guesses)) if bounded else 1.0
            if arm.found:
                self.looked((drafted > 0) / arm.found, decay)
            if drafted > 0 or not arm.found:
                self.guess(stayed, kept if arm.varies else kept * length, decay)
                if bounded:
                    self.made(length, decay)

    @property
    def untold(self) -> int:
        """Steps of a trial that tell nothing yet, before the one that may end it."""
        return max(0, HOPELESS - 1 - (TRIAL - self.trial))

    def begin(self) -> None:
        """Begin to draft, for as long as a trial lasts at least."""
        self.trial, self.guessed, self.hit = TRIAL, False, False

    def doubt(self) -> None:
        """Begin a trial: what is known is of a while ago, and counts no more than what is known when a row begins."""
        if self.expected > PRIOR:
            self.accepted, self.expected = self.accepted * PRIOR / self.expected, PRIOR
        if self.steps > PRIOR:
            self.found, self.steps = self.found * PRIOR / self.steps, PRIOR
        if self.finds > PRIOR:
            self.length_of_finds, self.finds = self.length_of_finds * PRIOR / self.finds, PRIOR
        self.guessed = self.hit = False

    def goes_on(self, steps: int = 1) -> bool:
        """Count steps of a trial; return whether another one follows."""
        self.trial = max(0, self.trial - steps)
        if self.guessed and not self.hit and TRIAL - self.trial >= HOPELESS:
            self.trial = 0
        return self.trial > 0


def no_evidence(odds: int) -> Evidence:
    """Return what is known where nothing was seen; the measured odds stand for it."""
    return Evidence(0.0, 0.0, odds, 0.0, 0.0, 0.0, 0.0)


@dataclass(slots=True)
class RowEvidence:
    """A row's evidence of every drafter, the steps of it that were looked at, and what it did last, 0 being nothing.

    `trying` says that it did so to see whether guesses stay now, `sampled` that its tokens are drawn.
    """

    evidence: list[Evidence]
    seen: int
    arm: int = 0
    trying: bool = False
    sampled: bool = False

    @property
    def longer(self) -> int:
        """How many times as long as the last pause the next one is after a trial that led to nothing."""
        return SAMPLED_LONGER if self.sampled else LONGER

    @property
    def stand(self) -> Stand:
        """How often guesses of every drafter stay here, how often it makes some, and how many."""
        return tuple((one.odds, one.growth, one.length) for one in self.evidence)
