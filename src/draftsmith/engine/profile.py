"""What drafts cost and bring on a machine: plans with the seconds of their steps and the guesses that stay."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from draftsmith.engine.arm import Arm, Behind, Times
from draftsmith.plan import NEVER_SURE, NO_COPY, NO_DRAFT, Plan
from draftsmith.types import DraftsmithError


@dataclass(frozen=True)
class Costs:
    """How long a step of each plan takes with some number of rows; the first plan drafts nothing.

    Args:
        seconds: of every plan when it makes as many guesses as measured.
        more: seconds added each time it makes as many guesses again, where that number differs from text to text.
        behind: the same for guesses made behind a lookup that found none.
        least: seconds that every plan takes however few guesses it makes; empty means those of a step without a draft.
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
        """Return the seconds of plan number `at` if it makes so many times as many guesses as measured."""
        more, behind = self.more[at], self.behind[at]
        if not more and not behind:
            return self.seconds[at]
        least = self.least[at] if self.least else self.plain
        return max(least, self.seconds[at] + (times[0] - 1) * more + (times[1] - 1) * behind)

    def slowed(self, times: Sequence[float]) -> "Costs":
        """Return the costs where each plan takes so many times as long."""
        seconds, more, behind = (
            [took * slower for took, slower in zip(each, times, strict=True)]
            for each in (self.seconds, self.more, self.behind)
        )
        return Costs(seconds, more, behind, [self.plain * slower for slower in times])

    def plus(self, other: "Costs", times: float) -> "Costs":
        """Return the costs with `times` times another's costs added."""
        pairs = (self.seconds, other.seconds), (self.more, other.more), (self.behind, other.behind)
        return Costs(*([took + times * extra for took, extra in zip(*pair, strict=True)] for pair in pairs))

    def grown(self, growths: Sequence[Times]) -> list[float]:
        """Return the seconds of all plans if each makes so many times as many guesses as measured."""
        return [self.of(at, times) for at, times in enumerate(growths)]


@dataclass(frozen=True)
class LengthCost:
    """What every further token of a row's text adds to a step, by a straight line.

    Args:
        measured_at: the length of text, in tokens, at which steps were timed.
        plain: seconds for each token beyond that, without a draft.
        guess: seconds for each token beyond that and for each guess, including what the drafter reads of the text; on
            average over the guesses of one plan.
    """

    measured_at: float = 0.0
    plain: float = 0.0
    guess: float = 0.0

    def __post_init__(self) -> None:
        _require_sizes(vars(self), "in what longer texts cost")


@dataclass(frozen=True)
class WidthCost:
    """How long the target takes for a step, by how many tokens the step verifies in all rows together.

    Args:
        widths: numbers of tokens, rising from 1.
        seconds: of a step without what the drafter takes, never falling.
    """

    widths: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = self.widths[:1] == (1,) and all(one < other for one, other in pairwise(self.widths))
        slower = all(0 < one <= other < math.inf for one, other in pairwise(self.seconds))
        if not (len(self.widths) == len(self.seconds) >= 2 and rising and slower):
            raise ValueError("the costs of a step by its width are of rising numbers from 1 on, and never fall")

    def of(self, tokens: float) -> float:
        """Return the seconds for so many tokens, by straight lines, the last of which goes on."""
        right = min(max(1, bisect_left(self.widths, tokens)), len(self.widths) - 1)
        # Beyond what was measured, a step grows as it did over the last half: a single stretch may be a jump.
        left = right - 1
        if tokens > self.widths[-1]:
            left = min(left, bisect_left(self.widths, self.widths[-1] / 2))
        (w0, w1), (t0, t1) = (self.widths[left], self.widths[right]), (self.seconds[left], self.seconds[right])
        return t1 + (t1 - t0) * (tokens - w1) / (w1 - w0)


@dataclass(frozen=True)
class Sampled:
    """How guesses fare in sampled texts, relative to greedy ones.

    Args:
        stayed: how many stay.
        found: for a lookup, the odds of a token that it comes from a step that found some.
        length: for plans bounded by the length of a match, how many are made where some are; 1 for plans with a
            confidence, because their number would say what was drawn, see `RowHistory.tells_any`.
        behind: of those made behind a lookup that found none, how many stay.
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
        width_cost: what steps take by the number of tokens; None where that was not measured.
    """

    rows: tuple[int, ...]
    arms: tuple[Arm, ...]
    length_cost: LengthCost = LengthCost()
    sampled: Sampled = Sampled()
    width_cost: WidthCost | None = None

    def seconds(self, arm: Arm, rows: int, odds: float = 1.0) -> float:
        """Return the seconds of a step with so many rows, by straight lines between the measured numbers of rows.

        A lookup's seconds depend on how many guesses it makes, see `Arm.accepted`.
        """
        return self.costs((self.arms[0], arm), rows).of(1, arm.times_at(odds))

    def costs(self, arms: Sequence[Arm], rows: int) -> Costs:
        """Return the costs of some of its plans, the first of which drafts nothing, for all rows together."""
        seconds, more, behind = [self._between(arm.seconds, rows) for arm in arms], [], []
        for arm, took in zip(arms, seconds, strict=True):
            others = 0.0 if arm.behind is None else arm.usual_behind * self._between(arm.behind.each, rows)
            most = arm.plan.max_nodes / arm.usual if arm.full else 1.0
            # A step whose rows all find guesses by lookup makes none behind it.
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
        """Return the tokens a second of all rows together; see `Arm.accepted` for the odds."""
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
            "width_cost": None if self.width_cost is None else asdict(self.width_cost),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Profile":
        """Undo `to_json`; KeyError, TypeError or ValueError for anything else."""
        arms = tuple(
            Arm(
                plan_from_json(arm["plan"]), tuple(map(float, arm["survival"])), tuple(map(float, arm["seconds"])),
                None if arm["found"] is None else float(arm["found"]), tuple(map(float, arm["full"])),
                None if arm["made"] is None else float(arm["made"]), _behind_from_json(arm["behind"]),
                bool(arm["suits_draws"]),
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
        return cls(rows, arms, LengthCost(*costs), Sampled(*fares), _width_from_json(value["width_cost"]))


def _width_from_json(value: Mapping[str, Any] | None) -> WidthCost | None:
    """Undo `asdict`."""
    if value is None:
        return None
    return WidthCost(tuple(map(int, value["widths"])), tuple(map(float, value["seconds"])))


def _behind_from_json(value: Mapping[str, Any] | None) -> Behind | None:
    """Undo `asdict`."""
    if value is None:
        return None
    return Behind(tuple(map(float, value["survival"])), float(value["made"]), tuple(map(float, value["each"])))


def plan_from_json(value: Mapping[str, Any]) -> Plan:
    """Return the plan from which `dataclasses.asdict` made `value`; ValueError for a plan that is not valid."""
    tree = {"branching": tuple(value["branching"]), "choices": tuple(map(tuple, value["choices"]))}
    try:
        return Plan(**{**value, **tree})
    except DraftsmithError as error:
        raise ValueError(f"no plan: {error}") from error


def candidates(
    default: Plan, prunable: bool, room: int, longest: int, factors: Sequence[float] = (),
    confidences: Sequence[float] = (), longest_copy: int = 0, deepest_behind: int = 0,
) -> list[Plan]:
    """Return the plans worth measuring for a drafter, those of few nodes first.

    Args:
        default: the drafter's own plan, which is among them if there is room for it.
        prunable: whether trees of its likeliest guesses can be made.
        room: the most nodes.
        longest: the deepest draft it can make.
        factors: bounds by the length of a match, which a lookup can be given; such plans come last. They separate good
            guesses from bad ones better than the length of a chain does, so that few lengths are needed then.
        confidences: bounds by how likely the guesses are, which some drafters can be given; such plans come last too.
            Where there are bounds of both kinds, every plan has both; in some only the lookup drafts, and in some only
            the drafter behind it. `prunable` is about that drafter then.
        longest_copy: the most guesses that a lookup makes where the length of a match bounds them, if that is more than
            in the default plan.
        deepest_behind: the deepest draft of the drafter behind a lookup.
    """
    depth = min(default.depth, longest)
    whole = min(max(depth, longest_copy), room)
    if factors and confidences:
        chain = (1,) * whole
        sure = (*confidences, NEVER_SURE)  # with the last one, only what is looked up is drafted
        both = [Plan(chain, factor=factor, confidence=least) for factor in factors for least in sure if chain]
        deepest = min(deepest_behind, room, SURE_DEPTHS[-1])
        unaided = [Plan((1,) * deep, factor=NO_COPY) for deep in sorted({*UNAIDED, deepest}) if 0 < deep <= deepest]
        if prunable and chain and deepest:
            wide = (WIDE,) * deepest
            deep = wide + (1,) * (whole - deepest)
            both += [Plan(deep, beam=WIDE, nodes=NEAR, factor=factor, confidence=HARDLY_SURE) for factor in factors]
            few = [nodes for nodes in TREES if deepest < nodes <= NEAR and nodes < Plan(wide, beam=WIDE).max_nodes]
            unaided += [Plan(wide, beam=WIDE, nodes=nodes, factor=NO_COPY) for nodes in few]
        return [plan for plan in both + unaided if plan.max_nodes <= room]
    copies = sorted({min(SHORT_COPY, depth, room), whole}) if factors and depth else []
    found = [Plan((1,) * deep) for deep in ([1, copies[0], min(depth, room)] if copies else ladder(depth))]
    if prunable and depth:
        # One deeper than its own draft, because a tree follows the likeliest path for longer.
        shapes = {(WIDE,) * min(depth + 1, longest), default.ranked().branching[:depth]}
        for shape in sorted(shape for shape in shapes if max(shape) > 1):
            tree = Plan(shape, beam=max(shape))
            found += [replace(tree, nodes=nodes) for nodes in TREES if len(shape) < nodes < tree.max_nodes]
    found.append(default)
    fitting = [plan for plan in dict.fromkeys(found) if plan != NO_DRAFT and plan.max_nodes <= room]
    bounded = [Plan((1,) * deep, factor=factor) for factor in factors for deep in copies]
    depths = sorted({min(deep, longest, room) for deep in SURE_DEPTHS})
    bounded += [Plan((1,) * deep, confidence=least) for deep in depths for least in confidences if depth]
    return sorted(fitting, key=lambda plan: (plan.max_nodes, plan.depth)) + bounded


def ladder(depth: int) -> Sequence[int]:
    """Return the depths of chains to try: first every depth, then in growing steps, and `depth` itself."""
    return [deep for deep in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48) if deep < depth] + [depth] * (depth > 0)


NEAR = 13
"""With so many guesses and the root, all rows of a product of bf16 weights fit the registers of AVX-512, so that
weights are read once (docs/native.md)."""
SURE_DEPTHS = (8, NEAR)
"""Most guesses of the chains to try that end where their drafter becomes unsure, and of those behind a lookup."""
UNAIDED = (1, 2, 3)
"""Guesses of chains to try for a drafter behind a lookup when nothing is looked up, besides the longest one."""
SHORT_COPY = 4
"""Guesses of the shorter chain to try for a lookup, besides the longest one."""
WIDE = 2
"""Children of a node, and nodes expanded at every depth, in trees to try besides those of a drafter's own shape."""
TREES = (4, 6, 9, NEAR, 20, 32, 48)
"""Nodes of the trees to try."""
HARDLY_SURE = 0.002
"""The confidence of trees behind a lookup. It leaves out next to nothing, but says that the plan has both bounds."""
