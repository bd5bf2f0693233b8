"""From windows of tokens to a training batch: positions are drawn, the frozen target reads.

Shapes: B windows, L tokens a window, T = L - 1, P positions trained on a window, N depths, F feature width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.drafters.trainable.batch import TrainingBatch, counted
from draftsmith.drafters.trainable.model import TrainableModel
from draftsmith.targets import Target
from draftsmith.training.data.loader import noise
from draftsmith.training.data.windows import FIRST_LEARNT, Batch
from draftsmith.training.sections import DistillationSection
from draftsmith.types import DraftsmithError


@dataclass(frozen=True)
class Task:
    """A batch, the roots to train on in it, how many guesses of every depth count there, and its learnt tokens.

    Position t is the root that is the window's token t + 1: the first token was predicted by no state.
    """

    batch: Batch
    positions_BP: Tensor
    counts_N: Tensor
    learnt_tokens: int


def draw(batch: Batch, depth: int, count: int | None, seed: tuple[object, ...]) -> Task:
    """Draw roots: all behind which a learnt token stands, or `count` random ones of each window.

    Windows with fewer of them fill up with others, which do not count.
    """
    positions_BP = choose_positions(batch.learnt_BL, depth, count, seed)
    counts_BPN = counted(batch.learnt_BL[:, 1:], positions_BP, depth)
    return Task(batch, positions_BP, counts_BPN.sum((0, 1)), int(batch.learnt_BL[:, FIRST_LEARNT:].sum()))


def choose_positions(learnt_BL: Tensor, depth: int, count: int | None, seed: tuple[object, ...]) -> Tensor:
    """Return sorted positions_BP; `depth` guesses behind each of them lie within the windows' length."""
    batch, length = learnt_BL.shape
    last = length - 1 - depth
    if last <= 0:
        raise DraftsmithError(
            f"windows of {length} tokens leave no position to train {depth} depths on; make them longer."
        )
    wanted_BT = learnt_BL[:, FIRST_LEARNT : FIRST_LEARNT + last]
    columns = wanted_BT.any(0).nonzero().flatten()
    first = int(columns[0]) if len(columns) else 0
    most = max(1, int(wanted_BT.sum(1).max()))
    count = most if count is None else min(count, most)
    every = last - first
    if count == every:
        return torch.arange(first, last).expand(batch, -1)
    generator = torch.Generator().manual_seed(noise(*seed))
    order_BT = torch.rand(batch, every, generator=generator) + ~wanted_BT[:, first:]
    return first + order_BT.argsort(dim=1)[:, :count].sort(dim=1).values


def prepare(
    drafter: TrainableModel, target: Target, task: Task, *, distillation: DistillationSection, seed: tuple[object, ...]
) -> TrainingBatch:
    """Let the frozen target read the windows."""
    tokens_BL = task.batch.tokens_BL.to(target.device)
    features_BLF, logits_BLV = target.encode(tokens_BL, drafter.taps, logits=distillation.weight > 0)
    return as_training_batch(tokens_BL, features_BLF, logits_BLV, task, distillation=distillation, seed=seed)


def as_training_batch(
    tokens_BL: Tensor, features_BLF: Tensor, logits_BLV: Tensor | None, task: Task, *,
    distillation: DistillationSection, seed: tuple[object, ...],
) -> TrainingBatch:
    """Align what the target made of the windows: the state behind token t predicted token t + 1."""
    learnt_BL = task.batch.learnt_BL
    everything = bool(learnt_BL[:, FIRST_LEARNT:].all())
    return TrainingBatch(
        tokens_BL[:, 1:],
        features_BLF[:, :-1],
        task.positions_BP.to(tokens_BL.device),
        None if logits_BLV is None else logits_BLV[:, 1:],
        distillation.weight,
        distillation.temperature,
        noise(*seed, "lesson"),
        None if everything else learnt_BL[:, 1:].to(tokens_BL.device),
        tokens_BL[:, 0],
        distillation.divergence,
    )
