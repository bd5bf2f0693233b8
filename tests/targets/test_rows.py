"""Rows of a batch have slots of any order, nodes of any number and memory in any blocks: each reads as if alone.

Natively that holds bit by bit, on every instruction set; in PyTorch it is shown in float64.

Shapes: B rows, M nodes (root first), N = M - 1 guesses, P nodes of a path, V vocabulary, F width.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from draftsmith.engine.steps.compiled import Compiled
from draftsmith.native import LIBRARY, kernels_in_use, use_kernels
from draftsmith.targets import Blocks, KVCache, Nodes, Target, keep_path
from draftsmith.verify import tree_tables
from tests.helpers.tiny import ARCHITECTURES, VOCABULARY, prompts, tiny_model, tiny_target
from tests.targets.test_target import random_tree

SLOTS, CAPACITY = 6, 128
KERNELS = ("portable", "avx2", "avx512", "avx512bf16", "amx")
NATIVE = [(name, kernels) for name in ("llama", "qwen3", "mistral") for kernels in KERNELS] if LIBRARY else []
ALL = [*NATIVE, *((name, "PyTorch") for name in ARCHITECTURES)]


@cache
def native(name: str) -> Target:
    return Target(tiny_model(name).bfloat16(), name=name)


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    name, kernels = request.param
    if kernels == "PyTorch":
        yield tiny_target(name)
        return
    before = kernels_in_use()
    if not use_kernels(kernels):
        pytest.skip(f"this processor lacks {kernels}")
    yield native(name)
    use_kernels(before)


def assert_same(target: Target, found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0 if target.backend.reads_apart else 1e-9)


def one_piece(target: Target) -> KVCache:
    return target.new_cache(SLOTS, CAPACITY)


def in_blocks(target: Target) -> KVCache:
    """Make a cache whose slots took their blocks in turns, from the last slot on; some block holds NaN throughout."""
    cache = target.new_cache(SLOTS, CAPACITY, blocks=SLOTS * CAPACITY // 64 + 3)
    for tensor in cache.tensors:
        tensor[:] = torch.nan
    blocks = Blocks(cache)
    for length in range(64, CAPACITY + 1, 64):
        for slot in reversed(range(SLOTS)):
            blocks.reserve(slot, length)
    return cache


CACHES: dict[str, Callable[[Target], KVCache]] = {"one piece": one_piece, "blocks": in_blocks}


@dataclass
class Trees:
    """Texts (the last token of each is the root), and trees behind them, of which rows have the first few nodes."""

    texts: list[list[int]]
    guesses_BN: Tensor
    parents: list[list[int]]
    counts_B: Tensor
    slots_B: Tensor

    @classmethod
    def draw(cls, shortest: int = 40, longest: int = 100) -> "Trees":
        generator = torch.Generator().manual_seed(3)
        nodes = 11
        return cls(
            prompts(4, shortest=shortest, longest=longest),
            torch.randint(0, VOCABULARY, (4, nodes), generator=generator),
            [random_tree(nodes, 0, generator) for _ in range(3)] + [list(range(-1, nodes - 1))],
            torch.tensor([nodes + 1, 5, 1, 7]), torch.tensor([4, 0, 5, 2]),
        )

    def nodes(self, rows: list[int], slots_B: Tensor | None, count: int, counts_B: Tensor | None) -> Nodes:
        """Return the first `count` nodes of some of the rows."""
        parents_BN = torch.tensor([self.parents[b] for b in rows])[:, : count - 1]
        visible_BMM, depths_BM = tree_tables(parents_BN, count)
        roots_B1 = torch.tensor([[self.texts[b][-1]] for b in rows])
        tokens_BM = torch.cat([roots_B1, self.guesses_BN[rows, : count - 1]], dim=1)
        if counts_B is not None:
            # Nobody looks at what does not exist.
            beyond_BM = torch.arange(count) >= counts_B.unsqueeze(1)
            tokens_BM = tokens_BM.masked_fill(beyond_BM, 10**6)
            depths_BM = depths_BM.masked_fill(beyond_BM, 10**6)
            visible_BMM = visible_BMM | beyond_BM.unsqueeze(2)
        cached_B = torch.tensor([len(self.texts[b]) - 1 for b in rows])
        return Nodes(tokens_BM, cached_B, slots_B, depths_BM, visible_BMM, counts_B)


def read_texts(target: Target, cache: KVCache, trees: Trees) -> tuple[Tensor, Tensor]:
    """Read all texts but for their roots in pieces, rows of different lengths together; return the last piece's."""
    held = [0] * len(trees.texts)
    last_BV = [torch.empty(0)] * len(held)
    last_BF = list(last_BV)
    while any(h < len(text) - 1 for h, text in zip(held, trees.texts, strict=True)):
        going = [b for b, text in enumerate(trees.texts) if held[b] < len(text) - 1]
        sizes = [min(19 + 5 * b, len(trees.texts[b]) - 1 - held[b]) for b in going]
        size = max(sizes)
        # Nobody looks at what does not exist.
        pieces = [
            trees.texts[b][held[b] : held[b] + n] + [10**6] * (size - n) for b, n in zip(going, sizes, strict=True)
        ]
        counts_B = torch.tensor(sizes)
        logits_B1V, features_BMF = target.read_chain(
            cache, torch.tensor(pieces), torch.tensor([held[b] for b in going]), (-1, 0), trees.slots_B[going],
            (counts_B - 1).unsqueeze(1), counts_B=counts_B,
        )
        for i, (b, n) in enumerate(zip(going, sizes, strict=True)):
            assert not features_BMF[i, n:].any() and features_BMF[i, :n].any(dim=1).all()
            held[b] += n
            last_BV[b], last_BF[b] = logits_B1V[i, 0], features_BMF[i, n - 1]
    return torch.stack(last_BV), torch.stack(last_BF)


@torch.no_grad()
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("target", ALL, indirect=True, ids=" ".join)
def test_ragged_rows_read_as_each_alone(target: Target, kind: str, uninitialised_is_nan: None):
    trees = Trees.draw()
    memory = CACHES[kind](target)
    last_BV, last_BF = read_texts(target, memory, trees)
    together = trees.nodes([0, 1, 2, 3], trees.slots_B, 12, trees.counts_B)
    logits_BMV, features_BMF = target.forward(memory, together, (-1, 0))
    columns_B2 = torch.stack([trees.counts_B - 1, trees.counts_B // 2], dim=1)
    picked_B2V, _ = target.forward(memory, together, (), columns_B2)
    for b, count in enumerate(trees.counts_B.tolist()):
        alone, text = target.new_cache(1, CAPACITY), trees.texts[b]
        logits_1TV, states_1TF = target.read_chain(alone, torch.tensor([text[:-1]]), torch.zeros(1).long(), (-1, 0))
        assert_same(target, last_BV[b], logits_1TV[0, -1])
        assert_same(target, last_BF[b], states_1TF[0, -1])
        own_1MV, own_1MF = target.forward(alone, trees.nodes([b], None, count, None), (-1, 0))
        assert_same(target, logits_BMV[b, :count], own_1MV[0])
        assert_same(target, features_BMF[b, :count], own_1MF[0])
        assert not features_BMF[b, count:].any()
        assert_same(target, picked_B2V[b], own_1MV[0, columns_B2[b]])


@pytest.mark.skipif(not LIBRARY, reason="there are no native kernels")
@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_threads_change_no_bit_of_ragged_rows(name: str, threads: int):
    trees, found = Trees.draw(), []
    used_BM = torch.arange(12) < trees.counts_B.unsqueeze(1)
    before = torch.get_num_threads()
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            memory = in_blocks(native(name))
            read = read_texts(native(name), memory, trees)
            nodes = trees.nodes([0, 1, 2, 3], trees.slots_B, 12, trees.counts_B)
            logits_BMV, features_BMF = native(name).forward(memory, nodes, (-1, 0))
            found.append([*read, logits_BMV[used_BM], features_BMF])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("target", ALL, indirect=True, ids=" ".join)
def test_a_kept_path_is_text(target: Target, kind: str):
    """Rows keep paths of different lengths, and go on as if they had read them as text."""
    trees = Trees.draw(shortest=60, longest=70)
    memory = CACHES[kind](target)
    read_texts(target, memory, trees)
    target.forward(memory, trees.nodes([0, 1, 2, 3], trees.slots_B, 12, trees.counts_B), ())
    paths = []
    for b, count in enumerate(trees.counts_B.tolist()):
        path, node = [], count - 1
        while node > 0:
            path.insert(0, node)
            node = trees.parents[b][node - 1] + 1
        paths.append(path)
    path_BP = torch.tensor([path + [path[-1] if path else 0] * (11 - len(path)) for path in paths])
    keep_path(memory, torch.tensor([len(text) - 1 for text in trees.texts]), path_BP, trees.slots_B, trees.counts_B)
    longer = [
        [*text, *(int(trees.guesses_BN[b, node - 1]) for node in path), 7]
        for b, (text, path) in enumerate(zip(trees.texts, paths, strict=True))
    ]
    assert {len(path) for path in paths} >= {0, 6}
    following = Nodes(
        torch.tensor([[7]] * 4), torch.tensor([len(text) - 1 for text in longer]), trees.slots_B
    )
    logits_B1V, _ = target.forward(memory, following, ())
    for b, text in enumerate(longer):
        alone_1TV, _ = target.read_chain(target.new_cache(1, CAPACITY), torch.tensor([text]), torch.zeros(1).long(), ())
        assert_same(target, logits_B1V[b, 0], alone_1TV[0, -1])


@torch.no_grad()
@pytest.mark.parametrize("target", ALL, indirect=True, ids=" ".join)
def test_shared_blocks_read_as_ones_own(target: Target):
    cache = target.new_cache(2, CAPACITY, blocks=4)
    blocks = Blocks(cache)
    first, second = prompts(2, shortest=100, longest=100)
    second = first[:80] + second[80:]
    zero_1 = torch.zeros(1, dtype=torch.long)

    def read(slot: int, text: list[int], begin: int) -> Tensor:
        blocks.reserve(slot, len(text))
        tokens_1T, slots_1 = torch.tensor([text[begin:]]), torch.tensor([slot])
        return target.read_chain(cache, tokens_1T, zero_1 + begin, (), slots_1)[0][0, -1]

    def alone(text: list[int]) -> Tensor:
        return target.read_chain(target.new_cache(1, CAPACITY), torch.tensor([text]), zero_1, ())[0][0, -1]

    assert_same(target, read(0, first, 0), alone(first))
    blocks.publish(0, first)
    assert blocks.share(1, second) == 64 and blocks.blocks_of(1) == blocks.blocks_of(0)[:1]
    assert_same(target, read(1, second, 64), alone(second))
    longer = [*first, 5, 6]
    assert_same(target, read(0, longer, 100), alone(longer))
    assert_same(target, read(1, [*second, 8], 100), alone([*second, 8]))
    assert blocks.held_tokens == 3 * 64


@torch.no_grad()
@pytest.mark.parametrize("kind", CACHES)
def test_recorded_forwards_read_the_same(kind: str):
    """One recording serves cached texts of any length, and slots and blocks of any order."""
    target, trees = tiny_target("gemma3"), Trees.draw()
    compiled = Compiled(target, "trace")
    for longest in (60, 100):
        trees.texts = [text[:longest] for text in trees.texts]
        memories = [CACHES[kind](target) for _ in range(2)]
        found = []
        for memory, read in zip(memories, (compiled.forward, target.forward), strict=True):
            read_texts(target, memory, trees)
            nodes = trees.nodes([0, 1, 2, 3], trees.slots_B, 12, trees.counts_B)
            nodes.columns_S = compiled.columns(lambda span=longest + 12: span)
            found += read(memory, nodes, (-1, 0))
        assert_same(target, found[1], found[3])
        for b, count in enumerate(trees.counts_B.tolist()):
            assert_same(target, found[0][b, :count], found[2][b, :count])
        trees.slots_B = trees.slots_B.flip(0)


@pytest.mark.skipif(not LIBRARY, reason="there are no native kernels")
def test_places_without_a_block_are_refused():
    target = native("llama")
    cache = target.new_cache(2, CAPACITY, blocks=3)
    Blocks(cache).reserve(0, 64)
    one_11 = torch.ones((1, 1), dtype=torch.long)
    target.read_chain(cache, one_11, torch.tensor([63]), ())
    with pytest.raises(IndexError, match="slot 0 has no block for place 64, and 65 are needed"):
        target.read_chain(cache, one_11, torch.tensor([64]), ())
    with pytest.raises(IndexError, match="slot 1 has no block for place 0, and 1 are needed"):
        target.read_chain(cache, one_11, torch.tensor([0]), (), torch.tensor([1]))
    with pytest.raises(IndexError, match="3 of 1 nodes cannot exist"):
        target.read_chain(cache, one_11, torch.tensor([0]), (), counts_B=torch.tensor([3]))
    with pytest.raises(IndexError, match="the cache has 2 slots"):
        target.read_chain(cache, one_11, torch.tensor([0]), (), torch.tensor([2]))
