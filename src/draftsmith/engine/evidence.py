"""What a fitted policy knows of a text: how often the guesses of every drafter stayed, and when to try again."""

from dataclasses import dataclass

from draftsmith.engine.arm import Arm
from draftsmith.engine.policy import RowHistory

PRIOR, PRIOR_TOKENS = 6.0, 16.0
"""Guesses, or steps, and tokens: so much evidence stands for what was measured, or for what other rows met, when a row
begins."""
FIRST_WAIT, LONGEST_WAIT = 4, 384
"""Steps without a drafter before it is tried; they grow as long as no trial leads to more."""
LONGER, SAMPLED_LONGER = 2, 4
"""So many times as long they are the next time. Greedy texts fall into loops; of a sampled one the first trials tell
what comes."""
TRIAL, HOPELESS = 4, 3
"""Steps that a trial lasts, and after which it ends if guesses were made and none has stayed; one guess tells next to
nothing, and what a step costs is not seen at the first ones."""
SIXTEENTHS, QUARTERS, MOST = 16, 4, 16
"""How finely growths and lengths are told apart, see `Arm.accepted`; none is above so much."""


Stand = tuple[tuple[int, int, int], ...]
"""For every guesser, which of the odds, which growth in sixteenths and which length in quarters."""


@dataclass(slots=True)
class Evidence:
    """How a guesser's guesses do in a text: those that stayed and that were expected to, both fading.

    Args:
        tokens, found: of a lookup, tokens of steps that looked for guesses, and of those that found some, each of which
            counts for as many as hold one such where that was measured; fading too.
        finds, length_of_finds: of plans that more than their length bounds, steps that found some (of a drafter that
            knows how likely its guesses are, all), and how many times as many guesses as such a step usually makes they
            made together; fading too.
        odds: which of `ODDS` follows.
        since: steps since it was taken up, or laid aside.
        wait: steps without it before it is tried.
        trial: steps that are left of a trial, 0 where there is none.
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
        """How many times as many as measured are made where some are, in quarters."""
        return min(max(1, round(QUARTERS * self.length_of_finds / self.finds)), QUARTERS * MOST)

    def looked(self, tokens: int, found: float, decay: float) -> None:
        """Take in the tokens of a step of a lookup, and for how many they count; what was before fades."""
        self.found, self.tokens = decay * self.found + found, decay * self.tokens + tokens

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
        for stayed, drafted, behind in history.steps(seen):
            found = drafted > 0 and not behind
            if arm.found:
                self.looked(1 + stayed, (1 + stayed) * found / arm.found, decay)
            if found or not arm.found:
                length = history.guesses(drafted, arm.plan, arm.guesses) / arm.guesses if bounded else 1.0
                self.guess(stayed, kept if arm.varies else kept * length, decay)
                if bounded:
                    self.made(length, decay)

    def of_steps_behind(self, history: RowHistory, seen: int, arm: Arm, kept: float, decay: float) -> None:
        """Take in those of the same steps in which the lookup of a plan found nothing, so that another drafter guessed.

        Args:
            kept: how many guesses such a step accepts, as measured.
        """
        assert arm.behind is not None
        usual = arm.behind.made
        for stayed, drafted, behind in history.steps(seen):
            if behind:
                self.guess(stayed, kept, decay)
                self.made(history.guesses(drafted, arm.plan, usual, True) / usual, decay)

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
        if self.tokens > PRIOR_TOKENS:
            self.found, self.tokens = self.found * PRIOR_TOKENS / self.tokens, PRIOR_TOKENS
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
    """A row's evidence of every guesser, the steps of it that were looked at, and what it did last, 0 being nothing.

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
        """How often guesses of every guesser stay here, how often it makes some, and how many."""
        return tuple((one.odds, one.growth, one.length) for one in self.evidence)
