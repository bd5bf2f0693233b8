"""The native speculator against the PyTorch that says what it computes. B rows, F feature width."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from draftsmith.drafters.heads.mlp import MLPSpeculator
from draftsmith.drafters.heads.mlp_config import MLPConfig
from draftsmith.native import LIBRARY, why_missing
from draftsmith.plan import Plan
from draftsmith.targets import Target
from draftsmith.types import DraftsmithError
from tests.helpers.contract import check_draft
from tests.helpers.native_toy import PLANS, certain_rows, context_for, contexts_for, guesses, sampled
from tests.helpers.tiny import VOCABULARY, WIDTH, packer, tiny_model

if not LIBRARY:
    pytest.skip(why_missing(), allow_module_level=True)

VARIANTS = {
    "untied": {},
    "tied and scaled": {"tie_weights": True, "scale_input": True},
    "narrow": {"inner_dim": 12},
    "wide": {"inner_dim": 144},
    "of an odd width": {"inner_dim": 13},
    "state only": {"condition_on_tokens": False},
    "target's tables": {"tie_to_target": True},
    "draft vocabulary": {"draft_vocab_size": 40},
    "target's draft vocabulary": {"draft_vocab_size": 40, "tie_to_target": True, "tie_weights": True},
}
@cache
def target() -> Target:
    return Target(tiny_model(seed=4).bfloat16(), name="tiny-llama")


def speculator(seed: int, **options: object) -> MLPSpeculator:
    """Make a bf16 speculator whose heads tell tokens well apart, and whose norms do something."""
    torch.manual_seed(seed)
    config = MLPConfig(hidden_size=WIDTH, vocab_size=VOCABULARY, n_predict=4, **options)  # type: ignore[arg-type]
    tokens = torch.randperm(VOCABULARY)[: config.draft_vocab_size] if config.draft_vocab_size else None
    made = MLPSpeculator(config, tokens)
    for name, parameter in made.named_parameters():
        if name.startswith("ln"):
            parameter.data += 0.3 * torch.randn_like(parameter)
        elif name.startswith("head"):
            parameter.data *= 6
    made = made.bfloat16().requires_grad_(False)
    made.bind(target())
    return made


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_native_guesses_are_those_of_the_written_out_stages(name: str, plan: Plan):
    made = speculator(0, **VARIANTS[name])
    native = copy.deepcopy(made)
    native.pack(packer())
    assert made.can_compile and not native.can_compile, "one operator drafts"
    context, parts = contexts_for((1, 3, 120), 5, WIDTH)
    tokens_BN, parents_BN, certain_B = certain_rows(made, context, plan)
    for begin, end in parts:
        draft, sure_B = native.propose(context.part(begin, end), plan), certain_B[begin:end]
        check_draft(draft, plan, end - begin, VOCABULARY)
        assert (draft.depth, draft.branching) == (plan.depth, plan.branching)
        for found_BN, expected_BN in zip(guesses(draft, plan), (tokens_BN, parents_BN), strict=True):
            assert torch.equal(found_BN[sure_B], expected_BN[begin:end][sure_B])
    assert certain_B.sum() >= 3


@pytest.mark.parametrize("plan", [Plan((1, 1, 1)), Plan((2, 2, 1)), Plan((3, 2, 2), paths=4, beam=2)], ids=str)
@pytest.mark.parametrize("name", ["narrow", "target's draft vocabulary"])
def test_native_guesses_share_the_targets_noise(name: str, plan: Plan):
    made = speculator(0, **VARIANTS[name])
    native = copy.deepcopy(made)
    native.pack(packer())
    context = sampled(contexts_for((60,), 5, WIDTH)[0])
    tokens_BN, parents_BN, certain_B = certain_rows(made, context, plan)
    found = native.propose(context, plan)
    assert found.q_BMV is None and torch.equal(found.tokens_BN[certain_B], tokens_BN[certain_B])
    assert torch.equal(found.parents_BN[certain_B], parents_BN[certain_B])
    assert (certain_B & (context.temperature_B > 0)).sum() >= 3


def test_a_beam_without_a_limit_of_paths_keeps_what_it_did_not_expand():
    plan, context = Plan((3, 3, 2), beam=2), context_for(24, 5, WIDTH, 3)
    made = speculator(0)
    native = copy.deepcopy(made)
    native.pack(packer())
    tokens_BN, parents_BN, certain_B = certain_rows(made, context, plan)
    draft = native.propose(context, plan)
    assert certain_B.any()
    assert torch.equal(draft.parents_BN[certain_B], parents_BN[certain_B])
    assert torch.equal(draft.tokens_BN[certain_B], tokens_BN[certain_B])


@pytest.mark.parametrize("plan", [Plan((1, 1, 1)), Plan((4, 2, 1), paths=4), Plan((3, 3, 2), paths=5, beam=4)], ids=str)
def test_a_row_guesses_the_same_in_any_company(instructions: str, threads: Callable[[int], None], plan: Plan):
    native = speculator(1, inner_dim=48, draft_vocab_size=77)
    native.pack(packer())
    context = context_for(9, 5, WIDTH, 4)
    together = native.propose(context, plan)
    for b in (0, 4, 8):
        alone = replace(
            context, tokens_BT=context.tokens_BT[b : b + 1], features_BTF=context.features_BTF[b : b + 1],
            counts_B=context.counts_B[b : b + 1],
        )
        draft = native.propose(alone, plan)
        assert torch.equal(draft.tokens_BN[0], together.tokens_BN[b])
        assert torch.equal(draft.parents_BN[0], together.parents_BN[b])
    again = native.propose(context, plan)
    threads(2)
    shared = native.propose(context, plan)
    for other in (again, shared):
        assert torch.equal(other.tokens_BN, together.tokens_BN)
    assert torch.equal(again.parents_BN, together.parents_BN)


@pytest.mark.parametrize(("width", "inner"), [(32, 12), (33, 12), (32, 13)])
def test_memory_of_an_earlier_context_cannot_matter(width: int, inner: int):
    """NaN in one context, then a clean one of fewer rows."""
    torch.manual_seed(0)
    config = MLPConfig(hidden_size=width, vocab_size=VOCABULARY, inner_dim=inner, n_predict=3)
    native = MLPSpeculator(config).bfloat16().requires_grad_(False)
    native.pack(packer())
    context, plan = context_for(2, 3, width, 0), Plan((3, 2), paths=4)
    expected = native.propose(context, plan)
    spoilt = context_for(7, 3, width, 1)
    spoilt.features_BTF.fill_(torch.nan)
    native.propose(spoilt, plan)
    found = native.propose(context, plan)
    assert torch.equal(found.tokens_BN, expected.tokens_BN) and torch.equal(found.parents_BN, expected.parents_BN)


def test_plans_that_native_code_does_not_know_go_the_other_way():
    made = speculator(0)
    native = copy.deepcopy(made)
    native.pack(packer())
    context = context_for(24, 5, WIDTH, 2)
    sampled = native.propose(replace(context, temperature_B=torch.ones(24)), Plan((2, 2), sampled=True))
    check_draft(sampled, Plan((2, 2), sampled=True), 24, VOCABULARY)
    plan = Plan(choices=((0,), (1,), (0, 0)))
    static = native.propose(context, plan)
    tokens_BN, _, certain_B = certain_rows(made, context, plan)
    assert certain_B.any() and torch.equal(static.tokens_BN[certain_B], tokens_BN[certain_B])
    assert native.propose(context, Plan()).tokens_BN.shape == (24, 0)
    with pytest.raises(DraftsmithError, match="the plan drafts 5 tokens ahead"):
        native.propose(context, Plan((1,) * 5))


def test_a_context_that_does_not_fit_is_refused():
    native = speculator(0)
    native.pack(packer())
    context, plan = context_for(2, 5, WIDTH, 0), Plan((2, 1))

    def refused(error: type[Exception], message: str, **changes: Tensor) -> None:
        with pytest.raises(error, match=f"draftsmith: {message}"):
            native.propose(replace(context, **changes), plan)

    refused(RuntimeError, "the context has to be", features_BTF=context.features_BTF[:, :, 1:])
    refused(RuntimeError, "the context has to be", features_BTF=context.features_BTF[:, :, 1:].contiguous())
    refused(RuntimeError, "the context has to be", tokens_BT=context.tokens_BT.int())
    refused(RuntimeError, "the context has to be", counts_B=context.counts_B[:1])
    refused(IndexError, "a row has 6 tokens", counts_B=torch.tensor([1, 6]))
    refused(IndexError, "a row has 0 tokens", counts_B=torch.tensor([0, 1]))
    refused(IndexError, f"there is no token {VOCABULARY}", tokens_BT=torch.full((2, 5), VOCABULARY))
    with pytest.raises(RuntimeError, match=f"draftsmith: a node cannot have {VOCABULARY + 1} children"):
        native.propose(context, Plan((VOCABULARY + 1,)))
