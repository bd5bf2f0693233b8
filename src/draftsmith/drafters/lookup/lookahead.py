"""Lookahead decoding: the target itself extends guesses at many later positions, which gives n-grams to guess with.

Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding" (arXiv:2402.02057, section 3).
The window has W columns. Column j is a trajectory of guesses for the positions j, j + 1, … after the root; in an
earlier step, the target chose each of them after the one before. When a column has N tokens, it goes into the pool of
n-grams, and it loses its first token. Every step verifies two things at once:

    verification branch   up to G n-grams of the pool that begin with the root
    lookahead branch      root → first tokens of columns 1, 2, … as a trunk; column j hangs from its first token

In the lookahead branch a token sees the tokens before it in its column, and the first tokens of the columns to its
left. This is the paper's mask, and in columns it is an ordinary tree. So all these tokens are tree nodes, and the text
is exact whatever they are. Differences from the paper: guesses of the lookahead branch may be accepted too, which costs
nothing; the window starts with the end of the prompt instead of random tokens; the target's argmax extends columns at
any temperature.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from draftsmith.drafters.lookup.lookahead_config import LookaheadConfig
from draftsmith.drafters.lookup.python_drafter import DraftTree, PythonDrafter
from draftsmith.plan import Plan
from draftsmith.types import ROOT, Context, Draft

if TYPE_CHECKING:
    from draftsmith.targets import KVCache, Target


class Pool:
    """N-grams by their first token; for each, only the latest few."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._rest: dict[int, dict[tuple[int, ...], None]] = {}

    def add(self, gram: list[int]) -> None:
        """Store an n-gram as the latest with its first token."""
        known = self._rest.setdefault(gram[0], {})
        rest = tuple(gram[1:])
        known.pop(rest, None)
        known[rest] = None
        if len(known) > self._most:
            del known[next(iter(known))]

    def after(self, token: int) -> list[tuple[int, ...]]:
        """Return the continuations of a token, latest first."""
        return list(reversed(self._rest.get(token, {})))


class LookaheadRow:
    """A request: the end of its text, its window and its pool."""

    def __init__(self, config: LookaheadConfig) -> None:
        self._config = config
        # Until columns have their full height, the window moves on by one per step, and loses its first column.
        self._wide = config.window + config.length - 2
        self._newest: list[int] = []
        self._pool = Pool(config.guesses)
        self._columns: list[list[int]] = []
        # For each column the node that the target extends: `ROOT`, or None if it was not drafted.
        self._tips: list[int | None] = []

    def extend(self, tokens: list[int]) -> None:
        """Add committed tokens; they may be split in any way."""
        length = self._config.length
        kept = self._newest[1 - length :]
        if self._config.from_text:
            text = kept + tokens
            for end in range(max(length, len(kept) + 1), len(text) + 1):
                self._pool.add(text[end - length : end])
        # The next n-grams need the last N - 1 tokens; the columns, until they exist, need as many tokens as there are
        # columns.
        most = length - 1 if self._columns else max(length - 1, self._wide)
        self._newest = (self._newest + tokens)[-most:]

    def advance(self, choices: list[int]) -> None:
        """Extend every column by the target's choice after the root (entry 0) or after node n (entry n + 1)."""
        for column, tip in zip(self._columns, self._tips, strict=True):
            if tip is None:
                continue
            column.append(choices[tip + 1])
            if len(column) == self._config.length:
                self._pool.add(column)
                del column[0]
        if len(self._columns) > self._config.window:
            del self._columns[0]

    def draft(self, branching: tuple[int, ...], room: int) -> DraftTree:
        """Lay out both branches, the verification branch first."""
        tree, root = DraftTree(branching, room), self._newest[-1]
        if not self._columns:
            self._columns = [[token] for token in (self._newest * self._wide)[-self._wide :]]
        for rest in self._pool.after(root):
            tree.add_path(ROOT, rest)
        self._columns[0][0] = root
        self._tips = []
        trunk: int | None = ROOT
        for j, column in enumerate(self._columns):
            if j and trunk is not None:
                trunk = tree.add(trunk, column[0])
            self._tips.append(tree.add_path(trunk, column[1:]) if trunk is not None else None)
        return tree


class LookaheadDrafter(PythonDrafter[LookaheadRow]):
    """Drafts n-grams that the target made at later positions of the same text, and lets it make more of them."""

    observes = True

    def __init__(self, config: LookaheadConfig) -> None:
        super().__init__()
        self.config = config
        self._observed: list[tuple[Tensor, Tensor]] = []

    def default_plan(self) -> Plan:
        config = self.config
        height = config.length - 1
        # While columns grow there are more of them: with f tokens each, there are W + N - 1 - f.
        window = max((config.window + height - f) * f - 1 for f in range(1, height + 1))
        depth = max(height, config.window + height - 2)
        return Plan((config.guesses + 2,) * depth, nodes=config.guesses * height + window)

    def attach(self, cache: "KVCache", plan: Plan) -> None:
        super().attach(cache, plan)
        self._observed = []

    def new_row(self) -> LookaheadRow:
        return LookaheadRow(self.config)

    def observe(self, context: Context, draft: Draft, choice_BM: Tensor) -> None:
        # Read together with the next context, when the device has finished anyway.
        self._observed.append((context.rows_B, choice_BM))

    def propose(self, context: Context, plan: Plan) -> Draft:
        observed, self._observed = self._observed, []
        for rows_B, choice_BM in observed:
            for number, choices in zip(rows_B.tolist(), choice_BM.tolist(), strict=True):
                if number in self._rows:
                    self._rows[number].advance(choices)
        return super().propose(context, plan)

    def draft_row(self, row: LookaheadRow, plan: Plan, room: int) -> DraftTree:
        return row.draft(plan.branching, room)


def make_lookahead(config: LookaheadConfig, target: "Target", draft_tokens: Tensor | None) -> LookaheadDrafter:
    """Make a drafter that is ready; it needs neither the target nor a list of tokens."""
    return LookaheadDrafter(config)
