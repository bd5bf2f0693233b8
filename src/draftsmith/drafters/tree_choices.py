"""Irregular static trees as lists of choices: the published trees, and functions for any tree.

A tree is a list of paths of ranks, see `Plan.choices`: (0, 1) is the second likeliest guess after the likeliest one.
"""

from collections.abc import Sequence

from draftsmith.plan import Plan
from draftsmith.types import DraftsmithError

Choices = tuple[tuple[int, ...], ...]


def _paths(text: str) -> Choices:
    return tuple(tuple(int(rank) for rank in path) for path in text.split())


EAGLE_TREE = _paths("0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001")
"""EAGLE (arXiv:2401.15077, section 4) with the authors' default choices: 25 guesses, 26 verified with the root."""

MEDUSA_TREE = _paths(
    "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 005 0000 "
    "011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070"
)
"""Medusa (arXiv:2401.10774, section 2.3.3) with the authors' default choices: 63 guesses, in order of merit."""


def plan_of(choices: Choices, depth: int, vocabulary: int) -> Plan:
    """Return the plan of a tree, without nodes that a drafter of this depth and vocabulary cannot make."""
    return Plan(choices=tuple(path for path in choices if len(path) <= depth and max(path) < vocabulary))


def pruned(choices: Choices, nodes: int) -> Choices:
    """Return the `nodes` choices with the smallest sums of rank + 1 over their guesses; of equal sums, the deeper ones.

    No parent comes behind its child in this order, so the remaining choices form a tree.
    """
    return tuple(sorted(choices, key=lambda path: (sum(path) + len(path), -len(path), path))[:nodes])


def read_choices(values: object, where: str) -> Plan:
    """Read a list of lists of ranks; anything else is a DraftsmithError that names `where`."""
    if not isinstance(values, Sequence) or not values:
        raise DraftsmithError(f"{where} holds no choices; give a list of lists of ranks, such as [[0], [0, 0], [1]].")
    for path in values:
        if not isinstance(path, list) or not all(type(rank) is int for rank in path):
            raise DraftsmithError(f"{where} has {path!r} among its choices; give lists of ranks, such as [0, 1].")
    return Plan(choices=tuple(tuple(path) for path in values))
