"""The sizes of a run that nobody chose, from the target, the data and the machine, each with its reason."""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from draftsmith.drafters.registry import family_named
from draftsmith.targets import Target
from draftsmith.training.build import build_drafter, build_loader, build_prompts
from draftsmith.training.data.generated import Generate
from draftsmith.training.data.loader import Windowing
from draftsmith.training.data.reader import Reader
from draftsmith.training.data.survey import Survey, survey
from draftsmith.training.recipe import Recipe, build_recipe
from draftsmith.training.step import TrainingStep

DEFAULT_MINUTES = 20.0
BATCH, LENGTH, PROMPT_TOKENS, NEW_TOKENS = 16, 256, 64, 128
LARGE_VOCABULARY, ENOUGH_COVERAGE = 8192, 0.98
POSITIONS = 64
MOST_STEPS, FEWEST_STEPS, MOST_PASSES = 5000, 10, 20
FIRST_SHARE = 0.4
"""Of the budget, for stage 1; stage 2 also waits for the target to write."""
MEASURING_SHARE = 0.1
"""No more of the budget is spent on measuring τ within the stages."""
MEASUREMENTS = 4
PROBED_STEPS, PROBED_ROWS, PROBED_TOKENS = 2, 8, 8
DEPTH = 5
"""Guessed depths that memory is reckoned with before the drafter is there."""


@dataclass(frozen=True)
class Choice:
    """A key of the recipe, the value that was chosen for it, and why."""

    key: str
    value: Any
    why: str

    def override(self) -> str:
        """Return it as an override."""
        return f"{self.key}={json.dumps(self.value)}"


@dataclass(frozen=True)
class Pace:
    """Seconds a step of stage 1 and stage 2, for a text that the target writes, and the drafter's parameters."""

    first: float
    second: float
    text: float
    parameters: int


def choose(
    values: Mapping[str, Any], overrides: Sequence[str], target: Target, generate: Generate, *, minutes: float,
    measured_tokens: int, console: Console,
) -> Recipe:
    """Return the recipe with what nobody chose filled in; say what was chosen and what the run will take.

    Args:
        values: the recipe before the overrides, which win over every choice.
        measured_tokens: that one measurement of τ decodes.
    """
    taken = [override.partition("=")[0].strip() for override in overrides]

    def settled(choices: list[Choice]) -> Recipe:
        return build_recipe(dict(values), [*(choice.override() for choice in choices), *overrides])

    def free(choices: list[Choice]) -> list[Choice]:
        return [c for c in choices if not any(c.key == key or c.key.startswith(f"{key}.") for key in taken)]

    recipe = settled([])
    with console.status("Looking at the data …"):
        found = survey(recipe.data, Reader.of(target, recipe.data.learn))
    choices = free(by_data(found, recipe, target))
    recipe = settled(choices)
    choices += free(by_memory(recipe, target, free_memory(target)))
    recipe = settled([*choices, Choice("stage1.steps", 1, ""), Choice("stage2.steps", 1, "")])
    with console.status("Measuring a step …"):
        pace = measure(recipe, target, generate)
    choices += free(by_time(found, recipe, settled(choices), pace, minutes, measured_tokens, taken))
    recipe = settled(choices)
    for choice in choices:
        console.print(f"chosen: {choice.key} = {json.dumps(choice.value)}: {choice.why}", highlight=False, markup=False)
    seconds = recipe.stage1.steps * pace.first + recipe.stage2.steps * (pace.second + texts_a_step(recipe) * pace.text)
    console.print(
        f"estimate: {seconds / 60:.1f} minutes of training and writing, as a step of stage 1 took {pace.first:.3f} s; "
        f"{memory(recipe, target, pace.parameters) / 2**30:.1f} GiB beside the target.",
        highlight=False, markup=False,
    )
    return recipe


def by_data(found: Survey, recipe: Recipe, target: Target) -> list[Choice]:
    """Choose lengths by the data's texts and the target's context, and the drafted vocabulary by the data's tokens."""
    long, middle, context = found.quantile(0.9), found.quantile(0.5), target.max_length
    length = min(LENGTH, context, max(16, long))
    prompt = max(2, min(PROMPT_TOKENS, context // 4, middle))
    new = max(8, min(NEW_TOKENS, context // 2))
    choices = [
        Choice(
            "stage1.length", length,
            f"nine in ten texts have at most {long} tokens, the target's context {context}, and {LENGTH} are enough",
        ),
        Choice("stage2.prompt_tokens", prompt, f"half of the texts have {middle} tokens or more"),
        Choice("stage2.new_tokens", new, f"fits the target's context of {context} behind a prompt"),
    ]
    family = family_named(recipe.drafter.family)
    choices += [Choice(f"stage{number}.rate", family.rate, f"suits {family.name}") for number in (1, 2)]
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
    """Choose how much is learnt at once: as much as a quarter of the free memory holds."""
    choices = []
    if scored(recipe, target) > LARGE_VOCABULARY // 2:
        choices.append(
            Choice("stage1.positions_per_sequence", POSITIONS, "scoring every position of a large vocabulary is slow")
        )
    batch = BATCH
    while batch > 1 and activations(recipe, target, batch) > room / 4:
        batch //= 2
    why = f"a quarter of the {room / 2**30:.1f} GiB of free memory holds it"
    return [*choices, Choice("stage1.batch", batch, why), Choice("stage2.batch", batch, why)]


def by_time(
    found: Survey, probed: Recipe, recipe: Recipe, pace: Pace, minutes: float, measured_tokens: int,
    taken: Sequence[str],
) -> list[Choice]:
    """Choose the steps of both stages, and how often τ is measured, by the minutes there are."""
    seconds, given = 60 * minutes, f"of {minutes:g} minutes (--minutes)"
    none = [name for name, stage in (("1", recipe.stage1), ("2", recipe.stage2)) if not stage.steps]
    skips = {name: f"stage{name}.steps" in taken and name in none for name in ("1", "2")}
    shares = {"1": 1.0 if skips["2"] else FIRST_SHARE, "2": 1.0 if skips["1"] else 1 - FIRST_SHARE}
    first = within(shares["1"] * seconds / pace.first)
    why = f"{shares['1']:.0%} {given}, but {FEWEST_STEPS} to {MOST_STEPS}"
    if found.whole:
        windows = sum(-(-length // probed.stage1.length) for length in found.lengths)
        passes = within(MOST_PASSES * windows / probed.stage1.batch)
        if passes < first:
            first = passes
            why = f"{MOST_PASSES} passes over the data's {windows} windows; more would learn them by heart"
    second = within(shares["2"] * seconds / (pace.second + texts_a_step(probed) * pace.text))
    every = (first + second) // MEASUREMENTS
    cost = measured_tokens * pace.text / probed.stage2.new_tokens
    choices = [
        Choice("stage1.steps", first, why),
        Choice(
            "stage2.steps", second,
            f"{shares['2']:.0%} {given}, the target's writing included, but {FEWEST_STEPS} to {MOST_STEPS}",
        ),
    ]
    if MEASUREMENTS * cost <= MEASURING_SHARE * seconds and every:
        why = f"so that the best of {MEASUREMENTS} or more checkpoints is kept"
        choices.append(Choice("evaluation.every", every, why))
    return choices


def within(steps: float) -> int:
    """Return whole steps, neither too few to learn nor more than a first run needs."""
    return int(min(MOST_STEPS, max(FEWEST_STEPS, steps)))


def texts_a_step(recipe: Recipe) -> float:
    """Return how many texts the target writes for a step of stage 2."""
    section = recipe.stage2
    return 0.0 if section.texts is not None else section.batch * section.accumulate / section.epochs


def measure(recipe: Recipe, target: Target, generate: Generate) -> Pace:
    """Train a throwaway drafter for a few steps, and let the target write a little."""
    drafter = build_drafter(recipe, target)
    step = TrainingStep(drafter, target, recipe.optimizer, recipe.distillation)
    first, second, room = recipe.stage1, recipe.stage2, drafter.max_depth - 1
    loader = build_loader(recipe, target, Windowing(first.length), "pace")

    def train(number: int) -> None:
        batches = [loader.next_batch(first.batch, room) for _ in range(first.accumulate)]
        step(batches, rate=0.0, positions=first.positions_per_sequence, seed=("pace", number))

    train(0)  # the first one warms up
    first_s = sum(timed(partial(train, number)) for number in range(1, 1 + PROBED_STEPS)) / PROBED_STEPS
    text_s = 0.0
    if texts_a_step(recipe):
        prompts = build_prompts(recipe, target)
        rows = [prompts.next_window().tokens for _ in range(PROBED_ROWS)]
        text_s = timed(lambda: generate(rows, PROBED_TOKENS, 0)) * second.new_tokens / PROBED_TOKENS / PROBED_ROWS
    read = (second.prompt_tokens + second.new_tokens) * second.batch * second.accumulate
    second_s = first_s * read / (first.length * first.batch * first.accumulate)
    return Pace(first_s, second_s, text_s, sum(parameter.numel() for parameter in drafter.parameters()))


def timed(task: Callable[[], object]) -> float:
    """Return the seconds that a task takes."""
    begun = time.perf_counter()
    task()
    return max(1e-6, time.perf_counter() - begun)


def scored(recipe: Recipe, target: Target) -> int:
    """Return how many tokens the drafter scores."""
    return recipe.drafter.config.draft_vocab_size or target.vocab_size


def activations(recipe: Recipe, target: Target, batch: int) -> int:
    """Reckon the bytes of a step of stage 1: the target's logits, twice, and the drafter's, three times, in fp32."""
    length = recipe.stage1.length
    positions = min(length, recipe.stage1.positions_per_sequence or length)
    return 4 * batch * (2 * length * target.vocab_size + 3 * positions * DEPTH * scored(recipe, target))


def memory(recipe: Recipe, target: Target, parameters: int) -> int:
    """Reckon the bytes of training: weights, gradients and two averages in fp32, and what a step needs."""
    return 16 * parameters + activations(recipe, target, recipe.stage1.batch)


def free_memory(target: Target) -> int:
    """Return the bytes that are free where the target computes; half of all where the system does not say."""
    if target.device.type == "cuda":
        return int(torch.cuda.mem_get_info(target.device)[0])
    # Linux says what programs can get; pages that are free this moment leave out what it only keeps of files.
    told = Path("/proc/meminfo")
    lines = told.read_text(encoding="ascii").splitlines() if told.is_file() else []
    available = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    if available is not None:
        return 1024 * int(available)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
