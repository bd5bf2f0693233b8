"""The losses a drafter can learn by: their formulas and gradients, and that every family learns by each of them."""

from typing import get_args

import pytest
import torch
from torch import Tensor

from draftsmith.drafters.registry import families
from draftsmith.drafters.trainable.batch import IGNORED, TrainingBatch
from draftsmith.drafters.trainable.divergence import Divergence, divergence, entropy
from draftsmith.drafters.trainable.model import TrainableModel
from draftsmith.dtypes import multiplies_bf16
from draftsmith.native import LIBRARY
from draftsmith.targets import Target
from draftsmith.training.data.batches import draw as draw_roots
from draftsmith.training.data.windows import Window, collate
from draftsmith.training.recipe import build_recipe
from draftsmith.training.sections import DistillationSection, OptimizerSection
from draftsmith.training.step import TrainingStep
from draftsmith.types import DraftsmithError
from tests.helpers import training_toy as toy
from tests.helpers.tiny import TOKENIZER_SIZE, tiny_model, tiny_tokenizer

KINDS = get_args(Divergence)
TRAINABLE = tuple(name for name, family in families().items() if family.trainable)
OPTIONS = {"mlp": {"n_predict": 2}, "eagle": {"depth": 2}, "eagle3": {"depth": 2}, "small-lm": {"width": 16}}
WORDS = 12


def reference(kind: str, p_RW: Tensor, q_RW: Tensor, share_R: Tensor, temperature: float) -> Tensor:
    """Return the divergence as the papers write it, in float64 and without any care for zeros.

    What is made of acceptance counts once by the temperature, not twice.
    """
    kl = (p_RW * (p_RW / q_RW).log()).sum(-1)
    accepted = torch.minimum(p_RW * share_R.unsqueeze(-1), q_RW).sum(-1)
    middle = (p_RW + q_RW) / 2
    weight, variation = torch.exp(-3 * accepted.detach()), (1 - accepted) / temperature
    return {
        "forward_kl": kl,
        "reverse_kl": (q_RW * (q_RW / p_RW).log()).sum(-1),
        "js": ((p_RW * (p_RW / middle).log()).sum(-1) + (q_RW * (q_RW / middle).log()).sum(-1)) / 2,
        "tv": variation,
        "lk": weight * kl + (1 - weight) * variation,
    }[kind]


def draw(*shape: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafted", [None, (7, 2, 9, 0, 4)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_are_those_of_the_formula(
    kind: Divergence, drafted: tuple[int, ...] | None, temperature: float
):
    """Masked guesses, a drafted vocabulary and a temperature included."""
    d2t = None if drafted is None else torch.tensor(drafted)
    learnt_BT = torch.ones(2, 9, dtype=torch.bool)
    learnt_BT[1, 4] = False
    tokens_BT = torch.arange(18).view(2, 9) % WORDS
    logits_BTV = draw(2, 9, WORDS)
    batch = TrainingBatch(
        tokens_BT, torch.zeros(2, 9, 1), torch.tensor([[0, 3], [1, 3]]), logits_BTV, 1.0, temperature,
        learnt_BT=learnt_BT, divergence=kind,
    )
    scores_RW = draw(4, WORDS if drafted is None else len(drafted), seed=1).requires_grad_()
    labels_RN = batch.labels_RN(2, d2t, WORDS)
    loss, _ = batch.loss_and_accuracy(1, scores_RW, labels_RN, batch.soft_labels(2, d2t))
    loss.backward()
    # Depth 1 of root t is told by what the target says behind token t + 1.
    wide_RV = torch.stack([logits_BTV[b, t + 1] for b, t in ((0, 0), (0, 3), (1, 1), (1, 3))]).double() / temperature
    kept_RW = wide_RV if d2t is None else wide_RV[:, d2t]
    twin_RW = scores_RW.detach().double().requires_grad_()
    share_R = (kept_RW.logsumexp(-1) - wide_RV.logsumexp(-1)).exp()
    expected_R = reference(kind, kept_RW.softmax(-1), (twin_RW / temperature).softmax(-1), share_R, temperature)
    counts_R = torch.tensor([True, True, True, False])
    expected = expected_R[counts_R].mean() * temperature**2
    expected.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(scores_RW.grad.double(), twin_RW.grad, rtol=1e-4, atol=1e-6)
    assert not scores_RW.grad[~counts_R].any()


@pytest.mark.parametrize("kind", KINDS)
def test_no_probability_is_no_trouble(kind: Divergence):
    """Tokens that the target, the drafter or both give no probability that fp32 holds."""
    own_RW = torch.tensor([[0.0, 0.0, -torch.inf, -torch.inf], [500.0, 0.0, -500.0, 0.0], [0.0, 500.0, 0.0, 0.0]])
    scores_RW = torch.tensor([[0.0, -900.0, 0.0, -900.0], [0.0, 500.0, 0.0, 0.0], [0.0, 500.0, 0.0, 0.0]])
    scores_RW.requires_grad_()
    log_p_RW = own_RW.log_softmax(-1)
    distance_R = divergence(kind, log_p_RW, scores_RW, entropy(log_p_RW))
    distance_R.sum().backward()
    assert distance_R.isfinite().all() and scores_RW.grad.isfinite().all()
    assert distance_R[:2].gt(0.1).all() and distance_R[2] == 0
    if kind in ("forward_kl", "lk"):
        assert scores_RW.grad[1].abs().max() > 0.5, "where nothing is accepted there is still something to follow"


def test_equal_distributions_are_no_distance_apart():
    scores_RW = draw(5, WORDS)
    log_p_RW = scores_RW.log_softmax(-1)
    for kind in KINDS:
        torch.testing.assert_close(
            divergence(kind, log_p_RW, scores_RW, entropy(log_p_RW)), torch.zeros(5), rtol=0, atol=1e-6
        )


def test_total_variation_is_one_minus_what_rejection_sampling_accepts():
    """Drawn: a guess x of q is kept with probability min(1, p(x) / q(x)), p being the whole vocabulary's."""
    d2t, logits_1TV = torch.tensor([3, 5, 8, 1]), draw(1, 3, WORDS)
    batch = TrainingBatch(
        torch.tensor([[3, 5, 8]]), torch.zeros(1, 3, 1), torch.tensor([[0]]), logits_1TV, 1.0, divergence="tv"
    )
    scores_1W, soft = draw(1, 4, seed=3), batch.soft_labels(1, d2t)
    loss, _ = batch.loss_and_accuracy(0, scores_1W, torch.full((1, 1), IGNORED), soft)
    p_W, q_W = logits_1TV[0, 0].softmax(-1)[d2t], scores_1W[0].softmax(-1)
    generator = torch.Generator().manual_seed(0)
    drawn = q_W.multinomial(200_000, replacement=True, generator=generator)
    kept = torch.rand(len(drawn), generator=generator) < p_W[drawn] / q_W[drawn]
    assert loss.item() == pytest.approx(1 - kept.float().mean().item(), abs=0.005)


def test_the_default_is_cross_entropy_and_forward_kl():
    batch = TrainingBatch(
        torch.arange(8).view(1, 8), torch.zeros(1, 8, 1), torch.arange(6).view(1, 6), draw(1, 8, WORDS), 0.3, 1.7
    )
    scores_RW = draw(6, WORDS, seed=1)
    labels_RN = batch.labels_RN(1, None, WORDS)
    loss, _ = batch.loss_and_accuracy(0, scores_RW, labels_RN, batch.soft_labels(1, None))
    log_p_RW = (draw(1, 8, WORDS)[0, :6] / 1.7).log_softmax(-1)
    p_RW, scaled_RW = log_p_RW.exp(), scores_RW / 1.7
    cross_R = scaled_RW.logsumexp(-1) - (p_RW * scaled_RW).sum(-1)
    far = (cross_R + (p_RW * log_p_RW).sum(-1)).mean() * 1.7**2
    true = torch.nn.functional.cross_entropy(scores_RW, labels_RN[:, 0], reduction="sum") / 6
    torch.testing.assert_close(loss, (1 - 0.3) * true + 0.3 * far, atol=0, rtol=1e-6)


def make(name: str, target: Target | None = None, **options: object) -> TrainableModel:
    family, target = families()[name], target or toy.target()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drafter = family.make(family.config.read({**OPTIONS.get(name, {}), **options}, ""), target, None)
    assert isinstance(drafter, TrainableModel)
    return drafter.train()


def windows() -> list[Window]:
    generator = torch.Generator().manual_seed(2)
    return [Window(torch.randint(0, TOKENIZER_SIZE, (14,), generator=generator).tolist(), [(0, 14)]) for _ in range(3)]


def one_step(drafter: TrainableModel, rate: float, **distillation: object) -> Tensor:
    """Take a step of the optimizer; return the losses by depth that are logged."""
    section = OptimizerSection(precision="fp32", weight_decay=0.0)
    step = TrainingStep(drafter, toy.target(), section, DistillationSection.model_validate(distillation))
    return step([collate(windows(), 99, drafter.max_depth)], rate=rate, positions=None, seed=()).loss_N


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TRAINABLE)
def test_a_step_lowers_the_loss_of_every_family(name: str, kind: Divergence):
    drafter = make(name)
    before, after = (one_step(drafter, 1e-3, weight=1.0, divergence=kind).sum() for _ in range(2))
    assert after < before


@pytest.mark.parametrize("name", TRAINABLE)
def test_a_bf16_target_teaches_in_fp32_what_it_teaches_in_bf16(name: str):
    """On processors without instructions for bf16, the native kernels read the target, and PyTorch trains in fp32."""
    target = Target(tiny_model(dtype=torch.bfloat16, vocabulary=TOKENIZER_SIZE), tiny_tokenizer(), name="toy-bf16")
    assert target.backend.native == LIBRARY
    losses: dict[str, Tensor] = {}
    gradients: dict[str, Tensor] = {}
    for precision in get_args(OptimizerSection.model_fields["precision"].annotation):
        drafter = make(name, target)
        step = TrainingStep(drafter, target, OptimizerSection(precision=precision), DistillationSection(weight=0.5))
        batch = collate(windows(), 99, drafter.max_depth)
        task = draw_roots(batch, drafter.max_depth, None, ())
        objective, losses[precision], _ = step.compute_loss(task, torch.ones(drafter.max_depth), 1.0, ())
        objective.backward()
        grown = [parameter.grad for parameter in drafter.parameters() if parameter.grad is not None]
        assert {gradient.dtype for gradient in grown} == {torch.float32}
        gradients[precision] = torch.cat([gradient.flatten() for gradient in grown])
    torch.testing.assert_close(losses["fp32"], losses["bf16"], atol=0, rtol=0.02)
    assert torch.nn.functional.cosine_similarity(gradients["fp32"], gradients["bf16"], dim=0) > 0.99
    chosen = "bf16" if multiplies_bf16(torch.device("cpu")) else "fp32"
    assert torch.equal(gradients["auto"], gradients[chosen])


@pytest.mark.parametrize("name", ["medusa", "mlp", "eagle3"])
def test_depths_count_by_the_decay_and_are_logged_in_full(name: str):
    """The first step of AdamW is blind to the gradient's size, so gradients are compared."""
    full = make(name, decay=1.0)
    loss_N = one_step(full, 0.0)
    decayed = make(name, decay=0.5)
    assert torch.equal(one_step(decayed, 0.0), loss_N)
    step = TrainingStep(decayed, toy.target(), OptimizerSection(precision="fp32"), DistillationSection())
    plain = TrainingStep(full, toy.target(), OptimizerSection(precision="fp32"), DistillationSection())
    batch = collate(windows(), 99, full.max_depth)
    shares_N = torch.ones(full.max_depth)
    task = draw_roots(batch, full.max_depth, None, ())
    objective, found_N, _ = step.compute_loss(task, shares_N, 1.0, ())
    weights_N = torch.tensor([0.5**depth for depth in range(len(found_N))])
    torch.testing.assert_close(objective, (found_N * weights_N).sum())
    torch.testing.assert_close(plain.compute_loss(task, shares_N, 1.0, ())[0], found_N.sum())


def test_defaults_of_the_families():
    assert {name: make(name).config.decay for name in ("medusa", "hydra", "mlp", "eagle3", "firp")} == {
        "medusa": 0.8, "hydra": 1.0, "mlp": 1.0, "eagle3": 0.8, "firp": 1.0,
    }


def test_an_unknown_divergence_is_refused():
    with pytest.raises(DraftsmithError, match=r"recipe key distillation\.divergence"):
        build_recipe({"distillation": {"divergence": "kl"}})
