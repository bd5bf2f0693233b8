"""The demo's live training: the target writes, the speculator learns from it, all within a promised time.

This is stage 2 of the report (section 3.2) by the clock instead of by steps, so that it ends when it was promised to
on any machine. Shapes: B sequences, L tokens, N stages.
"""

import math
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from draftsmith.drafters.mlp import MLPSpeculator
from draftsmith.engine import Engine
from draftsmith.plan import NO_DRAFT
from draftsmith.target import Target
from draftsmith.training.lessons import prepare
from draftsmith.training.optimizer import build_optimizers, set_rate
from draftsmith.training.recipe import DistillationSection, OptimizerSection
from draftsmith.training.schedule import learning_rate
from draftsmith.types import DraftsmithError, SamplingParams, unbroken

RESOLUTION = 1000
"""The schedule knows steps; the clock is cut into so many."""


@dataclass(frozen=True)
class LiveSettings:
    """How the minutes are spent.

    Args:
        minutes: of writing and learning together.
        writing_share: of the time that goes into the target's writing.
        prompt_tokens, new_tokens: of each sequence.
        write_batch: sequences written together.
        batch: sequences a step.
        positions: trained on in each of them.
        rate, final_rate: peak and end of the learning rate.
        distillation: weight of the target's own distribution in the loss.
    """

    minutes: float = 2.5
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

    speculator: MLPSpeculator
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
    target: Target, speculator: MLPSpeculator, prompts: list[list[int]], settings: LiveSettings, console: Console
) -> LiveResult:
    """Train an fp32 speculator in place for `settings.minutes`, with a progress bar of time, rate and loss."""
    begun = time.monotonic()
    total = 60 * settings.minutes
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("The target writes", total=total, rate="")

        def show(description: str, rate: str) -> None:
            progress.update(bar, description=description, rate=rate, completed=min(total, time.monotonic() - begun))

        sequences = write(target, speculator.for_decoding(target), prompts, settings, show)
        curve = learn(target, speculator, sequences, settings, begun, show)
    return LiveResult(speculator, len(sequences), len(curve), curve, time.monotonic() - begun)


def write(
    target: Target,
    drafter: MLPSpeculator,
    prompts: list[list[int]],
    settings: LiveSettings,
    show: Callable[[str, str], None],
) -> list[list[int]]:
    """Let the target continue prompts, greedily as it will be raced; at least one batch."""
    begun = time.monotonic()
    longest = settings.prompt_tokens + settings.new_tokens
    engine = Engine(target, drafter, max_batch=settings.write_batch, max_length=longest)
    sequences: list[list[int]] = []
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
                ignore_eos=True,
                seed=settings.seed + first + i,
            )
            for i in range(len(chosen))
        ]
        # So many rows fill a CPU's arithmetic by themselves; guesses would only be more work.
        plan = NO_DRAFT if target.device.type == "cpu" else None
        done = unbroken(engine.generate(chosen, rules, plan, on_progress=note))
        sequences += [completion.prompt_tokens + completion.tokens for completion in done]
    return sequences


def learn(
    target: Target,
    speculator: MLPSpeculator,
    sequences: list[list[int]],
    settings: LiveSettings,
    begun: float,
    show: Callable[[str, str], None],
) -> list[tuple[float, float]]:
    """Train until the time is up, at least one step; return (seconds, loss) of every step."""
    rng = random.Random(settings.seed)
    section = OptimizerSection()
    optimizers = build_optimizers(speculator.train(), section)
    distillation = DistillationSection(weight=settings.distillation)
    start, end = time.monotonic(), begun + 60 * settings.minutes
    curve: list[tuple[float, float]] = []
    mean = math.nan
    while not curve or time.monotonic() < end:
        share = (time.monotonic() - start) / max(1e-6, end - start)
        local = min(RESOLUTION - 1, int(share * RESOLUTION))
        set_rate(optimizers, learning_rate(local, RESOLUTION, settings.rate, settings.final_rate))
        tokens_BL = torch.tensor(rng.sample(sequences, min(settings.batch, len(sequences))))
        with torch.autocast(target.device.type, torch.bfloat16, enabled=target.dtype == torch.bfloat16):
            lesson = prepare(
                speculator,
                target,
                tokens_BL,
                first=settings.prompt_tokens - 2,
                count=settings.positions,
                distillation=distillation,
                seed=(settings.seed, len(curve)),
            )
            loss_N, _ = speculator.losses(lesson)
        loss_N.sum().backward()
        torch.nn.utils.clip_grad_norm_(speculator.parameters(), section.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        loss = loss_N.mean().item()
        if not math.isfinite(loss):
            raise DraftsmithError(f"the loss became {loss} at step {len(curve) + 1} of the demo; lower the rate.")
        curve.append((time.monotonic() - begun, loss))
        mean = loss if math.isnan(mean) else 0.95 * mean + 0.05 * loss
        speed = len(curve) / (time.monotonic() - start)
        show("The speculator learns", f"step {len(curve)}, {speed:.1f} steps/s, loss {mean:.3f} a stage")
    speculator.eval()
    return curve
