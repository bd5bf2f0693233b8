"""What drafters in plain Python share: rows found again, contexts to lists, trees in lists, lists to a draft.

Shapes: B rows, N drafted nodes, T context tokens.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch

from draftsmith.drafters.base import Drafter
from draftsmith.plan import Plan
from draftsmith.types import UNUSED, Context, Draft

if TYPE_CHECKING:
    from draftsmith.targets import KVCache


class DraftTree:
    """The draft of one row while it grows: a path that is given twice is kept once, and what exceeds the plan is not.

    Args:
        branching: the most children of a node, depth by depth.
        room: the most nodes.
    """

    __slots__ = ("_branching", "_children", "_depths", "_room", "depth", "parents", "tokens")

    def __init__(self, branching: Sequence[int], room: int) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depth = 0
        self._branching, self._room = branching, room
        # Entry n + 1 is node n's, entry 0 the root's.
        self._depths = [0]
        self._children: list[dict[int, int]] = [{}]

    def add(self, parent: int, token: int) -> int | None:
        """Return the node of this guess under `parent` (a node or `ROOT`), new or known; None if there is no room."""
        below = self._children[parent + 1]
        known = below.get(token)
        if known is not None:
            return known
        node, depth = len(self.tokens), self._depths[parent + 1]
        if node >= self._room or depth >= len(self._branching) or len(below) >= self._branching[depth]:
            return None
        below[token] = node
        self.tokens.append(token)
        self.parents.append(parent)
        self._depths.append(depth + 1)
        self._children.append({})
        self.depth = max(self.depth, depth + 1)
        return node

    def add_path(self, parent: int, tokens: Sequence[int]) -> int | None:
        """Add a chain under `parent`, as far as there is room; return its last node, or None if it was cut short."""
        node: int | None = parent
        for token in tokens:
            node = self.add(parent, token)
            if node is None:
                return None
            parent = node
        return node


def read_context(context: Context) -> list[tuple[int, list[int]]]:
    """Return every row's number and its newly committed tokens, in one transfer from the device."""
    table = torch.cat([context.rows_B.unsqueeze(1), context.counts_B.unsqueeze(1), context.tokens_BT], dim=1).tolist()
    return [(line[0], line[2 : 2 + line[1]]) for line in table]


def to_draft(trees: Sequence[DraftTree], context: Context, plan: Plan) -> Draft:
    """Make one draft of the trees of all rows, as wide as the largest; without any guess it has no column at all."""
    width = max(len(tree.tokens) for tree in trees)
    device = context.tokens_BT.device
    if width == 0:
        none_BN = torch.empty((len(trees), 0), dtype=torch.int64, device=device)
        return Draft(tokens_BN=none_BN, parents_BN=none_BN, depth=0)
    gaps = [width - len(tree.tokens) for tree in trees]
    tokens = [tree.tokens + [0] * gap for tree, gap in zip(trees, gaps, strict=True)]
    parents = [tree.parents + [UNUSED] * gap for tree, gap in zip(trees, gaps, strict=True)]
    tokens_BN, parents_BN = torch.tensor([tokens, parents], dtype=torch.int64, device=device).unbind(0)
    return Draft(tokens_BN, parents_BN, max(tree.depth for tree in trees), branching=plan.branching)


class RowState(Protocol):
    """What a drafter keeps of one request."""

    def extend(self, tokens: list[int]) -> None:
        """Add committed tokens: first the prompt from its second token on, in pieces, then those of the output."""


R = TypeVar("R", bound=RowState)


class PythonDrafter(Drafter, Generic[R]):
    """A drafter that works on lists of tokens in plain Python: it needs the prompt, and no states of the target."""

    taps = ()
    reads_prompt = True

    def __init__(self) -> None:
        self._rows: dict[int, R] = {}

    @abstractmethod
    def new_row(self) -> R:
        """Return the state of a request of which nothing is known yet."""

    @abstractmethod
    def draft_row(self, row: R, plan: Plan, room: int) -> DraftTree:
        """Guess ahead of a row's newest token, `room` being the plan's nodes."""

    def attach(self, cache: "KVCache", plan: Plan) -> None:
        # A core that was dropped halfway did not say that its rows ended, and others may have their numbers.
        self._rows.clear()

    def reset_rows(self, rows: list[int]) -> None:
        for number in rows:
            self._rows.pop(number, None)

    def follow(self, context: Context) -> None:
        self._read(context)

    def propose(self, context: Context, plan: Plan) -> Draft:
        room = plan.max_nodes
        return to_draft(
            [DraftTree((), 0) if row is None else self.draft_row(row, plan, room) for row in self._read(context)],
            context,
            plan,
        )

    def _read(self, context: Context) -> list[R | None]:
        """Tell every row its new tokens; None stands for padding."""
        rows: list[R | None] = []
        for number, tokens in read_context(context):
            row = None
            if number >= 0:
                row = self._rows.get(number)
                if row is None:
                    row = self._rows[number] = self.new_row()
                row.extend(tokens)
            rows.append(row)
        return rows
