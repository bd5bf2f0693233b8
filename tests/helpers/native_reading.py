"""Reads rows and trees by a target, and says what of them is used.

B rows, M nodes (root first), N = M - 1 guesses, S columns of the cache.
"""

import torch
from torch import Tensor

from draftsmith.targets import KVCache, Nodes, Target
from draftsmith.types import ROOT, UNUSED
from draftsmith.verify import tree_tables
from tests.helpers.tiny import VOCABULARY, prompts
from tests.targets.test_target import random_tree


def read(
    target: Target, cache: KVCache, rows: list[list[int]], taps: tuple[int, ...] = (), columns: Tensor | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Prefill every row but for its last token, which is the root."""
    found = []
    for slot, tokens in enumerate(rows):
        count = len(tokens) - 1
        nodes = Nodes(
            torch.tensor([tokens[:-1]]), torch.zeros(1, dtype=torch.long), torch.tensor([slot]),
            torch.arange(count).unsqueeze(0), torch.ones((1, count, count), dtype=torch.bool).tril(),
            columns_S=torch.arange(cache.capacity),
        )
        found.append(target.forward(cache, nodes, taps, columns))
    return found


def verify(
    target: Target,
    cache: KVCache,
    rows: list[list[int]],
    guesses_BN: Tensor,
    trees: list[list[int]],
    taps: tuple[int, ...] = (-1, 0),
    slots_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Read the root and the tree of every row, one step."""
    visible_BMM, depths_BM = tree_tables(torch.tensor(trees).view(len(rows), -1).long(), guesses_BN.shape[1])
    roots_B1 = torch.tensor([[tokens[-1]] for tokens in rows])
    cached_B = torch.tensor([len(tokens) - 1 for tokens in rows])
    nodes = Nodes(
        torch.cat([roots_B1, guesses_BN], dim=1), cached_B, slots_B, depths_BM, visible_BMM,
        columns_S=torch.arange(cache.capacity),
    )
    return target.forward(cache, nodes, taps)


@torch.no_grad()
def read_trees(target: Target, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Read four ragged rows and their trees, deeper than any window; return logits and features of used nodes."""
    generator = torch.Generator().manual_seed(1)
    rows = prompts(4, shortest=5, longest=21)
    comb = [ROOT, ROOT, *(2 * (node // 2) for node in range(14))]
    trees = [comb, *(random_tree(len(comb), unused, generator) for unused in (0, 5, len(comb)))]
    guesses_BN = torch.randint(0, VOCABULARY, (4, len(comb)), generator=generator)
    cache = target.new_cache(slots=5, capacity=48)
    read(target, cache, rows)
    logits_BMV, features_BMF = verify(target, cache, rows, guesses_BN, trees, taps)
    used_BM = torch.tensor([[ROOT, *tree] for tree in trees]) != UNUSED
    return logits_BMV[used_BM], features_BMF[used_BM]
