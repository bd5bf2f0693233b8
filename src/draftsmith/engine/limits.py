"""How much a core takes on at once."""

from dataclasses import dataclass

DRAFT_ROOM = 256
"""Cache places after a row's text that the nodes of a draft may take."""
PIECE_TOKENS = 512
"""Prompt tokens that are read in a step while rows decode."""
LARGEST_PIECE = 2048
"""The same while no row decodes."""

SCORED_PIECE = 256
"""The same for a prompt with `prompt_logprobs`, each token of which takes a row of logits as wide as the vocabulary."""


@dataclass(frozen=True)
class Limits:
    """Sizes of a core.

    Args:
        max_batch: most rows at a time; further requests wait.
        max_length: most tokens a row, prompt and output.
        max_tokens: most tokens of all rows together, prompts and outputs; a request that would exceed it waits.
        piece: prompt tokens that are read in a step while rows decode, which bounds how long a running row waits.
        largest_piece: the same while none decodes.
        share: read and store common beginnings of prompts only once.
    """

    max_batch: int
    max_length: int
    max_tokens: int
    piece: int = PIECE_TOKENS
    largest_piece: int = LARGEST_PIECE
    share: bool = True
