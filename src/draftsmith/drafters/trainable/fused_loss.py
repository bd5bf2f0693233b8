"""Cross-entropy and forward KL in one pass over the logits, which also computes their gradient.

The gradient of both is a difference of distributions, softmax(x) minus the wanted one. So this gradient is the only
tensor of the logits' size that has to be kept or read again. Rows are processed a few at a time, so that the
intermediate values of wider dtype stay in the processor's cache.

Shapes: R guesses, C of them at a time, S places of the text, W drafted vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

AT_A_TIME_CPU, AT_A_TIME = 2**18, 2**26
"""Number of logits that are converted to the wider dtype together."""


def rows_at_a_time(width: int, device: torch.device) -> int:
    """Return how many rows of `width` logits to process together; compiled code is fused, so it takes all rows."""
    most = AT_A_TIME_CPU if device.type == "cpu" and not torch.compiler.is_compiling() else AT_A_TIME
    return max(1, most // width)


class MixedLoss(torch.autograd.Function):
    """Σ hard · cross-entropy + Σ soft · forward KL, with weights per guess and term."""

    @staticmethod
    def forward(
        ctx: Any, logits_RW: Tensor, labels_R: Tensor, hard_R: Tensor, log_p_SW: Tensor | None, index_R: Tensor | None,
        entropy_R: Tensor | None, soft_R: Tensor | None, temperature: float,
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and the best guesses (R).

        Args:
            labels_R: the true tokens; any index if `hard_R` is 0.
            log_p_SW: the target's distributions; `index_R` says which guess needs which. None without `soft_R`.
            entropy_R: the entropies of these distributions in nats.
            temperature: of the divergence; the target's distributions are already softened by it.
        """
        gradient_RW = torch.empty_like(logits_RW)
        best_R = torch.empty_like(labels_R)
        loss = logits_RW.new_zeros((), dtype=torch.float32)
        size = rows_at_a_time(logits_RW.shape[1], logits_RW.device)
        for begin in range(0, len(logits_RW), size):
            piece = slice(begin, begin + size)
            x_CW = logits_RW[piece].float()
            best_R[piece] = x_CW.argmax(-1)
            hard_C1, labels_C1 = hard_R[piece].unsqueeze(1), labels_R[piece].unsqueeze(1)
            chosen_C1 = x_CW.gather(1, labels_C1)
            if soft_R is not None and temperature == 1:
                part, gradient_CW = _soft(x_CW, log_p_SW, index_R, entropy_R, soft_R, piece, hard_C1, 1.0)
                loss += part - (hard_C1 * chosen_C1).sum()
            else:
                total_C1 = x_CW.logsumexp(-1, keepdim=True)
                loss += (hard_C1 * (total_C1 - chosen_C1)).sum()
                gradient_CW = (x_CW - total_C1).exp_().mul_(hard_C1)
                if soft_R is not None:
                    none_C1 = torch.zeros_like(hard_C1)
                    part, softened_CW = _soft(
                        x_CW / temperature, log_p_SW, index_R, entropy_R, soft_R, piece, none_C1, temperature
                    )
                    loss += part
                    gradient_CW += softened_CW
            gradient_RW[piece] = gradient_CW.scatter_add_(1, labels_C1, -hard_C1)
        ctx.save_for_backward(gradient_RW)
        ctx.mark_non_differentiable(best_R)
        return loss, best_R

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradient that the forward pass computed."""
        (gradient_RW,) = ctx.saved_tensors
        return gradient_RW * gradients[0], None, None, None, None, None, None, None


def _soft(
    x_CW: Tensor, log_p_SW: Tensor | None, index_R: Tensor | None, entropy_R: Tensor | None, soft_R: Tensor,
    piece: slice, hard_C1: Tensor, temperature: float,
) -> tuple[Tensor, Tensor]:
    """Return Σ (hard + soft) · logsumexp(x) - Σ soft · (Σ p x + entropy), and its gradient by the logits before /T."""
    assert log_p_SW is not None and index_R is not None and entropy_R is not None
    soft_C1 = soft_R[piece].unsqueeze(1)
    total_C1 = x_CW.logsumexp(-1, keepdim=True)
    p_CW = log_p_SW[index_R[piece]].exp_()
    cross_C = (p_CW * x_CW).sum(-1)
    weight_C1 = hard_C1 + soft_C1
    loss = (weight_C1 * total_C1).sum() - (soft_R[piece] * (cross_C + entropy_R[piece])).sum()
    gradient_CW = (x_CW - total_C1).exp_().mul_(weight_C1).sub_(p_CW.mul_(soft_C1))
    return loss, gradient_CW if temperature == 1 else gradient_CW / temperature
