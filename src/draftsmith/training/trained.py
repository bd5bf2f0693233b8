"""The trained models of a run, and their way in and out of folders: checkpoints, the measured copy, the export."""

import copy
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.drafters.trainable.model import TrainableModel
from draftsmith.drafters.trainable.storage import verify_folder
from draftsmith.dtypes import cast_parameters, resolve_dtype
from draftsmith.targets import Target
from draftsmith.training.build import build_drafter
from draftsmith.training.checkpoint import load_optimizer_tensors, optimizer_tensors
from draftsmith.training.data.loader import Loader
from draftsmith.training.recipe import Recipe
from draftsmith.training.sections import OptimizerSection
from draftsmith.training.step import TrainingStep
from draftsmith.types import TargetFacts


class Trained:
    """The drafter and its optimizers; subclasses that train the target too override its methods."""

    def __init__(
        self, recipe: Recipe, target: Target, documents: Loader | None = None, warm: bool = True
    ) -> None:
        self.recipe, self.target = recipe, target
        self.drafter = build_drafter(recipe, target, documents, warm)
        self.learning = self.new_learning(self.drafter, recipe.optimizer)

    def new_learning(self, drafter: TrainableModel, optimizer: OptimizerSection) -> TrainingStep:
        """Return an object that takes steps with a drafter."""
        return TrainingStep(drafter, self.target, optimizer, self.recipe.distillation)

    def throwaway(self) -> TrainingStep:
        """Return an object that takes steps with an uncompiled copy, to measure how long a step takes."""
        drafter = copy.deepcopy(self.drafter)
        drafter.bind(self.target)
        return self.new_learning(drafter, self.recipe.optimizer.model_copy(update={"compile": False}))

    @torch.no_grad()
    def served(self) -> TrainableModel:
        """Return a copy as it is served: in the target's dtype."""
        served = copy.deepcopy(self.drafter).eval().requires_grad_(False)
        cast_parameters(served, self.target.dtype)
        served.bind(self.target)
        return served

    def facts(self, step: int) -> TargetFacts:
        """Return the facts that the drafter of a step expects of its target."""
        return self.target.facts()

    def write(self, folder: Path, step: int) -> None:
        """Write the files that `load` reads."""
        self.drafter.write_files(folder, self.facts(step), {"training_step": step}, False)

    def load(self, folder: Path) -> None:
        """Load the weights of a checkpoint."""
        verify_folder(folder)
        self.drafter.load_published(self.drafter.read_tensors(folder), folder)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Return the optimizers' state."""
        return optimizer_tensors(self.learning.optimizers)

    def load_optimizers(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the optimizers' state."""
        load_optimizer_tensors(self.learning.optimizers, tensors)

    def export(self, folder: Path, step: int) -> None:
        """Write the drafter for serving."""
        drafter = copy.deepcopy(self.drafter).to(resolve_dtype(self.recipe.output.dtype, self.target.device))
        drafter.save_pretrained(folder, self.facts(step), {"training_step": step}, repeat_tied=False)
