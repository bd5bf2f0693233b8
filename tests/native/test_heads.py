"""The native operator of heads against the PyTorch that says what Medusa, Hydra and recurrent drafters compute."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch

from draftsmith.drafters.grow import grow
from draftsmith.drafters.heads.base import HeadDrafter
from draftsmith.drafters.heads.hydra import HydraDrafter
from draftsmith.drafters.heads.medusa import MedusaDrafter
from draftsmith.drafters.heads.recurrent import RecurrentDrafter
from draftsmith.drafters.heads.recurrent_config import RecurrentConfig
from draftsmith.drafters.trainable.drafter import RowwiseDrafter
from draftsmith.native.heads import ALL, RESIDUAL, NativeHead, native_heads
from draftsmith.native.layers import PackedLinear
from draftsmith.plan import Plan
from draftsmith.targets import Target
from draftsmith.types import UNUSED, DraftsmithError
from tests.helpers.contract import check_draft
from tests.helpers.native_toy import (
    PLANS,
    PRUNED,
    certain_rows,
    context_for,
    contexts_for,
    guesses,
    paths_of,
    sampled,
)
from tests.helpers.tiny import VOCABULARY, WIDTH, packer, tiny_model

Maker = Callable[[], RowwiseDrafter]
SOME = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))[:40]


@cache
def target() -> Target:
    return Target(tiny_model(seed=4).bfloat16(), name="tiny-llama")


def heads(kind: type[HeadDrafter], **options: object) -> RowwiseDrafter:
    tokens = SOME if "draft_vocab_size" in options else None
    return settled(kind(kind.config_class(hidden_size=WIDTH, vocab_size=VOCABULARY, num_heads=4, **options), tokens))


def recurrent(width: int = WIDTH, **options: object) -> RowwiseDrafter:
    tokens = SOME if "draft_vocab_size" in options else None
    config = RecurrentConfig(hidden_size=width, vocab_size=VOCABULARY, beam_length=4, **options)  # type: ignore[arg-type]
    return settled(RecurrentDrafter(config, tokens))


def settled(made: RowwiseDrafter) -> RowwiseDrafter:
    """Draw every weight anew, heads so that they tell tokens well apart, and round all to bf16."""
    generator = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        scale = 2.0 if parameter.shape[0] in (VOCABULARY, len(SOME)) else 1.0
        drawn = torch.randn(parameter.shape, generator=generator)
        parameter.data = drawn * (scale * parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.3)
    made = made.bfloat16().requires_grad_(False)
    made.bind(target())
    return made


VARIANTS: dict[str, Maker] = {
    "medusa": lambda: heads(MedusaDrafter),
    "medusa of two layers": lambda: heads(MedusaDrafter, num_layers=2),
    "tied medusa": lambda: heads(MedusaDrafter, tie_to_target=True),
    "medusa with a draft vocabulary": lambda: heads(MedusaDrafter, draft_vocab_size=40),
    "hydra": lambda: heads(HydraDrafter),
    "hydra of three layers, draft vocabulary": lambda: heads(HydraDrafter, num_layers=3, draft_vocab_size=40),
    "recurrent": recurrent,
    "recurrent, projected to an odd width": lambda: recurrent(exit_dim=45, num_draft_layers=2),
    "recurrent without blocks, draft vocabulary": lambda: recurrent(num_draft_layers=0, draft_vocab_size=40),
    "recurrent of odd states": lambda: recurrent(33, own_embeddings=True),
    "sums": lambda: recurrent(rnn=False),
}


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_native_guesses_are_those_of_the_written_out_heads(name: str, plan: Plan):
    made = VARIANTS[name]()
    native = copy.deepcopy(made)
    native.pack(packer())
    assert made.can_compile and not native.can_compile, "one operator drafts"
    context, parts = contexts_for((1, 3, 40), 5, 33 if "odd states" in name else WIDTH)
    tokens_BN, parents_BN, certain_B = certain_rows(made, context, plan, moves=24)
    for begin, end in parts:
        draft, sure_B = native.propose(context.part(begin, end), plan), certain_B[begin:end]
        check_draft(draft, plan, end - begin, VOCABULARY)
        assert (draft.depth, draft.branching) == (plan.depth, plan.branching)
        for found_BN, expected_BN in zip(guesses(draft, plan), (tokens_BN, parents_BN), strict=True):
            assert torch.equal(found_BN[sure_B], expected_BN[begin:end][sure_B])
    assert certain_B.sum() >= 3


@pytest.mark.parametrize("plan", PRUNED, ids=str)
@pytest.mark.parametrize(
    "name", ["medusa", "hydra", "recurrent of odd states", "recurrent without blocks, draft vocabulary"]
)  # not sums: there a, b and b, a are equally likely whatever the weights
def test_native_trees_keep_the_nodes_that_grow_keeps(name: str, plan: Plan):
    made = VARIANTS[name]()
    native = copy.deepcopy(made)
    native.pack(packer())
    context = context_for(120, 5, 33 if "odd states" in name else WIDTH, 3)
    _, _, certain_B = certain_rows(made, context, plan)
    draft, expected = native.propose(context, plan), grow(made, context, plan)
    check_draft(draft, plan, 120, VOCABULARY)
    assert (draft.depth, draft.branching) == (expected.depth, expected.branching)
    sure = certain_B.nonzero().flatten().tolist()
    assert len(sure) >= 3 and all(paths_of(draft, row) == paths_of(expected, row) for row in sure)
    for row in range(120):  # from the front, a path as long as any
        parents = [parent for parent in draft.parents_BN[row].tolist() if parent != UNUSED]
        chain = next((n for n, parent in enumerate(parents) if parent != n - 1), len(parents))
        assert plan.paths or chain == max((len(path) for path in paths_of(draft, row)), default=0)


@pytest.mark.parametrize("plan", [Plan((2, 2, 1)), *PRUNED], ids=str)
@pytest.mark.parametrize("name", ["medusa with a draft vocabulary", "hydra", "recurrent"])
def test_native_trees_share_the_targets_noise(name: str, plan: Plan, threads: Callable[[int], None]):
    """Greedy rows beside sampled ones have the trees that they have by themselves, and every row those of its own."""
    made = VARIANTS[name]()
    native = copy.deepcopy(made)
    native.pack(packer())
    greedy = context_for(120, 5, WIDTH, 3)
    context = sampled(greedy)
    _, _, certain_B = certain_rows(made, context, plan)
    draft, expected = native.propose(context, plan), grow(made, context, plan)
    check_draft(draft, plan, 120, VOCABULARY)
    sure = certain_B.nonzero().flatten().tolist()
    assert sum(row % 3 > 0 for row in sure) >= 3
    assert all(paths_of(draft, row) == paths_of(expected, row) for row in sure)
    others = native.propose(greedy, plan)
    same = [paths_of(draft, row) == paths_of(others, row) for row in range(120)]
    assert all(same[::3]) and sum(same) < 90
    for begin in (1, 4, 30):
        alone = native.propose(context.part(begin, begin + 1), plan)
        assert torch.equal(alone.tokens_BN[0], draft.tokens_BN[begin])
        assert torch.equal(alone.parents_BN[0], draft.parents_BN[begin])
    threads(2)
    shared = native.propose(context, plan)
    assert torch.equal(shared.tokens_BN, draft.tokens_BN) and torch.equal(shared.parents_BN, draft.parents_BN)


@pytest.mark.parametrize("name", ["medusa with a draft vocabulary", "hydra", "recurrent"])
def test_native_chains_share_the_targets_noise(name: str, threads: Callable[[int], None]):
    """Sampled rows guess what the noise of their positions makes of the scores, greedy rows beside them the best."""
    made, plan = VARIANTS[name](), Plan((1, 1, 1))
    native = copy.deepcopy(made)
    native.pack(packer())
    greedy, _ = contexts_for((40,), 5, WIDTH)
    context = sampled(greedy)
    tokens_BN, _, certain_B = certain_rows(made, context, plan, moves=24)
    for count in (1, 2):
        threads(count)
        draft = native.propose(context, plan)
        assert draft.q_BMV is None and torch.equal(draft.tokens_BN[certain_B], tokens_BN[certain_B])
    others_BN = native.propose(greedy, plan).tokens_BN
    same_B = (draft.tokens_BN == others_BN).all(1)
    assert bool(same_B[::3].all()) and int(same_B.sum()) < 30
    assert (certain_B & (context.temperature_B > 0)).sum() >= 3


@pytest.mark.parametrize("name", ["medusa of two layers", "hydra", "recurrent, projected to an odd width", "sums"])
@pytest.mark.parametrize(
    "plan", [Plan((1, 1, 1)), Plan((4, 2, 1), paths=4), Plan((3, 3, 2), paths=5, beam=4), *PRUNED], ids=str
)
def test_a_row_guesses_the_same_in_any_company(
    instructions: str, threads: Callable[[int], None], name: str, plan: Plan
):
    native = VARIANTS[name]()
    native.pack(packer("int8" if name == "hydra" else "int4" if name == "firp" else "none"))
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
    threads(2)
    shared = native.propose(context, plan)
    assert torch.equal(shared.tokens_BN, together.tokens_BN)
    assert torch.equal(shared.parents_BN, together.parents_BN)


def test_equally_likely_nodes_have_an_order_of_their_own():
    """All heads tell the same pairs of tokens no better than each other, so that many nodes are equally likely."""
    made = VARIANTS["medusa"]()
    for weight in made.parameters():
        if weight.shape[0] == VOCABULARY:
            weight.data[1::2] = weight.data[::2]
    native = copy.deepcopy(made)
    native.pack(packer())
    context, plan = context_for(40, 5, WIDTH, 7), Plan((4, 4, 4, 4), beam=4, nodes=9)
    together = native.propose(context, plan)
    for b in range(40):
        alone = native.propose(context.part(b, b + 1), plan)
        assert torch.equal(alone.tokens_BN[0], together.tokens_BN[b])
        assert torch.equal(alone.parents_BN[0], together.parents_BN[b])


@pytest.mark.parametrize("name", ["hydra", "recurrent of odd states", "recurrent, projected to an odd width"])
def test_memory_of_an_earlier_context_cannot_matter(name: str):
    """NaN in one context and a deeper draft, then a clean one of fewer rows."""
    native, width = VARIANTS[name](), 33 if "odd states" in name else WIDTH
    native.pack(packer())
    context, plan = context_for(2, 3, width, 0), Plan((3, 2), paths=4)
    expected = native.propose(context, plan)
    spoilt = context_for(7, 3, width, 1)
    spoilt.features_BTF.fill_(torch.nan)
    native.propose(spoilt, Plan((3, 2, 2, 1)))
    found = native.propose(context, plan)
    assert torch.equal(found.tokens_BN, expected.tokens_BN) and torch.equal(found.parents_BN, expected.parents_BN)


def test_int8_heads_mostly_agree():
    made, context = VARIANTS["hydra"](), context_for(120, 5, WIDTH, 5)
    whole, quantised = copy.deepcopy(made), copy.deepcopy(made)
    whole.pack(packer())
    quantised.pack(packer("int8"))
    same = quantised.propose(context, Plan((1, 1))).tokens_BN == whole.propose(context, Plan((1, 1))).tokens_BN
    assert same[:, 0].float().mean() > 0.8


@pytest.mark.parametrize("name", ["medusa", "hydra", "recurrent"])
def test_plans_that_native_code_does_not_know_go_the_other_way(name: str):
    made = VARIANTS[name]()
    native = copy.deepcopy(made)
    native.pack(packer())
    context = context_for(24, 5, WIDTH, 2)
    sampled = native.propose(replace(context, temperature_B=torch.ones(24)), Plan((2, 2), sampled=True))
    check_draft(sampled, Plan((2, 2), sampled=True), 24, VOCABULARY)
    plan = Plan(choices=((0,), (1,), (0, 0)))
    static = native.propose(context, plan)
    tokens_BN, _, certain_B = certain_rows(made, context, plan, moves=24)
    assert certain_B.any() and torch.equal(static.tokens_BN[certain_B], tokens_BN[certain_B])
    with pytest.raises(DraftsmithError, match="the plan drafts 5 tokens ahead"):
        native.propose(context, Plan((1,) * 5))


def test_a_context_that_does_not_fit_is_refused():
    native = VARIANTS["hydra"]()
    native.pack(packer())
    context, plan = context_for(2, 5, WIDTH, 0), Plan((2, 1))
    for error, message, changes in (
        (RuntimeError, "the context has to be", {"features_BTF": context.features_BTF[:, :, 1:]}),
        (IndexError, "a row has 6 tokens", {"counts_B": torch.tensor([1, 6])}),
        (IndexError, f"there is no token {VOCABULARY}", {"tokens_BT": torch.full((2, 5), VOCABULARY)}),
    ):
        with pytest.raises(error, match=f"draftsmith: {message}"):
            native.propose(replace(context, **changes), plan)
    with pytest.raises(RuntimeError, match=f"draftsmith: a node cannot have {VOCABULARY + 1} children"):
        native.propose(context, Plan((VOCABULARY + 1,)))


def test_layers_that_do_not_fit_together_are_refused():
    def layer(outputs: int, inputs: int) -> PackedLinear:
        return PackedLinear(torch.zeros(outputs, inputs).bfloat16(), None)

    table_VF = torch.zeros(10, 6).bfloat16()
    with pytest.raises(RuntimeError, match="layer 0 of the heads has to read 6 values"):
        native_heads([NativeHead([], layer(10, 8))], 6)
    with pytest.raises(RuntimeError, match="a step of a head turns 6 values into 8"):
        native_heads([NativeHead([(RESIDUAL, [layer(8, 6)])], layer(10, 8))], 6)
    with pytest.raises(RuntimeError, match="all heads have to score the same tokens"):
        native_heads([NativeHead([], layer(9, 6)), NativeHead([], layer(10, 6))], 6)
    with pytest.raises(RuntimeError, match="the embedding of the heads has to be bf16 of width 6"):
        native_heads([NativeHead([], layer(10, 12))], 6, ALL, table_VF.float())
    with pytest.raises(RuntimeError, match="there are 10 tokens, but 11 are scored"):
        native_heads([NativeHead([], layer(11, 12))], 6, ALL, table_VF)
    with pytest.raises(IndexError, match="there is no token 10 to draft"):
        native_heads([NativeHead([], layer(2, 12))], 6, ALL, table_VF, d2t=torch.tensor([1, 10]))
