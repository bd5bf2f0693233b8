"""The native operator of EAGLE's layer against the PyTorch that says what it computes."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from draftsmith.drafters.attention.eagle import Eagle
from draftsmith.drafters.attention.eagle3 import Eagle3
from draftsmith.drafters.attention.eagle_config import Eagle3Config, EagleConfig
from draftsmith.drafters.attention.feature_drafter import FeatureDrafter
from draftsmith.plan import Plan
from draftsmith.targets import Target
from draftsmith.types import Context
from tests.helpers.native_toy import context_for, sampled
from tests.helpers.tiny import VOCABULARY, WIDTH, packer, tiny_model

SOME = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))[:40]
CHAIN = Plan((1, 1, 1, 1))


@cache
def target() -> Target:
    return Target(tiny_model(seed=4).bfloat16(), name="tiny-llama")


def eagle(**options: object) -> FeatureDrafter:
    return settled(Eagle.new(EagleConfig(depth=4, **options), target(), SOME if options else None))


def eagle3(**options: object) -> FeatureDrafter:
    return settled(Eagle3.new(Eagle3Config(depth=4, **options), target(), SOME))


def settled(made: FeatureDrafter) -> FeatureDrafter:
    """Draw every weight anew and round all to bf16."""
    generator = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        parameter.data = drawn * parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 1 + 0.3 * drawn
    made = made.bfloat16().requires_grad_(False)
    made.bind(target())
    return made


VARIANTS: dict[str, Callable[[], FeatureDrafter]] = {
    "eagle": eagle,
    "eagle with a bias, draft vocabulary": lambda: eagle(bias=True, draft_vocab_size=40),
    "eagle3": lambda: eagle3(draft_vocab_size=40),
    "eagle3 from normal states": lambda: eagle3(draft_vocab_size=40, norm_before_residual=True),
}


def native_form(made: FeatureDrafter) -> FeatureDrafter:
    """Return a copy whose chains the operator makes, its weights bf16."""
    packed = copy.deepcopy(made)
    packed.pack(packer())
    return packed


def contexts(batch: int, taps: int, seed: int) -> list[Context]:
    """Make a ragged prompt and then two steps of as many rows."""
    found, lengths_B = [], torch.ones(batch, dtype=torch.long)
    for step, width in enumerate((9, 3, 4)):
        context = context_for(batch, width, taps * WIDTH, seed + step)
        lengths_B = lengths_B + context.counts_B
        found.append(replace(context, lengths_B=lengths_B))
    return found


def drafts(drafter: FeatureDrafter, steps: list[Context], plan: Plan = CHAIN, follows: bool = False) -> Tensor:
    """Draft at every step; tokens (steps, B, N). With `follows` nothing is drafted at the second."""
    drafter.attach(target().new_cache(len(steps[0].counts_B), 64), plan)
    tokens = []
    for number, context in enumerate(steps):
        if follows and number == 1:
            drafter.follow(context)
        else:
            tokens.append(drafter.propose(context, plan).tokens_BN)
    return torch.stack(tokens)


def wide(steps: list[Context]) -> list[Context]:
    return [replace(context, features_BTF=context.features_BTF.double()) for context in steps]


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_native_chains_are_those_of_the_written_out_layer(name: str, follows: bool):
    made = VARIANTS[name]()
    native, compared = native_form(made), 0
    for batch, seed in ((1, 0), (5, 10), (24, 20)):
        steps = contexts(batch, len(made.taps), seed)
        exact = drafts(copy.deepcopy(made).double(), wide(steps), follows=follows)
        certain = (drafts(made, steps, follows=follows) == exact).all(2)
        generator = torch.Generator().manual_seed(0)
        for _ in range(16):
            moved = copy.deepcopy(made).double()
            for tensor in {id(t): t for t in (*moved.parameters(), *moved.buffers()) if t.is_floating_point()}.values():
                tensor *= 1 + 2**-7 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            certain &= (drafts(moved, wide(steps), follows=follows) == exact).all(2)
        assert torch.equal(drafts(native, steps, follows=follows)[certain], exact[certain])
        compared += int(certain.sum())
    assert compared >= 20


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_native_chains_share_the_targets_noise(name: str):
    made = VARIANTS[name]()
    native, compared = native_form(made), 0
    for batch, seed in ((5, 10), (24, 20)):
        steps = [sampled(context) for context in contexts(batch, len(made.taps), seed)]
        exact = drafts(copy.deepcopy(made).double(), wide(steps))
        certain = (drafts(made, steps) == exact).all(2)
        generator = torch.Generator().manual_seed(0)
        for _ in range(16):
            moved = copy.deepcopy(made).double()
            for tensor in {id(t): t for t in (*moved.parameters(), *moved.buffers()) if t.is_floating_point()}.values():
                tensor *= 1 + 2**-7 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            certain &= (drafts(moved, wide(steps)) == exact).all(2)
        assert torch.equal(drafts(native, steps)[certain], exact[certain])
        compared += int((certain & (steps[0].temperature_B > 0)).sum())
    assert compared >= 10


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_a_row_guesses_the_same_in_any_company(threads: Callable[[int], None], name: str):
    native = native_form(VARIANTS[name]())
    steps = contexts(6, len(native.taps), 3)
    together = drafts(native, steps)
    for b in (0, 2, 5):
        alone = [
            replace(
                context, tokens_BT=context.tokens_BT[b : b + 1], features_BTF=context.features_BTF[b : b + 1],
                counts_B=context.counts_B[b : b + 1], lengths_B=context.lengths_B[b : b + 1],
                rows_B=context.rows_B[b : b + 1],
            )
            for context in steps
        ]
        assert torch.equal(drafts(native, alone)[:, 0], together[:, b])
    threads(2)
    assert torch.equal(drafts(native, steps), together)


def test_rows_keep_their_slots_when_others_leave():
    native = native_form(VARIANTS["eagle"]())
    steps = contexts(4, 1, 5)
    expected = drafts(native, steps)
    native.attach(target().new_cache(4, 64), CHAIN)
    for context in steps[:2]:
        native.propose(context, CHAIN)
    native.reset_rows([1])
    left = torch.tensor([0, 3, 2])
    last = steps[2]
    staying = replace(
        last, tokens_BT=last.tokens_BT[left], features_BTF=last.features_BTF[left], counts_B=last.counts_B[left],
        lengths_B=last.lengths_B[left], rows_B=last.rows_B[left], slots_B=left,
    )
    assert torch.equal(native.propose(staying, CHAIN).tokens_BN, expected[2][left])


def test_trees_and_samples_go_the_other_way():
    made = VARIANTS["eagle"]()
    native, steps = native_form(made), contexts(3, 1, 7)
    for plan in (Plan((2, 2)), Plan((2, 1), sampled=True), Plan((1, 1, 1), nodes=2)):
        drafts(native, steps, plan)
    native.attach(target().new_cache(3, 64), CHAIN)
    assert native.propose(steps[0], CHAIN).tokens_BN.shape == (3, 4)
    # What a chain has begun, a tree goes on from.
    assert native.propose(steps[1], Plan((2, 2))).tokens_BN.shape == (3, 6)


@pytest.mark.parametrize("plan", [CHAIN, Plan((8, 4, 2, 1), beam=8), Plan((3, 3), sampled=True)], ids=str)
def test_rows_that_nothing_was_drafted_for_at_first_get_the_same_drafts_later(plan: Plan):
    """As when an engine is too busy to draft, and then is not."""
    native, steps, found = native_form(VARIANTS["eagle"]()), contexts(8, 1, 7), []
    for first in (lambda: native.propose(steps[0], plan), lambda: native.follow(steps[0])):
        native.attach(target().new_cache(8, 64), plan)
        first()
        found.append(torch.cat([native.propose(context, plan).tokens_BN for context in steps[1:]]))
    assert torch.equal(*found)


def test_what_does_not_fit_is_refused():
    native, (context, *_) = native_form(VARIANTS["eagle"]()), contexts(2, 1, 0)
    native.attach(target().new_cache(2, 4), CHAIN)
    with pytest.raises(IndexError, match="do not fit a slot of 4"):
        native.propose(replace(context, counts_B=torch.tensor([9, 1]), lengths_B=torch.tensor([10, 2])), CHAIN)
    native.attach(target().new_cache(2, 64), CHAIN)
    with pytest.raises(IndexError, match=f"there is no token {VOCABULARY}"):
        native.propose(replace(context, tokens_BT=torch.full_like(context.tokens_BT, VOCABULARY)), CHAIN)
    with pytest.raises(RuntimeError, match="the context has to be"):
        native.propose(replace(context, features_BTF=context.features_BTF[:, :, 1:]), CHAIN)
