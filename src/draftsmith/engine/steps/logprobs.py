"""Log-probabilities of committed tokens. Shapes: T tokens, V vocabulary."""

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.types import TokenLogprob


def logprobs_of(logits_TV: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Return each token's log-probability and its `top` best alternatives, by logits before any rule of sampling."""
    logprobs_TV = torch.log_softmax(logits_TV.float() if logits_TV.dtype != torch.float64 else logits_TV, dim=-1)
    own_T1 = torch.tensor(tokens, dtype=torch.long, device=logprobs_TV.device).unsqueeze(1)
    own = logprobs_TV.gather(1, own_T1).squeeze(1).tolist()
    best = logprobs_TV.topk(top, dim=-1)
    lines = zip(tokens, own, best.indices.tolist(), best.values.tolist(), strict=True)
    return [TokenLogprob(token, logprob, dict(zip(ids, values, strict=True))) for token, logprob, ids, values in lines]
