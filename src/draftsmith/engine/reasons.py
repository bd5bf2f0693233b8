"""Why a row drafts what it drafts: a label for counting, and a sentence for people.

A policy has to answer before every step, so a reason only keeps the numbers that led to the answer; they become a
sentence when somebody asks for it.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from draftsmith.engine.arm import Arm
from draftsmith.plan import NEVER_SURE, NO_COPY, Plan

Label = Literal[
    "pays", "does_not_pay", "no_room", "probing", "batch_too_large", "text_too_long", "never_pays", "fixed", "asked",
    "prediction",
]
LABELS: tuple[Label, ...] = get_args(Label)
"""All labels, so that counts by label are bounded."""
FINEST = 1 / 256
"""How precisely `Weighed.would_pay` finds the odds that would pay."""


class Reason(ABC):
    """Why a row drafts as it does; immutable, so that any thread may read it later."""

    __slots__ = ()

    @property
    @abstractmethod
    def label(self) -> Label:
        """The kind of reason."""

    @abstractmethod
    def sentence(self) -> str:
        """Return the reason in words, without a full stop."""


@dataclass(frozen=True, slots=True)
class Said(Reason):
    """A reason without numbers."""

    kind: Label
    words: str

    @property
    def label(self) -> Label:
        """The kind of reason."""
        return self.kind

    def sentence(self) -> str:
        """Return the words."""
        return self.words


@dataclass(frozen=True, slots=True)
class Crowded(Reason):
    """None drafts, because `rows` rows decode and drafts are made only for up to `most`."""

    rows: int
    most: int

    @property
    def label(self) -> Label:
        """The kind of reason."""
        return "batch_too_large"

    def sentence(self) -> str:
        """Return both numbers in words."""
        return f"batch too large to draft: {self.rows} texts are written, and drafts are made for up to {self.most}"


@dataclass(frozen=True, slots=True)
class Weighed(Reason):
    """What plans were expected to bring, against the time that they take.

    Args:
        kind: "pays", "does_not_pay", "no_room", "probing", "batch_too_large" or "text_too_long".
        arms: all plans that were weighed, plain decoding first.
        seconds: what each of them adds to a step of `rows` rows, if all of them take it.
        at: the plan that this is about, as an index: the one taken or, if that is plain decoding, the best other one.
        alike: the plans of the same drafter, as indices.
        odds: how many times as often as measured the drafter's guesses are expected to stay.
        growth: for a lookup, how many times as high as measured the odds are that a token comes from a step that finds
            guesses.
        length: how many times as many guesses as measured it makes then, if a match or a confidence bounds them.
        behind: for a lookup with another drafter behind it, how many times as often as measured the latter's stay.
        price: tokens a second that all rows together could have.
        margin: tokens that a plan has to bring beyond what its time is worth.
        rows: how many decode.
    """

    kind: Label
    arms: Sequence[Arm]
    seconds: Sequence[float]
    at: int
    alike: Sequence[int]
    odds: float
    growth: float
    length: float
    behind: float
    price: float
    margin: float
    rows: int

    @property
    def label(self) -> Label:
        """The kind of reason."""
        return self.kind

    @property
    def tokens(self) -> float:
        """How many tokens a step of the plan is expected to bring a row, including the target's own."""
        return 1 + self.arms[self.at].accepted(self.odds, self.growth, self.length, self.behind)

    @property
    def cost(self) -> float:
        """How many times as long as a step without drafts a step of the plan takes."""
        return self.seconds[self.at] / self.seconds[0]

    @property
    def stays(self) -> float:
        """How often the first guess is expected to stay, where one is made."""
        return self._first(self.arms[self.at], self.odds, self.behind)

    def sentence(self) -> str:
        """Return the numbers in words."""
        shape = shape_in_words(self.arms[self.at].plan)
        if self.kind == "pays":
            return f"{shape}: expects {self.tokens:.1f} tokens for {self.cost:.1f} plain steps"
        if self.kind == "probing":
            return f"probing with a {shape}: so far guesses of this text stay {self.stays:.2f} of the time"
        if self.kind == "batch_too_large":
            texts = f"of {self.rows} texts" if self.rows > 1 else "of one text"
            return f"batch too large to draft: in a step {texts} not even guesses that all stay would pay"
        if self.kind == "no_room":
            return "no draft: guesses of other texts bring more, and no more of them pay in one step"
        needed = self.would_pay()
        pays = "no share would pay" if needed is None else f"{needed:.2f} would pay"
        if self.kind == "text_too_long":
            return "text too long to draft: behind so many tokens not even guesses that all stay would pay"
        arm = self.arms[self.at]
        seldom = arm.found is not None and arm.behind is None
        where = f"{self._share(arm, self.odds, self.behind):.2f} of the steps find guesses, which " if seldom else ""
        return f"no draft: {where or 'guesses of this text '}stay {self.stays:.2f} of the time, {pays}"

    def would_pay(self) -> float | None:
        """Return how often the first guess has to stay for some plan of the drafter to pay; None if none ever would."""
        def paying(odds: float) -> Arm | None:
            most, at = max(
                ((self.arms[at].accepted(odds, self.growth, self.length) - self._worth(at), at) for at in self.alike),
                default=(-1.0, 0),
            )
            return self.arms[at] if most >= 0 else None

        low, high = 0.0, 1.0
        while paying(high) is None:
            low, high = high, 2 * high
            if high > 1 / FINEST:
                return None
        while high - low > FINEST:  # higher odds never bring less, so bisection finds the lowest that pay
            middle = (low + high) / 2
            low, high = (low, middle) if paying(middle) is not None else (middle, high)
        arm = paying(high)
        return None if arm is None else self._first(arm, high, high)

    def _first(self, arm: Arm, odds: float, behind: float) -> float:
        """Return how often the first guess stays, whether the lookup or the drafter behind it makes it."""
        first = min(1.0, arm.survival[0] * odds) if arm.survival else 0.0
        if arm.behind is None:
            return first
        share = self._share(arm, odds, behind)
        return share * first + (1 - share) * min(1.0, arm.behind.survival[0] * behind)

    def _share(self, arm: Arm, odds: float, behind: float) -> float:
        """Return the share of steps that find guesses, if it is a lookup."""
        return arm.share(self.growth, arm.stretched(self.length, arm.kept(odds)), arm.kept_behind(behind))

    def _worth(self, at: int) -> float:
        """Return how many accepted guesses pay for the time that a plan takes beyond a plain step."""
        return self.price * (self.seconds[at] - self.seconds[0]) + self.margin


def shape_in_words(plan: Plan) -> str:
    """Return "chain of 3", "tree of 8", "chain of up to 8 with guesses at least 10 % likely" or "none".

    A plan under which only the lookup drafts, and not the drafter behind it, has "1 guess for each matched token and no
    others".
    """
    if not plan.depth:
        return "none"
    kind = "chain" if plan.is_chain else "tree"
    bounds = []
    if plan.factor == NO_COPY:
        bounds.append("nothing looked up")
    elif plan.factor is not None:
        bounds.append(f"{plan.factor:g} {'guess' if plan.factor == 1 else 'guesses'} for each matched token")
    if plan.confidence == NEVER_SURE:
        bounds.append("no others")
    elif plan.confidence is not None:
        bounds.append(f"guesses at least {100 * plan.confidence:g} % likely")
    return f"{kind} of up to {plan.max_nodes} with {' and '.join(bounds)}" if bounds else f"{kind} of {plan.max_nodes}"


ASKED = Said("asked", "asked for by the request")
EXPECTED = Said("prediction", "the text keeps to the prediction of its request")
FIXED = Said("fixed", "the plan that is always taken here")
TIMING = Said("probing", "some steps by another plan or without one, to see what they take now")
NEVER = Said("never_pays", "no draft: on this machine no plan of any drafter pays")
