"""Tables of a draft tree. Shapes: B rows, N drafted nodes, M = N + 1 verified nodes (root first), D depth."""

import torch
from torch import Tensor


def ancestor_table(parents_BN: Tensor, depth: int) -> Tensor:
    """Return ancestors_BMA (A = depth + 1, int64): the node itself, its parent, … up to the root (0), then repeating 0.

    Indices count the root as 0 and node n as n + 1. `UNUSED` nodes count as children of the root.

    >>> ancestor_table(torch.tensor([[-1, 0, -1]]), 2).tolist()      # root → {1 → {2}, 3}
    [[[0, 0, 0], [1, 0, 0], [2, 1, 0], [3, 0, 0]]]
    """
    batch, nodes = parents_BN.shape
    # The root is its own parent; ROOT (-1) becomes 0 by the shift and UNUSED (-2) by the clamp.
    up_BM = torch.nn.functional.pad((parents_BN + 1).clamp(min=0), (1, 0))
    ancestors = [torch.arange(nodes + 1, device=parents_BN.device).expand(batch, -1)]
    for _ in range(depth):
        ancestors.append(up_BM.gather(1, ancestors[-1]))
    return torch.stack(ancestors, dim=2)


def tree_tables(parents_BN: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Return visible_BMM (bool: row node may look at column node, its ancestor or itself) and depths_BM (int64).

    The mask is that of tree attention (SpecInfer, arXiv 2305.09781, section 4.2). Index 0 is the root, at depth 0;
    `UNUSED` nodes see the root and themselves and have depth 1. `depth` bounds the depth of every node.

    >>> visible, depths = tree_tables(torch.tensor([[-1, 0, -1]]), 2)
    >>> visible[0].int().tolist(), depths.tolist()
    ([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]], [[0, 1, 2, 1]])
    """
    batch, nodes = parents_BN.shape
    ancestors_BMA = ancestor_table(parents_BN, depth)
    visible_BMM = torch.zeros((batch, nodes + 1, nodes + 1), dtype=torch.bool, device=parents_BN.device)
    return visible_BMM.scatter(2, ancestors_BMA, True), (ancestors_BMA != 0).sum(2)
