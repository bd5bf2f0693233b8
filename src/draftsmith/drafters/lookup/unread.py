"""What a lookup was told while it did not draft: it is read when guesses are wanted, so that until then a step costs
hardly more than without a drafter, and texts for which nothing is ever looked up cost little.

Shapes: B rows, T context tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from draftsmith.types import Context

MOST_UNREAD = 256
"""At most so many contexts are collected before they are read together."""

News = tuple[Tensor, Tensor, Tensor]
"""Each row's number (B), its count of newly committed tokens (B), and these tokens (B, T)."""


@dataclass(slots=True)
class _Piece:
    """Some contexts, and the rows that ended behind them."""

    news: list[News] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)


class Unread:
    """Contexts and ended rows, in the order in which a drafter heard of them."""

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []
        self._count = 0

    def add(self, context: Context) -> bool:
        """Collect what was committed; return whether there is so much by now that it should be read."""
        if not self._pieces or self._pieces[-1].ended:
            self._pieces.append(_Piece())
        self._pieces[-1].news.append((context.rows_B, context.counts_B, context.tokens_BT))
        self._count += 1
        return self._count >= MOST_UNREAD

    def end(self, rows: list[int]) -> None:
        """Note that these requests have ended."""
        if not self._pieces:
            self._pieces.append(_Piece())
        self._pieces[-1].ended += rows

    def clear(self) -> None:
        """Forget everything."""
        self._pieces, self._count = [], 0

    def take(self) -> Iterator[tuple[list[News], list[int]]]:
        """Give what was collected, and forget it: contexts of the same width in one, then rows that ended behind."""
        pieces = self._pieces
        if not pieces:
            return
        self.clear()
        for piece in pieces:
            yield [joined(list(alike)) for _, alike in groupby(piece.news, lambda one: one[2].shape[1])], piece.ended


def joined(news: list[News]) -> News:
    """Return one item with all rows of several of the same width, on the CPU, by one transfer."""
    if len(news) == 1 and news[0][0].device.type == "cpu":
        return news[0]
    rows, counts, tokens = zip(*news, strict=True)
    every: News = (torch.cat(rows), torch.cat(counts), torch.cat(tokens))
    if every[0].device.type == "cpu":
        return every
    table_BX = table_of(every).cpu()
    return table_BX[:, 0], table_BX[:, 1], table_BX[:, 2:]


def table_of(news: News) -> Tensor:
    """Return one tensor with a line per row: its number, its count and its tokens."""
    rows_B, counts_B, tokens_BT = news
    return torch.cat([rows_B.unsqueeze(1), counts_B.unsqueeze(1), tokens_BT], dim=1)
