"""The native halves of a step, and the native speculator, against the PyTorch that says what they compute.

B rows, N guesses, M = N + 1 nodes (root first), D depth, T = D + 1, F feature width, V vocabulary.
"""

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from contract import check_draft
from draftsmith.drafters.grow import grow
from draftsmith.drafters.mlp import MLPSpeculator
from draftsmith.drafters.mlp_config import MLPConfig
from draftsmith.drafters.trainable import RowwiseDrafter
from draftsmith.engine.commit import commit, commit_greedily_natively, commit_greedy, commit_natively
from draftsmith.engine.layout import Layout
from draftsmith.native import LIBRARY, why_missing
from draftsmith.plan import Plan
from draftsmith.target import Blocks, KVCache, Target
from draftsmith.target.cache import BLOCK
from draftsmith.types import ROOT, UNUSED, Context, Draft, DraftsmithError
from draftsmith.verify import Acceptance, accept_greedy, tree_tables
from test_tree import random_parents
from tiny import VOCABULARY, WIDTH, packer, tiny_model

if not LIBRARY:
    pytest.skip(why_missing(), allow_module_level=True)

ops = torch.ops.draftsmith

CAPACITY = 80
KV_SHAPES = [(2, 6, 1, 5), (2, 6, 1, 3)]


def context_for(batch: int, width: int, features: int, seed: int, vocabulary: int = VOCABULARY) -> Context:
    """Draw a context of ragged rows, as an engine hands it over."""
    generator = torch.Generator().manual_seed(seed)
    counts_B = torch.randint(1, width + 1, (batch,), generator=generator)
    return Context(
        torch.randint(0, vocabulary, (batch, width), generator=generator),
        torch.randn((batch, width, features), generator=generator).bfloat16(),
        counts_B,
        counts_B + torch.randint(0, 30, (batch,), generator=generator),
        torch.arange(batch), torch.zeros(batch), torch.arange(batch),
    )


def random_draft(batch: int, nodes: int, depth: int, vocabulary: int, seed: int) -> Draft:
    """Draw trees with padding inside, siblings that repeat a token included."""
    generator = random.Random(seed)
    parents = [random_parents(generator, nodes, depth) for _ in range(batch)]
    tokens = [[generator.randrange(vocabulary) for _ in range(nodes)] for _ in range(batch)]
    return Draft(torch.tensor(tokens, dtype=torch.long), torch.tensor(parents, dtype=torch.long), depth)


# ---- laying a draft out

TREES = [(1, 0, 0), (3, 0, 0), (1, 1, 1), (4, 5, 2), (8, 14, 5), (2, 40, 7), (3, 12, 12)]
"""(B, N, D)"""


def laid_out(context: Context, draft: Draft) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    found: tuple[Tensor, Tensor, Tensor, Tensor | None] = ops.lay_out(
        context.tokens_BT, context.counts_B, draft.tokens_BN, draft.parents_BN
    )
    return found


@pytest.mark.parametrize(("batch", "nodes", "depth"), TREES)
def test_a_draft_is_laid_out_as_the_tables_of_its_tree(batch: int, nodes: int, depth: int):
    for seed in range(8):
        context, draft = context_for(batch, 4, 0, seed), random_draft(batch, nodes, depth, VOCABULARY, seed)
        tokens_BM, depths_BM, visible_BMM, nodes_B = laid_out(context, draft)
        expected_BMM, expected_BM = tree_tables(draft.parents_BN, depth)
        assert torch.equal(visible_BMM, expected_BMM) and visible_BMM.dtype == torch.bool
        assert torch.equal(depths_BM, expected_BM)
        assert torch.equal(tokens_BM, torch.cat([context.root()[0].unsqueeze(1), draft.tokens_BN], dim=1))
        used = [max([0, *(n + 1 for n, p in enumerate(row) if p != UNUSED)]) + 1 for row in draft.parents_BN.tolist()]
        if min(used) <= nodes:
            assert nodes_B is not None and nodes_B.tolist() == used
        else:
            assert nodes_B is None


def test_strided_trees_are_laid_out_by_their_strides():
    context, draft = context_for(3, 4, 0, 0), random_draft(3, 9, 4, VOCABULARY, 0)
    turned = replace(draft, tokens_BN=draft.tokens_BN.T.contiguous().T, parents_BN=draft.parents_BN.T.contiguous().T)
    chain = replace(draft, parents_BN=torch.arange(ROOT, 8).expand(3, -1), depth=9)
    for given in (turned, chain):
        visible_BMM, depths_BM = tree_tables(given.parents_BN, given.depth)
        found = laid_out(context, given)
        assert torch.equal(found[0][:, 1:], draft.tokens_BN)
        assert torch.equal(found[1], depths_BM) and torch.equal(found[2], visible_BMM)


def test_what_is_no_tree_is_refused():
    context, draft = context_for(2, 4, 0, 0), random_draft(2, 5, 3, VOCABULARY, 0)
    later_BN = draft.parents_BN.clone()
    later_BN[1, 2] = 2
    with pytest.raises(IndexError, match="draftsmith: the parent of node 2 comes behind it"):
        laid_out(context, replace(draft, parents_BN=later_BN))
    with pytest.raises(RuntimeError, match="draftsmith: tokens and parents have to be int64"):
        laid_out(context, replace(draft, parents_BN=draft.parents_BN.int()))
    with pytest.raises(RuntimeError, match="draftsmith: tokens and parents have to be int64"):
        laid_out(context, replace(draft, parents_BN=draft.parents_BN[:, 1:]))
    with pytest.raises(RuntimeError, match="draftsmith: the context does not fit the draft"):
        laid_out(context_for(3, 4, 0, 0), draft)
    for counts in ([0, 1], [1, 5]):
        with pytest.raises(IndexError, match=r"draftsmith: a row has [05] tokens"):
            laid_out(replace(context, counts_B=torch.tensor(counts)), draft)


# ---- committing what the target chose


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def layout_of(context: Context, draft: Draft) -> Layout:
    return Layout(draft, *laid_out(context, draft))


def new_cache(slots: int, seed: int) -> KVCache:
    """Draw keys and values of two layers, of different widths; nothing in them repeats."""
    generator = torch.Generator().manual_seed(seed)
    cache = KVCache(KV_SHAPES, slots, CAPACITY, torch.bfloat16, torch.device("cpu"))
    for tensor in cache.tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return cache


def assert_commits_alike(logits_BMV: Tensor, features_BMF: Tensor, draft: Draft, context: Context, seed: int) -> Tensor:
    """Commit both ways and compare everything that counts; return how many were accepted."""
    layout = layout_of(context, draft)
    theirs, ours = new_cache(len(context.counts_B) + 1, seed), new_cache(len(context.counts_B) + 1, seed)
    expected, table_BX, path_BD = commit_greedy(theirs, logits_BMV, features_BMF, layout, context)
    found, own_table_BX, own_path_BD = commit_greedily_natively(ours, logits_BMV, features_BMF, layout, context)
    assert torch.equal(found.counts_B, expected.counts_B)
    assert torch.equal(found.lengths_B, expected.lengths_B)
    assert torch.equal(own_table_BX[:, :2], table_BX[:, :2])
    assert own_table_BX.shape == table_BX.shape and own_path_BD.shape == path_BD.shape
    assert found.tokens_BT.shape == expected.tokens_BT.shape
    assert found.features_BTF.shape == expected.features_BTF.shape
    nodes = logits_BMV.shape[1]
    assert not own_path_BD.numel() or (own_path_BD.min() >= 0 and own_path_BD.max() < nodes)
    for b, count in enumerate(expected.counts_B.tolist()):
        assert torch.equal(own_table_BX[b, 2 : 2 + count], table_BX[b, 2 : 2 + count])
        assert torch.equal(found.tokens_BT[b, :count], expected.tokens_BT[b, :count])
        assert torch.equal(found.features_BTF[b, :count], expected.features_BTF[b, :count])
        assert torch.equal(own_path_BD[b, : count - 1], path_BD[b, : count - 1])
        committed = int(context.lengths_B[b]) - 1 + count
        for own, other in zip(ours.tensors, theirs.tensors, strict=True):
            assert torch.equal(own[b, :committed], other[b, :committed])
    untouched = new_cache(len(context.counts_B) + 1, seed)
    assert all(torch.equal(own[-1], before[-1]) for own, before in zip(ours.tensors, untouched.tensors, strict=True))
    assert found.rows_B is context.rows_B and found.seeds_B is context.seeds_B
    return expected.counts_B - 1


@pytest.mark.parametrize("features", [0, 5])
@pytest.mark.parametrize(("batch", "nodes", "depth"), TREES)
def test_the_same_is_committed(batch: int, nodes: int, depth: int, features: int):
    """Three tokens and a few scores: guesses are often right, siblings repeat, and the highest scores often tie."""
    accepted = []
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        logits_BMV = torch.randint(-2, 3, (batch, nodes + 1, 3), generator=generator).bfloat16()
        features_BMF = torch.randn((batch, nodes + 1, features), generator=generator).bfloat16()
        draft, context = random_draft(batch, nodes, depth, 3, seed), context_for(batch, 4, features, seed)
        accepted.append(assert_commits_alike(logits_BMV, features_BMF, draft, context, seed))
    if depth > 1:
        assert {0, 1, 2} <= set(torch.cat(accepted).tolist())


def test_the_same_is_committed_where_scores_are_not_finite():
    flagged = set()
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        logits_BMV = torch.randint(-2, 3, (4, 9, 3), generator=generator).bfloat16()
        for value in (torch.inf, -torch.inf, torch.nan, -torch.nan):
            logits_BMV[torch.rand(logits_BMV.shape, generator=generator) < 0.04] = value
        draft, context = random_draft(4, 8, 3, 3, seed), context_for(4, 4, 2, seed)
        assert_commits_alike(logits_BMV, torch.randn((4, 9, 2)).bfloat16(), draft, context, seed)
        table_BX = commit_greedily_natively(
            new_cache(4, 0), logits_BMV, torch.zeros((4, 9, 2)).bfloat16(), layout_of(context, draft), context
        )[1]
        flagged |= set((table_BX[:, 1] == -1).tolist())
    assert flagged == {True, False}


def test_a_wide_vocabulary_has_one_highest_score_wherever_it_stands():
    vocabulary = 1000
    places = torch.tensor([0, 1, 63, 64, 65, 127, 128, 511, 512, 998, 999])
    draft = Draft(places[:, None].clone(), torch.full((11, 1), ROOT), 1, branching=(2,))
    context = context_for(11, 2, 3, 0)
    for low, high in ((-1.0, -0.5), (0.0, 1.0), (-torch.inf, -3e38), (-0.0, 0.0)):
        logits_BMV = torch.full((11, 2, vocabulary), low).bfloat16()
        logits_BMV[torch.arange(11), 0, places] = high
        logits_BMV[torch.arange(11), 0, places.clamp(min=places[-2])] = high  # one more of the same further on
        accepted_B = assert_commits_alike(logits_BMV, torch.zeros((11, 2, 3)).bfloat16(), draft, context, 0)
        assert accepted_B.tolist() == ([1] * 11 if low != high else [1] + [0] * 10)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("batch", "nodes", "depth"), TREES[2:])
def test_a_row_commits_what_its_own_nodes_say(blocks: bool, batch: int, nodes: int, depth: int):
    """Rows of fewer nodes, in slots and blocks of any order, commit what each commits alone, in one piece."""
    fewer = 0
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        logits_BMV = torch.randint(-2, 3, (batch, nodes + 1, 3), generator=generator).bfloat16()
        features_BMF = torch.randn((batch, nodes + 1, 5), generator=generator).bfloat16()
        draft, context = random_draft(batch, nodes, depth, 3, seed), context_for(batch, 4, 5, seed)
        tokens_BM = layout_of(context, draft).tokens_BM
        counts_B = torch.randint(1, nodes + 2, (batch,), generator=generator)
        slots_B = torch.randperm(batch + 2, generator=generator)[:batch]
        memory = new_cache(batch + 2, seed)
        if blocks:
            memory = KVCache(KV_SHAPES, batch + 2, CAPACITY, torch.bfloat16, torch.device("cpu"), 2 * batch + 4)
            owner = Blocks(memory)
            for length in (BLOCK, CAPACITY):
                for slot in range(batch + 2):
                    owner.reserve(slot, length)
        places_BP = torch.arange(CAPACITY).expand(batch, -1)
        entries_BP = memory.entries(slots_B, places_BP)
        drawn = [
            torch.randn((batch, CAPACITY, *tensor.shape[2:]), generator=generator).bfloat16()
            for tensor in memory.tensors
        ]
        for tensor, one in zip(memory.tensors, drawn, strict=True):
            tensor.flatten(0, 1)[entries_BP] = one
        found = ops.commit_greedy(
            memory.tensors, logits_BMV, features_BMF, tokens_BM, draft.parents_BN, context.lengths_B, depth, slots_B,
            counts_B, memory.tables_RJ,
        )
        for b, count in enumerate(counts_B.tolist()):
            fewer += count <= nodes
            own = [one[b : b + 1].clone() for one in drawn]
            row = slice(b, b + 1)
            alone = ops.commit_greedy(
                own, logits_BMV[row, :count], features_BMF[row, :count], tokens_BM[row, :count].contiguous(),
                draft.parents_BN[row, : count - 1], context.lengths_B[row], depth,
            )
            for mine, theirs in zip(found, alone, strict=True):
                assert torch.equal(mine[row], theirs)
            for tensor, one in zip(memory.tensors, own, strict=True):
                assert torch.equal(tensor.flatten(0, 1)[entries_BP[b]], one[0])
    assert fewer


def test_a_chain_lies_where_it_stays():
    chain = Draft(torch.tensor([[1, 2, 0]] * 2), torch.arange(ROOT, 2).expand(2, -1), 3, branching=(1, 1, 1))
    logits_BMV = torch.nn.functional.one_hot(torch.tensor([[1, 2, 0, 1], [1, 0, 0, 0]]), 3).bfloat16()
    accepted_B = assert_commits_alike(logits_BMV, torch.randn((2, 4, 5)).bfloat16(), chain, context_for(2, 4, 5, 1), 1)
    assert accepted_B.tolist() == [3, 1]


@pytest.mark.parametrize(("batch", "nodes", "depth"), TREES)
def test_paths_of_any_rule_are_committed_natively_as_by_pytorch(batch: int, nodes: int, depth: int):
    accepted = 0
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        draft, context = random_draft(batch, nodes, depth, 3, seed), context_for(batch, 4, 5, seed)
        layout = layout_of(context, draft)
        logits_BMV = torch.randn((batch, nodes + 1, 6), generator=generator).bfloat16()
        if seed % 2:
            logits_BMV[-1, 0, 2] = torch.nan
        features_BMF = torch.randn((batch, nodes + 1, 5), generator=generator).bfloat16()
        # A rule of its own: what it accepts has nothing to do with the logits.
        choice_BM = torch.randint(0, 3, (batch, nodes + 1), generator=generator)
        acceptance = accept_greedy(choice_BM, draft)
        theirs, ours = new_cache(batch, seed), new_cache(batch, seed)
        expected, table_BX, _ = commit(theirs, acceptance, logits_BMV, features_BMF, layout, context)
        found, own_table_BX, path_BD = commit_natively(ours, acceptance, logits_BMV, features_BMF, layout, context)
        assert torch.equal(found.counts_B, expected.counts_B) and torch.equal(found.lengths_B, expected.lengths_B)
        assert torch.equal(own_table_BX[:, :2], table_BX[:, :2])
        for row, stays in enumerate(acceptance.counts_B.tolist()):
            length = int(context.lengths_B[row])
            kept = slice(0, stays + 1)
            assert torch.equal(found.tokens_BT[row, kept], expected.tokens_BT[row, kept])
            assert torch.equal(found.features_BTF[row, kept], expected.features_BTF[row, kept])
            assert torch.equal(path_BD[row, :stays], acceptance.path_BD[row, :stays])
            for mine, other in zip(ours.tensors, theirs.tensors, strict=True):
                assert torch.equal(mine[row, : length + stays], other[row, : length + stays])
            accepted += stays
    assert accepted or not nodes
    if nodes:
        off = Acceptance(acceptance.path_BD + nodes + 1, torch.ones_like(acceptance.counts_B), acceptance.next_B)
        with pytest.raises(IndexError, match="draftsmith: no path leads over node"):
            commit_natively(ours, off, logits_BMV, features_BMF, layout, context)


@pytest.mark.parametrize("count", [1, 2])
def test_rows_that_threads_share_are_committed_alike(threads: Callable[[int], None], count: int):
    threads(count)
    draft, context = random_draft(7, 5, 3, 3, 2), context_for(7, 4, 3, 2)
    generator = torch.Generator().manual_seed(2)
    logits_BMV = torch.nn.functional.pad(torch.rand((7, 6, 3), generator=generator), (0, 70_000)).bfloat16()
    features_BMF = torch.randn((7, 6, 3), generator=generator).bfloat16()
    assert assert_commits_alike(logits_BMV, features_BMF, draft, context, 2).sum() > 2


def test_a_draft_that_does_not_fit_is_refused():
    draft, context = random_draft(2, 6, 3, 3, 5), context_for(2, 4, 2, 0)
    layout = layout_of(context, draft)
    logits_BMV, features_BMF = torch.zeros((2, 7, 3)).bfloat16(), torch.zeros((2, 7, 2)).bfloat16()
    tensors = new_cache(2, 0).tensors

    def refused(error: type[Exception], message: str, *given: object) -> None:
        with pytest.raises(error, match=f"^draftsmith: {message}"):
            ops.commit_greedy(*given)

    lengths_B, tokens_BM, parents_BN = context.lengths_B, layout.tokens_BM, draft.parents_BN
    belong = "logits, features, tokens and parents do not belong to one draft"
    refused(RuntimeError, belong, tensors, logits_BMV.float(), features_BMF, tokens_BM, parents_BN, lengths_B, 3)
    refused(RuntimeError, belong, tensors, logits_BMV[:, 1:], features_BMF, tokens_BM, parents_BN, lengths_B, 3)
    refused(RuntimeError, belong, tensors, logits_BMV, features_BMF[:1], tokens_BM, parents_BN, lengths_B, 3)
    refused(RuntimeError, belong, tensors, logits_BMV, features_BMF, tokens_BM, parents_BN[:, 1:], lengths_B, 3)
    refused(RuntimeError, belong, tensors, logits_BMV, features_BMF, tokens_BM, parents_BN, lengths_B[:1], 3)
    small = [tensor[:1] for tensor in tensors]
    shape = "the cache has another shape"
    refused(RuntimeError, shape, small, logits_BMV, features_BMF, tokens_BM, parents_BN, lengths_B, 3)
    right = torch.zeros((1, 2), dtype=torch.long)
    deep = (logits_BMV[:1, :3], features_BMF[:1, :3], torch.zeros((1, 3), dtype=torch.long), right - 1, lengths_B[:1])
    ops.commit_greedy(tensors, *deep, 1)
    chain = (*deep[:3], torch.tensor([[ROOT, 0]]), deep[4])
    refused(IndexError, "the draft is deeper than its plan", tensors, *chain, 1)
    beside = (*deep[:3], torch.tensor([[UNUSED, ROOT]]), torch.tensor([CAPACITY - 1]))
    refused(IndexError, "the draft does not fit its slot", tensors, *beside, 1)


# ---- the speculator's guesses

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
SHAPES = [
    Plan((1,)), Plan((1, 1, 1, 1)), Plan((4, 2, 1), paths=4), Plan((3, 2)), Plan((2, 2, 2), paths=1),
    Plan((3, 3, 2), paths=5, beam=4), Plan((4, 4, 3), paths=6, beam=2), Plan((20, 1), paths=3),
]


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


def certain_rows(
    made: RowwiseDrafter, context: Context, plan: Plan, moves: int = 8
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the draft in float64 and which rows of it rounding cannot change.

    A row counts as certain when the same tree comes out in PyTorch's bf16, and with every weight moved by some 2^-7 of
    itself, twice the most that a rounding to bf16 does, as often as `moves` says.
    """
    wide = replace(context, features_BTF=context.features_BTF.double())
    exact = grow(copy.deepcopy(made).double(), wide, plan)
    narrow = grow(made, context, plan)
    certain_B = (narrow.tokens_BN == exact.tokens_BN).all(1) & (narrow.parents_BN == exact.parents_BN).all(1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(moves):
        moved = copy.deepcopy(made).double()
        for tensor in {id(t): t for t in (*moved.parameters(), *moved.buffers()) if t.is_floating_point()}.values():
            tensor *= 1 + 2**-7 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        other = grow(moved, wide, plan)
        for ours, theirs in ((exact.tokens_BN, other.tokens_BN), (exact.parents_BN, other.parents_BN)):
            certain_B &= (ours == theirs).all(1)
    return exact.tokens_BN, exact.parents_BN, certain_B


@pytest.mark.parametrize("plan", SHAPES, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_native_guesses_are_those_of_the_written_out_stages(name: str, plan: Plan):
    made = speculator(0, **VARIANTS[name])
    native = copy.deepcopy(made)
    native.pack(packer())
    assert made.can_compile and not native.can_compile, "one operator drafts"
    compared = 0
    for batch, seed in ((1, 0), (3, 1), (120, 2)):
        context = context_for(batch, 5, WIDTH, seed)
        tokens_BN, parents_BN, certain_B = certain_rows(made, context, plan)
        draft = native.propose(context, plan)
        check_draft(draft, plan, batch, VOCABULARY)
        assert (draft.depth, draft.branching) == (plan.depth, plan.branching)
        assert torch.equal(draft.tokens_BN[certain_B], tokens_BN[certain_B])
        assert torch.equal(draft.parents_BN[certain_B], parents_BN[certain_B])
        compared += int(certain_B.sum())
    assert compared >= 3


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
    pruned, plan = native.propose(context, Plan((3, 2), nodes=4)), Plan((3, 2), nodes=4)
    tokens_BN, _, certain_B = certain_rows(made, context, plan)
    assert certain_B.any() and torch.equal(pruned.tokens_BN[certain_B], tokens_BN[certain_B])
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
