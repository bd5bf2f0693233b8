"""From sequences of tokens to a lesson: the frozen target reads them, positions are drawn.

Shapes: B sequences, L tokens a sequence, P positions trained on a sequence, F feature width.
"""

import torch
from torch import Tensor

from draftsmith.drafters.learner import Learner
from draftsmith.drafters.lesson import Lesson
from draftsmith.target import Target
from draftsmith.training.data import noise
from draftsmith.training.recipe import DistillationSection
from draftsmith.types import DraftsmithError


def choose_positions(first: int, last: int, count: int | None, batch: int, seed: tuple[object, ...]) -> Tensor:
    """Return positions_BP: all from `first` to `last` - 1, or `count` random ones of each sequence, sorted."""
    every = last - first
    if count is None or count >= every:
        return torch.arange(first, last).expand(batch, -1)
    generator = torch.Generator().manual_seed(noise(*seed))
    return first + torch.rand(batch, every, generator=generator).argsort(dim=1)[:, :count].sort(dim=1).values


def prepare(
    drafter: Learner, target: Target, tokens_BL: Tensor, *, first: int, count: int | None,
    distillation: DistillationSection, seed: tuple[object, ...],
) -> Lesson:
    """Let the frozen target read the sequences and draw positions; the first to be trained on is `first`."""
    tokens_BL = tokens_BL.to(target.device)
    features_BLF, logits_BLV = target.encode(tokens_BL, drafter.taps, logits=distillation.weight > 0)
    return as_lesson(
        drafter, tokens_BL, features_BLF, logits_BLV, first=first, count=count, distillation=distillation, seed=seed
    )


def as_lesson(
    drafter: Learner, tokens_BL: Tensor, features_BLF: Tensor, logits_BLV: Tensor | None, *, first: int,
    count: int | None, distillation: DistillationSection, seed: tuple[object, ...],
) -> Lesson:
    """Align what the target made of the sequences and draw positions; the first to be trained on is `first`.

    The state behind token t predicted token t + 1, so the lesson's tokens begin with the second.
    """
    last = tokens_BL.shape[1] - 1 - drafter.max_depth
    if last <= first:
        raise DraftsmithError(
            f"sequences of {tokens_BL.shape[1]} tokens leave no position to train {drafter.max_depth} depths on; make "
            "them longer."
        )
    return Lesson(
        tokens_BL[:, 1:],
        features_BLF[:, :-1],
        choose_positions(first, last, count, len(tokens_BL), seed).to(tokens_BL.device),
        None if logits_BLV is None else logits_BLV[:, 1:],
        distillation.weight,
        distillation.temperature,
        noise(*seed, "lesson"),
    )
