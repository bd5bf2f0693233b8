"""What drafters in plain Python share: finding rows, turning contexts into lists, and lists of trees into a draft.

Shapes: B rows, N drafted nodes, T context tokens.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.lookup.unread import Unread, table_of
from draftsmith.plan import Plan
from draftsmith.types import UNUSED, Context, Draft, empty_draft

if TYPE_CHECKING:
    from draftsmith.targets import KVCache


class DraftTree:
    """The draft of one row while it grows. A path that is added twice is kept once; nodes beyond the plan are dropped.

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
        # Entry n + 1 belongs to node n, entry 0 to the root.
        self._depths = [0]
        self._children: list[dict[int, int]] = [{}]

    def add(self, parent: int, token: int) -> int | None:
        """Return the node of this guess under `parent` (a node or `ROOT`), new or old; None if there is no room."""
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


def to_draft(trees: Sequence[DraftTree], context: Context, plan: Plan) -> Draft:
    """Combine the trees of all rows into one draft, as wide as the largest; without any guess it has no columns."""
    width = max(len(tree.tokens) for tree in trees)
    device = context.tokens_BT.device
    if width == 0:
        return empty_draft(context)
    gaps = [width - len(tree.tokens) for tree in trees]
    tokens = [tree.tokens + [0] * gap for tree, gap in zip(trees, gaps, strict=True)]
    parents = [tree.parents + [UNUSED] * gap for tree, gap in zip(trees, gaps, strict=True)]
    tokens_BN, parents_BN = torch.tensor([tokens, parents], dtype=torch.int64, device=device).unbind(0)
    return Draft(tokens_BN, parents_BN, max(tree.depth for tree in trees), branching=plan.branching)


class RowState(Protocol):
    """What a drafter stores for one request."""

    def extend(self, tokens: list[int]) -> None:
        """Add committed tokens: first the prompt from its second token on, in pieces, then those of the output."""


R = TypeVar("R", bound=RowState)


class PythonDrafter(Drafter, Generic[R]):
    """A drafter that works on lists of tokens in plain Python: it needs the prompt, and no states of the target."""

    taps = ()
    reads_prompt = True
    in_python = True

    def __init__(self) -> None:
        self._rows: dict[int, R] = {}
        self._unread = Unread()

    @abstractmethod
    def new_row(self) -> R:
        """Return the state of a new request."""

    @abstractmethod
    def draft_row(self, row: R, plan: Plan, room: int) -> DraftTree:
        """Guess ahead of a row's newest token, `room` being the plan's nodes."""

    def attach(self, cache: "KVCache", plan: Plan) -> None:
        # A core that was dropped halfway did not report that its rows ended, and other rows may get their numbers.
        self._rows.clear()
        self._unread.clear()

    def reset_rows(self, rows: list[int]) -> None:
        self._unread.end(rows)

    def follow(self, context: Context) -> None:
        if self._unread.add(context):
            self.catch_up()

    def propose(self, context: Context, plan: Plan) -> Draft:
        room = plan.max_nodes
        return to_draft(
            [DraftTree((), 0) if row is None else self.draft_row(row, plan, room) for row in self.take_in(context)],
            context,
            plan,
        )

    def take_in(self, context: Context) -> list[R | None]:
        """Give every row its new tokens; None stands for padding."""
        self.catch_up()
        news = (context.rows_B, context.counts_B, context.tokens_BT)
        if context.rows_B.device.type == "cpu":  # on a CPU, three small lists are cheaper than a table
            rows, counts, tokens = (tensor.tolist() for tensor in news)
            return [self._tell(*row) for row in zip(rows, counts, tokens, strict=True)]
        return self._read(table_of(news).tolist())

    def catch_up(self) -> None:
        """Read what was collected."""
        for news, ended in self._unread.take():
            try:
                for alike in news:
                    self._read(table_of(alike).tolist())
            finally:
                for number in ended:
                    row = self._rows.pop(number, None)
                    if row is not None:
                        self.forget_row(number, row)

    def forget_row(self, number: int, row: R) -> None:
        """Hear that a request has ended, with what was stored for it."""

    def _read(self, lines: Sequence[list[int]]) -> list[R | None]:
        """Give rows their new tokens; None stands for padding."""
        return [self._tell(number, count, tokens) for number, count, *tokens in lines]

    def _tell(self, number: int, count: int, tokens: list[int]) -> R | None:
        """Give a row its new tokens; None stands for padding."""
        if number < 0:
            return None
        row = self._rows.get(number)
        if row is None:
            row = self._rows[number] = self.new_row()
        row.extend(tokens[:count])
        return row


K = TypeVar("K")


class LookupDrafter(Drafter, Generic[K]):
    """A drafter that finds its guesses in texts, and so can also guess behind tokens that are only guesses."""

    taps = ()
    reads_prompt = True
    follows_cheaply = True

    @abstractmethod
    def take_in(self, context: Context) -> Sequence[K | None]:
        """Read committed tokens, and return every row's key for `continue_row`; None stands for padding."""

    @abstractmethod
    def continue_row(self, row: K, ahead: Sequence[int], count: int) -> list[int]:
        """Return up to `count` guesses, one after another, behind a row's text followed by the tokens `ahead`.

        Nothing of these is remembered. Empty if it knows nothing.
        """
