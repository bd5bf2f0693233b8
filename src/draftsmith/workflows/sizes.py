"""Chooses the sizes of a run that the user left open, from target, data and machine, each with a reason."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from draftsmith.drafters.registry import family_named
from draftsmith.targets import Target
from draftsmith.training.build import build_drafter
from draftsmith.training.data.reader import Reader
from draftsmith.training.data.survey import Survey, survey
from draftsmith.training.overrides import keys_in
from draftsmith.training.recipe import Recipe, build_recipe
from draftsmith.training.schedule import LAST_SHARE, last_rate
from draftsmith.training.step import TrainingStep
from draftsmith.training.terminal import say
from draftsmith.training.wording import counted
from draftsmith.workflows.bridge import EngineBridge
from draftsmith.workflows.estimate import Pace, activations, free_memory, scored, try_out

DEFAULT_MINUTES = 20.0
BATCH, LENGTH, PROMPT_TOKENS, NEW_TOKENS = 16, 256, 64, 128
LARGE_VOCABULARY, ENOUGH_COVERAGE = 8192, 0.98
POSITIONS = 64
MOST_STEPS, FEWEST_STEPS, MOST_PASSES = 5000, 10, 20
FIRST_SHARE = 0.4
"""Share of the budget for stage 1; stage 2 also waits for the target to write."""
MEASURING_SHARE = 0.1
"""At most this share of the budget is spent on measuring τ within the stages."""
MOST_MEASUREMENTS, FEWEST_MEASUREMENTS, PATIENCE = 8, 4, 3
"""Measurements per run; stages end early only if there are more than twice as many measurements as the patience."""
DEPTH = 5
"""Number of guessed depths assumed when memory is estimated before the drafter exists."""


@dataclass(frozen=True)
class Choice:
    """A key of the recipe, its chosen value, and the reason."""

    key: str
    value: Any
    why: str

    def override(self) -> str:
        """Return it in the form of an override."""
        return f"{self.key}={json.dumps(self.value)}"


def choose(
    values: Mapping[str, Any], overrides: Sequence[str], target: Target, bridge: EngineBridge, *, minutes: float,
    console: Console,
) -> tuple[Recipe, Pace]:
    """Return the recipe with open values chosen, and the time its steps take; print what was chosen and why.

    Args:
        values: the recipe before the overrides; overrides win over every choice made here.
    """
    taken = keys_in(overrides)

    def settled(choices: list[Choice]) -> Recipe:
        return build_recipe(dict(values), [*overrides, *(choice.override() for choice in choices)])

    def free(choices: list[Choice]) -> list[Choice]:
        return [c for c in choices if not any(c.key == key or c.key.startswith(f"{key}.") for key in taken)]

    recipe = settled([])
    with console.status("Looking at the data …"):
        found = survey(recipe.data, Reader.of(target, recipe.data.learn))
    choices = free(by_data(found, recipe, target))
    once = free([Choice("stage1.steps", 1, ""), Choice("stage2.steps", 1, "")])
    choices += free(by_memory(settled([*choices, *once]), target, free_memory(target)))
    recipe = settled([*choices, *once])
    with console.status("Measuring a step …"):
        step = TrainingStep(build_drafter(recipe, target), target, recipe.optimizer, recipe.distillation)
        pace = try_out(recipe, target, step, bridge.generate, bridge.every_prompt, bridge.new_tokens)
    choices += by_time(found, recipe, pace, minutes, taken)
    measured = free(by_measurements(settled(choices), pace, minutes))
    # A user who sets how often to measure also decides when to stop.
    choices += measured if measured and measured[0].key == "evaluation.every" else []
    say(console, *(f"chosen: {choice.key} = {json.dumps(choice.value)}: {choice.why}" for choice in choices))
    return settled(choices), pace


def by_data(found: Survey, recipe: Recipe, target: Target) -> list[Choice]:
    """Choose lengths by the data's texts and the target's context, and the drafted vocabulary by the data's tokens."""
    long, middle, context = found.quantile(0.9), found.quantile(0.5), target.max_length
    length = min(LENGTH, context, max(16, long))
    behind = middle - 1  # an end token, which counts as one, is in no prompt
    prompt = max(2, min(PROMPT_TOKENS, context // 4, behind))
    new = max(8, min(NEW_TOKENS, context // 2))
    choices = [
        Choice(
            "stage1.length", length,
            f"nine in ten texts have at most {long} tokens, the target's context {context}, and {LENGTH} are enough",
        ),
        Choice("stage2.prompt_tokens", prompt, f"half of the texts have {behind} tokens or more"),
        Choice("stage2.new_tokens", new, f"fits the target's context of {context} behind a prompt"),
    ]
    family = family_named(recipe.drafter.family)
    choices += [Choice(f"stage{number}.rate", family.rate, f"suits {family.name}") for number in (1, 2)]
    final = last_rate(family.rate)
    choices += [Choice(f"stage{number}.final_rate", final, f"{LAST_SHARE:.0%} of that") for number in (1, 2)]
    restricts = family.compared.options.get("draft_vocab_size") != 0
    if target.vocab_size > LARGE_VOCABULARY and restricts and recipe.drafter.init_from is None:
        fitting = [size for factor in (1, 2, 4) if (size := factor * LARGE_VOCABULARY) < target.vocab_size]
        size = next((size for size in fitting if found.coverage(size) >= ENOUGH_COVERAGE), fitting[-1])
        choices.append(
            Choice(
                "drafter.draft_vocab_size", size,
                f"of the target's {target.vocab_size:,} tokens; these cover {found.coverage(size):.1%} of the data's",
            )
        )
    return choices


def by_memory(recipe: Recipe, target: Target, room: int) -> list[Choice]:
    """Choose the batch size and positions per step, so that a step fits into a quarter of the free memory."""
    choices = []
    if scored(recipe, target) > LARGE_VOCABULARY // 2:
        choices.append(
            Choice("stage1.positions_per_sequence", POSITIONS, "scoring every position of a large vocabulary is slow")
        )
    batch = BATCH
    while batch > 1 and activations(with_batch(recipe, batch), target, DEPTH) > room / 4:
        batch //= 2
    why = f"a quarter of the {room / 2**30:.1f} GiB of free memory holds it"
    return [*choices, Choice("stage1.batch", batch, why), Choice("stage2.batch", batch, why)]


def with_batch(recipe: Recipe, batch: int) -> Recipe:
    """Return the recipe with another batch in both stages."""
    stages = {name: getattr(recipe, name).model_copy(update={"batch": batch}) for name in ("stage1", "stage2")}
    return recipe.model_copy(update=stages)


def by_time(
    found: Survey, tried: Recipe, pace: Pace, minutes: float, taken: Collection[str] = ()
) -> list[Choice]:
    """Choose the steps of each stage by the minutes that remain after measuring and saving.

    Args:
        taken: the keys that are set already. A stage whose steps are among them keeps these, and the other one has what
            they leave of the time.
    """
    costs = {"stage1": pace.first, "stage2": pace.second + texts_a_step(tried) * pace.text}
    steps = {"stage1": tried.stage1.steps, "stage2": tried.stage2.steps}
    stages = [stage for stage in costs if steps[stage]]
    fixed = [stage for stage in stages if f"{stage}.steps" in taken]
    measurements = 1 + len(stages) + measurements_within(pace, minutes)
    seconds = 60 * minutes - measurements * (pace.measurement + pace.save)
    seconds -= sum(steps[stage] * costs[stage] for stage in fixed)
    shares = {"stage1": FIRST_SHARE, "stage2": 1 - FIRST_SHARE} if len(stages) == 2 and not fixed else {}
    choices = []
    for stage in stages:
        if stage in fixed:
            continue
        share = shares.get(stage, 1.0)
        count = bounded(share * seconds / costs[stage])
        part = f"what {fixed[0]}.steps={steps[fixed[0]]} leaves" if fixed else f"{share:.0%}"
        writing = ", the target's writing included" if stage == "stage2" else ""
        why = f"{part} of {counted(minutes, 'minute')} (--minutes){writing}, but {FEWEST_STEPS} to {MOST_STEPS}"
        if stage == "stage1" and found.whole:
            windows = sum(-(-length // tried.stage1.length) for length in found.lengths)
            passes = bounded(MOST_PASSES * windows / (tried.stage1.batch * tried.stage1.accumulate))
            if passes < count:
                count = passes
                of = counted(windows, "window")
                why = f"{MOST_PASSES} passes over the data's {of}; more would learn them by heart"
        choices.append(Choice(f"{stage}.steps", count, why))
    return choices


def measurements_within(pace: Pace, minutes: float) -> int:
    """Return how often τ can be measured within the stages."""
    return min(MOST_MEASUREMENTS, int(MEASURING_SHARE * 60 * minutes / (pace.measurement + pace.save)))


def by_measurements(recipe: Recipe, pace: Pace, minutes: float) -> list[Choice]:
    """Choose how often τ is measured, and after how many measurements without improvement a stage ends."""
    count = measurements_within(pace, minutes)
    steps = recipe.stage1.steps + recipe.stage2.steps
    if count < FEWEST_MEASUREMENTS or not steps:
        return []
    every = -(-steps // count)  # rounded down, the last one could come just before the end, which is measured anyway
    choices = [Choice("evaluation.every", every, f"so that the best of about {count} checkpoints is kept")]
    if count > 2 * PATIENCE and recipe.joint is None:
        why = f"a stage ends early that brings neither a higher τ nor a lower loss in {PATIENCE} measurements in a row"
        choices.append(Choice("evaluation.patience", PATIENCE, why))
    return choices


def bounded(steps: float) -> int:
    """Return a whole number of steps: enough to learn something, and no more than a first run needs."""
    return int(min(MOST_STEPS, max(FEWEST_STEPS, steps)))


def texts_a_step(recipe: Recipe) -> float:
    """Return how many texts the target writes for a step of stage 2."""
    section = recipe.stage2
    return 0.0 if section.texts is not None else section.batch * section.accumulate / section.epochs
