"""Connects training to an engine, which it does not import: text that the target writes, and τ measured by decoding."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.trainable.model import TrainableModel
from draftsmith.engine import Engine
from draftsmith.evaluation.measuring.intervals import ratio_interval
from draftsmith.evaluation.measuring.measure import measure
from draftsmith.evaluation.prompts import Prompt, cut, distinct
from draftsmith.plan import NO_DRAFT
from draftsmith.targets import Target
from draftsmith.types import SamplingParams, Statistics, require_finished

ROWS = 64
EVALUATION_ROWS = 8
MOST_DRAFTED_ROWS = 8
FIRST_PROMPTS, TOO_LOW = 4, 1.1
"""The first prompts of each task; if their τ is surely below this value, as before training, no others are decoded."""


class EngineBridge:
    """Writes texts and measures τ for a run.

    Args:
        prompts: the prompts to measure τ on, by task.
        sampling: how the target writes, as `SamplingParams` takes it.
    """

    def __init__(
        self, target: Target, prompts: Sequence[Prompt], prompts_a_task: int, new_tokens: int, prompt_tokens: int,
        sampling: Mapping[str, Any],
    ) -> None:
        self.target, self.new_tokens, self.sampling = target, new_tokens, dict(sampling)
        self.drafter: Drafter | None = None
        tasks = sorted({prompt.task for prompt in prompts})
        self.prompts = {
            task: distinct(
                cut(target, [p for p in prompts if p.task == task], prompt_tokens, prompts_a_task, exact=False)
            )
            for task in tasks
        }

    @property
    def every_prompt(self) -> list[list[int]]:
        """The prompts of all tasks in one list."""
        return [prompt for prompts in self.prompts.values() for prompt in prompts]

    @property
    def digest(self) -> str:
        """A hash of what τ is measured on: the tokens of the prompts of each task, and the number of new tokens."""
        measured_on = json.dumps([[*self.prompts.values()], self.new_tokens])
        return hashlib.sha256(measured_on.encode()).hexdigest()

    def use(self, drafter: TrainableModel) -> None:
        """Draft with this drafter while writing, for speed; the distribution of the texts does not depend on it."""
        self.drafter = drafter.for_decoding(self.target)

    def generate(self, prompts: list[list[int]], max_tokens: int, seed: int) -> list[list[int]]:
        """Let the target write `max_tokens` tokens after every prompt, or fewer if an end token comes first."""
        longest = max(map(len, prompts)) + max_tokens
        engine = Engine(self.target, self.drafter, max_batch=ROWS, max_length=longest)
        rules = [
            SamplingParams(max_tokens=max_tokens, seed=(seed + 7919 * i) % 2**63, **self.sampling)
            for i in range(len(prompts))
        ]
        # Many rows keep a CPU's arithmetic busy by themselves; verifying guesses would only add work.
        crowded = self.target.device.type == "cpu" and len(prompts) > MOST_DRAFTED_ROWS
        done = require_finished(engine.generate(prompts, rules, NO_DRAFT if crowded else None))
        return [completion.tokens for completion in done]

    def evaluate(self, drafter: TrainableModel) -> Mapping[str, Any]:
        """Measure greedy τ, over all tasks and for each; texts end at the target's end token, as in serving.

        If the first few prompts show that almost no guess is accepted, the other prompts are skipped.
        """
        longest = max(map(len, self.every_prompt)) + self.new_tokens
        engine = Engine(self.target, drafter.for_decoding(self.target), max_batch=EVALUATION_ROWS, max_length=longest)
        params = SamplingParams(max_tokens=self.new_tokens)
        few = {task: prompts[:FIRST_PROMPTS] for task, prompts in self.prompts.items()}
        more = {task: prompts[FIRST_PROMPTS:] for task, prompts in self.prompts.items()}
        found = decoded(engine, few, params)
        interval = scores([statistics for own in found.values() for statistics in own]).get("tokens_per_step_ci")
        if any(more.values()) and (interval is None or interval[1] >= TOO_LOW):
            rest = decoded(engine, more, params)
            found = {task: own + rest[task] for task, own in found.items()}
        every = [statistics for own in found.values() for statistics in own]
        return {**scores(every), "by_source": {task: scores(own) for task, own in found.items()}}


def decoded(
    engine: Engine, prompts: Mapping[str, Sequence[list[int]]], params: SamplingParams
) -> dict[str, list[Statistics]]:
    """Decode the prompts of all tasks together; return the statistics of each prompt, by task."""
    done = iter(measure(engine, [prompt for own in prompts.values() for prompt in own], params).completions)
    return {task: [completion.statistics for completion in islice(done, len(own))] for task, own in prompts.items()}


def scores(prompts: Sequence[Statistics]) -> dict[str, Any]:
    """Return τ over some decoded prompts and, if there are several, its 95 % interval over them."""
    total = Statistics()
    for own in prompts:
        total += own
    told: dict[str, Any] = {"tokens_per_step": total.tokens_per_step, "prompts": len(prompts)}
    # A text of a single token needed no decoding step.
    stepped = [own for own in prompts if own.steps]
    if len(stepped) > 1:
        tokens, steps = [own.steps + own.accepted for own in stepped], [own.steps for own in stepped]
        told["tokens_per_step_ci"] = ratio_interval(tokens, steps).ends
    return told
