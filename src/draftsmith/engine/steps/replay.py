"""On a GPU: steps whose pieces are recorded once for each of their shapes, see `draftsmith.replays`."""

from collections.abc import Callable

from draftsmith.drafters.base import Drafter
from draftsmith.engine.steps.layout import Layout, StaticDrafting
from draftsmith.engine.steps.runner import DraftRows, FixedShapes
from draftsmith.plan import Plan
from draftsmith.replays import Recorder, Replays, few_spans
from draftsmith.targets import Target
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
        self.commit_greedily = Replays(self.commit_greedily, recorders(), copies=True)

    def drafting(self, drafter: Drafter) -> DraftRows:
        """Record a drafter with the layout of its drafts where it works on the device alone; pad all drafts."""
        draft = StaticDrafting(drafter, self.lay_out).run
        recorded = Replays(lambda context, plan, memory: draft(context, plan), self._recorders(), copies=True)

        def run(context: Context, plan: Plan) -> Layout:
            memory = drafter.ready(context)
            # Another memory is another recording, and the recording keeps it where it is.
            layout: Layout = draft(context, plan) if memory is None else recorded(context, plan, memory)
            return layout

        return run

    def drafted_span(self, longest: int) -> int | None:
        """Return a span of few values."""
        return self.span(longest)

    def span(self, most: int) -> int:
        """Return one of few spans."""
        return few_spans(most)
