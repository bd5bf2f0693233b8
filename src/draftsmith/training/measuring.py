"""Measures a run: τ by decoding, and the loss on held-out text, both also by source. Shapes: N depths."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from draftsmith.drafters.trainable.model import TrainableModel
from draftsmith.targets import Target
from draftsmith.training.build import held_out_windows
from draftsmith.training.data.windows import Window, collate
from draftsmith.training.recipe import Recipe
from draftsmith.training.step import TrainingStep
from draftsmith.types import DraftsmithError

Scores = Mapping[str, Any]
Evaluate = Callable[[TrainableModel], Scores]
"""Measures by decoding: `tokens_per_step`, with its interval if that is known, and both `by_source`."""
TAU, TAU_INTERVAL, HELD_OUT_LOSS, BY_SOURCE = "tokens_per_step", "tokens_per_step_ci", "held_out_loss", "by_source"
HELD_OUT_ROWS, HELD_OUT_POSITIONS = 4, 64


class HeldOutLoss:
    """The loss on some windows of each source's held-out text, which are read once and kept."""

    def __init__(self, recipe: Recipe, target: Target) -> None:
        self.recipe, self.target = recipe, target
        self.windows: dict[str, list[Window]] | None = None

    def __call__(self, learning: TrainingStep) -> tuple[float | None, dict[str, float]]:
        """Return the mean loss over all guesses, and that of every source; None if nothing is held out."""
        depth = learning.drafter.max_depth
        if self.windows is None:
            self.windows = held_out_windows(self.recipe, self.target, depth + 3)
        if not self.windows:
            return None, {}
        most = max(depth + 3, *(len(window.tokens) for own in self.windows.values() for window in own))
        sums_N, counts_N = torch.zeros(depth), torch.zeros(depth)
        found = {}
        for name, own in self.windows.items():
            groups = [own[at : at + HELD_OUT_ROWS] for at in range(0, len(own), HELD_OUT_ROWS)]
            loss_N, count_N = learning.measure(
                [collate(group, most, depth - 1, again=True) for group in groups], HELD_OUT_POSITIONS
            )
            found[name] = loss_N.sum().item()
            sums_N[: len(loss_N)] += loss_N * count_N[: len(loss_N)]
            counts_N += count_N
        return (sums_N / counts_N.clamp(min=1)).sum().item(), found


def checked(scores: Scores) -> dict[str, Any]:
    """Return the scores of an evaluation; DraftsmithError if they have no τ."""
    if TAU not in scores:
        raise DraftsmithError(f"the evaluation returned {', '.join(scores) or 'nothing'}; it must have {TAU}.")
    return dict(scores)


def with_loss(scores: dict[str, Any], loss: float | None, by_source: Mapping[str, float]) -> dict[str, Any]:
    """Add the loss on held-out text to the scores, overall and for each source."""
    if loss is None:
        return scores
    sources: dict[str, dict[str, Any]] = {name: dict(own) for name, own in scores.get(BY_SOURCE, {}).items()}
    for name, own_loss in by_source.items():
        sources.setdefault(name, {})[HELD_OUT_LOSS] = own_loss
    return {**scores, HELD_OUT_LOSS: loss, BY_SOURCE: sources}


def tau_in_words(scores: Scores) -> str:
    """Return τ as text, with its interval if it has one."""
    interval = scores.get(TAU_INTERVAL)
    return f"τ = {scores[TAU]:.3f}" + (
        f" (95 % interval {interval[0]:.3f} to {interval[1]:.3f})" if interval is not None else ""
    )


def loss_in_words(scores: Scores) -> str:
    """Return the loss on held-out text as text to put after τ; empty if there is none."""
    return f"; loss on held-out text {scores[HELD_OUT_LOSS]:.3f}" if HELD_OUT_LOSS in scores else ""


def source_lines(scores: Scores) -> list[str]:
    """Return a line with both measures for every source; none if there is only one source."""
    sources = scores.get(BY_SOURCE, {})
    if len(sources) < 2:
        return []
    width = max(map(len, sources))
    return [
        f"  {name:{width}}  {tau_in_words(own) if TAU in own else 'τ not measured'}{loss_in_words(own)}"
        for name, own in sources.items()
    ]
