"""One step of the optimizer: the target reads, the drafter is judged, its weights move. All training goes through here.

Shapes: B sequences, L tokens a sequence, N depths.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.drafters.learner import Learner
from draftsmith.target import Target
from draftsmith.training.lessons import prepare
from draftsmith.training.optimizer import build_optimizers, set_rate
from draftsmith.training.recipe import DistillationSection, OptimizerSection
from draftsmith.types import DraftsmithError


class NotFinite(DraftsmithError):
    """The loss or the gradient is no finite number; the weights are as they were before the step."""


@dataclass(frozen=True)
class Outcome:
    """What a step found: losses by depth in nats (N), shares of right first guesses (N), the gradient's norm.

    `noted` is what else the record of the step says.
    """

    loss_N: Tensor
    hits_N: Tensor
    gradient_norm: float
    noted: Mapping[str, float]

    @property
    def loss(self) -> float:
        """The losses of all depths, summed."""
        return self.loss_N.sum().item()


@dataclass(frozen=True)
class Positions:
    """What of each sequence is trained on: `count` random positions from `first` on, None for all of them."""

    first: int
    count: int | None


class TrainingStep:
    """Steps of a drafter on a frozen target; what changes when more is trained is in methods of its own."""

    def __init__(
        self, drafter: Learner, target: Target, optimizer: OptimizerSection, distillation: DistillationSection
    ) -> None:
        self.drafter, self.target, self.section, self.distillation = drafter, target, optimizer, distillation
        self.optimizers = self.fresh_optimizers()
        self.noted: dict[str, float] = {}
        self.losses = torch.compile(drafter.losses) if optimizer.compile else drafter.losses

    def fresh_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return optimizers that have not moved anything yet."""
        return build_optimizers(self.drafter, self.section)

    def renew(self) -> None:
        """Begin with fresh optimizers, as every stage does."""
        self.optimizers = self.fresh_optimizers()

    def __call__(
        self, batches: Iterable[Tensor], *, rate: float, positions: Positions, seed: tuple[object, ...], accumulate: int
    ) -> Outcome:
        """Take one step.

        Args:
            batches: tokens_BL of each micro-batch, `accumulate` of them.
            rate: the learning rate.
            positions: what to train on.
            seed: of the positions drawn; the number of the micro-batch is added.

        Raises:
            NotFinite: before any weight was moved.
        """
        self.noted = {}
        self.set_rate(rate)
        losses, hits = [], []
        for micro, tokens_BL in enumerate(batches):
            objective, loss_N, hits_N = self.judge(tokens_BL, positions, (*seed, micro), accumulate)
            (objective / accumulate).backward()
            losses.append(loss_N.detach())
            hits.append(hits_N)
        norm = self.clip()
        found = Outcome(torch.stack(losses).mean(0), torch.stack(hits).mean(0), norm, self.noted)
        if not math.isfinite(found.loss) or not math.isfinite(norm):
            raise NotFinite(f"the loss became {found.loss} (gradient norm {norm})")
        self.apply()
        return found

    def judge(
        self, tokens_BL: Tensor, positions: Positions, seed: tuple[object, ...], accumulate: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what a micro-batch minimises, the losses of the depths and their right first guesses."""
        half = self.section.precision == "bf16"
        # A target that is bf16 already only loses time under autocast.
        with self.autocast(half and self.target.dtype == torch.float32):
            lesson = prepare(
                self.drafter, self.target, tokens_BL, first=positions.first, count=positions.count,
                distillation=self.distillation, seed=seed,
            )
        with self.autocast(half):
            loss_N, hits_N = self.losses(lesson)
        return loss_N.sum(), loss_N, hits_N

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the step to come."""
        set_rate(self.optimizers, rate)

    def clip(self) -> float:
        """Limit the gradients and return their norm before."""
        return torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.section.clip).item()

    def apply(self) -> None:
        """Move the weights."""
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def autocast(self, enabled: bool) -> torch.autocast:
        """Return the context in which bf16 arithmetic is chosen where it is `enabled`."""
        return torch.autocast(self.target.device.type, torch.bfloat16, enabled=enabled)
