"""The demo's live training: the target writes, the drafter learns from it, all within a promised time.

This is stage 2 of the report (section 3.2), limited by time instead of steps, so that it ends as promised on any
machine. Shapes: N stages.
"""

import math
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from draftsmith.drafters.trainable.model import TrainableModel
from draftsmith.engine import Engine
from draftsmith.plan import NO_DRAFT
from draftsmith.targets import Target
from draftsmith.training.data.windows import Window, collate
from draftsmith.training.schedule import learning_rate
from draftsmith.training.sections import DistillationSection, OptimizerSection
from draftsmith.training.step import NotFinite, TrainingStep
from draftsmith.types import DraftsmithError, SamplingParams, require_finished

RESOLUTION = 1000
"""The schedule counts steps, so the time is divided into this many."""

Show = Callable[[str, str], None]
"""Receives what is being done, and how fast; when all is done, both texts are empty."""


@dataclass(frozen=True)
class LiveSettings:
    """How the minutes are spent.

    Args:
        minutes: time for writing and learning together.
        writing_share: share of the time that the target spends writing.
        prompt_tokens, new_tokens: of each sequence.
        write_batch: sequences written together.
        batch: sequences a step.
        positions: positions trained on in each sequence.
        rate, final_rate: peak and end of the learning rate.
        distillation: weight of the target's own distribution in the loss.
    """

    minutes: float = 2.0
    writing_share: float = 0.4
    prompt_tokens: int = 64
    new_tokens: int = 128
    write_batch: int = 64
    batch: int = 8
    positions: int = 64
    rate: float = 1e-3
    final_rate: float = 1e-4
    distillation: float = 0.7
    seed: int = 0


@dataclass(frozen=True)
class LiveResult:
    """The trained speculator and what was done; `curve` holds (seconds, loss)."""

    speculator: TrainableModel
    sequences: int
    steps: int
    curve: list[tuple[float, float]]
    seconds: float

    def summary(self, settings: LiveSettings) -> dict[str, Any]:
        """Return the figures for JSON."""
        return {
            "settings": asdict(settings),
            "sequences_written": self.sequences,
            "steps": self.steps,
            "seconds": self.seconds,
            "loss_first": self.curve[0][1],
            "loss_last": self.curve[-1][1],
            "curve": self.curve,
        }


def train_live(
    target: Target, speculator: TrainableModel, prompts: list[list[int]], settings: LiveSettings, show: Show
) -> LiveResult:
    """Train an fp32 speculator in place for `settings.minutes`."""
    begun = time.monotonic()
    sequences = write(target, speculator, prompts, settings, show)
    curve = learn(target, speculator, sequences, settings, begun, show)
    show("", "")
    return LiveResult(speculator, len(sequences), len(curve), curve, time.monotonic() - begun)


def write(
    target: Target, speculator: TrainableModel, prompts: list[list[int]], settings: LiveSettings, show: Show
) -> list[Window]:
    """Let the target continue prompts, greedily as in the later timing; write at least one batch."""
    begun = time.monotonic()
    longest = settings.prompt_tokens + settings.new_tokens
    engine = Engine(target, speculator.for_decoding(target), max_batch=settings.write_batch, max_length=longest)
    sequences: list[Window] = []
    tokens = 0

    def note(committed: int) -> None:
        nonlocal tokens
        tokens += committed
        speed = tokens / (time.monotonic() - begun)
        show("The target writes", f"{tokens:,} tokens, {speed:.0f} tokens/s")

    while not sequences or time.monotonic() - begun < 60 * settings.minutes * settings.writing_share:
        first = len(sequences)
        chosen = [prompts[(first + i) % len(prompts)] for i in range(settings.write_batch)]
        rules = [
            SamplingParams(
                max_tokens=settings.new_tokens,
                seed=settings.seed + first + i,
            )
            for i in range(len(chosen))
        ]
        # This many rows keep a CPU's arithmetic busy by themselves; verifying guesses would only add work.
        plan = NO_DRAFT if target.device.type == "cpu" else None
        done = require_finished(engine.generate(chosen, rules, plan, on_progress=note))
        for completion in done:
            whole = completion.prompt_tokens + completion.tokens
            sequences.append(Window(whole, [(len(completion.prompt_tokens), len(whole))]))
    return sequences


def learn(
    target: Target,
    speculator: TrainableModel,
    sequences: list[Window],
    settings: LiveSettings,
    begun: float,
    show: Show,
) -> list[tuple[float, float]]:
    """Train until the time is up, for at least one step; return (seconds, loss) of every step."""
    rng = random.Random(settings.seed)
    section = OptimizerSection(precision="auto" if target.dtype == torch.bfloat16 else "fp32")
    step = TrainingStep(speculator.train(), target, section, DistillationSection(weight=settings.distillation))
    most, room = max(len(window.tokens) for window in sequences), speculator.max_depth - 1
    start, end = time.monotonic(), begun + 60 * settings.minutes
    curve: list[tuple[float, float]] = []
    mean = math.nan
    while not curve or time.monotonic() < end:
        share = (time.monotonic() - start) / max(1e-6, end - start)
        local = min(RESOLUTION - 1, int(share * RESOLUTION))
        rate = learning_rate(local, RESOLUTION, settings.rate, settings.final_rate)
        batch = collate(rng.sample(sequences, min(settings.batch, len(sequences))), most, room, again=True)
        try:
            found = step([batch], rate=rate, positions=settings.positions, seed=(settings.seed, len(curve)))
        except NotFinite as error:
            raise DraftsmithError(f"{error} at step {len(curve) + 1} of the demo; lower the rate.") from error
        loss = found.loss_N.mean().item()
        curve.append((time.monotonic() - begun, loss))
        mean = loss if math.isnan(mean) else 0.95 * mean + 0.05 * loss
        speed = len(curve) / (time.monotonic() - start)
        show("The speculator learns", f"step {len(curve)}, {speed:.1f} steps/s, loss {mean:.3f} a stage")
    speculator.eval()
    return curve
