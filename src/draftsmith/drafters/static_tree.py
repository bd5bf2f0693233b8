"""Irregular static trees: the tables with which `grow` lays out a tree.

A tree is a list of paths of ranks, see `Plan.choices`: (0, 1) is the second likeliest guess after the likeliest one.

Shapes: N nodes, W nodes of a level, F those of them that have guesses under them.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from draftsmith.drafters.tree_choices import Choices
from draftsmith.types import ROOT


@dataclass(frozen=True)
class Level:
    """One depth of a tree. The frontier are the nodes of the depth above that have guesses under them.

    Args:
        width: number of guesses to request under every node of the frontier.
        taken_W: the nodes of this depth, each as its parent's place in the frontier times the width plus its rank.
        frontier: F, how many of them have guesses under them.
        grown_F: which ones have guesses under them; None if all have.
        under_F: for each of those, its parent's place in this frontier; None if each is under the one in its own place.
    """

    width: int
    taken_W: Tensor
    frontier: int
    grown_F: Tensor | None
    under_F: Tensor | None


@dataclass(frozen=True)
class StaticTree:
    """The tables of a tree, on the device where it is drafted.

    Args:
        levels: the depths, from the root down.
        order_N: for every node, in the order of the choices, its place when all levels are concatenated.
        parents_N: the parent of every node in that order.
    """

    levels: tuple[Level, ...]
    order_N: Tensor
    parents_N: Tensor


@torch.compiler.assume_constant_result
def static_tree(choices: Choices, device: torch.device) -> StaticTree:
    """Return the tables of a plan's choices, which are sorted: the likeliest path comes first.

    They are cached, because each costs a transfer to the device, and must not be changed.

    >>> static_tree(((0,), (0, 0), (0, 1), (1,)), torch.device("cpu")).parents_N.tolist()
    [-1, 0, 0, -1]
    """
    return _tables(choices, device)


@cache  # never dropped, because recordings of steps read them where they lie; a process uses few trees
def _tables(choices: Choices, device: torch.device) -> StaticTree:
    inner = {path[:-1] for path in choices}
    frontier: list[tuple[int, ...]] = [()]
    levels: list[Level] = []
    laid: list[tuple[int, ...]] = []
    while frontier:
        nodes = [path for path in choices if len(path) == len(levels) + 1]
        places = {path: place for place, path in enumerate(frontier)}
        width = 1 + max(path[-1] for path in nodes)
        taken = [places[path[:-1]] * width + path[-1] for path in nodes]
        grown = [number for number, path in enumerate(nodes) if path in inner]
        under = [places[nodes[number][:-1]] for number in grown]
        levels.append(
            Level(
                width,
                torch.tensor(taken, device=device),
                len(grown),
                torch.tensor(grown, device=device) if len(grown) < len(nodes) else None,
                torch.tensor(under, device=device) if under != list(range(len(frontier))) else None,
            )
        )
        laid += nodes
        frontier = [nodes[number] for number in grown]
    place, number = {path: n for n, path in enumerate(laid)}, {path: n for n, path in enumerate(choices)}
    return StaticTree(
        tuple(levels),
        torch.tensor([place[path] for path in choices], device=device),
        torch.tensor([number.get(path[:-1], ROOT) for path in choices], device=device),
    )
