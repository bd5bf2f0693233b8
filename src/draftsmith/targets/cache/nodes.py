"""The input of a forward: the nodes of every row, and where the row lies in the cache.

Shapes: B rows, M nodes, S cached entries looked at.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Nodes:
    """Tokens to read behind what a cache holds for every row: a draft tree, root first, or the next tokens of a text.

    Args:
        tokens_BM: the tokens.
        cached_B: number of tokens that the cache holds for every row; the first node goes behind them.
        slots_B: slot of every row in the cache; None for row b in slot b.
        depths_BM: depth of every node, 0 for the root.
        visible_BMM: entry (i, j) says whether node i may see node j: itself and its ancestors. Without depths and
            visible, every row is a chain, in which each node sees those before it.
        counts_B: how many nodes a row really has, counted from the first, at least one; None for all. Further nodes are
            not read, and write nothing.
        columns_S: 0, 1, 2 … S - 1: the cached entries to look at, as `Backend.columns` returns them; S is at least the
            largest cached_B + M. A tensor, so that compiled code can leave its length open. None computes the largest
            value, which waits for the device.
    """

    tokens_BM: Tensor
    cached_B: Tensor
    slots_B: Tensor | None = None
    depths_BM: Tensor | None = None
    visible_BMM: Tensor | None = None
    counts_B: Tensor | None = None
    columns_S: Tensor | None = None


def neighbours(slots_B: Tensor | None, rows: int) -> slice | None:
    """Return consecutive slots as a slice if that can be decided without waiting for the device, else None."""
    if slots_B is None:
        return slice(0, rows)
    if torch.compiler.is_compiling() or slots_B.device.type != "cpu":
        return None
    slots: list[int] = slots_B.tolist()
    first = slots[0] if slots else 0
    return slice(first, first + rows) if slots == list(range(first, first + rows)) else None
