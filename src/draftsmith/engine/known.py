"""What a fitted policy was told of a drafter, and which of its plans may ever pay."""

from dataclasses import dataclass

from draftsmith.engine.profile import MOST_ODDS, Arm, Profile

ODDS = tuple(at / 20 for at in range(round(20 * MOST_ODDS) + 1))
"""How many times as often as measured a guess may stay; see `Arm.accepted`."""
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of rows for which plans are compared beforehand."""
NEARLY = 0.95
"""A plan is kept that is somewhere so near to the best: which of them is, is only learnt while they are used."""


@dataclass(frozen=True)
class Known:
    """One of the engine's drafters, with what was measured of it.

    Args:
        name: by which the engine has it; None is its first.
        hope: it never drafts, and so costs nothing at all, where nothing would be gained even with these odds, see
            `Arm.accepted`.
        rows: nor where nothing would be gained with so many rows; None asks whether there is any number of rows.
    """

    profile: Profile
    name: str | None = None
    hope: float = 1.0
    rows: int | None = None

    def useful(self) -> list[Arm]:
        """Return its plans that are the best, or nearly, for some number of rows and some odds."""
        profile, asked = self.profile, COUNTS if self.rows is None else (self.rows,)
        if all(profile.best(count, self.hope) is profile.arms[0] for count in asked):
            return []
        kept = set[int]()
        for odds in ODDS:
            for count in COUNTS:
                speeds = [profile.speed(arm, count, odds) for arm in profile.arms]
                enough = max(speeds[0], NEARLY * max(speeds))
                kept.update(at for at, speed in enumerate(speeds) if at and speed >= enough)
        return [profile.arms[at] for at in sorted(kept)]
