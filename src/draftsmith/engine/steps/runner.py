"""How an engine runs the pieces of a step: as they are (here), compiled (`draftsmith.engine.steps.compiled`), or
recorded (`draftsmith.engine.steps.replay`)."""

from collections.abc import Callable

from torch import Tensor

from draftsmith.drafters.base import Drafter
from draftsmith.engine.steps.commit import (
    commit,
    commit_greedily_natively,
    commit_greedy,
    commit_natively,
    keep_states,
    keep_states_natively,
)
from draftsmith.engine.steps.layout import Drafting, Layout, lay_out, lay_out_natively
from draftsmith.plan import Plan
from draftsmith.targets import KVCache, Nodes, Target
from draftsmith.types import CompileLevel, Context

Forward = Callable[[KVCache, Nodes, tuple[int, ...]], tuple[Tensor, Tensor]]
DraftRows = Callable[[Context, Plan], Layout]
CommitGreedily = Callable[[KVCache, Tensor, Tensor, Layout, Context], tuple[Context, Tensor, Tensor]]

SPAN_STEP = 64
"""The number of cached entries that a step looks at is a multiple of this, so that few lengths occur."""


class Runner:
    """The pieces of a step for one engine and its target: functions that are chosen once.

    Args:
        forward: reads nodes, see `Target.forward`.
        columns: the cached entries to look at, see `Backend.columns`.
        commit_greedily: see `commit_greedy`.
        commit_path: see `commit`.
        keep_states: see `keep_states`.
    """

    level: CompileLevel = "off"

    def __init__(self, target: Target) -> None:
        self.backend = target.backend
        self.columns = self.backend.columns
        self.lay_out = self.backend.choose(lay_out, lay_out_natively)
        self.commit_path = self.backend.choose(commit, commit_natively)
        self.keep_states = self.backend.choose(keep_states, keep_states_natively)
        self.forward: Forward = target.forward
        self.commit_greedily: CommitGreedily = self.backend.choose(commit_greedy, commit_greedily_natively)

    def drafting(self, drafter: Drafter) -> DraftRows:
        """Return a function that guesses with a drafter and lays its trees out for the target."""
        return Drafting(drafter, self.lay_out).run

    def bucket(self, rows: int, most: int) -> int:
        """Return how many rows to compute for so many requests, at most `most`."""
        return rows

    def width(self, plan: Plan) -> int:
        """Return the least number of tokens in the context of a group that drafts by this plan."""
        return 1

    def slots(self, max_batch: int) -> int:
        """Return how many slots a cache needs for so many requests."""
        return max_batch

    def span(self, most: int) -> int:
        """Return how many cached entries a step looks at that needs so many."""
        return -(-most // SPAN_STEP) * SPAN_STEP

    def drafted_span(self, longest: int) -> int | None:
        """Return `Context.span` for rows of at most so many tokens."""
        return None


class FixedShapes(Runner):
    """Runs pieces that are made once for each of a few shapes: rows are padded, and a step's context has its plan's
    width."""

    def bucket(self, rows: int, most: int) -> int:
        """Return a power of two, so that few shapes occur."""
        return min(1 << (rows - 1).bit_length(), most) if rows else 0

    def width(self, plan: Plan) -> int:
        """Return the width of context that a step of the plan produces, so that only one shape occurs."""
        return plan.depth + 1

    def slots(self, max_batch: int) -> int:
        """Return a power of two, so that padding rows have somewhere to write."""
        return 1 << (max_batch - 1).bit_length()
