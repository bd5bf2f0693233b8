"""On a GPU: steps whose pieces are recorded once for each of their shapes, see `draftsmith.replays`."""

from collections.abc import Callable, Hashable
from dataclasses import replace

from torch import Tensor

from draftsmith.drafters.base import Drafter
from draftsmith.engine.steps.layout import Layout, StaticDrafting
from draftsmith.engine.steps.runner import DraftRows, FixedShapes
from draftsmith.plan import Plan
from draftsmith.replays import Recorder, Replays, few_spans
from draftsmith.targets import KVCache, Target
from draftsmith.types import Context


class Replayed(FixedShapes):
    """Runs the pieces of a step as they are when a shape is new, and as recordings from then on.

    Args:
        recorders: makes a recorder. Each piece gets one of its own, because their results have to live side by side.
    """

    def __init__(self, target: Target, recorders: Callable[[], Recorder]) -> None:
        super().__init__(target)
        self._recorders = recorders
        # Logits and states are used up within the step.
        self.forward = Replays(self.forward, recorders(), copies=False)
        committed = Replays(self.commit_greedily, recorders(), copies=True)

        def commit_greedily(
            cache: KVCache, logits_BMV: Tensor, features_BMF: Tensor, layout: Layout, context: Context
        ) -> tuple[Context, Tensor, Tensor]:
            # Only what decides about the work: everything else would make more recordings of the same.
            draft = replace(layout.draft, parts=None, branching=(1,) if layout.draft.is_chain else None)
            shapes = replace(layout, draft=draft), replace(context, drawn=None, span=None)
            after, table_BX, path_BD = committed(cache, logits_BMV, features_BMF, *shapes)
            return replace(after, drawn=context.drawn), table_BX, path_BD

        self.commit_greedily = commit_greedily

    def drafting(self, drafter: Drafter) -> DraftRows:
        """Record a drafter with the layout of its drafts where it works on the device alone; pad all drafts."""
        draft = StaticDrafting(drafter, self.lay_out).run
        # A draft that is left empty because something failed must not be recorded: it would be empty for ever.
        raising = StaticDrafting(drafter.unguarded, self.lay_out).run
        recorded = Replays(draft, self._recorders(), copies=True, to_record=raising)
        known: Hashable | None = None

        def run(context: Context, plan: Plan) -> Layout:
            nonlocal known
            memory = drafter.ready(context)
            if memory is None:
                return draft(replace(context, span=None), plan)
            if memory is not known:
                recorded.forget()  # they work in a memory that is no longer in use
                known = memory  # kept, so that it stays where it is
            layout: Layout = recorded(context, beside=(plan,))
            return layout

        return run

    def drafted_span(self, longest: int) -> int | None:
        """Return a span of few values."""
        return self.span(longest)

    def span(self, most: int) -> int:
        """Return one of few spans."""
        return few_spans(most)
