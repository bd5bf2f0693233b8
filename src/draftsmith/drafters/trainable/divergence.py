"""How far a drafter's distribution q is from the target's own p: a training loss besides that of the true token.

With α = Σ min(p, q), the probability that a guess drawn from q is accepted if the target samples,

    forward_kl    Σ p log(p / q)
    reverse_kl    Σ q log(q / p)
    js            Jensen-Shannon: the mean of the forward_kl of p and that of q from their middle (p + q) / 2
    tv            1 - α, the total variation
    lk            λ forward_kl + (1 - λ) tv, λ = exp(-3 α), no gradient going through λ

The first four are those of DistillSpec (arXiv:2310.08461), the last is the hybrid of "LK Losses" (arXiv:2602.23881).

Shapes: R guesses, W drafted vocabulary.
"""

import math

import torch
from torch import Tensor

from draftsmith.drafters.config import Divergence

ACCEPTANCE: tuple[Divergence, ...] = ("tv", "lk")
"""The divergences made of α; they depend on the probability that the target gives to tokens that are never drafted."""

SHARPNESS = 3.0
"""The η of the LK loss, λ = exp(-η α)."""

LEAST = math.log(torch.finfo(torch.float32).tiny)
"""The smallest log-probability that is told from zero probability: the logarithm of zero has to stay finite."""


def entropy(log_p: Tensor) -> Tensor:
    """Return the entropies in nats of distributions (…, W)."""
    return -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1)


def forward_kl(log_p_RW: Tensor, entropy_R: Tensor, scores_RW: Tensor) -> Tensor:
    """Return Σ p log(p / q) for every guess, q being the softmax of its finite scores."""
    cross_R = scores_RW.logsumexp(-1) - (log_p_RW.exp() * scores_RW).sum(-1)
    return cross_R - entropy_R


def acceptance(log_p_RW: Tensor, log_q_RW: Tensor) -> Tensor:
    """Return α of every guess; p may be incomplete, with the rest on tokens that q never draws."""
    return torch.minimum(log_p_RW.exp(), log_q_RW.exp()).sum(-1)


def divergence(
    kind: Divergence, log_p_RW: Tensor, scores_RW: Tensor, entropy_R: Tensor, log_share_R: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Return one divergence for every guess, in fp32.

    Args:
        log_p_RW: the target's distribution, given that the token is drafted at all.
        scores_RW: the drafter's scores, already divided by the temperature.
        entropy_R: the entropy of the target's distribution.
        log_share_R: the target's log-probability that the token is drafted at all; None if it always is.
        temperature: of both. The gradient of a KL divergence falls with its square, that of α with its first power; so
            1 - α is divided by the temperature here, and the caller's square fits all.
    """
    if kind == "forward_kl":
        return forward_kl(log_p_RW, entropy_R, scores_RW)
    log_q_RW = scores_RW.log_softmax(-1)
    if kind in ACCEPTANCE:
        alpha_R = acceptance(log_p_RW if log_share_R is None else log_p_RW + log_share_R.unsqueeze(-1), log_q_RW)
        variation_R = (1 - alpha_R) / temperature
        if kind == "tv":
            return variation_R
        weight_R = torch.exp(-SHARPNESS * alpha_R.detach())
        return weight_R * forward_kl(log_p_RW, entropy_R, scores_RW) + (1 - weight_R) * variation_R
    p_RW, q_RW = log_p_RW.exp(), log_q_RW.exp()
    log_p_RW, log_q_RW = log_p_RW.clamp(min=LEAST), log_q_RW.clamp(min=LEAST)
    if kind == "reverse_kl":
        return (q_RW * (log_q_RW - log_p_RW)).sum(-1)
    log_middle_RW = torch.logaddexp(log_p_RW, log_q_RW) - math.log(2)
    return 0.5 * (p_RW * (log_p_RW - log_middle_RW) + q_RW * (log_q_RW - log_middle_RW)).sum(-1)
