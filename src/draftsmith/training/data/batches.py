"""From windows of tokens to a training batch: positions are drawn, the frozen target reads.

Shapes: B windows, L tokens a window, T = L - 1, P positions trained on a window, N depths, F feature width, H
width of the target's states.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftsmith.drafters.trainable.batch import TrainingBatch, counted
from draftsmith.drafters.trainable.model import TrainableModel
from draftsmith.targets import Target
from draftsmith.training.data.loader import noise
from draftsmith.training.data.readings import Readings
from draftsmith.training.data.windows import FIRST_LEARNT, Batch
from draftsmith.training.sections import DistillationSection
from draftsmith.types import DraftsmithError


@dataclass(frozen=True)
class Task:
    """A batch, the roots to train on, the number of guesses that count at every depth, and of learnt tokens.

    Position t is the root that is the window's token t + 1, because no state predicted the first token.
    """

    batch: Batch
    positions_BP: Tensor
    counts_N: Tensor
    learnt_tokens: int


def draw(batch: Batch, depth: int, count: int | None, seed: tuple[object, ...]) -> Task:
    """Draw roots: all that a learnt token follows, or `count` random ones of each window.

    Windows with fewer roots are filled up with others, which do not count.
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
    drafter: TrainableModel, target: Target, task: Task, *, distillation: DistillationSection,
    seed: tuple[object, ...], readings: Readings | None = None,
) -> TrainingBatch:
    """Let the frozen target read the windows, or take earlier readings of them from `readings`."""
    batch, wants_logits = task.batch, distillation.weight > 0
    if readings is None or not readings.keeps(batch):
        tokens_BL = batch.tokens_BL.to(target.device)
        features_BLF, logits_BLV = target.encode(tokens_BL, drafter.taps, logits=wants_logits)
        return as_training_batch(tokens_BL, features_BLF, logits_BLV, task, distillation=distillation, seed=seed)
    features_BLF, final_BLH = readings.states(batch)
    examples = as_training_batch(batch.tokens_BL, features_BLF, None, task, distillation=distillation, seed=seed)
    if not wants_logits:
        return examples
    wanted_BT = torch.zeros_like(examples.tokens_BT, dtype=torch.bool)
    row_B11, reads_BPN = examples.reads_BPN(drafter.max_depth)
    wanted_BT[row_B11, reads_BPN] = True
    row_BT = (wanted_BT.flatten().cumsum(0) - 1).clamp(min=0).view_as(wanted_BT)
    return replace(examples, logits_BTV=readings.logits(final_BLH[:, 1:][wanted_BT]), row_BT=row_BT)


def as_training_batch(
    tokens_BL: Tensor, features_BLF: Tensor, logits_BLV: Tensor | None, task: Task, *,
    distillation: DistillationSection, seed: tuple[object, ...],
) -> TrainingBatch:
    """Align the target's outputs with the windows: the state behind token t predicted token t + 1."""
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
