"""The target's own distributions over the tokens that a drafter learns to guess, computed only where guesses need them.

Shapes: B sequences, T tokens a sequence, S places of the text that guesses need, R rows, N depths, V vocabulary, W
drafted vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.drafters.trainable.divergence import entropy
from draftsmith.drafters.trainable.fused_loss import rows_at_a_time


@dataclass(frozen=True)
class SoftLabels:
    """The target's own distribution at places of a batch: log p, its entropy in nats, and which row needs which place.

    With a drafted vocabulary, it is the distribution given that the token is in it; the probability of that is stored
    separately, if requested. Rows share distributions, because depth d of one position learns the same as depth d - 1
    of the next.
    """

    log_p_SW: Tensor
    entropy_S: Tensor
    index_RN: Tensor
    log_share_S: Tensor | None = None


def soft_labels(
    logits_BTV: Tensor, places_RN: Tensor, d2t: Tensor | None, temperature: float, share: bool
) -> SoftLabels:
    """Return the distributions at the places (indices into all but the last dimension) that rows and depths need.

    Args:
        share: whether to return the total probability of the drafted tokens too.
    """
    logits_SV = logits_BTV.flatten(0, -2)
    device, wanted_S, index_RN = logits_SV.device, None, places_RN
    if device.type == "cpu" and not torch.compiler.is_compiling():
        # No guess needs the places of prompts and padding. On another device, their number would have to be waited for,
        # and compiled code must not depend on it.
        wanted_S, index_RN = places_RN.unique(return_inverse=True)
    count = len(logits_SV) if wanted_S is None else len(wanted_S)
    share = share and d2t is not None
    width = logits_SV.shape[1] if d2t is None else len(d2t)
    log_p_SW = torch.empty((count, width), dtype=torch.float32, device=device)
    entropy_S, log_share_S = (torch.empty(count, dtype=torch.float32, device=device) for _ in range(2))
    size = rows_at_a_time(logits_SV.shape[1] if share else width, device)
    for begin in range(0, count, size):
        piece = slice(begin, begin + size)
        some_CV = logits_SV[piece] if wanted_S is None else logits_SV.index_select(0, wanted_S[piece])
        drafted_CW = (some_CV if d2t is None else some_CV.index_select(1, d2t)).float()
        if temperature != 1:
            drafted_CW = drafted_CW / temperature
        log_p_SW[piece] = log_p_CW = drafted_CW.log_softmax(-1)
        entropy_S[piece] = entropy(log_p_CW)
        if share:
            log_share_S[piece] = drafted_CW.logsumexp(-1) - (some_CV.float() / temperature).logsumexp(-1)
    return SoftLabels(log_p_SW, entropy_S, index_RN, log_share_S if share else None)
