"""What a training run brings."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TrainingResult:
    """What a run brought: its folder, the exported drafter (the best by τ), and the measurements.

    `best` is the highest τ and `best_step` where it was measured; of joint training, the last.
    `ended_early` has a record of every stage that ended before its last step. `target` is the folder of the changed
    target where the recipe changes it. `seconds` are those of all commands that trained this run; of one that was
    killed, up to its last checkpoint. None where a command kept no count.
    """

    folder: Path
    drafter: Path
    step: int
    best: float | None
    evaluations: list[dict[str, Any]]
    target: Path | None = None
    seconds: float | None = None
    best_step: int | None = None
    ended_early: tuple[dict[str, Any], ...] = ()

    @property
    def best_scores(self) -> dict[str, Any] | None:
        """All that was measured at `best_step`; None where nothing was."""
        found = (record["evaluation"] for record in self.evaluations if record["step"] == self.best_step)
        return next(found, None)
