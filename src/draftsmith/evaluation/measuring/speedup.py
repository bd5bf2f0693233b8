"""Plain against drafted decoding, one way or several: interleaved rounds, intervals, and whether texts are the same."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.engine import Engine
from draftsmith.evaluation.measuring.interleaving import interleaved
from draftsmith.evaluation.measuring.intervals import Interval, ratio_interval
from draftsmith.evaluation.measuring.losslessness import TextComparison, compare_texts, is_targets_own
from draftsmith.evaluation.measuring.measure import Measurement, measure
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.types import Completion, SamplingParams


@dataclass(frozen=True)
class SpeedupResult:
    """Baseline and speculation, one entry a round; both generated exactly the same number of tokens."""

    plain: list[Measurement]
    drafted: list[Measurement]
    comparison: TextComparison
    own_texts: int

    @property
    def plain_speed(self) -> Interval:
        """Tokens a second of all rounds without drafting."""
        return ratio_interval([m.new_tokens for m in self.plain], [m.wall_s for m in self.plain])

    @property
    def drafted_speed(self) -> Interval:
        """Tokens a second of all rounds with drafting; divided by `plain_speed` it is `speedup`."""
        return ratio_interval([m.new_tokens for m in self.drafted], [m.wall_s for m in self.drafted])

    @property
    def speedup(self) -> Interval:
        """Ratio of the wall-clocks, paired by round."""
        return ratio_interval([m.wall_s for m in self.plain], [m.wall_s for m in self.drafted])

    @property
    def total(self) -> Measurement:
        """All rounds with drafting as one."""
        completions = [completion for m in self.drafted for completion in m.completions]
        return Measurement(completions, sum(m.wall_s for m in self.drafted))

    def sentence(self) -> str:
        """Say in a few words whether texts are identical, and how many plain texts one forward confirms."""
        return f"{self.comparison.sentence()}; one plain forward confirms {self.own_texts} of {len(self.plain)}"

    def completions(self) -> list[Completion]:
        """Return the drafted texts."""
        return self.total.completions

    def summary(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        speedup = self.speedup
        return {
            "rounds": len(self.plain),
            "new_tokens_plain": sum(m.new_tokens for m in self.plain),
            "new_tokens_drafted": sum(m.new_tokens for m in self.drafted),
            "tokens_per_second_plain": self.plain_speed.value,
            "tokens_per_second_plain_ci": self.plain_speed.ends,
            "tokens_per_second_drafted": self.drafted_speed.value,
            "tokens_per_second_drafted_ci": self.drafted_speed.ends,
            "speedup": speedup.value,
            "speedup_ci": speedup.ends,
            "realised": speedup.value / self.total.tokens_per_step,
            "drafted": self.total.summary(),
            "identical": self.comparison.summary(),
            "confirmed_by_one_forward": self.own_texts,
        }


Way = tuple[Engine, Plan | None]
"""How texts are decoded: an engine and a plan; without one, the engine decides."""


def measure_speedups(
    plain: Engine,
    ways: Mapping[str, Way],
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    warmups: int = 1,
    seed: int = 0,
) -> dict[str, SpeedupResult]:
    """Decode every prompt plainly and in all other ways, greedily and alone, in random order; each prompt is a round.

    Args:
        plain: the engine of the baseline.
    """
    rng = random.Random(seed)
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    every: list[Way] = [(plain, NO_DRAFT), *ways.values()]
    for _ in range(warmups):
        for engine, plan in every:
            measure(engine, [prompts[0]], params, plan)
    runs: list[list[Measurement]] = [[] for _ in every]
    for index, way, _ in interleaved(range(len(every)), len(prompts), rng):
        engine, plan = every[way]
        runs[way].append(measure(engine, [prompts[index]], params, plan))
    baseline, *others = runs
    texts, *drafted = [[text for one in several for text in one.completions] for several in runs]
    own = sum(is_targets_own(plain.target, text) for text in texts)
    return {
        name: SpeedupResult(baseline, other, compare_texts(texts, theirs, plain.target), own)
        for name, other, theirs in zip(ways, others, drafted, strict=True)
    }
