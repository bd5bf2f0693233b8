"""Log-probabilities of committed tokens. Shapes: T tokens, V vocabulary."""

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.types import TokenLogprob


def logprobs_of(logits_TV: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Return those of the tokens with the `top` best alternatives each, by logits before any rule of sampling."""
    logprobs_TV = torch.log_softmax(logits_TV.float() if logits_TV.dtype != torch.float64 else logits_TV, dim=-1)
    results = []
    for t in range(logprobs_TV.shape[0]):
        best = logprobs_TV[t].topk(top)
        alternatives = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        results.append(TokenLogprob(tokens[t], logprobs_TV[t, tokens[t]].item(), alternatives))
    return results
