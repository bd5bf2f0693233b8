"""What constraints allow at the nodes of a draft: looked up before the target reads them, applied to its logits after.

Shapes: B rows, R rows of them with a constraint, N drafted nodes, M = N + 1 verified nodes (root first), V vocabulary,
W words of 32 tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from draftsmith.engine.requests.guide import Guide
from draftsmith.engine.steps.layout import Allowed, Layout
from draftsmith.types import ROOT, UNUSED, Context, Draft


@dataclass(frozen=True)
class Constrained:
    """The rows of a group that have a constraint, as indices into the group, and the guide of each."""

    rows: list[int]
    guides: list[Guide]

    def behind(self, begin: int) -> "Constrained":
        """Return the same rows as indices into the part of the group that begins at `begin`."""
        return Constrained([row - begin for row in self.rows], self.guides)


def constrain(
    layout: Layout, constrained: Constrained, context: Context, lay_out: Callable[[Context, Draft], Layout],
    removes: bool = True,
) -> Layout:
    """Return the layout with the tokens that its rows' constraints allow, and without the guesses that they forbid.

    A forbidden guess that was drawn (from a q) stays, because sampling is exact only if its rejection counts; its
    descendants go.

    Args:
        removes: whether guesses may be removed; not if the drafter learns from every node of its draft.
    """
    draft = layout.draft
    device, nodes = draft.tokens_BN.device, draft.tokens_BN.shape[1]
    rows_R = torch.tensor(constrained.rows, device=device)
    tree = torch.stack([draft.tokens_BN[rows_R], draft.parents_BN[rows_R]]).tolist() if nodes else None
    bits_RMW = torch.empty((len(constrained.rows), nodes + 1, constrained.guides[0].words), dtype=torch.int32)
    changed: list[list[int]] = []
    drawn = draft.q_BMV is not None
    for r, guide in enumerate(constrained.guides):
        tokens, parents = (tree[0][r], tree[1][r]) if tree is not None else ([], [])
        allowed = guide.look(tokens, parents, bits_RMW[r], removes and not drawn)
        left, guide.refused = without_forbidden(parents, allowed, keeps_drawn=drawn)
        changed.append(left)
    allowed_R = Allowed(rows_R, bits_RMW.to(device))
    if not removes or tree is None or changed == tree[1]:
        return replace(layout, allowed=allowed_R)
    parents_BN = draft.parents_BN.clone()
    parents_BN[rows_R] = torch.tensor(changed, device=device)
    return replace(lay_out(context, replace(draft, parents_BN=parents_BN)), allowed=allowed_R)


def without_forbidden(
    parents: Sequence[int], allowed: Sequence[bool], keeps_drawn: bool
) -> tuple[list[int], int]:
    """Return the parents of a draft's guesses, `UNUSED` for those that go, and how many forbidden guesses stay.

    >>> without_forbidden([-1, 0, 1, -1], [True, False, False, True], keeps_drawn=False)
    ([-1, -2, -2, -1], 0)
    >>> without_forbidden([-1, 0, 1, -1], [True, False, False, True], keeps_drawn=True)
    ([-1, 0, -2, -1], 1)
    """
    left, refused = list(parents), 0
    for node, parent in enumerate(parents):
        if parent == UNUSED or allowed[node]:
            continue
        if keeps_drawn and (parent == ROOT or allowed[parent]):
            refused += 1
        else:
            left[node] = UNUSED
    return left, refused
