"""Top-k sampling without passes over the vocabulary: the distribution of only those tokens that can be drawn or were
guessed.

Shapes: B rows, N drafted, M = N + 1 verified nodes (root first), V vocabulary, K tokens kept at a node and a few more,
U tokens of a row's own alphabet.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftsmith.types import Draft
from draftsmith.verify.accept import Acceptance
from draftsmith.verify.distribution import SamplingBatch, normalised_exponentials

# More than k tokens stay if several equal the k-th. This many tokens beyond k are looked at; if all of them tie, the
# whole vocabulary is.
SPARE = 8


@dataclass(frozen=True)
class Narrowed:
    """A draft and the target's distribution over each row's own alphabet: the tokens that any node keeps, and guesses.

    Args:
        alphabet_BU: token ids in increasing order, so that a draw by inversion picks the same token as over V; a
            race uses the ids themselves. If an id occurs twice, its probability is at the first place. The last entry
            stands for all other tokens.
        draft: the draft with tokens and q in this alphabet.
        p_BMU: the target's distribution, float64, as `probabilities` would give it.
    """

    alphabet_BU: Tensor
    draft: Draft
    p_BMU: Tensor

    def restore(self, acceptance: Acceptance) -> Acceptance:
        """Turn the token chosen in the alphabet into its id."""
        return replace(acceptance, next_B=self.alphabet_BU.gather(1, acceptance.next_B.unsqueeze(1)).squeeze(1))


def narrow(logits_BMV: Tensor, batch: SamplingBatch, draft: Draft) -> Narrowed | None:
    """Restrict the distribution of rows that are all sampled with a top-k; None where the whole vocabulary is needed.

    The whole vocabulary is needed with other filters, with a k that is no small part of it, and with too many ties at
    the k-th token. It is also used on an accelerator, where checking for ties would cost a transfer and a pass over the
    vocabulary costs little.
    """
    nodes, vocabulary = logits_BMV.shape[1:]
    width = batch.largest_top_k + SPARE
    if not batch.all_top_k or batch.has_top_p or batch.has_min_p or logits_BMV.device.type != "cpu":
        return None
    if 4 * nodes * (width + 1) > vocabulary:
        return None
    best = logits_BMV.topk(width, dim=-1)
    exact = logits_BMV.dtype if logits_BMV.dtype == torch.float64 else torch.float32
    scores_BMK = best.values.to(exact) / batch.temperature_B[:, None, None].to(exact)
    last_BM1 = scores_BMK.gather(-1, (batch.top_k_B - 1)[:, None, None].expand(-1, nodes, 1))
    if bool((scores_BMK[..., -1:] >= last_BM1).any()):
        return None
    scores_BMK = scores_BMK.masked_fill(scores_BMK < last_BM1, float("-inf"))
    tokens_BX = torch.cat([best.indices.flatten(1), draft.tokens_BN], dim=1)
    alphabet_BU = torch.nn.functional.pad(tokens_BX.sort(dim=1).values, (0, 1), value=vocabulary)
    places_BX = torch.searchsorted(alphabet_BU, tokens_BX)
    kept = best.indices[0].numel()
    p_BMU = torch.zeros((*logits_BMV.shape[:2], alphabet_BU.shape[1]), dtype=torch.float64)
    p_BMU.scatter_(2, places_BX[:, :kept].view_as(best.indices), normalised_exponentials(scores_BMK))
    q_BMU = None
    if draft.q_BMV is not None:
        repeated_BU = torch.nn.functional.pad(alphabet_BU[:, 1:] == alphabet_BU[:, :-1], (1, 0))
        index_BMU = alphabet_BU[:, :-1].unsqueeze(1).expand(-1, draft.q_BMV.shape[1], -1)
        total_BM1 = draft.q_BMV.sum(2, keepdim=True, dtype=torch.float64)
        inside_BMU = draft.q_BMV.gather(2, index_BMU).double().masked_fill(repeated_BU[:, None, :-1], 0.0)
        # The other tokens' mass has to stay in, because siblings are renormalised by the whole sum.
        q_BMU = torch.cat([inside_BMU, (total_BM1 - inside_BMU.sum(2, keepdim=True)).clamp(min=0)], dim=2)
    return Narrowed(alphabet_BU, replace(draft, tokens_BN=places_BX[:, kept:], q_BMV=q_BMU), p_BMU)
