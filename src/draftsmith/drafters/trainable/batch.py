"""Training examples: text, the target's states that predicted it, and optionally the target's distributions.

Shapes: B sequences, T tokens a sequence, P positions trained on a sequence, R = B × P rows, S places of the text, N
depths, F feature width, V vocabulary, W drafted vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.drafters.trainable.divergence import ACCEPTANCE, Divergence, divergence
from draftsmith.drafters.trainable.fused_loss import MixedLoss
from draftsmith.drafters.trainable.soft_labels import SoftLabels, soft_labels

IGNORED = -100


def counted(learnt_BT: Tensor, positions_BP: Tensor, depths: int) -> Tensor:
    """Return which guesses behind these roots count (B, P, N): those whose tokens, up to their own, are all learnt."""
    batch = torch.arange(len(learnt_BT), device=learnt_BT.device).view(-1, 1, 1)
    labels_BPN = positions_BP.unsqueeze(2) + torch.arange(1, depths + 1, device=positions_BP.device)
    return learnt_BT[batch, labels_BPN].long().cumprod(2).bool()


@dataclass(frozen=True)
class TrainingBatch:
    """One micro-batch, aligned as everywhere: `features_BTF[:, t]` is the state that predicted `tokens_BT[:, t]`.

    Args:
        tokens_BT: the text from its second token on.
        features_BTF: the target's tapped states.
        positions_BP: roots t to train on; depth d reads tokens up to t + d and predicts token t + d + 1.
        logits_BTV: the target's logits after `tokens_BT[:, t]` (they predict token t + 1); None without distillation.
            With `row_BT`, (S, V), only those that are needed.
        weight: share of the loss that is the divergence from the target's own distribution.
        temperature: of both distributions in that divergence.
        seed: seed of the random numbers that a family draws in training; different in every micro-batch of a run.
        learnt_BT: which tokens are learnt: not padding, and in a conversation only what the assistant wrote. A guess
            counts if its token, and those between it and the root, are learnt; None if all are.
        first_B: the tokens before the second, which no state predicted; for families that read whole texts.
        divergence: which divergence, see `draftsmith.drafters.trainable.divergence`.
        row_BT: which of the logits belong to which token; None if there are logits for all tokens, in order.
    """

    tokens_BT: Tensor
    features_BTF: Tensor
    positions_BP: Tensor
    logits_BTV: Tensor | None = None
    weight: float = 0.0
    temperature: float = 1.0
    seed: int = 0
    learnt_BT: Tensor | None = None
    first_B: Tensor | None = None
    divergence: Divergence = "forward_kl"
    row_BT: Tensor | None = None

    def reads_BPN(self, depths: int) -> tuple[Tensor, Tensor]:
        """Return the batch index (B, 1, 1) and, for every position and depth, the index of the last token read."""
        batch = torch.arange(self.tokens_BT.shape[0], device=self.tokens_BT.device).view(-1, 1, 1)
        return batch, self.positions_BP.unsqueeze(2) + torch.arange(depths, device=self.tokens_BT.device)

    def roots_RF(self) -> Tensor:
        """Return the states that predicted the roots (R, F)."""
        batch, reads_BP1 = self.reads_BPN(1)
        return self.features_BTF[batch.squeeze(2), reads_BP1.squeeze(2)].flatten(0, 1)

    def tokens_RN(self, depths: int) -> Tensor:
        """Return the tokens that the depths read: the root and the true tokens after it."""
        batch, reads_BPN = self.reads_BPN(depths)
        return self.tokens_BT[batch, reads_BPN].flatten(0, 1)

    def labels_RN(self, depths: int, d2t: Tensor | None, vocab_size: int) -> Tensor:
        """Return the right guesses, as indices into the drafted vocabulary; IGNORED for tokens that are not in it."""
        batch, reads_BPN = self.reads_BPN(depths)
        labels_RN = self.tokens_BT[batch, reads_BPN + 1].flatten(0, 1)
        if d2t is not None:
            index_V = labels_RN.new_full((vocab_size,), IGNORED)
            index_V[d2t] = torch.arange(len(d2t), device=labels_RN.device)
            labels_RN = index_V[labels_RN]
        counts_RN = self.counts_RN(depths)
        return labels_RN if counts_RN is None else labels_RN.masked_fill(~counts_RN, IGNORED)

    def counts_RN(self, depths: int) -> Tensor | None:
        """Return which guesses count; None if all do."""
        if self.learnt_BT is None:
            return None
        return counted(self.learnt_BT, self.positions_BP, depths).flatten(0, 1)

    def mean(self, values_R: Tensor, depth: int) -> Tensor:
        """Return the mean over the guesses of a depth that count."""
        counts_RN = self.counts_RN(depth + 1)
        if counts_RN is None:
            return values_R.mean()
        counts_R = counts_RN[:, depth]
        return values_R.where(counts_R, 0).sum() / counts_R.sum().clamp(min=1)

    def soft_labels(self, depths: int, d2t: Tensor | None) -> SoftLabels | None:
        """Return the target's own distributions, or None if nothing is to be distilled."""
        if self.logits_BTV is None or self.weight == 0:
            return None
        batch, reads_BPN = self.reads_BPN(depths)
        row_BPN = batch * self.tokens_BT.shape[1] + reads_BPN if self.row_BT is None else self.row_BT[batch, reads_BPN]
        places_RN = row_BPN.flatten(0, 1)
        return soft_labels(self.logits_BTV, places_RN, d2t, self.temperature, self.divergence in ACCEPTANCE)

    def loss_and_accuracy(
        self, depth: int, logits_RW: Tensor, labels_RN: Tensor, soft: SoftLabels | None
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of one depth in nats and the share of right first guesses, given true tokens as input.

        That share is not the acceptance in serving.
        """
        labels_R = labels_RN[:, depth]
        if self.divergence == "forward_kl" and not torch.compiler.is_compiling():
            return self._fused(depth, logits_RW, labels_R, soft)
        logits_RW = logits_RW.float()
        valid = (labels_R != IGNORED).sum().clamp(min=1)
        loss = F.cross_entropy(logits_RW, labels_R, ignore_index=IGNORED, reduction="sum") / valid
        if soft is not None:
            index_R = soft.index_RN[:, depth]
            distance_R = divergence(
                self.divergence, soft.log_p_SW[index_R], logits_RW / self.temperature, soft.entropy_S[index_R],
                None if soft.log_share_S is None else soft.log_share_S[index_R], self.temperature,
            )
            # The square keeps the gradient's size independent of the temperature.
            loss = (1 - self.weight) * loss + self.weight * (self.mean(distance_R, depth) * self.temperature**2)
        return loss, self.mean((logits_RW.detach().argmax(-1) == labels_R).float(), depth)

    def _fused(
        self, depth: int, logits_RW: Tensor, labels_R: Tensor, soft: SoftLabels | None
    ) -> tuple[Tensor, Tensor]:
        """Compute the same in one pass, which is several times as fast if nothing is compiled."""
        valid_R = labels_R != IGNORED
        hard_R = valid_R / valid_R.sum().clamp(min=1)
        if soft is None:
            loss, best_R = MixedLoss.apply(
                logits_RW, labels_R.where(valid_R, 0), hard_R, None, None, None, None, self.temperature
            )
        else:
            index_R, counts_RN = soft.index_RN[:, depth], self.counts_RN(depth + 1)
            counts_R = torch.ones_like(valid_R) if counts_RN is None else counts_RN[:, depth]
            # The square keeps the gradient's size independent of the temperature.
            soft_R = self.weight * self.temperature**2 * counts_R / counts_R.sum().clamp(min=1)
            loss, best_R = MixedLoss.apply(
                logits_RW, labels_R.where(valid_R, 0), (1 - self.weight) * hard_R, soft.log_p_SW, index_R,
                soft.entropy_S[index_R], soft_R, self.temperature,
            )
        return loss, self.mean((best_R == labels_R).float(), depth)
