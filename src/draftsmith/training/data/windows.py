"""Windows of tokens, each from one text only, and batches of them.

A window that is shorter than its neighbours is padded on the right, where causal attention does not see the padding.
Shapes: B windows, L tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.targets.token_ids import Span

FIRST_LEARNT = 2
"""The first token that can be guessed: guesses follow a root, and a root follows the token whose state predicted it."""


@dataclass(frozen=True)
class Window:
    """Tokens of one text, and the spans that are learnt."""

    tokens: list[int]
    spans: list[Span]

    @property
    def learns(self) -> bool:
        """Whether any of its tokens are learnt."""
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
    """Windows side by side: `learnt_BL` marks the tokens to learn, which are neither padding nor written by others.

    `again` says that the same windows are used for learning several times.
    """

    tokens_BL: Tensor
    learnt_BL: Tensor
    again: bool = False


def cut(text: Window, opening: Sequence[int], length: int) -> list[Window]:
    """Cut a text into windows of at most `length` tokens; `opening` is put before every window that continues the text.

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
        most: the greatest length of a window in the stage.
        room: padding behind the longest window, up to `most`, so that deep guesses have places behind its last tokens.
        again: whether the windows are used for learning several times.
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
