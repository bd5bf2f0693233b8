"""The native halves of a step, and the native speculator, against the PyTorch that says what they compute.

B rows, N guesses, M = N + 1 nodes (root first), D depth, T = D + 1, F feature width, V vocabulary.
"""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftsmith.engine.steps.commit import (
    commit,
    commit_greedily_natively,
    commit_greedy,
    commit_natively,
    keep_states,
    keep_states_natively,
)
from draftsmith.engine.steps.layout import Layout
from draftsmith.native import LIBRARY, why_missing
from draftsmith.targets import Blocks, KVCache
from draftsmith.targets.cache.cache import BLOCK
from draftsmith.types import ROOT, UNUSED, Context, Draft
from draftsmith.verify import Acceptance, accept_greedy, tree_tables
from tests.helpers.native_toy import context_for
from tests.helpers.tiny import VOCABULARY
from tests.verify.test_tree import random_parents

if not LIBRARY:
    pytest.skip(why_missing(), allow_module_level=True)

ops = torch.ops.draftsmith

CAPACITY = 80
KV_SHAPES = [(2, 6, 1, 5), (2, 6, 1, 3)]


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


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_states_are_kept_natively_where_pytorch_keeps_them(dtype: torch.dtype, blocks: bool):
    for seed, (batch, tokens) in enumerate([(1, 1), (1, 4), (3, 1), (5, 7)]):
        context = context_for(batch, tokens, 5, seed)
        context = replace(context, features_BTF=context.features_BTF.to(dtype))
        if batch > 1:
            context = replace(context, slots_B=torch.randperm(batch + 2)[:batch])
        kept = []
        for keep in (keep_states, keep_states_natively):
            cache = KVCache(
                KV_SHAPES, batch + 2, CAPACITY, dtype, torch.device("cpu"), 2 * batch + 4 if blocks else None, 5
            )
            if blocks:
                owner = Blocks(cache)
                for length in (BLOCK, CAPACITY):
                    for slot in range(batch + 2):
                        owner.reserve(slot, length)
            keep(cache, context, context.features_BTF)
            assert cache.states_NEF is not None and cache.states_NEF.count_nonzero() > 0
            kept.append(cache.states_NEF)
        assert torch.equal(*kept)


def test_states_that_do_not_fit_are_refused():
    cache, context = KVCache(KV_SHAPES, 2, CAPACITY, torch.bfloat16, torch.device("cpu"), 4, 5), context_for(2, 3, 5, 0)
    states_BTF, lengths_B, tables_RJ = context.features_BTF, context.lengths_B, cache.tables_RJ

    def refused(error: type[Exception], message: str, *given: object) -> None:
        with pytest.raises(error, match=f"^draftsmith: {message}"):
            ops.keep_states(cache.states_NEF, *given)

    apart = "states, lengths and slots do not fit the cache"
    refused(RuntimeError, apart, states_BTF.float(), lengths_B, None, tables_RJ)
    refused(RuntimeError, apart, states_BTF[:, :, 1:], lengths_B, None, tables_RJ)
    refused(RuntimeError, apart, states_BTF[:1], lengths_B, None, tables_RJ)
    refused(RuntimeError, apart, states_BTF, lengths_B, torch.tensor([0]), tables_RJ)
    refused(RuntimeError, "the cache has another shape", states_BTF, lengths_B, torch.tensor([0, 2]), tables_RJ)
    refused(IndexError, "slot 0 has no block for place", states_BTF, lengths_B, None, tables_RJ)
    refused(IndexError, "the states do not fit their slot", states_BTF, lengths_B - lengths_B, None, tables_RJ)
    refused(IndexError, "the states do not fit their slot", states_BTF, lengths_B + 2 * BLOCK, None, tables_RJ)


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
