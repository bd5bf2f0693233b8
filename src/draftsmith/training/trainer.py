"""The training run: stage 1 on ground truth, stage 2 on what the target itself writes; the target stays frozen.

Everything random is a function of the recipe's seed and the step, so a run that was killed and resumed ends with the
same weights as one that was not. Two callables from outside stand for the engine.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress as Bars

from draftsmith.drafters.trainable.model import TrainableModel
from draftsmith.drafters.trainable.storage import standing
from draftsmith.targets import Target
from draftsmith.targets.loading.tokens import TokenText
from draftsmith.training.checkpoint import BEST, Checkpoint, Checkpoints, warn
from draftsmith.training.data.generated import Generate
from draftsmith.training.data.identity import identify
from draftsmith.training.interruption import TrainingInterrupted
from draftsmith.training.material import CENSUS, Material
from draftsmith.training.measuring import (
    HELD_OUT_LOSS,
    TAU,
    Evaluate,
    HeldOutLoss,
    checked,
    loss_in_words,
    source_lines,
    tau_in_words,
    with_loss,
)
from draftsmith.training.plan import check_lengths, check_stages, plan_lines
from draftsmith.training.progress import DONE, Progress, Work, early_in_words
from draftsmith.training.recipe import Recipe
from draftsmith.training.result import TrainingResult
from draftsmith.training.run_folder import RunFolder
from draftsmith.training.samples import keep_samples, show_samples
from draftsmith.training.schedule import learning_rate
from draftsmith.training.sections import StageSection
from draftsmith.training.step import NotFinite, TrainingStep
from draftsmith.training.terminal import progress_bar, say
from draftsmith.training.trained import Trained
from draftsmith.types import DraftsmithError

Foretell = Callable[[Work, TrainingStep], None]
"""Called before the first step with the work to be done, and with a step to try out that changes nothing."""


OTHER_TEXT = (
    "stage 2 learns what the target writes; the loss on held-out text, which others wrote, may rise while τ does too."
)


class TrainingRun:
    """One run; subclasses that train more than the drafter override its methods."""

    def __init__(
        self, recipe: Recipe, target: Target, generate: Generate, evaluate: Evaluate, console: Console,
        on_drafter: Callable[[TrainableModel], None] | None, foretell: Foretell | None,
    ) -> None:
        self.recipe, self.target, self.console = recipe, target, console
        self.generate, self.evaluate, self.on_drafter, self.foretell = generate, evaluate, on_drafter, foretell
        check_stages(recipe)
        self.folder = RunFolder(recipe, target.facts())
        self.checkpoints = Checkpoints(self.folder.path, recipe.output.keep)
        self.go_on = "go on with --resume (resume=True) and the same options as before"
        self.on_step: Callable[[], None] = lambda: None
        self.progress = Progress.start(recipe)
        self.material = Material(recipe, target, self.folder, console)
        self.held_out_loss = HeldOutLoss(recipe, target)

    def _make_trained(self, warm: bool) -> Trained:
        return Trained(self.recipe, self.target, self.material.documents, warm)

    def _note(self, sentence: str) -> None:
        """Say what nobody should miss: as a warning of Python's where no progress is shown."""
        if self.console.quiet:
            warn(sentence)
        else:
            say(self.console, sentence)

    def _build(self, resume: bool) -> None:
        # A checkpoint has all weights, so where the first ones came from may be gone by now.
        self.trained = self._make_trained(warm=not resume)
        check_lengths(self.recipe, self.trained.drafter, self.target)

    def plan_only(self, resume: bool) -> TrainingResult:
        """Print the plan, and write an untrained drafter.

        Of a run that is to be resumed, print what is left and write nothing; the result's drafter is its best
        checkpoint, or the last one.
        """
        if resume:
            self.checkpoints.check_found(resume)
        self.folder.check_place(self.folder.path)
        self._build(resume)
        if resume:
            self.folder.check_resumable(identify(self.recipe))
            self.progress = Progress.of(self.checkpoints.load(self._note).progress)
        self.material.check()
        say(self.console, *plan_lines(self.recipe, self.trained.drafter))
        if resume:
            say(self.console, self.progress.in_words(self.recipe))
        self._foretell(self.material.written if resume else 0)
        if resume:
            best, step = self.progress.best_step, self.progress.step
            folder = standing(self.checkpoints.at(step if best not in self.checkpoints.steps() else best))
        else:
            folder = self.folder.path / "dry-run"
            self.trained.export(folder, 0)
            self.console.print(f"initialised drafter: {folder}", markup=False)
        return TrainingResult(self.folder.path, folder, self.progress.step, None, [])

    def _foretell(self, written: int) -> None:
        work = self.progress.rest(self.recipe, written)
        if self.foretell is not None and work.first + work.second:
            self.foretell(work, self.trained.throwaway())

    def go(self, resume: bool, interrupted: threading.Event) -> TrainingResult:
        """Train from the start, or from the last good checkpoint."""
        self.checkpoints.check_begin(resume)
        self.folder.check_place(self.folder.path)
        self._build(resume)
        census = None if resume else self.material.check()
        with self.checkpoints.held():
            self.checkpoints.check_found(resume)  # again, since another process may have trained in the meantime
            return self._go(self.checkpoints.load(self._note) if resume else None, census, interrupted)

    def _go(
        self, checkpoint: Checkpoint | None, census: dict[str, Any] | None, interrupted: threading.Event
    ) -> TrainingResult:
        self.folder.open(checkpoint.progress["step"] if checkpoint else None)
        if census is not None:
            self.folder.note_data(CENSUS, census)
        if checkpoint is not None:
            self._take_up(checkpoint)
        try:
            self._foretell(self.material.written if checkpoint is not None else 0)
            self._stages(interrupted, fresh=checkpoint is None)
        finally:
            self.folder.close()
        return self._result()

    def _take_up(self, checkpoint: Checkpoint) -> None:
        self.progress = progress = Progress.of(checkpoint.progress)
        self.trained.load(checkpoint.folder)
        best = progress.best_step if progress.best_step in self.checkpoints.steps() else None
        self.checkpoints.settle(progress.step, best)
        if progress.within:
            self.trained.load_optimizers(checkpoint.optimizer)
            if progress.stage == 1:
                self.material.loader.load_state_dict(checkpoint.progress["loader"])
        self.console.print(f"resuming at step {progress.step} of {progress.last(self.recipe)}")

    def _stages(self, interrupted: threading.Event, fresh: bool) -> None:
        if fresh:
            # The start of the curve, and a checkpoint to resume from, whatever happens next.
            self._measure()
            self._save()
        progress = self.progress
        if progress.stage == 1:
            if progress.step == 0:
                self._show(1)
            self._steps(interrupted)
            self.material.show_account()
        if progress.stage == DONE:
            return
        if progress.within:
            taken = progress.step - progress.begun
            self.material.require_texts(progress.step, taken * self.recipe.stage2.accumulate - 1)
        else:
            self.trained.learning.renew()
            ahead = self._writes_ahead()
            if ahead and self.on_drafter is not None and self.material.generated.missing:
                self.on_drafter(self.trained.served())
            with progress_bar(self.console) as bars:
                self._write_texts(self.material.generated.count if ahead else self._needed_now(), bars, interrupted)
            self._show(2)
            if self.held_out_loss.windows:
                say(self.console, OTHER_TEXT)
        self._steps(interrupted)

    def _writes_ahead(self) -> bool:
        """Whether all texts of stage 2 are written before it begins, so that the trained drafter drafts for them.

        Otherwise they are written as they are needed, so that learning begins at once.
        """
        return self.progress.begun > 0 or self.recipe.drafter.init_from is not None or self.recipe.joint is not None

    def _needed_now(self) -> int:
        """Return how many texts the next step of stage 2 needs."""
        taken, accumulate = self.progress.step - self.progress.begun, self.recipe.stage2.accumulate
        return self.material.texts_for((taken + 1) * accumulate - 1)

    def _write_texts(self, count: int, bars: Bars, interrupted: threading.Event) -> None:
        """Let the target write; if that is interrupted, save and stop."""
        if self.material.write_texts(count, self.generate, bars, interrupted):
            return
        if self.progress.step not in self.checkpoints.steps():
            self._save(improved=False)
        raise self._stopped()

    def _show(self, stage: int) -> None:
        """Show samples of what a stage learns from, and keep them in the run's folder."""
        self.material.note()
        if self.target.tokenizer is None:
            return  # sequences of another run can be learnt without a tokenizer
        text, title = TokenText(self.target.tokenizer), f"stage {stage} learns from"
        keep_samples(self.folder.samples, show_samples(self.material.samples(stage), text, title, self.console))

    def _steps(self, interrupted: threading.Event) -> None:
        """Take the stage's steps up to its end, or until its patience is exhausted."""
        output, every, progress = self.recipe.output, self.recipe.evaluation.every, self.progress
        stage, number, end = progress.section(self.recipe), progress.stage, progress.end(self.recipe)
        name = f"stage {number}"
        with progress_bar(self.console) as bars:
            bar = bars.add_task(name, total=stage.steps, completed=progress.step - progress.begun)
            while progress.stage == number:
                if number == 2:
                    self._write_texts(self._needed_now(), bars, interrupted)
                record = self._one_step(stage, progress.step - progress.begun)
                self.on_step()
                bars.update(bar, advance=1, description=f"{name}, loss {record['loss']:.3f}")
                if progress.step % output.log_every == 0 or progress.step == end:
                    self.folder.log({"step": progress.step, "stage": str(number), **record})
                measured = progress.step == end or (every > 0 and progress.step % every == 0)
                improved = False
                if measured:
                    improved, tau = self._measure()
                    self._end_stage(tau)
                if measured or progress.step % output.save_every == 0 or interrupted.is_set():
                    self._save(improved)
                if interrupted.is_set() and progress.stage != DONE:
                    raise self._stopped()

    def _end_stage(self, tau: float) -> None:
        """Go to the next stage if this one is over: at its last step, or when its patience is exhausted."""
        progress, patience = self.progress, self.recipe.evaluation.patience
        if progress.step == progress.end(self.recipe):
            progress.finish_stage(self.recipe, tau)
        elif patience is not None and progress.waited >= patience:
            self._end_early()

    def _end_early(self) -> None:
        progress = self.progress
        record = progress.end_early(self.recipe)
        if progress.stage == 2 and progress.best_step in self.checkpoints.steps():
            # The best checkpoint of stage 1 is the best of the run so far. Its weights are loaded before the save, so
            # that a resumed run needs no other checkpoint.
            record["goes_on_from_step"] = progress.best_step
            self.trained.load(self.checkpoints.at(progress.best_step))
        self.folder.log({"step": progress.step, "ended_early": record})
        say(self.console, early_in_words(record))

    def _stopped(self) -> TrainingInterrupted:
        return TrainingInterrupted(
            f"stopped at step {self.progress.step} of {self.progress.last(self.recipe)}; everything is saved in "
            f"{self.folder.path}: {self.go_on}."
        )

    def _one_step(self, stage: StageSection, local: int) -> dict[str, Any]:
        rate = learning_rate(local, stage.steps, stage.rate, stage.final_rate)
        number, room = self.progress.stage, self.trained.drafter.max_depth - 1
        batches = (
            self.material.batch(number, local * stage.accumulate + micro, room) for micro in range(stage.accumulate)
        )
        try:
            found = self.trained.learning(
                batches, rate=rate, positions=stage.positions_per_sequence,
                seed=(self.recipe.seed, "positions", self.progress.step),
            )
        except NotFinite as error:
            raise DraftsmithError(
                f"{error} at step {self.progress.step + 1}; the checkpoint of step {self.checkpoints.steps()[-1]} is "
                "kept; lower the rate or look at the data."
            ) from error
        self.progress.step += 1
        return {
            "loss": found.loss, "loss_by_head": found.loss_N.tolist(),
            "training_accuracy_by_head": found.accuracy_N.tolist(), "rate": rate, "gradient_norm": found.gradient_norm,
            **found.noted,
        }

    def _measure(self) -> tuple[bool, float]:
        """Evaluate, and log the result; return whether it is the best so far, and τ."""
        scores = checked(self.evaluate(self.trained.served()))
        scores = with_loss(scores, *self._loss_on_held_out_text())
        step, tau = self.progress.step, float(scores[TAU])
        self.folder.log({"step": step, "evaluation": scores})
        told = f"step {step}: {tau_in_words(scores)} tokens per step, by decoding{loss_in_words(scores)}"
        say(self.console, told, *source_lines(scores))
        return self.progress.measured(tau, scores.get(HELD_OUT_LOSS)), tau

    def _loss_on_held_out_text(self) -> tuple[float | None, dict[str, float]]:
        return self.held_out_loss(self.trained.learning)

    def _save(self, improved: bool = True) -> None:
        progress, loader = self.progress, None
        if progress.stage == 1:
            self.material.note()
            loader = self.material.loader.state_dict()
        self.checkpoints.save(
            progress.step, lambda folder: self.trained.write(folder, progress.step),
            {**progress.to_json(), "loader": loader}, self.trained.optimizer_tensors(),
            progress.step if improved else None,
        )
        self.folder.note_time()

    def _export(self, folder: Path, step: int) -> None:
        self.trained.export(folder, step)

    def _result(self) -> TrainingResult:
        best, step = self.checkpoints.linked(BEST), self.progress.step
        if best is not None and best != step:
            self.trained.load(self.checkpoints.at(best))
            step = best
        folder, records = self.folder.path / "drafter", self.folder.records
        self._export(folder, step)
        return TrainingResult(
            self.folder.path, folder, self.progress.step, self.progress.best,
            [record for record in records if "evaluation" in record], seconds=self.folder.seconds,
            best_step=self.progress.best_step,
            ended_early=tuple(record["ended_early"] for record in records if "ended_early" in record),
        )
