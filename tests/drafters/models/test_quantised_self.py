"""Copies of the target in fewer bits that draft for it, over its own cache where it is in bf16."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.drafters.draws import best_two, draw_like_target
from draftsmith.drafters.models.agreement import chance_of, kept_spread, spread_of
from draftsmith.drafters.models.model_drafter import DraftModel, ModelDrafter
from draftsmith.drafters.models.quantised_self import QuantisedSelf
from draftsmith.drafters.models.self_drafter import with_others
from draftsmith.drafters.registry import load_drafter
from draftsmith.engine import Engine
from draftsmith.native import LIBRARY, why_missing
from draftsmith.native.layers import Int4Linear, Int8Linear, PackedLinear
from draftsmith.plan import Plan
from draftsmith.targets import Target
from draftsmith.targets.calibration import DAMPING, factors_of, own_texts, products_of
from draftsmith.types import DraftsmithError, SamplingParams
from tests.drafters.lookup.lookup_toy import context_of
from tests.helpers.contract import FEW, check_drafter, check_joint_distribution
from tests.helpers.heads_toy import demo_target
from tests.helpers.tiny import prompts, tiny_model, tiny_target

if not LIBRARY:
    pytest.skip(why_missing(), allow_module_level=True)

LAYER = "model.layers.1.mlp.down_proj"
COPIES = ("int8-self", "int4-self")
TREE = Plan((3, 2, 1))
CONFIDENCE = Plan((3, 3, 3), beam=2, nodes=7)
CHAIN = Plan((1, 1, 1), sampled=True)
UNSURE = Plan((1,) * 6, confidence=0.6)
SAMPLED_TREE = Plan((2, 2), sampled=True)
# Two nodes have guesses under them, then one.
NARROWING = Plan(choices=((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)))


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_drafts_for_a_target_of_any_dtype(name: str):
    """With a cache of its own, because the target's is not in bf16."""
    drafter = load_drafter(name, tiny_target())
    assert isinstance(drafter, DraftModel)
    check_drafter(lambda: load_drafter(name, tiny_target()), tiny_target(), tiny_model(), [None, CHAIN])


@cache
def bf16_target(name: str, native: bool = True) -> Target:
    return Target(tiny_model(name, dtype=torch.bfloat16), name=name, native=native)


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("plan", [None, TREE, CONFIDENCE, CHAIN, SAMPLED_TREE, NARROWING, UNSURE], ids=str)
def test_a_copy_over_the_target_s_cache_changes_no_text(name: str, architecture: str, plan: Plan | None):
    """Rows of unlike lengths that join, leave and reach past a window, greedy and sampled: the plain text."""
    target = bf16_target(architecture)
    questions, lengths = prompts(6), [20, 7, 18, 12, 20, 1]
    drafter = load_drafter(name, target)
    assert isinstance(drafter, QuantisedSelf) and drafter.borrows_layers and not drafter.reads_prompt
    exact = plan is None or not plan.sampled
    for temperature in (0.0, 0.8) if exact else (0.0,):
        params = [
            SamplingParams(max_tokens=length, temperature=temperature, top_p=0.95, seed=seed)
            for seed, length in enumerate(lengths)
        ]
        plain = [c.tokens for c in Engine(target, max_batch=3).generate(questions, params)]
        for batch in (1, 4):
            found = Engine(target, drafter, max_batch=batch).generate(questions, params, plan)
            assert [c.tokens for c in found] == plain
            assert sum(map(sum, (c.accepted_lengths for c in found))) > 0


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral"])
def test_a_copy_rounded_by_the_target_s_own_text_changes_no_text(architecture: str):
    """Greedy and sampled, as chains and as trees, with layers of every kind."""
    target, questions = bf16_target(architecture), prompts(4)
    drafter = load_drafter("int4-self:guesses=3,calibrate=100", target)
    for temperature, plan in ((0.0, None), (0.0, TREE), (0.8, None), (0.8, CONFIDENCE)):
        params = [SamplingParams(max_tokens=16, temperature=temperature, seed=seed) for seed in range(4)]
        plain = [c.tokens for c in Engine(target, max_batch=3).generate(questions, params)]
        found = Engine(target, drafter, max_batch=3).generate(questions, params, plan)
        assert [c.tokens for c in found] == plain and sum(map(sum, (c.accepted_lengths for c in found))) > 0


def layer_of_copy(target: Target, tokens: int) -> Int4Linear:
    drafter = load_drafter(f"int4-self:calibrate={tokens}", target)
    assert isinstance(drafter, ModelDrafter)
    layer = drafter.model.model.get_submodule(LAYER)
    assert isinstance(layer, Int4Linear)
    return layer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_own_text_makes_a_copy_nearer_and_the_same_each_time(dtype: torch.dtype):
    """By what a layer makes of the inputs that the target's own text brings it."""
    target = Target(tiny_model("llama", dtype=dtype), name="tiny")
    plain, once, again, other = (layer_of_copy(target, tokens) for tokens in (0, 4096, 4096, 600))
    assert torch.equal(once.packed, again.packed)
    assert not torch.equal(once.packed, plain.packed) and not torch.equal(once.packed, other.packed)
    text_BT = own_texts(target, 1000)
    assert text_BT.shape == (16, 63) and torch.equal(text_BT, own_texts(target, 1000))
    rows: list[torch.Tensor] = []
    layer = target.model.get_submodule(LAYER)
    hook = layer.register_forward_pre_hook(lambda _, given: rows.append(given[0].flatten(0, 1).double()))
    target.encode(text_BT, by_model=True)
    hook.remove()
    right_RN = rows[0] @ layer.weight.double().T
    off = [(rows[0] @ copy.weight.double().T - right_RN).square().mean().item() for copy in (plain, once)]
    assert off[1] < 0.9 * off[0]


@pytest.mark.parametrize(
    ("name", "why"),
    [("int4-self:calibrate=-1", "calibrate"), ("int4-self:calibrate=100000", "calibrate"),
     ("int4-self:calibrate=some", "calibrate"), ("int8-self:calibrate=512", "calibrate")],
)
def test_a_calibration_that_cannot_be_is_refused(name: str, why: str):
    with pytest.raises(DraftsmithError, match=why):
        load_drafter(name, bf16_target("llama"))


@pytest.mark.parametrize(
    "name", ["int8-self", "int4-self:calibrate=100", pytest.param("int4-self", marks=pytest.mark.slow)]
)
def test_sampled_drafts_of_a_copy_keep_the_distribution(name: str):
    target = Target(tiny_model("llama", vocabulary=FEW, dtype=torch.bfloat16))
    check_joint_distribution(target, load_drafter(name, target))


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3"])
def test_a_copy_holds_little_beside_the_target(architecture: str, native: bool):
    """Its packed layers, and nothing of what the target holds as it is: norms, and embeddings that are not packed."""
    target = bf16_target(architecture, native)
    for name, kind in zip(COPIES, (Int8Linear, Int4Linear), strict=True):
        drafter = load_drafter(name, target)
        assert isinstance(drafter, QuantisedSelf)
        layers = [part for part in drafter.model.model.modules() if isinstance(part, kind)]
        biases = 0 if native else sum(part.bias_N.nbytes for part in layers if part.bias_N is not None)
        packed = sum(tensor.nbytes for part in layers for tensor in part.parts())
        other = drafter.memory_bytes() - packed - biases
        # Rotary frequencies; and where head and embedding are one table that stays bf16, the head, packed by the copy
        # where the target has not packed it.
        head = drafter.model.model.get_output_embeddings()
        own = 0 if native or isinstance(head, kind) else head.packed.nbytes
        assert 0 <= other - own < 1000


def test_a_copy_says_what_it_needs():
    target = Target(tiny_model("llama"))
    for name in COPIES:
        drafter = load_drafter(f"{name}:guesses=2", target)
        assert drafter.default_plan() == Plan((1, 1)) and drafter.parameter_count() == target.weights
    with pytest.raises(DraftsmithError, match="int4-self:guesses is 0; use at least 1"):
        load_drafter("int4-self:guesses=0", target)


@pytest.mark.parametrize("architecture", ["gpt2", "gemma3"])
def test_chains_end_early_without_an_operator_too(architecture: str):
    """In models of which only the layers are native: greedy rows among sampled ones keep their texts."""
    target = bf16_target(architecture)
    copy = QuantisedSelf(target, "int4", guesses=4)
    copy.spread = 1.0
    params = [SamplingParams(max_tokens=12, temperature=0.8 * (row % 2), seed=row) for row in range(4)]
    plain = [c.tokens for c in Engine(target, max_batch=1).generate(prompts(4), params)]
    found = Engine(target, copy, max_batch=1).generate(prompts(4), params, Plan((1,) * 6, confidence=0.8))
    assert [c.tokens for c in found] == plain and sum(map(sum, (c.accepted_lengths for c in found))) > 0
    assert any(c.statistics.drafted < 6 * c.statistics.steps for c in found)


def test_the_spread_says_how_often_a_copy_is_right():
    """However far its best token leads, about as many choices are the target's as follow from the spread."""
    target = demo_target()
    tokens_BT = own_texts(target, 2048)
    heat_R, seeds_R = torch.full((tokens_BT.numel(),), 0.8), torch.arange(tokens_BT.numel())
    for name in COPIES:
        drafter = load_drafter(name, target)
        assert isinstance(drafter, QuantisedSelf)
        own_BTV, whole_BTV = (one.encode(tokens_BT, (), logits=True)[1] for one in (drafter.model, target))
        assert own_BTV is not None and whole_BTV is not None
        own_RV, whole_RV = own_BTV.flatten(0, 1).float(), whole_BTV.flatten(0, 1).float()
        for heats_R in (torch.zeros_like(heat_R), heat_R):
            two_R2, lead_R = best_two(own_RV, heats_R, seeds_R, seeds_R)
            stays_R = two_R2[:, 0] == draw_like_target(whole_RV, heats_R, seeds_R, seeds_R)
            for least, most in ((0.25, 0.75), (0.75, 1.5), (3.0, 9.0)):  # in spreads
                near_R = (lead_R >= least * drafter.spread) & (lead_R < most * drafter.spread)
                expected = float(chance_of(lead_R[near_R], drafter.spread).mean())
                assert near_R.sum() > 40
                assert float(stays_R[near_R].double().mean()) == pytest.approx(expected, abs=0.12)


def test_other_tokens_are_kept_from_the_end_where_room_is_short():
    context = context_of({0: [1, 2]})
    draft = with_others([[5, 6, 7, -1]], [[15, 16, 17, -1]], context, Plan((1,) * 4, confidence=0.5))
    assert draft.tokens_BN.tolist() == [[5, 6, 7, 17]] and draft.parents_BN.tolist() == [[-1, 0, 1, 1]]
    assert draft.depth == 3 and not draft.is_chain
    draft = with_others([[5, 6, 7]], [[15, -1, -1]], context, Plan((1,) * 4, confidence=0.5))
    assert draft.tokens_BN.tolist() == [[5, 6, 7, 15]] and draft.parents_BN.tolist() == [[-1, 0, 1, -1]]
    draft = with_others([[5, 6]], [[15, 16]], context, Plan((1, 1), confidence=0.5))
    assert draft.tokens_BN.tolist() == [[5, 6]] and draft.is_chain, "there is no room"


def test_a_copy_of_a_broken_target_has_no_spread():
    model = tiny_model("llama", dtype=torch.bfloat16)
    torch.nn.init.constant_(model.lm_head.weight, torch.nan)
    target, healthy = Target(model), bf16_target("llama")
    assert spread_of(healthy.quantised("int4"), healthy) > 0
    assert spread_of(healthy.quantised("int4"), target) == 0.0
    assert chance_of(torch.tensor([0.0]), 0.0).tolist() == [1.0]


def test_a_spread_is_measured_once_for_a_target_and_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    first = load_drafter("int4-self", bf16_target("llama"))
    assert isinstance(first, QuantisedSelf) and first.spread > 0
    (kept,) = (tmp_path / "spreads").iterdir()
    kept.write_text(json.dumps({"spread": 7.0}))  # so that what was kept can be told from what is measured
    drafter = load_drafter("int4-self", Target(tiny_model("llama", dtype=torch.bfloat16)))
    assert isinstance(drafter, QuantisedSelf) and drafter.spread == 7.0, "another process with the same two"
    others = [load_drafter("int8-self", bf16_target("llama")), load_drafter("int4-self", bf16_target("qwen3"))]
    assert all(isinstance(other, QuantisedSelf) and other.spread not in (0.0, 7.0) for other in others)
    assert len(list((tmp_path / "spreads").iterdir())) == 3


@pytest.mark.parametrize(
    "held", ["", "{}", "[1]", '{"spread": null}', '{"spread": "x"}', '{"spread": NaN}', '{"spread": -1}']
)
def test_a_kept_spread_that_is_none_is_measured_again(held: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    target = bf16_target("llama")
    assert kept_spread(target, "int4", lambda: 0.5) == 0.5 == kept_spread(target, "int4", lambda: 0.25)
    (kept,) = (tmp_path / "spreads").iterdir()
    kept.write_text(held)
    assert kept_spread(target, "int4", lambda: 0.25) == 0.25
    assert json.loads(kept.read_text()) == {"spread": 0.25}


def test_without_a_cache_a_spread_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "file"))
    target = bf16_target("llama")
    assert kept_spread(target, "int4", lambda: 0.5) == 0.5
    assert kept_spread(target, "int4", lambda: 0.25) == 0.25


def test_a_row_draws_the_same_in_any_company(threads: Callable[[int], None]):
    target, plan = bf16_target("llama"), Plan((1, 1, 1), sampled=True)
    params = [SamplingParams(max_tokens=15, temperature=0.9, seed=row) for row in range(4)]
    texts = []
    for batch, count in ((1, 1), (4, 1), (4, 2)):
        threads(count)
        engine = Engine(target, load_drafter("int4-self", target), max_batch=batch)
        texts.append([c.tokens for c in engine.generate(prompts(4), params, plan)])
    assert texts[0] == texts[1] == texts[2]


def test_products_are_those_of_a_layer_s_own_inputs_within_blocks():
    """Layers that read the same inputs are told by one of them; a wide layer has blocks, the last one smaller."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=1100)).bfloat16()
    target, tokens_BT = Target(model, name="wide"), torch.arange(40).view(2, 20) % 30
    names = [name for name, one in target.model.named_modules() if isinstance(one, PackedLinear)]
    rows: dict[str, list[torch.Tensor]] = {}
    hooks = [
        target.model.get_submodule(name).register_forward_pre_hook(
            lambda _, given, name=name: rows.setdefault(name, []).append(given[0].flatten(0, -2).double())
        )
        for name in names
    ]
    found, readers = products_of(target, names, tokens_BT)
    for hook in hooks:
        hook.remove()
    assert sorted(name for some in readers.values() for name in some) == sorted(names)
    assert len(readers) < len(names) and all(first in some for first, some in readers.items())
    assert any(len(own_PW) > own_PW.shape[1] == 1024 for own_PW in found.values())
    for first, some in readers.items():
        for name in some:
            own_RK = torch.cat(rows[name])
            right_PP = torch.zeros(len(found[first]), len(found[first])).double()
            right_PP[: own_RK.shape[1], : own_RK.shape[1]] = own_RK.T @ own_RK / tokens_BT.numel()
            for begin in range(0, len(right_PP), 1024):
                own = slice(begin, min(begin + 1024, len(right_PP)))
                block_WW = found[first][own, : own.stop - begin]
                torch.testing.assert_close(block_WW.double(), right_PP[own, own], rtol=1e-4, atol=1e-6)
                lower_WW = factors_of(found[first])[own, : own.stop - begin].double()
                even_WW = torch.eye(len(block_WW), dtype=torch.float64)
                damped_WW = block_WW.double() / block_WW.diagonal().double().mean() + DAMPING * even_WW
                torch.testing.assert_close(lower_WW @ lower_WW.T @ damped_WW, even_WW, rtol=0, atol=1e-3)
