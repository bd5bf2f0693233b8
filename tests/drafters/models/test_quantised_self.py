"""Copies of the target in fewer bits that draft for it, over its own cache where it is in bf16."""

from functools import cache

import pytest
import torch

from draftsmith.drafters.models.model_drafter import DraftModel
from draftsmith.drafters.models.quantised_self import QuantisedSelf
from draftsmith.drafters.registry import load_drafter
from draftsmith.engine import Engine
from draftsmith.native import LIBRARY, why_missing
from draftsmith.native.layers import Int4Linear, Int8Linear
from draftsmith.plan import Plan
from draftsmith.targets import Target
from draftsmith.types import DraftsmithError, SamplingParams
from tests.helpers.contract import FEW, check_drafter, check_joint_distribution
from tests.helpers.tiny import prompts, tiny_model, tiny_target

if not LIBRARY:
    pytest.skip(why_missing(), allow_module_level=True)

COPIES = ("int8-self", "int4-self")
TREE = Plan((3, 2, 1))
CONFIDENCE = Plan((3, 3, 3), beam=2, nodes=7)
CHAIN = Plan((1, 1, 1), sampled=True)
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
@pytest.mark.parametrize("plan", [None, TREE, CONFIDENCE, CHAIN, SAMPLED_TREE, NARROWING], ids=str)
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


@pytest.mark.parametrize("name", COPIES)
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
        biases = sum(part.bias_N.nbytes for part in layers if part.bias_N is not None)
        packed = sum(tensor.nbytes for part in layers for tensor in part.parts())
        other = drafter.memory_bytes() - packed - biases
        # Rotary frequencies; and where head and embedding are one table that stays bf16, the head, packed once more.
        head = drafter.model.model.get_output_embeddings()
        own = 0 if isinstance(head, kind) else head.packed.nbytes
        assert 0 <= other - own < 1000


def test_a_copy_says_what_it_needs():
    target = Target(tiny_model("llama"))
    for name in COPIES:
        drafter = load_drafter(f"{name}:guesses=2", target)
        assert drafter.default_plan() == Plan((1, 1)) and drafter.parameter_count() == target.weights
    with pytest.raises(DraftsmithError, match="int4-self:guesses is 0; use at least 1"):
        load_drafter("int4-self:guesses=0", target)
