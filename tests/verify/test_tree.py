"""Tables of a tree against walking up parent by parent."""

import random

import pytest
import torch

from draftsmith.types import ROOT, UNUSED
from draftsmith.verify import ancestor_table, tree_tables


def random_parents(generator: random.Random, nodes: int, deepest: int) -> list[int]:
    parents: list[int] = []
    depths: list[int] = []
    for node in range(nodes):
        choices = [ROOT] + [n for n in range(node) if parents[n] != UNUSED and depths[n] < deepest]
        parent = UNUSED if generator.random() < 0.1 else generator.choice(choices)
        parents.append(parent)
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return parents


def walk_up(parents: list[int], node: int) -> list[int]:
    """Ancestors of a node from itself to the root, counting the root as 0."""
    path = [node + 1]
    while path[-1] != 0:
        path.append(max(parents[path[-1] - 1], ROOT) + 1)
    return path


@pytest.mark.parametrize(("nodes", "depth"), [(1, 1), (5, 2), (12, 4), (33, 7)])
def test_against_walking_up(nodes: int, depth: int) -> None:
    generator = random.Random(nodes)
    rows = [random_parents(generator, nodes, depth) for _ in range(20)]
    visible_BMM, depths_BM = tree_tables(torch.tensor(rows), depth)
    ancestors_BMA = ancestor_table(torch.tensor(rows), depth)
    for row, parents in enumerate(rows):
        for node in range(-1, nodes):
            path = walk_up(parents, node)
            assert set(visible_BMM[row, node + 1].nonzero().squeeze(1).tolist()) == set(path)
            assert depths_BM[row, node + 1] == len(path) - 1
            assert ancestors_BMA[row, node + 1].tolist() == path + [0] * (depth + 1 - len(path))


def test_unused_nodes_see_the_root_and_themselves() -> None:
    visible_BMM, depths_BM = tree_tables(torch.tensor([[ROOT, UNUSED, UNUSED]]), 3)
    assert visible_BMM[0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]
    assert depths_BM.tolist() == [[0, 1, 1, 1]]


def test_an_empty_draft_is_the_root_alone() -> None:
    visible_BMM, depths_BM = tree_tables(torch.zeros((3, 0), dtype=torch.int64), 0)
    assert visible_BMM.tolist() == [[[True]]] * 3
    assert depths_BM.tolist() == [[0]] * 3
