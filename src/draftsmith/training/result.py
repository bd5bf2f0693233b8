"""The result of a training run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TrainingResult:
    """Result of a run: its folder, the exported drafter (the best by τ), and the measurements.

    `best` is the highest τ, or in joint training the last, and `best_step` is where it was measured.
    `ended_early` has a record of every stage that ended before its last step. `target` is the folder of the changed
    target if the recipe changes it. After a dry run `drafter` is untrained, or a checkpoint of the run that was to be
    resumed. `seconds` is the time of all commands that trained this run; a killed command counts up to its last
    checkpoint. It is None if a command did not count its time.
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
        """All measurements at `best_step`; None if there were none."""
        found = (record["evaluation"] for record in self.evaluations if record["step"] == self.best_step)
        return next(found, None)
