"""Plain against drafted decoding: interleaved rounds, intervals, and whether the text is the same."""

import random
from collections.abc import Callable, Sequence
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
        """Tokens a second of all rounds with drafting; over those without, it is `speedup`."""
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
        """Answer "identical?" in a few words, and say how many plain texts one forward confirms."""
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


def measure_speedup(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    plan: Plan | None = None,
    warmups: int = 1,
    seed: int = 0,
    on_progress: Callable[[], None] | None = None,
) -> SpeedupResult:
    """Decode every prompt both ways, greedily and alone, in random order; one prompt is one round."""
    rng = random.Random(seed)
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    ways: dict[str, Plan | None] = {"plain": NO_DRAFT, "drafted": plan}
    for _ in range(warmups):
        for way in ways.values():
            measure(engine, [prompts[0]], params, way)
    rounds: dict[str, list[Measurement]] = {name: [] for name in ways}
    for index, name, _ in interleaved(ways, len(prompts), rng):
        rounds[name].append(measure(engine, [prompts[index]], params, ways[name]))
        if on_progress is not None and all(len(several) == index + 1 for several in rounds.values()):
            on_progress()
    texts = {name: [completion for m in runs for completion in m.completions] for name, runs in rounds.items()}
    own = sum(is_targets_own(engine.target, completion) for completion in texts["plain"])
    return SpeedupResult(
        rounds["plain"], rounds["drafted"], compare_texts(texts["plain"], texts["drafted"], engine.target), own
    )
