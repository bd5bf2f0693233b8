"""No cliff: as acceptance sweeps up and down, the policy stays near the better of plain decoding and the best plan.

All time is that of a table of costs, so nothing here depends on the machine.
"""

import random
from collections.abc import Sequence

import pytest

from draftsmith.engine.arm import Arm
from draftsmith.engine.evidence import LONGEST_WAIT
from draftsmith.engine.fitted import Fitted
from draftsmith.engine.known import Known
from draftsmith.engine.policy import RowHistory
from draftsmith.engine.profile import Profile
from draftsmith.plan import NO_DRAFT, Plan
from tests.helpers.profiles import load

DEPTHS, MEASURED = range(5), 0.6
UP = [at / 10 for at in range(11)]
SWEEP = [*UP, *reversed(UP)]
"""How often a guess stays whose predecessors did, up and down again."""
HELD = 2 * LONGEST_WAIT
"""Steps at each level; what does not pay is tried again at the latest after half of them."""


def cost(depth: int, rows: int) -> float:
    """Seconds of a step, of all rows together."""
    return 0.001 * rows**0.5 * (1 + (0.15 + 0.05 * rows) * depth)


def expected(share: float, depth: int) -> float:
    """Tokens of a step."""
    return sum(share**at for at in range(depth + 1))


def profile(scale: float) -> Profile:
    """The costs, at the acceptance at which they were measured; long steps let rows draft differently."""
    rows = (1, 2, 4, 8)
    return Profile(rows, tuple(
        Arm(
            Plan((1,) * depth) if depth else NO_DRAFT, tuple(MEASURED ** (at + 1) for at in range(depth)),
            tuple(scale * cost(depth, count) for count in rows),
        )
        for depth in DEPTHS
    ))


class World:
    """Rows that accept as often as they are told, and the time that they take."""

    def __init__(self, rows: int, scale: float) -> None:
        self.time, self.rows, self.scale = 0.0, rows, scale
        self.policy = Fitted(Known(profile(scale)), learns_times=True)
        self.histories = [RowHistory(False, 5) for _ in range(rows)]
        self.rng = random.Random(1)

    def run(self, shares: Sequence[float], steps: int) -> tuple[float, float]:
        """Return expected tokens and seconds of so many steps; a row accepts by its own share."""
        tokens, begun, held = 0.0, self.time, 0
        for _ in range(steps):
            if held:
                held -= 1
            else:
                choices = self.policy.choose(load(self.rows), self.histories)
                held = self.policy.holds
            took = 0.0
            for share, history, choice in zip(shares, self.histories, choices, strict=True):
                depth, stayed = choice.plan.depth, 0
                while stayed < depth and self.rng.random() < share:
                    stayed += 1
                history.note(stayed, depth, NO_DRAFT)
                tokens += expected(share, depth)
                took += self.scale * cost(depth, self.rows) / self.rows
            self.policy.timed(took)
            self.time += took
        return tokens, self.time - begun


def best(share: float, rows: int, scale: float) -> float:
    """Tokens a second of the best plan, which may be none."""
    return max(rows * expected(share, depth) / (scale * cost(depth, rows)) for depth in DEPTHS)


@pytest.mark.parametrize(
    ("rows", "scale"), [(1, 1.0), (4, 1.0), (1, 1000.0), (3, 1000.0)],
    ids=["one row", "four, all alike", "one row of long steps", "three, each by itself"],
)
def test_at_no_share_of_guesses_is_there_a_cliff(rows: int, scale: float):
    world = World(rows, scale)
    beside_plain, beside_best = [], []
    for share in SWEEP:
        # As it comes from the level before, and once it has had the time to notice.
        for settled in (False, True):
            tokens, seconds = world.run([share] * rows, HELD)
            beside_plain.append(tokens / seconds / (rows / (scale * cost(0, rows))))
            if settled:
                beside_best.append(tokens / seconds / best(share, rows, scale))
    assert min(beside_plain) > 0.97, "it is never slower than plain decoding by more than a little"
    assert min(beside_best) > 0.88, "nor than the best plan, not even where that gains next to nothing"
    assert sum(beside_best) / len(beside_best) > 0.97, "and as fast as that on the whole"
    assert beside_best[len(UP) - 1] > 0.99, "where all guesses stay"
