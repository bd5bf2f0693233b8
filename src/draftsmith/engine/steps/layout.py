"""Turns drafts into nodes that the target reads: a tree after its root, and the trees of several groups as one.

Shapes: B rows, R rows of them with a constraint, N drafted nodes, M = N + 1 verified nodes (root first), T context
tokens, V vocabulary, W words of 32 tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from draftsmith.drafters.base import Drafter
from draftsmith.plan import Plan
from draftsmith.types import UNUSED, Context, Draft, empty_draft
from draftsmith.verify import tree_tables


@dataclass(frozen=True)
class Allowed:
    """Which tokens the rows with a constraint may take at every node; the other rows may take all.

    Args:
        rows_R: the rows with a constraint (int64).
        bits_RMW: a bit for every token, 32 in a word, lowest bit first (int32).
    """

    rows_R: Tensor
    bits_RMW: Tensor

    def behind(self, begin: int) -> "Allowed":
        """Return the same for the part of the batch that begins at `begin`, in which all of these rows must lie."""
        return Allowed(self.rows_R - begin, self.bits_RMW) if begin else self

    def apply(self, logits_BMV: Tensor) -> Tensor:
        """Return a copy of the logits with minus infinity for what is not allowed."""
        closed_RMV = self._closed(logits_BMV.shape[2])
        if len(self.rows_R) == len(logits_BMV):
            return logits_BMV.masked_fill(closed_RMV, float("-inf"))
        return logits_BMV.index_copy(0, self.rows_R, logits_BMV[self.rows_R].masked_fill(closed_RMV, float("-inf")))

    def _closed(self, vocabulary: int) -> Tensor:
        """Return for every token whether it is forbidden (R, M, V)."""
        # The lowest byte of a word comes first on all processors that PyTorch runs on.
        bytes_RMY = ~self.bits_RMW.view(torch.uint8)
        if bytes_RMY.device.type == "cpu":
            bits_RMV = np.unpackbits(bytes_RMY.numpy(), axis=2, bitorder="little", count=vocabulary)
            return torch.from_numpy(bits_RMV).view(torch.bool)
        places_8 = torch.arange(8, dtype=torch.uint8, device=bytes_RMY.device)
        return ((bytes_RMY.unsqueeze(3) >> places_8) & 1).flatten(2)[:, :, :vocabulary].bool()


@dataclass
class Layout:
    """A draft with its root, laid out for the target: tokens and depths (B, M), and which node sees which (B, M, M).

    Args:
        nodes_B: how many nodes, the root included, each row really has; None if all rows have M.
        allowed: which tokens the rows' constraints allow at the nodes; None without constraints.
    """

    draft: Draft
    tokens_BM: Tensor
    depths_BM: Tensor
    visible_BMM: Tensor
    nodes_B: Tensor | None = None
    allowed: Allowed | None = None

    def part(self, begin: int, end: int) -> "Layout":
        """Return the rows `begin` to `end` - 1; only a part that ends with the last row keeps `allowed`."""
        if begin == 0 and end == len(self.tokens_BM):
            return self
        draft = self.draft
        q_BMV = None if draft.q_BMV is None else draft.q_BMV[begin:end]
        rows = replace(
            draft, tokens_BN=draft.tokens_BN[begin:end], parents_BN=draft.parents_BN[begin:end], q_BMV=q_BMV
        )
        return Layout(
            rows, self.tokens_BM[begin:end], self.depths_BM[begin:end], self.visible_BMM[begin:end],
            None if self.nodes_B is None else self.nodes_B[begin:end],
            None if self.allowed is None or end < len(self.tokens_BM) else self.allowed.behind(begin),
        )


@dataclass(frozen=True)
class Drafting:
    """A drafter together with the layout of its drafts, as one piece to compile.

    Args:
        lay_out: puts the tree of a draft after the root, in the form that the target reads.
    """

    drafter: Drafter
    lay_out: Callable[[Context, Draft], Layout]

    def run(self, context: Context, plan: Plan) -> Layout:
        """Let the drafter guess, and lay the guesses out."""
        return self.lay_out(context, self.drafter.propose(context, plan) if plan.depth else empty_draft(context))


class StaticDrafting(Drafting):
    """The same, with every draft padded to its plan's size, because what reads it is compiled for fixed shapes.

    Drafters that are compiled make drafts of that size anyway.
    """

    def run(self, context: Context, plan: Plan) -> Layout:
        """Let the drafter guess, pad the draft, and lay it out."""
        draft = self.drafter.propose(context, plan) if plan.depth else empty_draft(context)
        return self.lay_out(context, filled(draft, plan))


def lay_out(context: Context, draft: Draft) -> Layout:
    """Lay a draft out for the target."""
    visible_BMM, depths_BM = tree_tables(draft.parents_BN, draft.depth)
    tokens_BM = torch.cat([context.root()[0].unsqueeze(1), draft.tokens_BN], dim=1)
    return Layout(draft, tokens_BM, depths_BM, visible_BMM)


def lay_out_natively(context: Context, draft: Draft) -> Layout:
    """Do as `lay_out`, in one native operator, which also counts the nodes of every row."""
    tokens_BM, depths_BM, visible_BMM, nodes_B = torch.ops.draftsmith.lay_out(
        context.tokens_BT, context.counts_B, draft.tokens_BN, draft.parents_BN
    )
    return Layout(draft, tokens_BM, depths_BM, visible_BMM, nodes_B)


def together(layouts: Sequence[Layout]) -> Layout:
    """Put the rows of several layouts in one; smaller drafts get unused nodes, which `nodes_B` does not count."""
    if len(layouts) == 1:
        return layouts[0]
    width = max(layout.tokens_BM.shape[1] for layout in layouts)
    whole = [padded(layout, width) for layout in layouts]
    draft = Draft(
        torch.cat([layout.draft.tokens_BN for layout in whole]),
        torch.cat([layout.draft.parents_BN for layout in whole]),
        max(layout.draft.depth for layout in layouts),
    )
    counts = [
        layout.tokens_BM.new_full((len(layout.tokens_BM),), layout.tokens_BM.shape[1])
        if layout.nodes_B is None else layout.nodes_B
        for layout in layouts
    ]
    return Layout(
        draft, torch.cat([layout.tokens_BM for layout in whole]), torch.cat([layout.depths_BM for layout in whole]),
        torch.cat([layout.visible_BMM for layout in whole]), torch.cat(counts),
    )


def padded(layout: Layout, width: int) -> Layout:
    """Add unused nodes up to `width`; they see the root and themselves."""
    missing = width - layout.tokens_BM.shape[1]
    if missing == 0:
        return layout
    nodes = layout.tokens_BM.shape[1]
    # Padded with the row's own root, because another token may have no finite state, and attention multiplies masked
    # entries too (0 × NaN = NaN).
    tokens_BM = torch.cat([layout.tokens_BM, layout.tokens_BM[:, :1].expand(-1, missing)], dim=1)
    visible_BMM = pad(layout.visible_BMM, (0, missing, 0, missing))
    visible_BMM[:, nodes:, 0] = True
    own = torch.arange(nodes, width, device=visible_BMM.device)
    visible_BMM[:, own, own] = True
    draft = replace(
        layout.draft, tokens_BN=tokens_BM[:, 1:], parents_BN=pad(layout.draft.parents_BN, (0, missing), value=UNUSED)
    )
    return Layout(draft, tokens_BM, pad(layout.depths_BM, (0, missing), value=1), visible_BMM, layout.nodes_B)


def roots_alone(context: Context) -> Layout:
    """Lay out rows of one committed token that draft nothing."""
    depths_B1 = torch.zeros_like(context.tokens_BT)
    visible_B11 = torch.ones((len(depths_B1), 1, 1), dtype=torch.bool, device=depths_B1.device)
    return Layout(empty_draft(context), context.tokens_BT, depths_B1, visible_B11)


def filled(draft: Draft, plan: Plan) -> Draft:
    """Pad a draft to the nodes of its plan, and to the depth they can have; one without guesses stays empty, which is a
    shape too."""
    missing = plan.max_nodes - draft.tokens_BN.shape[1]
    if draft.depth == 0 or draft.q_BMV is not None or missing < 0:
        return draft
    return replace(
        draft,
        tokens_BN=pad(draft.tokens_BN, (0, missing)),
        parents_BN=pad(draft.parents_BN, (0, missing), value=UNUSED),
        depth=min(plan.depth, plan.max_nodes),
    )
