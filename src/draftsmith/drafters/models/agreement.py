"""How likely the target is to choose what a copy of it chooses: the smaller the lead of a token, the less likely.

A copy in fewer bits gives every token nearly the score that the target gives it. So where two tokens are close, the
target may choose the other one, however sure of the first the copy is; and where one leads clearly, the target chooses
it too, however unsure both are. The differences are taken to be normally distributed, and to be as large everywhere.

Shapes: B rows, T tokens, V vocabulary.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftsmith.targets.calibration import own_texts

if TYPE_CHECKING:
    from draftsmith.targets import Target

TEXTS, LONGEST = 16, 9
"""Number and length of the texts by which a copy is compared: few, because a first draft waits for them."""

WORTH_IT = 0.15
"""The least chance of a token beside a chain: to verify a guess costs some time. guesses.cpp has the same number."""
NO_TOKEN = -1
"""In the place of a token that there is not; the native operator writes the same."""


@torch.no_grad()
def spread_of(copy: "Target", target: "Target") -> float:
    """Return how far the lead of a copy's best token over its second differs from theirs in the target.

    It is the root of the mean square, over texts that the target writes after random tokens; 0 if its scores are not
    finite.
    """
    longest = min(LONGEST, target.max_length)
    tokens_BT = own_texts(target, TEXTS * longest, longest)
    own_BTV, whole_BTV = (one.encode(tokens_BT, (), logits=True)[1] for one in (copy, target))
    assert own_BTV is not None and whole_BTV is not None
    two = own_BTV.topk(2, dim=-1)
    there_BT2 = whole_BTV.gather(-1, two.indices)
    difference_BT = (two.values.double() - there_BT2.double()).diff(dim=-1).squeeze(-1)
    spread = float(difference_BT.square().mean().sqrt())
    return spread if math.isfinite(spread) else 0.0


def chance_of(lead: Tensor, spread: float) -> Tensor:
    """Return the chance that the target, too, ranks one token before another that it leads by so much in the copy."""
    return torch.special.ndtr(lead.double() / spread) if spread > 0 else torch.ones_like(lead, dtype=torch.float64)
