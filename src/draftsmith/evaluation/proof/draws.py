"""Draws short continuations of one prompt by the engine's own step, thousands of rows at a time.

The engine's bookkeeping of requests (streams, end tokens, statistics) is left out, because on such short texts it would
cost more than the step itself. Prefill, drafting, the target's forward over its cache, acceptance and the keeping of
paths are the engine's. Finished rows leave at once, as in the engine. Shapes: B rows, L tokens, S cached tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from draftsmith.drafters.base import Drafter
from draftsmith.engine.policy import Choice
from draftsmith.engine.requests.admission import SEED_STRIDE
from draftsmith.engine.requests.request import Request
from draftsmith.engine.requests.scheduler import Piece
from draftsmith.engine.steps.clock import Clock
from draftsmith.engine.steps.commit import NOT_FINITE
from draftsmith.engine.steps.prefill import PromptReader
from draftsmith.engine.steps.rows import Penalties, Rows, make_rows, pick
from draftsmith.engine.steps.runner import Runner
from draftsmith.engine.steps.step import Stepper, lists_of
from draftsmith.engine.text import TextStream
from draftsmith.plan import Plan
from draftsmith.targets import KVCache, Target
from draftsmith.types import DraftsmithError, SamplingParams

MakeStepper = Callable[[Target, Mapping[str, Drafter], KVCache, Runner], Stepper]
PROMPT_TOKENS = 8192
"""Prompt tokens, over all rows, that are read in one forward."""


@dataclass
class Draws:
    """Continuations of equal length, the number of verifications that they took, and how many guesses stayed."""

    texts: list[list[int]] = field(default_factory=list)
    steps: int = 0
    accepted: int = 0

    @property
    def accepted_per_step(self) -> float:
        """The mean number of guesses that stayed in a verification."""
        return self.accepted / max(1, self.steps)


@torch.no_grad()
def draw(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    params: SamplingParams,
    plan: Plan,
    count: int,
    *,
    batch: int,
    seed: int,
    make_stepper: MakeStepper = Stepper,
    on_progress: Callable[[int], None] | None = None,
) -> Draws:
    """Draw `count` continuations of `params.max_tokens` tokens, each with a seed of its own.

    Args:
        make_stepper: makes the stepper; tests pass their own to plant faults.
        on_progress: called with the number of continuations done since the last call.
    """
    if any(not 0 <= token < target.vocab_size for token in prompt) or not prompt:
        raise DraftsmithError(f"the prompt {list(prompt)} has a token that {target.name} does not know; fix it.")
    # Drafters that share the target's cache may write as many guesses as they can make, whatever the plan.
    room = max(plan.max_nodes, drafter.default_plan().depth) + 1
    capacity = len(prompt) + params.max_tokens + 2 * room
    cache = target.new_cache(batch, capacity)
    stepper = make_stepper(target, {"drafter": drafter}, cache, Runner(target))
    penalties = Penalties(batch, target.vocab_size, target.device)
    reader = PromptReader(stepper, penalties)
    draws = Draws()
    silent = TextStream(None, ())
    for first in range(0, count, batch):
        requests = [
            Request(
                slot, list(prompt), params, (seed * 1_000_003 + number * SEED_STRIDE) % 2**63, frozenset(), silent,
                id=number, slot=slot,
            )
            for slot, number in enumerate(range(first, min(first + batch, count)))
        ]
        # As in the engine, whose drafters follow texts also while nothing is drafted.
        drafter.attach(cache, plan if plan.depth else drafter.default_plan())
        try:
            _decode(stepper, reader, penalties, requests, plan, draws)
        finally:
            drafter.reset_rows([request.id for request in requests])
        draws.texts += [request.tokens for request in requests]
        if on_progress is not None:
            on_progress(len(requests))
    return draws


def _decode(
    stepper: Stepper, reader: PromptReader, penalties: Penalties, requests: list[Request], plan: Plan, draws: Draws
) -> None:
    clock, target, length = Clock(stepper.target.device), stepper.target, len(requests[0].prompt)
    step = max(1, PROMPT_TOKENS // len(requests))
    for begin in range(0, length, step):
        found = reader.read([Piece(request, begin, min(begin + step, length)) for request in requests])
    (first,) = found
    _commit(first.rows, first.table_BX.tolist(), target)
    rows = _remaining(first.rows, Choice(plan), target, penalties)
    while rows is not None:
        (result,) = stepper.step([rows], clock)
        clock.stop()
        draws.steps += rows.count
        draws.accepted += _commit(rows, lists_of([result])[0], target) - rows.count
        rows = _remaining(rows, Choice(plan), target, penalties)


def _remaining(rows: Rows, choice: Choice, target: Target, penalties: Penalties) -> Rows | None:
    """Return the rows that are not finished, None if there are none; they keep their places in the cache."""
    going = [b for b, request in enumerate(rows.requests) if request.finish_reason is None]
    if not going:
        return None
    if len(going) == rows.count and rows.choice == choice:
        return rows
    requests = [rows.requests[b] for b in going]
    return make_rows(requests, pick(rows.context, going), choice, target.vocab_size, penalties)


def _commit(rows: Rows, table: list[list[int]], target: Target) -> int:
    """Hand the tokens of a step to their requests; return how many were taken."""
    taken = 0
    for request, (count, drafted, *tokens) in zip(rows.requests, table, strict=True):
        if drafted == NOT_FINITE:
            raise DraftsmithError(f"{target.name} gave no finite logits; its weights are damaged, or try fp32.")
        taken += request.commit(tokens[:count])
    return taken
