"""Typical acceptance: guesses stay when they are likely enough. LOSSY: the text is not distributed as the target's own.

Shapes: B rows, N drafted nodes, M = N + 1 verified nodes (root first), V vocabulary.
"""

import torch
from torch import Tensor

from draftsmith.types import UNUSED, Draft
from draftsmith.verify.accept import Acceptance, longest_path
from draftsmith.verify.noise import Stream, race
from draftsmith.verify.tree import ancestor_table


def accept_typical(
    p_BMV: Tensor, draft: Draft, seeds_B: Tensor, positions_B: Tensor, epsilon: float, delta: float,
    alphabet_BU: Tensor | None = None,
) -> Acceptance:
    """Accept the longest path on which every guess x has p(x) > min(epsilon, delta exp(-H(p))); not exact.

    H is the entropy of p in nats, so guesses pass more easily where the target itself is undecided. Among equally long
    paths the first in the draft's order stays. The token after the path is drawn from p, also if no guess was accepted;
    the published decoder starts every draft with such a token instead, which gives the same order of tokens. p is the
    distribution after all sampling rules. A greedy row's p is one-hot and the threshold is below 1, so such a row
    accepts only argmaxes: its text is exact.
    Typical acceptance of Medusa (arXiv 2401.10774, section 2.3.1).

    >>> p = torch.tensor([[[0.5, 0.5, 0.0], [0.9, 0.1, 0.0], [0.0, 0.0, 1.0]]]).double()
    >>> draft = Draft(torch.tensor([[1, 1]]), torch.tensor([[-1, 0]]), depth=2)
    >>> accept_typical(p, draft, torch.tensor([3]), torch.tensor([9]), 0.09, 0.3).counts_B      # 0.1 is above 0.09
    tensor([2])
    >>> accept_typical(p, draft, torch.tensor([3]), torch.tensor([9]), 0.2, 0.3).counts_B       # and below 0.2
    tensor([1])

    Args:
        p_BMV: the target's distribution at every node, float64, each summing to 1.
        draft: any tree; how its guesses were made does not matter.
        seeds_B: seeds of the rows (int64).
        positions_B: absolute position of the token after the root.
        epsilon: a guess with a higher probability always passes; above 0 and below 1.
        delta: factor of the threshold that falls with entropy; above 0 and at most 1.
        alphabet_BU: as in `accept_deterministic`.
    """
    batch, nodes, vocabulary = p_BMV.shape
    ancestors_BMA = ancestor_table(draft.parents_BN, draft.depth)
    threshold_BM = (delta * (-torch.special.entr(p_BMV).sum(2)).exp()).clamp(max=epsilon)
    up_BN = (draft.parents_BN + 1).clamp(min=0)
    p_BN = p_BMV.reshape(batch, nodes * vocabulary).gather(1, up_BN * vocabulary + draft.tokens_BN)
    stays_BN = (p_BN > threshold_BM.gather(1, up_BN)) & (draft.parents_BN != UNUSED)
    path_BD, counts_B, last_B = longest_path(stays_BN, ancestors_BMA)
    p_BV = p_BMV.gather(1, last_B[:, None, None].expand(-1, 1, vocabulary)).squeeze(1)
    return Acceptance(path_BD, counts_B, race(p_BV, seeds_B, positions_B + counts_B, Stream.TARGET, alphabet_BU))
