"""One measured run: decodes prompts, and reports the speed and how well drafts were accepted. Shapes: D depth."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.engine import Engine
from draftsmith.plan import Plan
from draftsmith.types import Completion, SamplingParams, Statistics, require_finished


@dataclass
class Measurement:
    """The costs and results of decoding some prompts; `wall_s` covers prefill and decoding."""

    completions: list[Completion]
    wall_s: float

    @property
    def statistics(self) -> Statistics:
        """The sum over all completions."""
        total = Statistics()
        for completion in self.completions:
            total += completion.statistics
        return total

    @property
    def tokens_per_step(self) -> float:
        """τ weighted by tokens: 1 + accepted / steps over everything."""
        return self.statistics.tokens_per_step

    @property
    def mean_tokens_per_step(self) -> float:
        """τ as the mean over completions."""
        return sum(c.statistics.tokens_per_step for c in self.completions) / max(1, len(self.completions))

    @property
    def new_tokens(self) -> int:
        """Generated tokens, counted in the output itself."""
        return sum(len(c.tokens) for c in self.completions)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over wall-clock."""
        return self.new_tokens / self.wall_s

    def accepted_by_depth(self) -> list[float]:
        """Return, for each depth, the share of steps (D) whose accepted path reached it."""
        total = self.statistics
        return [count / total.steps for count in total.accepted_by_depth] if total.steps else []

    def shares(self) -> dict[str, float]:
        """Return the shares of decoding time in target, drafter and the rest; they add up to 1."""
        total = self.statistics
        seconds = total.decode_s or 1.0
        return {
            "target": total.target_s / seconds,
            "drafter": total.drafter_s / seconds,
            "rest": total.rest_s / seconds,
        }

    def summary(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        total = self.statistics
        return {
            "prompts": len(self.completions),
            "new_tokens": self.new_tokens,
            "tokens_per_step": self.tokens_per_step,
            "tokens_per_step_mean_over_prompts": self.mean_tokens_per_step,
            "accepted_by_depth": self.accepted_by_depth(),
            "steps": total.steps,
            "drafted": total.drafted,
            "accepted": total.accepted,
            "acceptance_rate": total.accepted / total.drafted if total.drafted else 0.0,
            "tokens_per_second": self.tokens_per_second,
            "lossless": total.lossless,
            "wall_s": self.wall_s,
            "prefill_s": total.prefill_s,
            "share": self.shares(),
        }


def measure(
    engine: Engine,
    prompts: Sequence[str | Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    plan: Plan | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Measurement:
    """Decode all prompts through the engine in one call, with the clock running."""
    begun = time.perf_counter()
    completions = require_finished(engine.generate(prompts, params, plan=plan, on_progress=on_progress))
    return Measurement(completions, time.perf_counter() - begun)
