"""What training minimises: the sum over stages of the mean cross-entropy, optionally mixed with the target's own law.

Shapes: B sequences, L tokens a sequence, S = B × L, P positions trained on a sequence, R = B × P rows, N stages,
F target width, V vocabulary, W drafted vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.drafters.mlp import MLPSpeculator
from draftsmith.target import Target
from draftsmith.training.data import noise
from draftsmith.training.recipe import DistillationSection
from draftsmith.types import DraftsmithError

IGNORED = -100


@dataclass(frozen=True)
class Law:
    """The target's own distribution at every token of the batch: p_SW, its entropy in nats, and which row wants which.

    With a drafted vocabulary it is the distribution given that the token is in it.
    Rows share it, because the law that stage d of one position learns is that of stage d - 1 of the next.
    """

    p_SW: Tensor
    entropy_S: Tensor
    index_RN: Tensor


@dataclass(frozen=True)
class Rows:
    """Training examples, one a position.

    Args:
        features_RF: the state that predicted tokens[:, 0].
        tokens_RN: what the stages read: the root and the N - 1 true tokens after it.
        labels_RN: what they should say, as indices into the drafted vocabulary; IGNORED where it is not in there.
        law: what the target itself would say, over the drafted vocabulary, or None.
    """

    features_RF: Tensor
    tokens_RN: Tensor
    labels_RN: Tensor
    law: Law | None


def choose_positions(first: int, last: int, count: int | None, batch: int, seed: tuple[object, ...]) -> Tensor:
    """Return positions_BP: all from `first` to `last` - 1, or `count` random ones of each sequence, sorted."""
    every = last - first
    if count is None or count >= every:
        return torch.arange(first, last).expand(batch, -1)
    generator = torch.Generator().manual_seed(noise(*seed))
    return first + torch.rand(batch, every, generator=generator).argsort(dim=1)[:, :count].sort(dim=1).values


def make_rows(
    tokens_BL: Tensor, features_BLF: Tensor, logits_BLV: Tensor | None, positions_BP: Tensor,
    speculator: MLPSpeculator, temperature: float = 1.0,
) -> Rows:
    """Gather the rows at `positions_BP`: position t reads state t, which predicted token t + 1, the root.

    Stage d reads token t + 1 + d and predicts token t + 2 + d, of which the target's own logits are those at t + 1 + d.
    """
    stages = speculator.config.n_predict
    positions_BP1 = positions_BP.unsqueeze(2)
    batch = torch.arange(tokens_BL.shape[0], device=tokens_BL.device).view(-1, 1, 1)
    reads_BPN = positions_BP1 + 1 + torch.arange(stages, device=tokens_BL.device)
    labels_RN = tokens_BL[batch, reads_BPN + 1].flatten(0, 1)
    law = None
    if logits_BLV is not None:
        if speculator.d2t is not None:
            logits_BLV = logits_BLV[..., speculator.d2t]
        log_p_SW = (logits_BLV.flatten(0, 1).float() / temperature).log_softmax(-1)
        p_SW = log_p_SW.exp()
        entropy_S = -(p_SW * log_p_SW).sum(-1)
        law = Law(p_SW, entropy_S, (batch * tokens_BL.shape[1] + reads_BPN).flatten(0, 1))
    if speculator.d2t is not None:
        index_V = labels_RN.new_full((speculator.config.vocab_size,), IGNORED)
        index_V[speculator.d2t] = torch.arange(len(speculator.d2t), device=labels_RN.device)
        labels_RN = index_V[labels_RN]
    return Rows(
        features_BLF[batch.squeeze(2), positions_BP].flatten(0, 1),
        tokens_BL[batch, reads_BPN].flatten(0, 1),
        labels_RN,
        law,
    )


def prepare(
    speculator: MLPSpeculator, target: Target, tokens_BL: Tensor, *, first: int, count: int | None,
    distillation: DistillationSection, seed: tuple[object, ...],
) -> Rows:
    """Run the frozen target over sequences and gather rows; the first position trained on is `first`."""
    tokens_BL = tokens_BL.to(target.device)
    features_BLF, logits_BLV = target.encode(tokens_BL, speculator.taps, logits=distillation.weight > 0)
    last = tokens_BL.shape[1] - 1 - speculator.config.n_predict
    if last <= first:
        raise DraftsmithError(
            f"sequences of {tokens_BL.shape[1]} tokens leave no position to train {speculator.config.n_predict} stages "
            "on; make them longer."
        )
    positions_BP = choose_positions(first, last, count, len(tokens_BL), seed).to(tokens_BL.device)
    return make_rows(tokens_BL, features_BLF, logits_BLV, positions_BP, speculator, distillation.temperature)


def stage_losses(
    speculator: MLPSpeculator, features_RF: Tensor, tokens_RN: Tensor, labels_RN: Tensor, law: Law | None,
    weight: float, temperature: float,
) -> tuple[Tensor, Tensor]:
    """Return loss_N in nats, which sums to the training loss, and the share of right first guesses hits_N.

    The hits are counted with true tokens as input: they are no acceptance when serving.
    """
    state, losses, hits = speculator.start(features_RF), [], []
    for depth in range(speculator.config.n_predict):
        state = speculator.stage(depth, state, tokens_RN[:, depth])
        logits_RW, labels_R = speculator.score(depth, state).float(), labels_RN[:, depth]
        valid = (labels_R != IGNORED).sum().clamp(min=1)
        loss = F.cross_entropy(logits_RW, labels_R, ignore_index=IGNORED, reduction="sum") / valid
        if law is not None:
            index_R, scaled_RW = law.index_RN[:, depth], logits_RW / temperature
            cross_R = scaled_RW.logsumexp(-1) - (law.p_SW[index_R] * scaled_RW).sum(-1)
            # The square keeps the gradient's size independent of the temperature.
            divergence = (cross_R - law.entropy_S[index_R]).mean() * temperature**2
            loss = (1 - weight) * loss + weight * divergence
        losses.append(loss)
        hits.append((logits_RW.detach().argmax(-1) == labels_R).sum() / labels_R.numel())
    return torch.stack(losses), torch.stack(hits)
