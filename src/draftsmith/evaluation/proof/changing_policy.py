"""Draws through the engine's core, under a policy that gives every row a different draft at every step.

In one step some rows then have chains, some trees and some no draft, with sampled guesses or best ones, and every
choice depends on what was accepted before. If that changed the distribution of the text, a chi-square test over enough
draws would find it.
"""

from collections.abc import Callable, Sequence

from draftsmith.drafters.base import Drafter
from draftsmith.engine import Choice, Engine, Load, Policy, RowHistory
from draftsmith.engine.requests.admission import SEED_STRIDE
from draftsmith.engine.requests.request import Request
from draftsmith.evaluation.proof.draws import Draws
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.targets import Target
from draftsmith.types import DraftsmithError, SamplingParams

PLANS = (
    NO_DRAFT, Plan((1,), sampled=True), Plan((2, 1)), Plan((1, 1), sampled=True), Plan((2, 1), sampled=True),
    Plan((1, 1), sampled=True, acceptance="block"), Plan((1, 1)),
)
NAME = "another plan at every step"

MakePolicy = Callable[[Sequence[Request]], Policy]


class ChangingPolicy(Policy):
    """Chooses by the number of the row, its steps so far, and how much the last step accepted."""

    def __init__(self, plans: Sequence[Plan] = PLANS) -> None:
        self._choices = tuple(Choice(plan) for plan in plans)

    @property
    def choices(self) -> tuple[Choice, ...]:
        """One choice for each plan."""
        return self._choices

    def choose(self, load: Load, rows: Sequence[RowHistory]) -> Sequence[Choice]:
        """Return a choice for each row, by the rule of the class."""
        return [
            self._choices[(number + 2 * len(row.accepted) + sum(row.accepted[-1:])) % len(self._choices)]
            for number, row in enumerate(rows)
        ]


def draw_under_policy(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    params: SamplingParams,
    count: int,
    *,
    batch: int,
    seed: int,
    make_policy: MakePolicy = lambda requests: ChangingPolicy(),
    on_progress: Callable[[int], None] | None = None,
) -> Draws:
    """Draw `count` continuations of `params.max_tokens` tokens, as `draw` does, through the whole core.

    Args:
        make_policy: makes the policy from the requests that it will serve; tests pass their own to plant faults.
        on_progress: called with the number of continuations done since the last call.
    """
    draws = Draws()
    for first in range(0, count, batch):
        size = min(batch, count - first)
        waiting: list[Request] = []
        policy = make_policy(waiting)
        engine = Engine(target, drafter, policy=policy, max_batch=size, max_length=len(prompt) + params.max_tokens)
        waiting += engine.admit_call([list(prompt)] * size, params)
        for number, request in enumerate(waiting, start=first):
            request.seed = (seed * 1_000_003 + number * SEED_STRIDE) % 2**63
            engine.core.add(request)
        while engine.core.has_work:
            engine.core.step()
        for request in waiting:
            if request.error is not None:
                raise DraftsmithError(request.error)
            draws.texts.append(request.tokens)
            draws.steps += len(request.history.accepted)
            draws.accepted += sum(request.history.accepted)
        if on_progress is not None:
            on_progress(size)
    return draws
