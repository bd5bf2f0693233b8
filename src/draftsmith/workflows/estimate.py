"""Estimates the time and memory of a run by trying out its parts on this machine."""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import torch

from draftsmith import system
from draftsmith.drafters.trainable import storage
from draftsmith.targets import Target
from draftsmith.training.build import build_loader
from draftsmith.training.data.generated import Generate
from draftsmith.training.data.loader import Windowing
from draftsmith.training.data.windows import Batch, Window, collate
from draftsmith.training.plan import stage_length
from draftsmith.training.progress import Work
from draftsmith.training.recipe import Recipe
from draftsmith.training.sections import StageSection
from draftsmith.training.step import TrainingStep
from draftsmith.training.wording import counted

TRIED_STEPS, TRIED_ROWS, TRIED_TOKENS = 2, 8, 8
LOOKED_AT_BATCHES = 8
"""Number of stage-1 batches whose lengths are looked at: some have short windows, some long ones."""
TRIED_BYTES = 32 * 2**20
SHOWN_IN_SECONDS = 100


@dataclass(frozen=True)
class Pace:
    """Seconds per step of stage 1 and of stage 2, per text that the target writes, per measurement and per save.

    `parameters` counts the trained parameters, `depth` the tokens that the drafter guesses.
    """

    first: float
    second: float
    text: float
    measurement: float
    save: float
    parameters: int
    depth: int

    def seconds(self, work: Work) -> tuple[float, float, float, float]:
        """Return the seconds a run takes: stage 1; stage 2 with the target's writing; measuring; saving."""
        second = work.second * self.second + work.texts * self.text
        return work.first * self.first, second, work.measurements * self.measurement, work.saves * self.save


def try_out(
    recipe: Recipe, target: Target, step: TrainingStep, generate: Generate, measured: Sequence[list[int]],
    measured_tokens: int,
) -> Pace:
    """Time a few throwaway steps, a little writing by the target, and the writing of a file.

    Args:
        step: the kind of step that the run takes, with its own drafter.
        measured: the prompts that τ is measured on.
        measured_tokens: number of tokens decoded after each of these prompts.
    """
    first_s = second_s = text_s = 0.0
    if recipe.stage1.steps:
        first_s = seconds_of_stage_one(recipe, target, step)
    if recipe.stage2.steps:
        second_s = seconds_of_stage_two(recipe, target, step)
        if recipe.stage2.texts is None:
            count = min(recipe.stage2.generate_batch, 8 * TRIED_ROWS)
            rows = list(islice(cycle(measured), count))
            text_s = seconds_a_text(generate, rows, recipe.stage2.new_tokens)
    measurement_s = len(measured) * seconds_a_text(generate, measured[:TRIED_ROWS], measured_tokens)
    parameters = sum(p.numel() for optimizer in step.optimizers for g in optimizer.param_groups for p in g["params"])
    return Pace(
        first_s, second_s, text_s, measurement_s, 12 * parameters * seconds_a_byte(), parameters, step.drafter.max_depth
    )


def seconds_of_stage_one(recipe: Recipe, target: Target, step: TrainingStep) -> float:
    """Return the seconds of a step of stage 1, measured on batches of about average length."""
    section, room = recipe.stage1, step.drafter.max_depth - 1
    loader = build_loader(recipe, target, Windowing(section.length), "pace")
    count = max(LOOKED_AT_BATCHES, section.accumulate)
    batches = [loader.next_batch(section.batch, room) for _ in range(count)]
    mean = sum(batch.tokens_BL.numel() for batch in batches) / count
    tried = sorted(batches, key=lambda batch: abs(batch.tokens_BL.numel() - mean))[: section.accumulate]
    read = sum(batch.tokens_BL.numel() for batch in tried)
    return seconds_a_step(recipe, step, section, tried) * mean * section.accumulate / read


def seconds_of_stage_two(recipe: Recipe, target: Target, step: TrainingStep) -> float:
    """Return the mean seconds of a step of stage 2; only its first epoch reads texts that were never read before."""
    section, length = recipe.stage2, stage_length(recipe, recipe.stage2)
    generator = torch.Generator().manual_seed(0)

    def batches() -> list[Batch]:
        texts_ML = torch.randint(target.vocab_size, (section.accumulate * section.batch, length), generator=generator)
        windows = [Window(tokens, [(section.prompt_tokens, length)]) for tokens in texts_ML.tolist()]
        own = [windows[at : at + section.batch] for at in range(0, len(windows), section.batch)]
        return [collate(some, length, again=section.epochs > 1) for some in own]

    take_step(recipe, step, section, batches(), 0)  # warms up
    some = batches()
    first, later = (timed(partial(take_step, recipe, step, section, some, number)) for number in (1, 2))
    return first / section.epochs + later * (1 - 1 / section.epochs)


def seconds_a_step(recipe: Recipe, step: TrainingStep, section: StageSection, batches: Sequence[Batch]) -> float:
    """Return the seconds that a step on these micro-batches takes."""
    take = partial(take_step, recipe, step, section, batches)
    take(0)  # the first one warms up
    return sum(timed(partial(take, number)) for number in range(1, 1 + TRIED_STEPS)) / TRIED_STEPS


def take_step(recipe: Recipe, step: TrainingStep, section: StageSection, batches: Sequence[Batch], number: int) -> None:
    """Take a step that changes nothing but the weights of its own throwaway drafter."""
    step.gradients(batches, rate=0.0, positions=section.positions_per_sequence, seed=("pace", number))
    if recipe.joint is None:
        step.apply()
    else:  # the target itself must not be touched
        step.forget()


def seconds_a_text(generate: Generate, prompts: Sequence[list[int]], new_tokens: int) -> float:
    """Return the seconds per text of `new_tokens` tokens, written side by side, one after each prompt."""
    rows = list(prompts)
    generate(rows[:1], 1, 0)  # warms up
    begun = timed(lambda: generate(rows, 1, 0))
    more = timed(lambda: generate(rows, 1 + TRIED_TOKENS, 0))
    return (begun + max(0.0, more - begun) * (new_tokens - 1) / TRIED_TOKENS) / len(rows)


def seconds_a_byte() -> float:
    """Return the seconds that it takes to write and seal a byte of a checkpoint."""
    with tempfile.TemporaryDirectory() as place:
        tensor = torch.zeros(TRIED_BYTES, dtype=torch.uint8)
        took = timed(
            lambda: storage.write_folder(
                Path(place) / "tried", lambda aside: storage.write_tensors(aside / "tried", {"tried": tensor})
            )
        )
    return took / TRIED_BYTES


def timed(task: Callable[[], object]) -> float:
    """Return the seconds that a task takes."""
    begun = time.perf_counter()
    task()
    return max(1e-6, time.perf_counter() - begun)


def foretold(recipe: Recipe, target: Target, pace: Pace, work: Work) -> str:
    """Say what is still to be done, and how much time and memory it will take."""
    first, second, measuring, saving = pace.seconds(work)
    parts = [
        f"{in_words(seconds)} {what}" for count, seconds, what in (
            (work.first, first, f"of stage 1 ({pace.first:.3f} s a step)"),
            (
                work.second, second,
                f"of stage 2 ({pace.second:.3f} s a step"
                + (f", {counted(work.texts, 'text')} of the target's to write)" if work.texts else ")"),
            ),
            (work.measurements, measuring, f"of measuring τ {counted(work.measurements, 'time')}"),
            (work.saves, saving, f"of saving {counted(work.saves, 'time')}"),
        ) if count
    ]
    compiled = ", reckoned without compilation" if recipe.optimizer.compile else ""
    early = ", less if a stage ends early" if recipe.evaluation.patience is not None else ""
    needed = memory(recipe, target, pace.parameters, pace.depth) / 2**30
    return (
        f"estimate: {in_words(first + second + measuring + saving)}{early}: {', '.join(parts)}{compiled}; "
        f"{needed:.1f} GiB of memory beside the target."
    )


def in_words(seconds: float) -> str:
    """Return "40 s" or "3.5 minutes"."""
    return f"{seconds:.0f} s" if seconds < SHOWN_IN_SECONDS else f"{seconds / 60:.1f} minutes"


def scored(recipe: Recipe, target: Target) -> int:
    """Return how many tokens the drafter scores, i.e. the size of its vocabulary."""
    return recipe.drafter.config.draft_vocab_size or target.vocab_size


def activations(recipe: Recipe, target: Target, depth: int) -> int:
    """Estimate the bytes of a step, in fp32: the target's logits twice, the drafter's of all depths three times."""

    def of(stage: StageSection) -> int:
        length = stage_length(recipe, stage)
        positions = min(length, stage.positions_per_sequence or length)
        return 4 * stage.batch * (2 * length * target.vocab_size + 3 * positions * depth * scored(recipe, target))

    return max((of(stage) for stage in (recipe.stage1, recipe.stage2) if stage.steps), default=0)


def memory(recipe: Recipe, target: Target, parameters: int, depth: int) -> int:
    """Estimate the bytes of training: weights, gradients and two averages in fp32, and a step's activations."""
    return 16 * parameters + activations(recipe, target, depth)


def free_memory(target: Target) -> int:
    """Return the free bytes on the device where the target computes; half of all bytes if the system does not say."""
    if target.device.type == "cuda":
        return int(torch.cuda.mem_get_info(target.device)[0])
    told = system.free_memory()
    if told is not None:
        return told
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
