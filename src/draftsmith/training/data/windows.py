"""Windows of tokens, each from one text alone, and batches of them.

A window shorter than its neighbours is padded on the right, where causal attention keeps the padding out of sight.
Shapes: B windows, L tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.targets.token_ids import Span

FIRST_LEARNT = 2
"""The first token that can be guessed: guesses stand behind a root, and a root behind the token that predicted it."""


@dataclass(frozen=True)
class Window:
    """Tokens of one text, and the spans of them that are learnt."""

    tokens: list[int]
    spans: list[Span]

    @property
    def learns(self) -> bool:
        """Whether there is anything to learn."""
        return any(max(begin, FIRST_LEARNT) < end for begin, end in self.spans)

    def to_json(self) -> list[Any]:
        """Return it as plain JSON."""
        return [self.tokens, [list(span) for span in self.spans]]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> "Window":
        """Undo `to_json`."""
        return cls(list(value[0]), [(begin, end) for begin, end in value[1]])


@dataclass(frozen=True)
class Batch:
    """Windows side by side: `learnt_BL` tells the tokens to learn from padding and from what others wrote.

    `again` says that the same windows are learnt from several times.
    """

    tokens_BL: Tensor
    learnt_BL: Tensor
    again: bool = False


def cut(text: Window, opening: Sequence[int], length: int) -> list[Window]:
    """Cut a text into windows of at most `length` tokens; `opening` stands before each that goes on with it.

    Windows in which nothing is learnt are left out.
    """
    pieces = [Window(text.tokens[:length], [(begin, min(end, length)) for begin, end in text.spans if begin < length])]
    own = max(1, length - len(opening))
    for start in range(length, len(text.tokens), own):
        shift = start - len(opening)
        spans = [
            (max(begin, start) - shift, min(end, start + own) - shift)
            for begin, end in text.spans if begin < start + own and end > start
        ]
        pieces.append(Window([*opening, *text.tokens[start : start + own]], spans))
    return [piece for piece in pieces if piece.learns]


def collate(windows: Iterable[Window], most: int, room: int = 0, again: bool = False) -> Batch:
    """Put windows side by side, padded to the longest of them.

    Args:
        most: as long as any window of the stage is.
        room: padding behind the longest, up to `most`, so that deep guesses have a place behind its last tokens.
        again: whether the windows are learnt from several times.
    """
    rows = list(windows)
    longest = max(len(window.tokens) for window in rows)
    tokens_BL = torch.zeros((len(rows), max(longest, min(most, longest + room))), dtype=torch.int64)
    learnt_BL = torch.zeros_like(tokens_BL, dtype=torch.bool)
    for row, window in enumerate(rows):
        tokens_BL[row, : len(window.tokens)] = torch.tensor(window.tokens)
        for begin, end in window.spans:
            learnt_BL[row, begin:end] = True
    return Batch(tokens_BL, learnt_BL, again)
