"""The state of a run: its step, its stage, its best τ, and when a stage has waited long enough for a better one.

All of it is saved with every checkpoint, so that a run that was killed decides like one that was not.
"""

from dataclasses import asdict, dataclass
from typing import Any

from draftsmith.training.recipe import Recipe
from draftsmith.training.sections import StageSection
from draftsmith.training.wording import counted
from draftsmith.types import DraftsmithError

DONE = 3
"""The stage number after stage 2."""


@dataclass(frozen=True)
class Work:
    """The remaining work of a run, if no stage ends early.

    Steps of both stages, texts that the target writes for stage 2, measurements of τ, and saves.
    """

    first: int
    second: int
    texts: int
    measurements: int
    saves: int


@dataclass
class Progress:
    """Counters of a run.

    `stage` is the stage of the next step, `begun` the step after which it began, and `best` the highest τ so far, at
    `best_step`. `stage_best` is the highest τ of the stage, including its beginning, and `stage_loss` the lowest loss
    on held-out text; `waited` counts the measurements since one of the two last improved. Stage 1 begins with the run,
    so its best is that of the run.
    """

    step: int = 0
    stage: int = 1
    begun: int = 0
    best: float | None = None
    best_step: int | None = None
    stage_best: float | None = None
    stage_loss: float | None = None
    waited: int = 0

    @classmethod
    def start(cls, recipe: Recipe) -> "Progress":
        """Return the progress of a new run, in the first stage that has steps."""
        return cls(stage=1 if recipe.stage1.steps else 2)

    @classmethod
    def of(cls, values: dict[str, Any]) -> "Progress":
        """Restore it from a checkpoint."""
        names = list(cls.__dataclass_fields__)
        if any(name not in values for name in names):
            raise DraftsmithError("the checkpoint was written by an earlier version; start a new run.")
        return cls(**{name: values[name] for name in names})

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        return asdict(self)

    @property
    def within(self) -> bool:
        """Whether the stage has begun and is not over."""
        return self.stage != DONE and self.step > self.begun

    def section(self, recipe: Recipe) -> StageSection:
        """Return the section of the stage."""
        return recipe.stage1 if self.stage == 1 else recipe.stage2

    def end(self, recipe: Recipe) -> int:
        """Return the last step of the stage, if nothing ends it earlier."""
        return self.step if self.stage == DONE else self.begun + self.section(recipe).steps

    def last(self, recipe: Recipe) -> int:
        """Return the last step of the run, if nothing ends it earlier."""
        return self.end(recipe) + (recipe.stage2.steps if self.stage == 1 else 0)

    def measured(self, tau: float, loss: float | None) -> bool:
        """Record a τ and the loss on held-out text, if there is one; return whether τ is the run's best so far."""
        higher = self.stage_best is None or tau > self.stage_best
        lower = loss is not None and self.stage_loss is not None and loss < self.stage_loss
        self.waited = 0 if higher or lower else self.waited + 1
        if higher:
            self.stage_best = tau
        if lower or self.stage_loss is None:
            self.stage_loss = loss
        improved = self.best is None or tau > self.best
        if improved:
            self.best, self.best_step = tau, self.step
        return improved

    def finish_stage(self, recipe: Recipe, tau: float) -> None:
        """Go to the next stage, which begins with weights of this τ."""
        self.stage = 2 if self.stage == 1 and recipe.stage2.steps else DONE
        self.begun, self.stage_best, self.stage_loss, self.waited = self.step, tau, None, 0

    def end_early(self, recipe: Recipe) -> dict[str, Any]:
        """Go to the next stage before the end of this one; return the record of the reason, as plain JSON."""
        assert self.stage_best is not None
        record: dict[str, Any] = {
            "stage": str(self.stage), "steps": self.step - self.begun, "planned_steps": self.section(recipe).steps,
            "stage_best": self.stage_best, "stage_loss": self.stage_loss, "measurements_since": self.waited,
        }
        self.finish_stage(recipe, self.stage_best)
        return record

    def in_words(self, recipe: Recipe) -> str:
        """Return a sentence that says where the run stands, and what is left of it."""
        if self.stage == DONE:
            return f"the run is done, after {counted(self.step, 'step')}: --resume would only export its drafter again."
        end, last = self.end(recipe), self.last(recipe)
        left = f"{counted(end - self.step, 'step')} of stage {self.stage}"
        if last > end:
            left += f" and {counted(last - end, 'step')} of stage 2"
        return f"the run stands at step {self.step:,} of {last:,}: --resume would take {left}."

    def rest(self, recipe: Recipe, written: int) -> Work:
        """Return the remaining work, including the measurement before the first step.

        Args:
            written: number of stage 2's texts that exist already.
        """
        every, save, second = recipe.evaluation.every, recipe.output.save_every, recipe.stage2
        end, last = self.end(recipe), self.last(recipe)
        steps = range(self.step + 1, last + 1)
        measured = {step for step in steps if step in (end, last) or (every and step % every == 0)}
        saved = measured | {step for step in steps if step % save == 0}
        begins = self.step == 0
        first = end - self.step if self.stage == 1 else 0
        missing = second.texts_needed - written if len(steps) > first and second.texts is None else 0
        return Work(first, len(steps) - first, max(0, missing), begins + len(measured), begins + len(saved))


def early_in_words(record: dict[str, Any]) -> str:
    """Return a sentence that says that a stage ended early, and why."""
    lowest, step = record["stage_loss"], record.get("goes_on_from_step")
    loss = f" or a loss on held-out text below {lowest:.3f}" if lowest is not None else ""
    without = counted(record["measurements_since"], "measurement")
    onward = f"; stage 2 goes on from the weights of step {step}" if step is not None else ""
    return (
        f"stage {record['stage']} ended early, after {record['steps']} of {record['planned_steps']} steps: "
        f"{without} in a row without a τ above {record['stage_best']:.3f}{loss}{onward}."
    )
