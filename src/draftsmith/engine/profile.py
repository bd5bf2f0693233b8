"""What drafts cost on a machine and what they bring: plans with the seconds of a step and the guesses that stay."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draftsmith.engine.arm import Arm, Behind, Times
from draftsmith.plan import NEVER_SURE, NO_DRAFT, Plan
from draftsmith.types import DraftsmithError


@dataclass(frozen=True)
class Costs:
    """What plans, the first of which drafts nothing, take in a step with some number of rows.

    Args:
        seconds: of every plan, which makes as many guesses as was measured.
        more: for each time that it makes as many guesses again, where that differs from text to text.
        behind: the same for those made behind a lookup that found none.
        least: that every plan takes however few guesses it makes; nothing stands for those without a draft.
    """

    seconds: Sequence[float]
    more: Sequence[float]
    behind: Sequence[float]
    least: Sequence[float] = ()

    @property
    def plain(self) -> float:
        """Seconds without a draft."""
        return self.seconds[0]

    def of(self, at: int, times: Times) -> float:
        """Return the seconds of a plan that makes so many times as many guesses."""
        more, behind = self.more[at], self.behind[at]
        if not more and not behind:
            return self.seconds[at]
        least = self.least[at] if self.least else self.plain
        return max(least, self.seconds[at] + (times[0] - 1) * more + (times[1] - 1) * behind)

    def slowed(self, times: Sequence[float]) -> "Costs":
        """Return what they take where every plan takes so many times as long."""
        seconds, more, behind = (
            [took * slower for took, slower in zip(each, times, strict=True)]
            for each in (self.seconds, self.more, self.behind)
        )
        return Costs(seconds, more, behind, [self.plain * slower for slower in times])

    def plus(self, other: "Costs", times: float) -> "Costs":
        """Return what they take with so many times another's costs besides."""
        pairs = (self.seconds, other.seconds), (self.more, other.more), (self.behind, other.behind)
        return Costs(*([took + times * extra for took, extra in zip(*pair, strict=True)] for pair in pairs))

    def grown(self, growths: Sequence[Times]) -> list[float]:
        """Return the seconds of plans that make so many times as many guesses."""
        return [self.of(at, times) for at, times in enumerate(growths)]


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
        behind: how many stay of those made behind a lookup that found none.
    """

    stayed: float = 1.0
    found: float = 1.0
    length: float = 1.0
    behind: float = 1.0

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
        return self.costs((self.arms[0], arm), rows).of(1, arm.times_at(odds))

    def costs(self, arms: Sequence[Arm], rows: int) -> Costs:
        """Return what these of its plans take, the first of which drafts nothing; all rows together."""
        seconds, more, behind = [self._between(arm.seconds, rows) for arm in arms], [], []
        for arm, took in zip(arms, seconds, strict=True):
            others = 0.0 if arm.behind is None else arm.usual_behind * self._between(arm.behind.each, rows)
            most = arm.plan.max_nodes / arm.usual if arm.full else 1.0
            # A step whose rows all find guesses makes none behind.
            more.append(max(0.0, self._between(arm.full, rows) - took + others) / (most - 1) if most > 1 else 0.0)
            behind.append(others)
        return Costs(seconds, more, behind)

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
                None if arm["made"] is None else float(arm["made"]), _behind_from_json(arm["behind"]),
            )
            for arm in value["arms"]
        )
        rows = tuple(map(int, value["rows"]))
        if (
            not arms or arms[0].plan != NO_DRAFT or any(len(arm.seconds) != len(rows) for arm in arms)
            or any(len(arm.full) != len(rows) for arm in arms if arm.found is not None or arm.varies)
            or any(len(arm.behind.each) != len(rows) for arm in arms if arm.behind is not None)
        ):
            raise ValueError("a profile begins with plain decoding, and every plan has as many times as there are rows")
        if any(
            not (arm.found is None or 0 < arm.found <= 1) or not 0 < arm.guesses <= arm.plan.max_nodes
            or not (arm.behind is None or arm.behind.made > 0)
            for arm in arms if arm.plan.depth
        ):
            raise ValueError("a lookup makes guesses in some steps, one or more, and no more than its plan allows")
        costs = [float(value["length_cost"][name]) for name in ("measured_at", "plain", "guess")]
        fares = [float(value["sampled"][name]) for name in ("stayed", "found", "length", "behind")]
        return cls(rows, arms, LengthCost(*costs), Sampled(*fares))


def _behind_from_json(value: Mapping[str, Any] | None) -> Behind | None:
    """Undo `asdict`."""
    if value is None:
        return None
    return Behind(tuple(map(float, value["survival"])), float(value["made"]), tuple(map(float, value["each"])))


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
        sure = (*confidences, NEVER_SURE)  # with the last one what is looked up is drafted alone
        return [Plan(chain, factor=factor, confidence=least) for factor in factors for least in sure if chain]
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
