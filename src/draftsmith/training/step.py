"""One step of the optimizer: the target reads, losses are computed, weights move. All training uses this module.

Shapes: B windows, L tokens a window, M micro-batches, N depths.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.drafters.trainable.model import TrainableModel
from draftsmith.dtypes import multiplies_bf16
from draftsmith.targets import Target
from draftsmith.training.data.batches import Task, draw, prepare
from draftsmith.training.data.readings import KEPT_BYTES, Readings
from draftsmith.training.data.windows import Batch
from draftsmith.training.optimizer import build_optimizers, set_rate
from draftsmith.training.sections import DistillationSection, OptimizerSection
from draftsmith.types import DraftsmithError


class NotFinite(DraftsmithError):
    """The loss or the gradient is not finite; the weights are as they were before the step."""


@dataclass(frozen=True)
class Outcome:
    """Result of a step: losses by depth in nats (N), shares of right first guesses (N), the gradient's norm.

    `noted` holds further entries for the step's record.
    """

    loss_N: Tensor
    accuracy_N: Tensor
    gradient_norm: float
    noted: Mapping[str, float]

    @property
    def loss(self) -> float:
        """The sum of the losses of all depths, each with weight 1."""
        return self.loss_N.sum().item()


class TrainingStep:
    """Takes steps of a drafter on a frozen target; subclasses that also train the target override its methods."""

    def __init__(
        self, drafter: TrainableModel, target: Target, optimizer: OptimizerSection, distillation: DistillationSection
    ) -> None:
        self.drafter, self.target, self.section, self.distillation = drafter, target, optimizer, distillation
        self.optimizers = self.fresh_optimizers()
        self.noted: dict[str, float] = {}
        # A compiler generates code for whole batches.
        room = 0 if optimizer.compile else KEPT_BYTES
        self.readings = Readings(target, drafter.taps, distillation.weight > 0, room)
        self.losses = torch.compile(drafter.losses) if optimizer.compile else drafter.losses

    def fresh_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return new optimizers without any state."""
        return build_optimizers(self.drafter, self.section)

    def renew(self) -> None:
        """Begin with fresh optimizers, as every stage does."""
        self.optimizers = self.fresh_optimizers()

    def __call__(
        self, batches: Iterable[Batch], *, rate: float, positions: int | None, seed: tuple[object, ...]
    ) -> Outcome:
        """Take several micro-batches as one large batch in a single step; every guess in it has the same weight.

        Args:
            batches: the micro-batches.
            rate: the learning rate.
            positions: number of random positions to train on in each window, None for all.
            seed: seed of the drawn positions; the number of the micro-batch is added to it.

        Raises:
            NotFinite: raised before any weight was moved.
        """
        found = self.gradients(batches, rate=rate, positions=positions, seed=seed)
        if not math.isfinite(found.loss) or not math.isfinite(found.gradient_norm):
            raise NotFinite(f"the loss became {found.loss} (gradient norm {found.gradient_norm})")
        self.apply()
        return found

    def gradients(
        self, batches: Iterable[Batch], *, rate: float, positions: int | None, seed: tuple[object, ...]
    ) -> Outcome:
        """Do everything of a step except moving the weights."""
        self.noted = {}
        self.set_rate(rate)
        losses, accuracies = [], []
        for task, share_N, token_share, own_seed in self._share_out(batches, positions, seed):
            objective, loss_N, accuracy_N = self.compute_loss(task, share_N, token_share, own_seed)
            objective.backward()
            losses.append(loss_N.detach() * share_N[: len(loss_N)])
            accuracies.append(accuracy_N * share_N[: len(accuracy_N)])
        norm = self.clip()
        return Outcome(torch.stack(losses).sum(0), torch.stack(accuracies).sum(0), norm, self.noted)

    @torch.no_grad()
    def measure(self, batches: Iterable[Batch], positions: int) -> tuple[Tensor, Tensor]:
        """Return the losses of the depths on batches, and the number of guesses in each mean (N); nothing is learnt.

        Args:
            positions: as in a step; the same positions are drawn every time.
        """
        losses, counts = [], []
        for task, share_N, token_share, seed in self._share_out(batches, positions, ("measure",)):
            _, loss_N, _ = self.compute_loss(task, share_N, token_share, seed)
            losses.append((loss_N * share_N[: len(loss_N)]).cpu())
            counts.append(task.counts_N)
        return torch.stack(losses).sum(0), torch.stack(counts).sum(0)

    def _share_out(
        self, batches: Iterable[Batch], positions: int | None, seed: tuple[object, ...]
    ) -> list[tuple[Task, Tensor, float, tuple[object, ...]]]:
        """Draw positions; return the arguments of `compute_loss` for every micro-batch."""
        batches = list(batches)
        seeds = [(*seed, micro) for micro in range(len(batches))]
        tasks = [
            draw(batch, self.drafter.max_depth, positions, own) for batch, own in zip(batches, seeds, strict=True)
        ]
        counts_MN = torch.stack([task.counts_N for task in tasks])
        shares_MN = (counts_MN / counts_MN.sum(0).clamp(min=1)).to(self.target.device)
        tokens = max(1, sum(task.learnt_tokens for task in tasks))
        return [
            (task, share_N, task.learnt_tokens / tokens, own)
            for task, share_N, own in zip(tasks, shares_MN, seeds, strict=True)
        ]

    def compute_loss(
        self, task: Task, share_N: Tensor, token_share: float, seed: tuple[object, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the value that a micro-batch minimises, the losses of the depths and their right first guesses.

        Args:
            share_N: the micro-batch's share of the step's guesses, for each depth.
            token_share: its share of the step's learnt tokens, for models that learn at all positions.
        """
        half = self.half
        # If the target is bf16 already, autocast only costs time.
        with self.autocast(half and self.target.dtype == torch.float32):
            examples = prepare(
                self.drafter, self.target, task, distillation=self.distillation, seed=seed, readings=self.readings
            )
        with self.autocast(half):
            loss_N, accuracy_N = self.losses(examples)
        decay_N = loss_N.new_tensor([self.drafter.config.decay**depth for depth in range(len(loss_N))])
        return (loss_N * share_N[: len(loss_N)] * decay_N).sum(), loss_N, accuracy_N

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the next step."""
        set_rate(self.optimizers, rate)

    def clip(self) -> float:
        """Limit the gradients, and return their norm before that."""
        return torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.section.clip).item()

    def apply(self) -> None:
        """Move the weights."""
        for optimizer in self.optimizers:
            optimizer.step()
        self.forget()

    def forget(self) -> None:
        """Drop the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    @property
    def half(self) -> bool:
        """Whether the arithmetic is bf16."""
        if self.section.precision == "auto":
            return multiplies_bf16(self.target.device)
        return self.section.precision == "bf16"

    def autocast(self, enabled: bool) -> torch.autocast:
        """Return the context in which PyTorch uses bf16 arithmetic if `enabled`."""
        return torch.autocast(self.target.device.type, torch.bfloat16, enabled=enabled)
