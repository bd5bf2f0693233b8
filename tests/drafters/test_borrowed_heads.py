"""Whoever scores with the target's own head says what the target says of the same state: scaled and capped as there.

Shapes: B texts, T tokens, F width, V vocabulary, W drafted vocabulary.
"""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    HyperCLOVAXConfig,
    HyperCLOVAXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from draftsmith.drafters.attention.eagle import Eagle
from draftsmith.drafters.heads.firp import FIRPDrafter
from draftsmith.drafters.heads.hydra import HydraDrafter
from draftsmith.drafters.heads.medusa import MedusaDrafter
from draftsmith.drafters.heads.mlp import MLPSpeculator
from draftsmith.drafters.registry import family_named
from draftsmith.drafters.trainable.batch import TrainingBatch
from draftsmith.drafters.trainable.drafter import TrainableDrafter
from draftsmith.targets import Target
from draftsmith.targets.logit_form import LogitForm
from tests.helpers.contract import check_drafter

VOCABULARY = 96
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}
MODELS: dict[str, tuple[Callable[[], PreTrainedModel], LogitForm]] = {
    "cohere": (lambda: CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.3)), LogitForm(0.3)),
    "cohere2": (lambda: Cohere2ForCausalLM(Cohere2Config(**SIZES, logit_scale=0.0625)), LogitForm(0.0625)),
    "granite": (lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=6.0)), LogitForm(1 / 6)),
    "hyperclovax": (lambda: HyperCLOVAXForCausalLM(HyperCLOVAXConfig(**SIZES, logits_scaling=0.2)), LogitForm(0.2)),
    "gemma2": (
        lambda: Gemma2ForCausalLM(
            Gemma2Config(**SIZES, final_logit_softcapping=2.0, query_pre_attn_scalar=8, sliding_window=64)
        ),
        LogitForm(cap=2.0),
    ),
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**SIZES)), LogitForm()),
    "llama with a key it passes by": (lambda: LlamaForCausalLM(LlamaConfig(**SIZES, logit_scale=0.3)), LogitForm()),
}
FORMED = ("cohere", "granite", "gemma2")


def new_model(name: str) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODELS[name][0]()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.15)
    return model.float().eval().requires_grad_(False)


@cache
def target(name: str) -> Target:
    return Target(new_model(name), name=name, native=False)


def make(family: str, name: str, drafted: Tensor | None = None, **options: object) -> TrainableDrafter:
    chosen = family_named(family)
    size = {} if drafted is None else {"draft_vocab_size": len(drafted)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = chosen.make(chosen.config.read({**options, **size}, ""), target(name), drafted)
    assert isinstance(made, TrainableDrafter)
    return made.float().eval()


def said(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, and the target's states and logits of them."""
    tokens_BT = torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(5))
    features_BTF, logits_BTV = target(name).encode(tokens_BT, logits=True)
    assert logits_BTV is not None
    return tokens_BT, features_BTF, logits_BTV


@pytest.mark.parametrize("name", MODELS)
def test_the_form_is_found(name: str):
    assert target(name).logit_form == MODELS[name][1]
    _, features_BTF, logits_BTV = said(name)
    products_BTV = features_BTF @ target(name).head_weight_VF.T
    torch.testing.assert_close(target(name).logit_form(products_BTV), logits_BTV, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("drafted", [None, torch.tensor([5, 2, 90, 33, 17])], ids=["whole", "drafted"])
@pytest.mark.parametrize("name", [*FORMED, "llama"])
def test_borrowed_heads_say_what_the_target_says(name: str, drafted: Tensor | None):
    _, features_BTF, logits_BTV = said(name)
    expected_BTW = logits_BTV if drafted is None else logits_BTV[..., drafted]
    eagle, firp = make("eagle", name, drafted), make("firp", name, drafted)
    medusa = make("medusa", name, drafted, tie_to_target=True, num_heads=2)
    mlp = make("mlp", name, drafted, tie_to_target=True, inner_dim=32, n_predict=2)
    assert isinstance(eagle, Eagle) and isinstance(medusa, MedusaDrafter)
    assert isinstance(mlp, MLPSpeculator) and isinstance(firp, FIRPDrafter)
    for scores_BTW in (
        eagle.score(features_BTF), medusa.score(1, features_BTF), mlp.score(1, features_BTF),
        firp.score(features_BTF, firp.upper), firp.score(features_BTF, firp.upper.differentiable),
    ):
        torch.testing.assert_close(scores_BTW, expected_BTW, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["cohere", "granite"])
def test_new_heads_begin_with_the_target_s_scale(name: str):
    _, features_BTF, logits_BTV = said(name)
    for family in ("medusa", "hydra"):
        heads = make(family, name, num_heads=1)
        assert isinstance(heads, MedusaDrafter | HydraDrafter)
        scores_BTV = heads.projections()[0](features_BTF)
        torch.testing.assert_close(scores_BTV, logits_BTV, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FORMED)
def test_eagle_learns_from_what_the_target_says(name: str):
    """A layer that put out the target's own next states would have its entropy as the loss, and nothing else."""
    tokens_BT, features_BTF, logits_BTV = said(name)
    drafter = make("eagle", name, feature_weight=0.0, token_weight=1.0, noise=0.0)
    assert isinstance(drafter, Eagle)
    positions_BP = torch.arange(7).expand(2, -1)
    batch = TrainingBatch(tokens_BT[:, 1:], features_BTF[:, :-1], positions_BP)
    state_BPF = drafter.unroll(batch.tokens_BT, batch.features_BTF, 1, positions_BP)[0]
    log_q_BPV = drafter.score(state_BPF).log_softmax(-1)
    p_BPV = logits_BTV[:, 1:8].softmax(-1)
    torch.testing.assert_close(drafter.losses(batch)[0][0], -(p_BPV * log_q_BPV).sum(-1).mean(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["eagle", "medusa", "firp"])
def test_the_text_stays_the_target_s(family: str):
    options = {"tie_to_target": True} if family == "medusa" else {}
    drafter = make(family, "granite", **options)
    check_drafter(lambda: drafter.for_decoding(target("granite")), target("granite"), new_model("granite"))


@pytest.mark.parametrize("family", ["medusa", "mlp"])
def test_native_drafts_leave_no_scale_out(family: str):
    """The operators rank paths by products alone, so PyTorch drafts where these are no logits."""
    options = {"medusa": {"num_heads": 2}, "mlp": {"inner_dim": 32, "n_predict": 2}}[family]
    for name, native in (("granite", False), ("llama", True)):
        served = Target(new_model(name).bfloat16(), name=name)
        if not served.backend.native:
            pytest.skip("no native kernels here")
        chosen = family_named(family)
        made = chosen.make(chosen.config.read({**options, "tie_to_target": True}, ""), served, None)
        assert isinstance(made, TrainableDrafter)
        assert (made.for_decoding(served)._native is not None) == native
