"""The pass that makes loss and gradient together says what the formulas say.

Shapes: B texts, T tokens, P positions, R = B × P guesses, N depths, V vocabulary, W drafted vocabulary.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.drafters.trainable.batch import IGNORED, TrainingBatch

# So many logits are taken in two pieces.
B, T, P, N, V, W = 2, 50, 45, 3, 4000, 3500


def made(weight: float, temperature: float, masked: bool) -> tuple[TrainingBatch, Tensor]:
    generator = torch.Generator().manual_seed(7)
    tokens_BT = torch.randint(0, V, (B, T), generator=generator)
    batch = TrainingBatch(
        tokens_BT, torch.zeros(B, T, 1), torch.arange(P).expand(B, -1),
        torch.randn(B, T, V, generator=generator) * 3, weight, temperature,
        learnt_BT=torch.rand(B, T, generator=generator) > 0.2 if masked else None,
    )
    return batch, torch.randperm(V, generator=generator)[:W].sort().values


def by_formula(batch: TrainingBatch, depth: int, logits_RW: Tensor, d2t: Tensor) -> Tensor:
    """Return the loss of a depth, a guess at a time."""
    labels_RN, counts_RN = batch.labels_RN(N, d2t, V), batch.counts_RN(N)
    hard, soft = [], []
    for row, scores_W in enumerate(logits_RW):
        if counts_RN is not None and not counts_RN[row, depth]:
            continue
        if labels_RN[row, depth] != IGNORED:
            hard.append(F.cross_entropy(scores_W, labels_RN[row, depth]))
        text, place = divmod(row, P)
        assert batch.logits_BTV is not None
        p_W = (batch.logits_BTV[text, place + depth, d2t] / batch.temperature).softmax(-1)
        q_W = (scores_W / batch.temperature).softmax(-1)
        soft.append((p_W * (p_W.log() - q_W.log())).sum() * batch.temperature**2)
    return (1 - batch.weight) * torch.stack(hard).mean() + batch.weight * torch.stack(soft).mean()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_loss_and_gradient_are_those_of_the_formulas(weight: float, temperature: float, masked: bool) -> None:
    batch, d2t = made(weight, temperature, masked)
    labels_RN = batch.labels_RN(N, d2t, V)
    for depth in (0, 2):
        logits_RW = torch.randn(B * P, W, generator=torch.Generator().manual_seed(depth)).requires_grad_()
        expected = by_formula(batch, depth, logits_RW, d2t)
        (gradient_RW,) = torch.autograd.grad(expected, logits_RW)
        found, share = batch.loss_and_accuracy(depth, logits_RW, labels_RN, batch.soft_labels(N, d2t))
        (found_RW,) = torch.autograd.grad(2 * found, logits_RW)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found_RW, 2 * gradient_RW, atol=1e-7, rtol=1e-3)
        torch.testing.assert_close(share, batch.mean((logits_RW.argmax(-1) == labels_RN[:, depth]).float(), depth))


def test_nothing_to_learn_is_no_loss() -> None:
    batch, d2t = made(0.3, 1.0, masked=False)
    empty = TrainingBatch(
        batch.tokens_BT, batch.features_BTF, batch.positions_BP, batch.logits_BTV, 0.3,
        learnt_BT=torch.zeros(B, T, dtype=torch.bool),
    )
    logits_RW = torch.randn(B * P, W).requires_grad_()
    loss, share = empty.loss_and_accuracy(0, logits_RW, empty.labels_RN(N, d2t, V), empty.soft_labels(N, d2t))
    (gradient_RW,) = torch.autograd.grad(loss, logits_RW)
    assert loss.item() == 0 and share.item() == 0 and not gradient_RW.any()
