"""What a forward reads: the nodes of every row, and where the row lies in the cache.

Shapes: B rows, M nodes, S cached entries looked at.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Nodes:
    """Tokens to read behind what a cache holds of every row: a draft tree, root first, or the next tokens of a text.

    Args:
        tokens_BM: the tokens.
        cached_B: tokens of every row that the cache holds; the first node goes behind them.
        slots_B: slot of every row in the cache; None for row b in slot b.
        depths_BM: depth of every node, 0 for the root.
        visible_BMM: entry (i, j) says whether node i may see node j: itself and its ancestors. Without depths and
            visible every row is a chain, each node seeing those before it.
        counts_B: how many of the nodes a row really has, from the first on, at least one; None for all. The others are
            not read, and write nothing.
        columns_S: 0, 1, 2 … S - 1: the cached entries to look at, as `Backend.columns` gives them; S is at least the
            largest cached_B + M. A tensor, so that compiled code can leave its length open; None where the device may
            be asked for the largest.
    """

    tokens_BM: Tensor
    cached_B: Tensor
    slots_B: Tensor | None = None
    depths_BM: Tensor | None = None
    visible_BMM: Tensor | None = None
    counts_B: Tensor | None = None
    columns_S: Tensor | None = None


def neighbours(slots_B: Tensor | None, rows: int) -> slice | None:
    """Return the slots as a slice where they follow each other and that is known without waiting, else None."""
    if slots_B is None:
        return slice(0, rows)
    if torch.compiler.is_compiling() or slots_B.device.type != "cpu":
        return None
    slots: list[int] = slots_B.tolist()
    first = slots[0] if slots else 0
    return slice(first, first + rows) if slots == list(range(first, first + rows)) else None
