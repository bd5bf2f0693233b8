"""How much a core takes on."""

from dataclasses import dataclass

DRAFT_ROOM = 256
"""Places behind a row's text that the nodes of a draft may take."""
PIECE_TOKENS = 512
"""Tokens of prompts that are read in a step while rows decode."""
LARGEST_PIECE = 2048
"""The same while none does."""

SCORED_PIECE = 256
"""Of a prompt whose tokens' probabilities are asked for: each takes a row as wide as the vocabulary."""


@dataclass(frozen=True)
class Limits:
    """Sizes of a core.

    Args:
        max_batch: most rows at a time; further requests wait.
        max_length: most tokens a row, prompt and output.
        max_tokens: most tokens that the texts of all rows may come to together; what would exceed it waits.
        piece: tokens of prompts that are read in a step while rows decode: the longest wait of a running row.
        largest_piece: the same while none decodes.
        share: read and store once what prompts have in common.
    """

    max_batch: int
    max_length: int
    max_tokens: int
    piece: int = PIECE_TOKENS
    largest_piece: int = LARGEST_PIECE
    share: bool = True
