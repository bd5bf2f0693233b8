"""Chooses the learning rate and the start of a family by short trainings, in the same way for all families."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.drafters.base import Drafter
from draftsmith.engine import Engine
from draftsmith.evaluation.comparison.methods import Method
from draftsmith.evaluation.comparison.questions import Settings
from draftsmith.evaluation.measuring.intervals import ratio_interval
from draftsmith.evaluation.measuring.measure import measure
from draftsmith.evaluation.prompts import Prompt, cut, distinct
from draftsmith.targets import Target
from draftsmith.training.build import build_drafter
from draftsmith.training.data.generated import GeneratedText
from draftsmith.training.recipe import Recipe
from draftsmith.training.schedule import learning_rate
from draftsmith.training.step import NotFinite, TrainingStep
from draftsmith.types import DraftsmithError, SamplingParams
from draftsmith.workflows.choice import Choice, Trial

FACTOR = 3
"""The ratio of one rate to the next."""
MOST_PROMPTS, ROWS = 24, 16
"""A trial is judged on at most this many prompts of each task, or on as many as are measured on if that is fewer."""

Run = Callable[[float, Mapping[str, Any]], Trial]
"""Runs the trial of a rate and options."""


def search(suggested: float, options: Mapping[str, Any], starts: Mapping[str, Sequence[Any]], run: Run) -> Choice:
    """Return the best rate and, with that rate, the best start.

    The rates tried are a third of the suggested one, the suggested one, and three times it. If the smallest or largest
    of them is best, one more rate beyond it is tried. Of equally good trials the first wins; the suggested rate is
    tried first.

    Args:
        options: the options of the family, including those of its start.
        starts: the options that say how it starts, and the values to try for each.

    Raises:
        DraftsmithError: no trial had a loss that was finite.
    """
    trials: list[Trial] = []

    def best() -> Trial:
        return max(trials, key=lambda trial: trial["tokens_per_step"] or 0.0)

    def at(power: int) -> float:
        return float(f"{suggested * float(FACTOR) ** power:.4g}")

    powers = [0, -1, 1]
    trials += [run(at(power), options) for power in powers]
    beyond = {at(-1): -2, at(1): 2}.get(best()["rate"])
    if beyond is not None:
        powers.append(beyond)
        trials.append(run(at(beyond), options))
    if best()["tokens_per_step"] is None:
        raise DraftsmithError(
            f"no loss was finite at rates from {at(min(powers)):g} to {at(max(powers)):g}; look at the data."
        )
    rate = best()["rate"]
    for name, values in starts.items():
        for value in values:
            if not any(trial["options"][name] == value for trial in trials):
                trials.append(run(rate, {**best()["options"], name: value}))
    found = best()
    return Choice(rate, found["options"], trials, rate in (at(min(powers)), at(max(powers))))


@dataclass(frozen=True)
class Judge:
    """Judges how well a drafter guesses on the tuning prompts: τ by greedy decoding with the common chain."""

    target: Target
    prompts: Sequence[Sequence[int]]
    new_tokens: int

    @classmethod
    def of(cls, target: Target, texts: Sequence[Prompt], settings: Settings) -> "Judge":
        """Make a judge with as many prompts per task, and as long ones, as in the measurement."""
        length, count = settings.prompt_tokens, min(MOST_PROMPTS, settings.prompts)
        tasks = dict.fromkeys(text.task for text in texts)
        prompts = (cut(target, [t for t in texts if t.task == task], length, count, exact=False) for task in tasks)
        return cls(target, [prompt for several in prompts for prompt in distinct(several)], settings.new_tokens)

    def count(self, drafter: Drafter) -> tuple[list[int], list[int]]:
        """Decode, and return the tokens and the steps of every prompt."""
        longest = max(map(len, self.prompts)) + self.new_tokens
        engine = Engine(self.target, drafter, max_batch=ROWS, max_length=longest, share_prefixes=False)
        params = SamplingParams(max_tokens=self.new_tokens, ignore_eos=True)
        done = measure(engine, self.prompts, params, Method("", drafter).chain()).completions
        steps = [completion.statistics.steps for completion in done]
        return [completion.statistics.accepted + own for completion, own in zip(done, steps, strict=True)], steps


def train_briefly(recipe: Recipe, target: Target) -> TrainingStep:
    """Train a throwaway drafter by a recipe's second stage; NotFinite if the loss blows up."""
    section = recipe.stage2
    assert section.texts is not None
    step = TrainingStep(build_drafter(recipe, target), target, recipe.optimizer, recipe.distillation)
    sequences = GeneratedText.of(
        Path(section.texts), section, 0, vocabulary=target.vocab_size, context=target.max_length
    )
    for number in range(section.steps):
        step(
            [sequences.batch(number, step.drafter.max_depth - 1)],
            rate=learning_rate(number, section.steps, section.rate, section.final_rate),
            positions=section.positions_per_sequence, seed=(recipe.seed, "positions", number),
        )
    return step


def try_out(recipe: Recipe, target: Target, judge: Judge) -> dict[str, Any]:
    """Train briefly, judge, and return the result with the cost of both."""
    begun = time.monotonic()
    try:
        tau = ratio_interval(*judge.count(train_briefly(recipe, target).drafter.for_decoding(target)))
        found = {"tokens_per_step": tau.value, "tokens_per_step_ci": tau.ends}
    except NotFinite:
        found = {"tokens_per_step": None, "tokens_per_step_ci": None}
    return found | {"steps": recipe.stage2.steps, "seconds": time.monotonic() - begun}
