"""Training the target together with its heads, which makes another target (Medusa-2).

"Medusa" (arXiv:2401.10774), section 2.2.2: with λ the `weight` of the recipe and d its `decay`,

    loss = cross-entropy of the target's own head + λ Σ_k d^k cross-entropy of head k

where d replaces the drafter's own `decay`. There are two learning rates, and the heads learn alone at first. Gradients
of the heads flow through the states into the target. What drafters borrow from the target (tables, heads) follows its
changes, but receives no gradients.

The new target's text differs from the old one's. Speculation stays lossless with respect to the new target.

Shapes: B sequences, L tokens a sequence, N depths, F feature width, V vocabulary.
"""

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.drafters.trainable import storage
from draftsmith.drafters.trainable.batch import IGNORED
from draftsmith.drafters.trainable.model import TrainableModel
from draftsmith.dtypes import resolve_dtype
from draftsmith.targets import Target
from draftsmith.targets.loading.support import LABEL
from draftsmith.training.data.batches import Task, as_training_batch
from draftsmith.training.data.identity import TARGET_FOLDER
from draftsmith.training.data.windows import FIRST_LEARNT
from draftsmith.training.optimizer import set_rate
from draftsmith.training.recipe import Recipe
from draftsmith.training.result import TrainingResult
from draftsmith.training.sections import JointSection, OptimizerSection, StageSection
from draftsmith.training.step import TrainingStep
from draftsmith.training.trained import Trained
from draftsmith.training.trainer import TrainingRun
from draftsmith.types import DraftsmithError, TargetFacts

TARGET_FILE = "target.safetensors"


class JointStep(TrainingStep):
    """Steps that also move the target; `done` counts the steps before this one."""

    def __init__(self, section: JointSection, drafter: TrainableModel, target: Target, *more: Any) -> None:
        self.joint, self.done = section, 0
        self.weights = list(target.model.parameters())
        super().__init__(drafter, target, *more)

    @property
    def waits(self) -> bool:
        """Whether the target is still unchanged, because the heads learn alone."""
        return self.done < self.joint.warmup_steps

    def heads_weight(self) -> float:
        """Return λ at this step; while the heads learn alone, they have full weight."""
        if self.waits:
            return 1.0
        done, ramp = self.done - self.joint.warmup_steps + 1, self.joint.ramp_steps
        return self.joint.weight * (math.sin(math.pi / 2 * done / ramp) if done < ramp else 1.0)

    def fresh_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers of the heads, followed by those of the target."""
        section = self.section
        own = torch.optim.AdamW(
            self.weights, lr=0.0, betas=section.betas, weight_decay=section.weight_decay, fused=True
        )
        return [*super().fresh_optimizers(), own]

    def set_rate(self, rate: float) -> None:
        """Set both rates, and let the target learn or stay unchanged."""
        set_rate(self.optimizers[:-1], rate)
        set_rate(self.optimizers[-1:], 0.0 if self.waits else rate / self.joint.heads_rate_factor)
        self.target.model.requires_grad_(not self.waits)
        self.noted["heads_weight"] = self.heads_weight()

    def compute_loss(
        self, task: Task, share_N: Tensor, token_share: float, seed: tuple[object, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the losses of heads and target from one forward; see `TrainingStep.compute_loss`."""
        tokens_BL = task.batch.tokens_BL.to(self.target.device)
        with self.autocast(self.half):
            features_BLF, logits_BLV = self.target.encode(
                tokens_BL, self.drafter.taps, logits=True, gradients=not self.waits
            )
            assert logits_BLV is not None
            examples = as_training_batch(
                tokens_BL, features_BLF, logits_BLV.detach() if self.distillation.weight > 0 else None, task,
                distillation=self.distillation, seed=seed,
            )
            loss_N, accuracy_N = self.losses(examples)
        # The target learns at all positions, however few of them the heads get.
        labels_BT = tokens_BL.masked_fill(~task.batch.learnt_BL.to(tokens_BL.device), IGNORED)[:, FIRST_LEARNT:]
        logits_SV, labels_S = logits_BLV[:, FIRST_LEARNT - 1 : -1].flatten(0, 1).float(), labels_BT.flatten()
        own = F.cross_entropy(logits_SV, labels_S, ignore_index=IGNORED, reduction="sum")
        own = own / max(1, task.learnt_tokens) * token_share
        self.noted["target_loss"] = self.noted.get("target_loss", 0.0) + own.item()
        decay_N = self.joint.decay ** torch.arange(1, len(loss_N) + 1, device=loss_N.device)
        objective = self.heads_weight() * (loss_N * share_N[: len(loss_N)] * decay_N).sum()
        return objective if self.waits else own + objective, loss_N, accuracy_N

    def clip(self) -> float:
        """Limit the gradients of heads and target separately; return the norm of both before that."""
        heads = super().clip()
        if self.waits:
            return heads
        return math.hypot(heads, torch.nn.utils.clip_grad_norm_(self.weights, self.section.clip).item())

    def apply(self) -> None:
        """Move both; what the drafter borrows from the target follows."""
        super().apply()
        self.drafter.bind(self.target)


class JointlyTrained(Trained):
    """The drafter and the target, which is changed in place."""

    learning: JointStep

    def __init__(self, section: JointSection, recipe: Recipe, target: Target, warm: bool) -> None:
        self.section, self.made_for = section, target.facts()
        self.fingerprint: str | None = None
        super().__init__(recipe, target, warm=warm)

    def new_learning(self, drafter: TrainableModel, optimizer: OptimizerSection) -> JointStep:
        """Return an object that takes steps with a drafter and the target."""
        return JointStep(self.section, drafter, self.target, optimizer, self.recipe.distillation)

    def throwaway(self) -> TrainingStep:
        """Return an object that takes steps as they are after the warm-up."""
        step = super().throwaway()
        assert isinstance(step, JointStep)
        step.done = self.section.warmup_steps
        return step

    def write(self, folder: Path, step: int) -> None:
        """Write the target beside the drafter."""
        super().write(folder, step)
        storage.write_tensors(folder / TARGET_FILE, self.target.model.state_dict())

    def load(self, folder: Path) -> None:
        """Take the weights of both."""
        super().load(folder)
        self.target.model.load_state_dict(storage.read_tensor_file(folder / TARGET_FILE))
        self.drafter.bind(self.target)

    def facts(self, step: int) -> TargetFacts:
        """Return the facts of the target as it was at a step."""
        if self.fingerprint is None and step <= self.section.warmup_steps:
            return self.made_for
        fingerprint = self.fingerprint or f"step {step}"
        name = f"{self.made_for.name}, changed with its heads"
        return replace(self.made_for, name=name, fingerprint=fingerprint, weights_hash=None)

    def export_target(self, folder: Path, step: int, steps: int) -> None:
        """Write the changed target as a transformers folder whose config marks it as changed."""
        model, dtype = self.target.model, resolve_dtype(self.recipe.output.dtype, self.target.device)
        # Tied weights have to stay one tensor, so that transformers writes them once.
        turned = {id(tensor): tensor.detach().to(dtype) for tensor in model.state_dict(keep_vars=True).values()}
        weights = {name: turned[id(tensor)] for name, tensor in model.state_dict(keep_vars=True).items()}

        def fill(aside: Path) -> None:
            model.save_pretrained(aside, state_dict=weights)
            if self.target.tokenizer is not None:
                self.target.tokenizer.save_pretrained(aside)
            sums = "".join(storage.sha256(path) for path in sorted(aside.glob("*.safetensors")))
            self.fingerprint = hashlib.sha256(sums.encode()).hexdigest()
            config = storage.read_json(aside / "config.json")
            config.pop("torch_dtype", None)
            config |= {"dtype": str(dtype).removeprefix("torch."), LABEL: self._label(step)}
            storage.write_json(aside / "config.json", config)
            storage.write_bytes(aside / "README.md", self._card(step, steps).encode())

        storage.write_folder(folder, fill)

    def _label(self, step: int) -> dict[str, Any]:
        return {
            "fingerprint": self.fingerprint, "changed_from": self.made_for.name, "training_step": step,
            "note": f"not lossless with respect to {self.made_for.name}: trained further, together with its heads",
        }

    def _card(self, step: int, steps: int) -> str:
        name, heads = self.made_for.name, self.recipe.drafter.family
        return (
            f"# {name}, changed with its heads\n\n"
            f"This model was made from `{name}` by training it further together with draft heads ({heads}; joint "
            "training after Medusa-2, arXiv:2401.10774, section 2.2.2).\n\n"
            f"**It is not `{name}`: its text is not lossless with respect to `{name}`.** Decoding it with its heads, "
            "in the folder `drafter` beside this one, is lossless with respect to this model. Licence and limits are "
            f"those of `{name}` and of the texts it was trained on.\n\n"
            f"- step {step} of {steps}; fingerprint `{self.fingerprint}`\n"
            f"- recipe: `recipe.yaml` beside this folder; joint: `{json.dumps(self.section.model_dump())}`\n"
        )


class JointTrainingRun(TrainingRun):
    """A run that changes the target in place; it exports the last state of both."""

    trained: JointlyTrained

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        assert self.recipe.joint is not None
        self.section: JointSection = self.recipe.joint
        if self.target.dtype not in (torch.float32, torch.float64):
            raise DraftsmithError(
                f"the recipe has a section joint, which changes the target, but {self.target.name!r} is held in "
                f"{self.target.dtype}; load it in fp32 (target.dtype=fp32)."
            )
        if self.recipe.evaluation.patience is not None:
            raise DraftsmithError(
                f"evaluation.patience is {self.recipe.evaluation.patience}, but in joint training τ chooses nothing; "
                "set it to null."
            )

    def _make_trained(self, warm: bool) -> JointlyTrained:
        return JointlyTrained(self.section, self.recipe, self.target, warm)

    def _one_step(self, stage: StageSection, local: int) -> dict[str, Any]:
        self.trained.learning.done = self.progress.step
        return super()._one_step(stage, local)

    def _loss_on_held_out_text(self) -> tuple[None, dict[str, float]]:
        """Return no loss: compared with the changing target's own loss, it would not show what the heads learnt."""
        return None, {}

    def _measure(self) -> tuple[bool, float]:
        """Treat the last state as the best: a target that says less is easier to guess, so τ must not choose."""
        self.progress.best = None
        return super()._measure()

    def _result(self) -> TrainingResult:
        result = super()._result()
        self.target.model.requires_grad_(False)
        return replace(result, target=self.folder.path / TARGET_FOLDER)

    def _export(self, folder: Path, step: int) -> None:
        # The drafter carries the fingerprint of its target.
        self.trained.export_target(self.folder.path / TARGET_FOLDER, step, self.progress.last(self.recipe))
        super()._export(folder, step)
