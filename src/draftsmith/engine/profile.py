"""What drafts cost on a machine and what they bring: plans with the seconds of a step and the guesses that stay."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.types import DraftsmithError

MOST_ODDS = 3.0
"""Guesses count as staying at most so many times as often as measured."""


@dataclass(frozen=True)
class Arm:
    """One plan, measured.

    Args:
        survival: the share of steps that accepted at least 1, 2, … guesses.
        seconds: of a step, all rows together, for each number of rows of the profile.
        found: of a lookup, the share of steps that made guesses; None stands for all.
        made: how many guesses a step made that made some, on average; of a plan with a confidence, on average over all
            steps. None stands for as many as the plan allows.
        full: of both, seconds of a step in which every row makes as many guesses as the plan allows.
    """

    plan: Plan
    survival: tuple[float, ...]
    seconds: tuple[float, ...]
    found: float | None = None
    full: tuple[float, ...] = ()
    made: float | None = None

    def kept(self, odds: float = 1.0) -> float:
        """Return how many guesses are accepted, on average, by a step that made some.

        Args:
            odds: how many times as often as measured a guess stays whose predecessors did; so the deeper guesses
                suffer, or gain, most. Above 1, the same number of guesses more stay of each arm that is `mixed`, all
                of them at `MOST_ODDS`.
        """
        if self.mixed and odds > 1:
            return min(self.plan.depth, self.kept() + (odds - 1) / (MOST_ODDS - 1) * self.plan.depth)
        total, factor, before = 0.0, 1.0, 1.0
        for survived in self.survival:
            factor *= odds
            # None stays whose predecessor did not.
            before = min(before, survived / self.found * factor if self.found else survived * factor)
            total += before
        return total if self.varies else min(total, self.guesses)

    @property
    def varies(self) -> bool:
        """Whether every step makes as many guesses as its drafter is sure of, more in one text than in another."""
        return self.plan.confidence is not None and self.found is None

    @property
    def mixed(self) -> bool:
        """Whether a lookup makes some of its guesses, and another drafter those that are bounded by how sure it is.

        Where the lookup finds more in a text than usual, all bounds of the other drafter gain alike.
        """
        return self.varies and self.plan.factor is not None

    def length_of(self, made: float) -> float:
        """Return how many times as many as measured so many guesses are, at a step that makes some.

        Of an arm that is `mixed` and makes more than measured: one, and how many more.
        """
        if self.mixed and made > self.guesses:
            return 1 + made - self.guesses
        return made / self.guesses

    @property
    def guesses(self) -> float:
        """How many guesses a step makes that makes some."""
        return self.plan.max_nodes if self.made is None else self.made

    @property
    def usual(self) -> float:
        """How many guesses a step makes, on average over all steps."""
        return self.guesses if self.found is None else self.found * self.guesses

    def share(self, growth: float = 1.0) -> float:
        """Return the share of steps that make guesses, in a text where a lookup finds so many times as often."""
        return 1.0 if self.found is None else min(1.0, self.found * growth)

    def accepted(self, odds: float = 1.0, growth: float | None = None, length: float = 1.0) -> float:
        """Return how many guesses a step accepts on average.

        Args:
            odds: see `kept`.
            growth: see `share`; without one, a lookup finds as many times as often as guesses stay.
            length: a step that finds some makes so many times as many as measured, see `stretched`.
        """
        kept = min(self.plan.depth, self.stretched(length) * self.kept(odds))
        return self.share(odds if growth is None else growth) * kept

    def stretched(self, length: float) -> float:
        """Return how many times as many guesses are accepted where some are made; 1 where no match bounds them.

        Of an arm that varies, guesses that its drafter is hardly sure of may be more, and no more of them stay.
        """
        return 1.0 if self.varies or self.plan.factor is None else min(length, self.most_length)

    def made_times(self, growth: float, length: float) -> float:
        """Return how many times as many guesses as measured it makes, over all steps; no more than it can.

        Args:
            length: how many times as many where some are made; of an arm that is `mixed`, above 1, how many more.
        """
        if self.mixed and length > 1:
            length = 1 + (length - 1) / self.guesses
        return min(growth, self.most_growth) * min(length, self.most_length)

    @property
    def most_growth(self) -> float:
        """How many times as often as measured it can find guesses."""
        return 1 / self.found if self.found else 1.0

    @property
    def most_length(self) -> float:
        """How many times as many guesses as measured it can make in a step that makes some."""
        return self.plan.max_nodes / self.guesses if self.varies or self.plan.factor is not None else 1.0


@dataclass(frozen=True)
class Costs:
    """What plans, the first of which drafts nothing, take in a step with some number of rows.

    Args:
        seconds: of every plan, which makes as many guesses as was measured.
        more: for each time that it makes as many guesses again, where that differs from text to text.
        least: that every plan takes however few guesses it makes; nothing stands for those without a draft.
    """

    seconds: Sequence[float]
    more: Sequence[float]
    least: Sequence[float] = ()

    @property
    def plain(self) -> float:
        """Seconds without a draft."""
        return self.seconds[0]

    def of(self, at: int, growth: float) -> float:
        """Return the seconds of a plan that makes so many times as many guesses."""
        more, least = self.more[at], self.least[at] if self.least else self.plain
        return max(least, self.seconds[at] + (growth - 1) * more) if more else self.seconds[at]

    def slowed(self, times: Sequence[float]) -> "Costs":
        """Return what they take where every plan takes so many times as long."""
        return Costs(
            [took * slower for took, slower in zip(self.seconds, times, strict=True)],
            [took * slower for took, slower in zip(self.more, times, strict=True)],
            [self.plain * slower for slower in times],
        )

    def plus(self, other: "Costs", times: float) -> "Costs":
        """Return what they take with so many times another's costs besides."""
        return Costs(
            [took + times * extra for took, extra in zip(self.seconds, other.seconds, strict=True)],
            [took + times * extra for took, extra in zip(self.more, other.more, strict=True)],
        )

    def grown(self, growths: Sequence[float]) -> list[float]:
        """Return the seconds of plans that make so many times as many guesses."""
        least = self.least or [self.plain] * len(self.seconds)
        return [
            max(fewest, took + (growth - 1) * more) if more else took
            for growth, took, more, fewest in zip(growths, self.seconds, self.more, least, strict=True)
        ]


@dataclass(frozen=True)
class LengthCost:
    """What every further token of a row's text adds to a step, by a straight line.

    Args:
        measured_at: steps were timed behind texts of about so many tokens.
        plain: seconds for each token beyond these, without a draft.
        guess: seconds for each token beyond these and for each guess, what the drafter reads of the text included; on
            average over the guesses of one plan.
    """

    measured_at: float = 0.0
    plain: float = 0.0
    guess: float = 0.0

    def __post_init__(self) -> None:
        _require_sizes(vars(self), "in what longer texts cost")


@dataclass(frozen=True)
class Sampled:
    """How guesses fare in sampled texts, in times of how they fare in greedy ones.

    Args:
        stayed: how many stay.
        found: of a lookup, how often it finds some.
        length: of plans that the length of a match bounds, how many are made where some are; 1 of those with a
            confidence, whose numbers say what was drawn, see `RowHistory.tells_any`.
    """

    stayed: float = 1.0
    found: float = 1.0
    length: float = 1.0

    def __post_init__(self) -> None:
        _require_sizes(vars(self), "for sampled texts")


def _require_sizes(values: Mapping[str, float], where: str) -> None:
    """Raise ValueError for a value that is negative or no number."""
    for name, value in values.items():
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name} is {value} {where}, where only 0 or more has a meaning")


@dataclass(frozen=True)
class Profile:
    """All plans that were measured, on greedy texts; the first drafts nothing.

    Args:
        rows: the numbers of rows that steps were timed with, rising.
        length_cost: what longer texts add to their seconds.
        sampled: how guesses fare where tokens are drawn.
    """

    rows: tuple[int, ...]
    arms: tuple[Arm, ...]
    length_cost: LengthCost = LengthCost()
    sampled: Sampled = Sampled()

    def seconds(self, arm: Arm, rows: int, odds: float = 1.0) -> float:
        """Return the seconds of a step of so many rows, by straight lines between what was measured.

        What a lookup takes goes with how many guesses it makes, see `Arm.accepted`.
        """
        times = arm.made_times(odds, odds if arm.varies else 1.0)
        if arm.mixed and odds > 1:
            times = arm.made_times(1.0, 1 + arm.kept(odds) - arm.kept())
        return self.costs((self.arms[0], arm), rows).grown((1.0, times))[1]

    def costs(self, arms: Sequence[Arm], rows: int) -> Costs:
        """Return what these of its plans take, the first of which drafts nothing; all rows together."""
        seconds, more = [self._between(arm.seconds, rows) for arm in arms], []
        for arm, took in zip(arms, seconds, strict=True):
            most = arm.plan.max_nodes / arm.usual if arm.full else 1.0
            more.append(max(0.0, self._between(arm.full, rows) - took) / (most - 1) if most > 1 else 0.0)
        return Costs(seconds, more)

    def _between(self, seconds: Sequence[float], rows: int) -> float:
        if len(self.rows) == 1 or rows <= self.rows[0]:
            return seconds[0]
        right = min(max(1, bisect_left(self.rows, rows)), len(self.rows) - 1)
        (r0, r1), (t0, t1) = self.rows[right - 1 : right + 1], seconds[right - 1 : right + 1]
        return max(t0, t0 + (t1 - t0) * (rows - r0) / (r1 - r0))

    def speed(self, arm: Arm, rows: int, odds: float = 1.0) -> float:
        """Return tokens a second of all rows together; see `Arm.accepted`."""
        return rows * (1 + arm.accepted(odds)) / self.seconds(arm, rows, odds)

    def best(self, rows: int, odds: float = 1.0) -> Arm:
        """Return the plan with the most tokens a second."""
        return max(self.arms, key=lambda arm: self.speed(arm, rows, odds))

    def gain(self, arm: Arm, rows: int) -> float:
        """Return how many times as fast as plain decoding a plan is."""
        return self.speed(arm, rows) / self.speed(self.arms[0], rows)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        return {
            "rows": list(self.rows), "arms": [asdict(arm) for arm in self.arms],
            "length_cost": asdict(self.length_cost), "sampled": asdict(self.sampled),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Profile":
        """Undo `to_json`; KeyError, TypeError or ValueError for what is none."""
        arms = tuple(
            Arm(
                plan_from_json(arm["plan"]), tuple(map(float, arm["survival"])), tuple(map(float, arm["seconds"])),
                None if arm["found"] is None else float(arm["found"]), tuple(map(float, arm["full"])),
                None if arm["made"] is None else float(arm["made"]),
            )
            for arm in value["arms"]
        )
        rows = tuple(map(int, value["rows"]))
        if (
            not arms or arms[0].plan != NO_DRAFT or any(len(arm.seconds) != len(rows) for arm in arms)
            or any(len(arm.full) != len(rows) for arm in arms if arm.found is not None or arm.varies)
        ):
            raise ValueError("a profile begins with plain decoding, and every plan has as many times as there are rows")
        if any(
            not (arm.found is None or 0 < arm.found <= 1) or not 0 < arm.guesses <= arm.plan.max_nodes
            for arm in arms if arm.plan.depth
        ):
            raise ValueError("a lookup makes guesses in some steps, one or more, and no more than its plan allows")
        costs = [float(value["length_cost"][name]) for name in ("measured_at", "plain", "guess")]
        fares = [float(value["sampled"][name]) for name in ("stayed", "found", "length")]
        return cls(rows, arms, LengthCost(*costs), Sampled(*fares))


def plan_from_json(value: Mapping[str, Any]) -> Plan:
    """Return the plan that `dataclasses.asdict` made this of."""
    tree = {"branching": tuple(value["branching"]), "choices": tuple(map(tuple, value["choices"]))}
    try:
        return Plan(**{**value, **tree})
    except DraftsmithError as error:
        raise ValueError(f"no plan: {error}") from error


def candidates(
    default: Plan, prunable: bool, room: int, longest: int, factors: Sequence[float] = (),
    confidences: Sequence[float] = (), longest_copy: int = 0,
) -> list[Plan]:
    """Return the plans worth measuring for a drafter, those of few nodes first.

    Args:
        default: the drafter's own plan, which is among them if there is room for it.
        prunable: whether trees of its likeliest guesses can be made.
        room: the most nodes.
        longest: the deepest draft it can make.
        factors: bounds by the length of a match that a lookup can be given; such plans come last. They tell good
            guesses from bad ones better than the length of a chain does, so there are few lengths then.
        confidences: bounds by how likely its guesses are that a drafter can be given; such plans come last too. Where
            there are bounds of both kinds, every plan has both.
        longest_copy: the most guesses that a lookup makes where the length of a match bounds them, if they are more
            than the default's.
    """
    depth = min(default.depth, longest)
    whole = min(max(depth, longest_copy), room)
    if factors and confidences:
        chain = (1,) * whole
        return [Plan(chain, factor=factor, confidence=least) for factor in factors for least in confidences if chain]
    copies = sorted({min(SHORT_COPY, depth, room), whole}) if factors and depth else []
    found = [Plan((1,) * deep) for deep in ([1, copies[0], min(depth, room)] if copies else ladder(depth))]
    if prunable and depth:
        wide = default.ranked().branching if max(default.branching) > 1 else WIDE
        shape = tuple(wide[min(at, len(wide) - 1)] for at in range(depth))
        tree = Plan(shape, beam=max(shape))
        found += [Plan(shape, beam=max(shape), nodes=nodes) for nodes in TREES if depth < nodes < tree.max_nodes]
    found.append(default)
    fitting = [plan for plan in dict.fromkeys(found) if plan != NO_DRAFT and plan.max_nodes <= room]
    bounded = [Plan((1,) * deep, factor=factor) for factor in factors for deep in copies]
    deepest = min(longest, room)
    bounded += [Plan((1,) * deepest, confidence=confidence) for confidence in confidences if depth]
    return sorted(fitting, key=lambda plan: (plan.max_nodes, plan.depth)) + bounded


def ladder(depth: int) -> Sequence[int]:
    """Return the depths of chains to try: every one at first, then in larger steps, and the last."""
    return [deep for deep in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48) if deep < depth] + [depth] * (depth > 0)


SHORT_COPY = 4
"""Guesses of a lookup, beside as many as its own plan has."""
WIDE = (3, 2, 1)
"""Children of a node in trees for drafters whose own plan is a chain."""
TREES = (4, 6, 8, 12, 16, 24, 32, 48)
"""Nodes of the trees to try."""
