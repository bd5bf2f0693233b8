"""What drafts cost on a machine and what they bring: plans with the seconds of a step and the guesses that stay."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.types import DraftsmithError


@dataclass(frozen=True)
class Arm:
    """One plan, measured.

    Args:
        survival: the share of steps that accepted at least 1, 2, … guesses.
        seconds: of a step, all rows together, for each number of rows of the profile.
        drafted: of a lookup, guesses that a step verified; None stands for as many as the plan has.
    """

    plan: Plan
    survival: tuple[float, ...]
    seconds: tuple[float, ...]
    drafted: float | None = None

    def accepted(self, odds: float = 1.0) -> float:
        """Return how many guesses a step accepts on average.

        Args:
            odds: how many times as often as measured a guess stays whose predecessors did; so the deeper guesses
                suffer, or gain, most.
        """
        total, factor, before = 0.0, 1.0, 1.0
        for survived in self.survival:
            factor *= odds
            before = min(before, survived * factor)  # none stays whose predecessor did not
            total += before
        return total

    @property
    def most_growth(self) -> float:
        """How many times as many guesses as measured it can make."""
        return max(1.0, self.plan.max_nodes / self.drafted) if self.drafted else 1.0

    def growth(self, odds: float) -> float:
        """Return how many times as many guesses as measured are made, as far as odds tell; see `accepted`.

        A lookup makes none where it finds nothing: where more stay it has found more, and has more to verify.
        """
        if self.most_growth == 1.0 or not self.accepted():
            return 1.0
        return min(self.most_growth, self.accepted(odds) / self.accepted())


@dataclass(frozen=True)
class Profile:
    """All plans that were measured; the first drafts nothing.

    Args:
        rows: the numbers of rows that steps were timed with, rising.
    """

    rows: tuple[int, ...]
    arms: tuple[Arm, ...]

    def seconds(self, arm: Arm, rows: int, odds: float = 1.0) -> float:
        """Return the seconds of a step of so many rows, by straight lines between what was measured.

        What a plan takes beyond plain decoding goes with the guesses that it makes, see `Arm.growth`.
        """
        took, growth = self._measured(arm, rows), arm.growth(odds)
        if growth == 1.0:
            return took
        plain = self._measured(self.arms[0], rows)
        return plain + max(0.0, took - plain) * growth

    def _measured(self, arm: Arm, rows: int) -> float:
        if len(self.rows) == 1 or rows <= self.rows[0]:
            return arm.seconds[0]
        right = min(max(1, bisect_left(self.rows, rows)), len(self.rows) - 1)
        (r0, r1), (t0, t1) = self.rows[right - 1 : right + 1], arm.seconds[right - 1 : right + 1]
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
        return {"rows": list(self.rows), "arms": [asdict(arm) for arm in self.arms]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Profile":
        """Undo `to_json`; KeyError, TypeError or ValueError for what is none."""
        arms = tuple(
            Arm(
                plan_from_json(arm["plan"]), tuple(map(float, arm["survival"])), tuple(map(float, arm["seconds"])),
                None if arm["drafted"] is None else float(arm["drafted"]),
            )
            for arm in value["arms"]
        )
        rows = tuple(map(int, value["rows"]))
        if not arms or arms[0].plan != NO_DRAFT or any(len(arm.seconds) != len(rows) for arm in arms):
            raise ValueError("a profile begins with plain decoding, and every plan has as many times as there are rows")
        return cls(rows, arms)


def grown_by(growths: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """Return the seconds of plans, the first of which drafts nothing, whose guesses are so many times as many."""
    plain = seconds[0]
    return [plain + growth * max(0.0, took - plain) for growth, took in zip(growths, seconds, strict=True)]


def plan_from_json(value: Mapping[str, Any]) -> Plan:
    """Return the plan that `dataclasses.asdict` made this of."""
    tree = {"branching": tuple(value["branching"]), "choices": tuple(map(tuple, value["choices"]))}
    try:
        return Plan(**{**value, **tree})
    except DraftsmithError as error:
        raise ValueError(f"no plan: {error}") from error


def candidates(
    default: Plan, prunable: bool, room: int, longest: int, matches: Sequence[int] = ()
) -> list[Plan]:
    """Return the plans worth measuring for a drafter, those of few nodes first.

    Args:
        default: the drafter's own plan, which is among them if there is room for it.
        prunable: whether trees of its likeliest guesses can be made.
        room: the most nodes.
        longest: the deepest draft it can make.
        matches: lengths that it can ask of what it looks up; such plans come last.
    """
    depth = min(default.depth, longest)
    found = [Plan((1,) * deep) for deep in ladder(depth)]
    if prunable and depth:
        wide = default.ranked().branching if max(default.branching) > 1 else WIDE
        shape = tuple(wide[min(at, len(wide) - 1)] for at in range(depth))
        tree = Plan(shape, beam=max(shape))
        found += [Plan(shape, beam=max(shape), nodes=nodes) for nodes in TREES if depth < nodes < tree.max_nodes]
    found.append(default)
    fitting = [plan for plan in dict.fromkeys(found) if plan != NO_DRAFT and plan.max_nodes <= room]
    copies = sorted({deep for deep in (min(SHORT_COPY, depth), depth) if 0 < deep <= room})
    sure = [Plan((1,) * deep, match=length) for length in matches for deep in copies]
    return sorted(fitting, key=lambda plan: (plan.max_nodes, plan.depth)) + sure


def ladder(depth: int) -> Sequence[int]:
    """Return the depths of chains to try: every one at first, then in larger steps, and the last."""
    return [deep for deep in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48) if deep < depth] + [depth] * (depth > 0)


SHORT_COPY = 4
"""Guesses behind a long match, beside as many as the drafter's own plan has."""
WIDE = (3, 2, 1)
"""Children of a node in trees for drafters whose own plan is a chain."""
TREES = (4, 6, 8, 12, 16, 24, 32, 48)
"""Nodes of the trees to try."""
