"""The training run: stage 1 on ground truth, stage 2 on what the target itself writes; the target stays frozen.

Everything random is a function of the recipe's seed and the step, so a run that was killed and resumed ends with the
weights of one that was not. The engine comes from outside, as two callables.
"""

import copy
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from draftsmith.drafters.trainable.model import TrainableModel
from draftsmith.drafters.trainable.storage import verify_folder
from draftsmith.targets import Target
from draftsmith.targets.loading.tokens import TokenText
from draftsmith.training.build import build_drafter, build_loader, build_prompts, held_out_windows
from draftsmith.training.checkpoint import (
    BEST,
    Checkpoint,
    Checkpoints,
    load_optimizer_tensors,
    optimizer_tensors,
)
from draftsmith.training.data.generated import Generate, GeneratedText
from draftsmith.training.data.loader import Loader, Windowing, noise
from draftsmith.training.data.windows import Batch, Window, collate
from draftsmith.training.recipe import Recipe, StageSection
from draftsmith.training.run_folder import RunFolder
from draftsmith.training.samples import SHOWN_SAMPLES, keep_samples, show_account, show_samples
from draftsmith.training.schedule import learning_rate
from draftsmith.training.step import NotFinite, TrainingStep
from draftsmith.training.terminal import progress_bar
from draftsmith.types import DraftsmithError, TargetFacts, cast_parameters, resolve_dtype

Evaluate = Callable[[TrainableModel], Mapping[str, float]]
TAU, HELD_OUT_LOSS = "tokens_per_step", "held_out_loss"
STAGE1, PROMPTS = "stage1", "prompts"
"""What data is read for."""
HELD_OUT_ROWS, HELD_OUT_POSITIONS = 4, 64


class TrainingInterrupted(DraftsmithError):
    """The user stopped the run; everything is saved."""

    exit_code = 130


@dataclass(frozen=True)
class TrainingResult:
    """What a run brought: its folder, the exported drafter (the best by τ), and the measurements.

    `target` is the folder of the changed target where the recipe changes it. `seconds` are those of all commands that
    trained this run; of one that was killed, up to its last checkpoint. None where a command kept no count.
    """

    folder: Path
    drafter: Path
    step: int
    best: float | None
    evaluations: list[dict[str, Any]]
    target: Path | None = None
    seconds: float | None = None


class TrainingRun:
    """One run; what changes when more than the drafter is trained is in methods of its own."""

    def __init__(
        self, recipe: Recipe, target: Target, generate: Generate, evaluate: Evaluate, console: Console,
        on_drafter: Callable[[TrainableModel], None] | None,
    ) -> None:
        self.recipe, self.target, self.console = recipe, target, console
        self.generate, self.evaluate, self.on_drafter = generate, evaluate, on_drafter
        self.steps = recipe.stage1.steps + recipe.stage2.steps
        if self.steps == 0:
            raise DraftsmithError("stage1.steps and stage2.steps are both 0; give at least one of them steps.")
        self.folder = RunFolder(recipe, target.facts())
        self.checkpoints = Checkpoints(self.folder.path, recipe.output.keep)
        self.go_on = "go on with --resume (resume=True)"
        self.step = 0
        self.best: float | None = None
        self.best_step: int | None = None
        self.loader: Loader | None = None
        self.generated: GeneratedText | None = None
        self.held_out: list[Window] | None = None

    def _build(self) -> None:
        self.drafter = build_drafter(self.recipe, self.target)
        first, second = self.recipe.stage1, self.recipe.stage2
        shortest = self.drafter.max_depth + 3
        for name, length, steps in (
            ("stage1.length", first.length, first.steps),
            ("stage2.prompt_tokens + stage2.new_tokens", second.prompt_tokens + second.new_tokens, second.steps),
        ):
            if steps and not shortest <= length <= self.target.max_length:
                raise DraftsmithError(
                    f"{name} is {length}; this target and drafter need {shortest} to {self.target.max_length} tokens."
                )

    def _check_data(self) -> None:
        """Read as much of the data as shows that both stages can be trained on it, before anything is written."""
        if self.recipe.stage1.steps:
            self._stage1_loader().first(1)
        section = self.recipe.stage2
        if section.steps == 0:
            return
        if section.texts is not None:
            GeneratedText.of(Path(section.texts), section, noise(self.recipe.seed, "stage2"))
        else:
            build_prompts(self.recipe, self.target).first(1)

    def plan_only(self) -> TrainingResult:
        """Print the plan and write an untrained drafter."""
        self.folder.check_place(self.folder.path)
        self._build()
        self._check_data()
        for name, stage in (("stage 1", self.recipe.stage1), ("stage 2", self.recipe.stage2)):
            tokens = self._tokens_a_step(stage)
            self.console.print(
                f"{name}: {stage.steps} steps × {stage.batch * stage.accumulate} sequences, "
                f"at most {tokens * stage.steps:,} tokens, rate {stage.rate:g} → {stage.final_rate:g}"
            )
        count = sum(p.numel() for p in self.drafter.parameters())
        self.console.print(
            f"drafter: {self.recipe.drafter.family}, {count / 1e6:.2f} M parameters, {self.drafter.max_depth} tokens "
            "deep"
        )
        if self.recipe.stage1.steps:
            loader = build_loader(self.recipe, self.target, Windowing(self.recipe.stage1.length), "stage1")
            self.console.print("data: " + ", ".join(source.source.label for source in loader.sources))
        folder = self._export("dry-run")
        self.console.print(f"initialised drafter: {folder}")
        return TrainingResult(self.folder.path, folder, 0, None, [])

    def _tokens_a_step(self, stage: StageSection) -> int:
        second = self.recipe.stage2
        length = self.recipe.stage1.length if stage is self.recipe.stage1 else second.prompt_tokens + second.new_tokens
        return stage.batch * stage.accumulate * length

    def go(self, resume: bool, interrupted: threading.Event) -> TrainingResult:
        """Train from the start, or from the last good checkpoint."""
        checkpoint = self.checkpoints.load() if resume else None
        if checkpoint is None and self.checkpoints.steps():
            raise DraftsmithError(
                f"{self.folder.path} already holds a run, at step {self.checkpoints.steps()[-1]}; "
                "add --resume (resume=True) to go on with it, or choose another output.folder."
            )
        self.folder.check_place(self.folder.path)
        self._build()
        if checkpoint is None:
            self._check_data()
        self.learning = self._make_learning()
        self.folder.open(checkpoint.progress["step"] if checkpoint else None)
        if checkpoint is not None:
            self._take_up(checkpoint)
        try:
            self._stages(interrupted, fresh=checkpoint is None)
        finally:
            self.folder.close()
        return self._result()

    def _take_up(self, checkpoint: Checkpoint) -> None:
        progress = checkpoint.progress
        self.step, self.best = progress["step"], progress["best"]
        self._load_weights(checkpoint.folder)
        if progress["best_step"] in self.checkpoints.steps():
            self.best_step = progress["best_step"]
        self.checkpoints.settle(self.step, self.best_step)
        if self._within_stage() and self.step < self.steps:
            load_optimizer_tensors(self.learning.optimizers, checkpoint.optimizer)
            if self.step < self.recipe.stage1.steps:
                self._stage1_loader().load_state_dict(progress["loader"])
        self.console.print(f"resuming at step {self.step} of {self.steps}")

    def _make_learning(self) -> TrainingStep:
        return TrainingStep(self.drafter, self.target, self.recipe.optimizer, self.recipe.distillation)

    def _load_weights(self, folder: Path) -> None:
        """Take the weights of a checkpoint."""
        verify_folder(folder)
        self.drafter.load_published(self.drafter.read_tensors(folder), folder)

    def _within_stage(self) -> bool:
        """Whether the optimizer goes on: each stage begins with a fresh one."""
        return self.step not in (0, self.recipe.stage1.steps)

    def _stage1_loader(self) -> Loader:
        if self.loader is None:
            self.loader = build_loader(self.recipe, self.target, Windowing(self.recipe.stage1.length), "stage1")
        return self.loader

    def _stages(self, interrupted: threading.Event, fresh: bool) -> None:
        if fresh:
            # The start of the curve, and something to resume from, whatever happens next.
            self._measure()
            self._save()
        first = self.recipe.stage1.steps
        if self.step < first:
            if self.step == 0:
                self._show(self._stage1_loader().first(SHOWN_SAMPLES), "stage 1 learns from", self._stage1_loader())
            self._steps(self.recipe.stage1, 0, interrupted)
        if self.step >= self.steps:
            return
        if not self._within_stage():
            self.learning.renew()
        self._make_text(interrupted)
        assert self.generated is not None
        if not self._within_stage():
            count = min(SHOWN_SAMPLES, len(self.generated.sequences))
            self._show([self.generated.window(place) for place in range(count)], "stage 2 learns from", None)
        self._steps(self.recipe.stage2, first, interrupted)

    def _show(self, windows: list[Window], title: str, loader: Loader | None) -> None:
        """Show what is learnt, and what of the data is left out; both are kept in the run's folder."""
        if loader is not None:
            self.folder.note_data(STAGE1, loader.account())
            show_account(loader.account(), self.console)
        if self.target.tokenizer is None:
            return  # sequences of another run can be learnt without one
        records = show_samples(windows, TokenText(self.target.tokenizer), title, self.console)
        keep_samples(self.folder.samples, records)

    def _make_text(self, interrupted: threading.Event) -> None:
        section = self.recipe.stage2
        seed = noise(self.recipe.seed, "stage2")
        if section.texts is not None:
            self.generated = GeneratedText.of(Path(section.texts), section, seed)
            return
        self.generated = GeneratedText(self.folder.generated, section, seed)
        if not self.generated.missing:
            return
        if self._within_stage():
            raise DraftsmithError(
                f"{self.generated.path} lacks {self.generated.missing} sequences that step {self.step} was trained on; "
                "restore it, or start a new run."
            )
        if self.on_drafter is not None:
            self.on_drafter(self._served())
        prompts = build_prompts(self.recipe, self.target)
        with progress_bar(self.console) as progress:
            done = len(self.generated.sequences)
            bar = progress.add_task("target writes", total=self.generated.count, completed=done)
            for made in self.generated.make(prompts, self.generate, self.target.eos_token_ids):
                progress.update(bar, completed=made)
                if interrupted.is_set():
                    raise self._stopped()
        self.folder.note_data(PROMPTS, prompts.account())
        show_account(prompts.account(), self.console)

    def _steps(self, stage: StageSection, first: int, interrupted: threading.Event) -> None:
        output, every = self.recipe.output, self.recipe.evaluation.every
        end = first + stage.steps
        name = "stage 1" if stage is self.recipe.stage1 else "stage 2"
        with progress_bar(self.console) as progress:
            bar = progress.add_task(name, total=stage.steps, completed=self.step - first)
            while self.step < end:
                record = self._one_step(stage, self.step - first)
                progress.update(bar, advance=1, description=f"{name}, loss {record['loss']:.3f}")
                if self.step % output.log_every == 0 or self.step == end:
                    self.folder.log({"step": self.step, "stage": name[-1], **record})
                measured = self.step == end or (every > 0 and self.step % every == 0)
                improved = self._measure() if measured else False
                if measured or self.step % output.save_every == 0 or interrupted.is_set():
                    self._save(improved)
                if interrupted.is_set() and self.step < self.steps:
                    raise self._stopped()

    def _stopped(self) -> TrainingInterrupted:
        return TrainingInterrupted(
            f"stopped at step {self.step} of {self.steps}; everything is saved in {self.folder.path}: {self.go_on}."
        )

    def _micro_batch(self, stage: StageSection, number: int) -> Batch:
        room = self.drafter.max_depth - 1
        if stage is self.recipe.stage1:
            return self._stage1_loader().next_batch(stage.batch, room)
        assert self.generated is not None
        return self.generated.batch(number, room)

    def _one_step(self, stage: StageSection, local: int) -> dict[str, Any]:
        rate = learning_rate(local, stage.steps, stage.rate, stage.final_rate)
        batches = (self._micro_batch(stage, local * stage.accumulate + micro) for micro in range(stage.accumulate))
        try:
            found = self.learning(
                batches, rate=rate, positions=stage.positions_per_sequence,
                seed=(self.recipe.seed, "positions", self.step),
            )
        except NotFinite as error:
            raise DraftsmithError(
                f"{error} at step {self.step + 1}; the checkpoint of step {self.checkpoints.steps()[-1]} is kept; "
                "lower the rate or look at the data."
            ) from error
        self.step += 1
        return {
            "loss": found.loss, "loss_by_head": found.loss_N.tolist(),
            "training_accuracy_by_head": found.accuracy_N.tolist(), "rate": rate, "gradient_norm": found.gradient_norm,
            **found.noted,
        }

    @torch.no_grad()
    def _served(self) -> TrainableModel:
        """Return a copy as it would be served: in the target's dtype."""
        served = copy.deepcopy(self.drafter).eval().requires_grad_(False)
        cast_parameters(served, self.target.dtype)
        served.bind(self.target)
        return served

    def _measure(self) -> bool:
        """Evaluate by decoding and log it; return whether this is the best so far."""
        scores = dict(self.evaluate(self._served()))
        if TAU not in scores:
            raise DraftsmithError(f"the evaluation returned {', '.join(scores) or 'nothing'}; it must have {TAU}.")
        loss = self._held_out_loss()
        if loss is not None:
            scores[HELD_OUT_LOSS] = loss
        self.folder.log({"step": self.step, "evaluation": scores})
        told = "" if loss is None else f"; loss on held-out text {loss:.3f}"
        self.console.print(f"step {self.step}: τ = {scores[TAU]:.3f} tokens per step, by decoding{told}")
        improved = self.best is None or scores[TAU] > self.best
        if improved:
            self.best, self.best_step = scores[TAU], self.step
        return improved

    def _held_out_loss(self) -> float | None:
        """Return the loss on the held-out part of the data; None where there is none."""
        depth = self.drafter.max_depth
        if self.held_out is None:
            self.held_out = held_out_windows(self.recipe, self.target, depth + 3)
        if not self.held_out:
            return None
        most = max(depth + 3, *(len(window.tokens) for window in self.held_out))
        groups = [self.held_out[at : at + HELD_OUT_ROWS] for at in range(0, len(self.held_out), HELD_OUT_ROWS)]
        return self.learning.measure([collate(group, most, depth - 1) for group in groups], HELD_OUT_POSITIONS)

    def _save(self, improved: bool = True) -> None:
        loader = self.loader if self.step < self.recipe.stage1.steps else None
        progress = {
            "best": self.best, "best_step": self.best_step, "loader": loader.state_dict() if loader else None,
        }
        if loader is not None:
            self.folder.note_data(STAGE1, loader.account())
        self.checkpoints.save(
            self.step, self._write_weights, progress, optimizer_tensors(self.learning.optimizers),
            self.step if improved else None,
        )
        self.folder.note_time()

    def _write_weights(self, folder: Path) -> None:
        """Write what `_load_weights` reads."""
        self.drafter.write_files(folder, self._facts(), {"training_step": self.step}, False)

    def _facts(self) -> TargetFacts:
        """Return what the drafter has to find in a target."""
        return self.target.facts()

    def _export(self, name: str) -> Path:
        folder = self.folder.path / name
        dtype = resolve_dtype(self.recipe.output.dtype, self.target.device)
        drafter = copy.deepcopy(self.drafter).to(dtype)
        drafter.save_pretrained(folder, self._facts(), {"training_step": self.step}, repeat_tied=False)
        return folder

    def _export_best(self) -> Path:
        return self._export("drafter")

    def _result(self) -> TrainingResult:
        best = self.checkpoints.linked(BEST)
        last = self.step
        if best is not None and best != self.step:
            self._load_weights(self.checkpoints.at(best))
            self.step = best
        folder = self._export_best()
        evaluations = [record for record in self.folder.records if "evaluation" in record]
        return TrainingResult(self.folder.path, folder, last, self.best, evaluations, seconds=self.folder.seconds)
