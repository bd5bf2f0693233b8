"""The whole idea in a few minutes: measure, train live, measure again, time what was saved: `draftsmith demo`."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from draftsmith import assets
from draftsmith.drafters.registry import load_drafter, reopen
from draftsmith.drafters.trainable.model import TrainableModel
from draftsmith.engine import Engine
from draftsmith.evaluation.measuring.measure import Measurement, measure
from draftsmith.evaluation.measuring.speedup import SpeedupResult
from draftsmith.evaluation.prompts import check_room, cut, embedded_prompts
from draftsmith.plan import NO_DRAFT
from draftsmith.provenance import provenance
from draftsmith.targets import Target
from draftsmith.types import SamplingParams
from draftsmith.workflows.demo_speeds import (
    LIVE,
    TRIALS,
    TargetSpeeds,
    drafters_for,
    race,
    race_on_larger,
    why_not_larger,
)
from draftsmith.workflows.live import LiveResult, LiveSettings, Show, train_live
from draftsmith.workflows.models import CompileChoice, Loading, dtype_name, load_target, quiet, settle_compilation
from draftsmith.workflows.sources import EMBEDDED, gather_prompts

TASKS = ("code", "prose")
ROWS = 8
# Beginnings of training texts for the target to continue; when all have been used, they repeat.
PIECES = 4000

Measured = Mapping[str, Measurement]


@dataclass(frozen=True)
class DemoResult:
    """Everything the demo measured: `before` and `after` by task, `speeds` of the target and of the larger one.

    The trained drafter is in the folder `drafter`.
    """

    provenance: Mapping[str, Any]
    before: Measured
    after: Measured
    live: LiveResult
    settings: LiveSettings
    speeds: Sequence[TargetSpeeds]
    seconds: float
    target: Target
    drafter: Path

    @property
    def trained(self) -> Mapping[str, SpeedupResult]:
        """What the drafter that was trained live brought on the target, by task."""
        return {task: found[LIVE] for task, found in self.speeds[0].tasks.items()}

    def as_json(self) -> dict[str, Any]:
        """Return what `draftsmith demo --json` writes."""
        return {
            "provenance": dict(self.provenance),
            "before": {task: m.summary() for task, m in self.before.items()},
            "after": {task: m.summary() for task, m in self.after.items()},
            "training": self.live.summary(self.settings),
            "speeds": [one.summary() for one in self.speeds],
            "seconds": self.seconds,
        }


def demonstrate(
    out: Path,
    settings: LiveSettings | None = None,
    target: Target | str | Path | None = None,
    drafter: str | Path | None = None,
    *,
    prompts: int = 8,
    larger: bool = True,
    compile: CompileChoice = "auto",
    loading: Loading | None = None,
    console: Console | None = None,
    show: Show = lambda what, how_fast: None,
    on_trained: Callable[[Measured, Measured, LiveResult], None] = lambda before, after, live: None,
) -> DemoResult:
    """Train a drafter live, then time it beside the shipped one and 4-bit copies of the target.

    Args:
        out: the trained drafter is saved in the folder `drafter` inside this one.
        settings: how the minutes are spent.
        target: a folder, a hub name or a `Target`; the embedded one by default.
        drafter: the folder of the drafter to start from; the embedded first stage by default.
        prompts: held-out prompts per task.
        larger: measure half of them on the enlarged embedded target as well.
        compile: how much of the step PyTorch compiles for the timing.
        loading: how a target given by name is loaded.
        console: where loading and measuring are reported; nowhere by default.
        show: receives what the training is doing, and how fast.
        on_trained: receives what was measured before and after the training, before the timing starts.

    Raises:
        DraftsmithError: prompts that do not fit the context, or a folder without a drafter to go on training.
    """
    begun = time.monotonic()
    settings, loading, console = settings or LiveSettings(), loading or Loading(), console or quiet()
    prompt_tokens, new_tokens = settings.prompt_tokens, settings.new_tokens
    first_stage = Path(drafter) if drafter is not None else assets.demo_first_stage()
    texts = gather_prompts(None)
    loaded = load_target(target, loading, console)
    check_room(loaded.max_length, prompt_tokens, new_tokens)
    trained_model = reopen(first_stage, loaded, torch.float32)
    held_out = {task: cut(loaded, [p for p in texts if p.task == task], prompt_tokens, prompts) for task in TASKS}
    console.print(
        f"Target {loaded.name}: {loaded.weights / 1e6:.1f} M parameters, {dtype_name(loaded)} on {loaded.device}. "
        f"Speculator {first_stage.name}: {trained_model.max_depth} guesses deep, "
        f"{sum(p.numel() for p in trained_model.parameters()) / 1e6:.1f} M."
    )
    with console.status("Measuring tokens per step on held-out text, before training …"):
        before = tokens_per_step(loaded, trained_model, held_out, new_tokens)
    live = train_live(
        loaded, trained_model, cut(loaded, embedded_prompts(split="train"), prompt_tokens, PIECES), settings, show
    )
    with console.status("Measuring again, after training …"):
        after = tokens_per_step(loaded, live.speculator, held_out, new_tokens)
    on_trained(before, after, live)

    # Time the saved drafter, loaded back as any user would load it.
    saved = out / "drafter"
    live.speculator.to(loaded.dtype).save_pretrained(saved, loaded.facts(), {"trained_by": "draftsmith demo"})
    longest = prompt_tokens + new_tokens
    engine = Engine(loaded, load_drafter(saved, loaded), max_batch=1, max_length=longest, share_prefixes=False)
    engine = settle_compilation(
        console, engine, compile, 3 * len(TASKS) * prompts * new_tokens,
        lambda compiled: compiled.prepare(1, NO_DRAFT) + compiled.prepare(1),
    )
    origin = Path(target) if isinstance(target, str | Path) else assets.demo_target() if target is None else Path()
    is_embedded = origin.resolve() == assets.demo_target().resolve()
    tuning = cut(loaded, embedded_prompts(split="train"), prompt_tokens, TRIALS)
    with console.status("Racing …") as status:
        def say(what: str) -> None:
            status.update(f"Racing: {what} …")

        def tell(sentence: str) -> None:
            console.print(f"[dim]{escape(sentence)}[/dim]", highlight=False)

        drafters = drafters_for(loaded, saved, assets.demo_drafter() if is_embedded else None, tell)
        speeds = [race(loaded, drafters, held_out, tuning, new_tokens, settings.seed, engine.compiled, say)]
        reason = why_not_larger(loaded, origin) if larger else "The larger target was not asked for."
        if reason is None:
            fewer = {task: texts[: max(1, prompts // 2)] for task, texts in held_out.items()}
            speeds.append(race_on_larger(origin, saved, fewer, tuning, new_tokens, settings.seed, say, tell))
    if reason is not None:
        console.print(f"[dim]{reason}[/dim]", highlight=False)
    where = provenance(
        target=loaded.name, drafter=first_stage.name, dtype=dtype_name(loaded), device=str(loaded.device),
        compiled=engine.compiled, prompts=EMBEDDED,
    )
    return DemoResult(where, before, after, live, settings, speeds, time.monotonic() - begun, loaded, saved)


def tokens_per_step(
    target: Target, trained_model: TrainableModel, held_out: Mapping[str, list[list[int]]], new_tokens: int
) -> dict[str, Measurement]:
    """Decode the held-out prompts of every task greedily with this drafter."""
    engine = Engine(target, trained_model.for_decoding(target), max_batch=ROWS)
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    return {task: measure(engine, prompts, params) for task, prompts in held_out.items()}
