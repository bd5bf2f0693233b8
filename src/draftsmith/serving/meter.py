"""Counters of the engine's work, kept as plain numbers because every step updates them."""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from draftsmith.engine.core import EngineCore, Progress
from draftsmith.engine.made import Made
from draftsmith.engine.requests.request import Request
from draftsmith.serving.tally import plan_in_words

FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)
TOKEN = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0,
)
WHOLE = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
)
ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
COUNTS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
"""Upper bounds of the histograms' buckets: those of vLLM, whose dashboards ask for them, and finer ones."""


MOST_PLANS, OTHER_PLANS = 64, ("other", "other")
"""The most pairs of drafter and plan that are counted separately, and the pair that stands for all others."""
UNTOLD = "untold"
"""The reason under which steps are counted whose policy gives none."""


class Histogram:
    """How many values lie between each two bounds, and the sum of all values."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class DrafterMeter:
    """Counts of one drafter: steps, guesses, guesses that stayed, and the latter by depth."""

    def __init__(self) -> None:
        self.steps = self.drafted = self.accepted = 0
        self.by_depth: list[int] = []

    def add(self, made: Made) -> None:
        """Note a step."""
        self.steps += 1
        self.drafted += made.drafted
        self.accepted += made.accepted
        if len(self.by_depth) < made.plan.depth:
            self.by_depth += [0] * (made.plan.depth - len(self.by_depth))
        for depth in range(made.accepted):
            self.by_depth[depth] += 1


class Meter:
    """Counters of one engine; only the engine's thread writes them, and others read them at any time.

    Args:
        core: the engine core whose steps are counted.
        model: the model's name in the metrics.
    """

    def __init__(self, core: EngineCore, model: str) -> None:
        self.core, self.model = core, model
        self.prompt_tokens = self.new_tokens = self.cached_tokens = 0
        self.finished: Counter[str] = Counter()
        self.drafters: dict[str, DrafterMeter] = {}
        self.plans: Counter[tuple[str, str]] = Counter()
        self.reasons: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self.steps = 0
        self.first_token, self.between = Histogram(FIRST_TOKEN), Histogram(TOKEN)
        self.per_token, self.whole = Histogram(TOKEN), Histogram(WHOLE)
        self.queue, self.prefill, self.decode = Histogram(WHOLE), Histogram(WHOLE), Histogram(WHOLE)
        self.prompts, self.texts = Histogram(COUNTS), Histogram(COUNTS)
        self.iteration = Histogram(ITERATION)
        # By id of each request that is being written: when its first and its newest token came.
        self._times: dict[int, tuple[float, float]] = {}
        self._words: dict[int, tuple[object, str]] = {}

    def note(self, progress: Sequence[Progress]) -> None:
        """Count the results of a step."""
        now, tokens, whole = time.monotonic(), 0, 0
        for one in progress:
            request, count = one.request, len(one.tokens)
            if count:
                # The whole prompt counts in the step that brings the first token after it, as with vLLM.
                whole += count + (0 if request.id in self._times else len(request.prompt))
                tokens += count
                self._note_tokens(request, count, now)
            if one.made is not None:
                self._note_draft(one.made)
            if one.finished:
                self._note_end(request, now)
        if tokens:
            self.steps += 1
            self.new_tokens += tokens
            self.iteration.add(whole)

    def _note_tokens(self, request: Request, count: int, now: float) -> None:
        times = self._times.get(request.id)
        if times is None:
            self._times[request.id] = (now, now)
            self.first_token.add(now - request.came)
            self.prompt_tokens += len(request.prompt)
            self.cached_tokens += request.shared
        else:
            # The tokens of one step come together and count as one interval, as with vLLM.
            self.between.add(now - times[1])
            self._times[request.id] = (times[0], now)

    def _note_draft(self, made: Made) -> None:
        words = self._words.get(id(made.plan))
        if words is None or words[0] is not made.plan:
            words = self._words[id(made.plan)] = (made.plan, plan_in_words(made.plan))
            if len(self._words) > 256:
                self._words.clear()
        # Requests may bring their own plans, so that there can be any number of them.
        plan = (made.drafter, words[1])
        self.plans[plan if plan in self.plans or len(self.plans) < MOST_PLANS else OTHER_PLANS] += 1
        self.reasons[UNTOLD if made.why is None else made.why.label] += 1
        if made.drafted:
            meter = self.drafters.get(made.drafter)
            if meter is None:
                meter = self.drafters[made.drafter] = DrafterMeter()
            meter.add(made)

    def _note_end(self, request: Request, now: float) -> None:
        self.finished[request.finish_reason or "error"] += 1
        self.whole.add(now - request.came)
        self.prompts.add(len(request.prompt))
        self.texts.add(len(request.tokens))
        times = self._times.pop(request.id, None)
        statistics = request.statistics
        for name in ("target_s", "drafter_s", "rest_s", "prefill_s"):
            self.seconds[name] += getattr(statistics, name)
        if request.began_at is None:
            return
        self.queue.add(request.began_at - request.came)
        if times is not None:
            first, last = times
            self.prefill.add(first - request.began_at)
            self.decode.add(last - first)
            if len(request.tokens) > 1:
                self.per_token.add((last - first) / (len(request.tokens) - 1))

    def failures(self) -> dict[str, int]:
        """Return how often each drafter failed."""
        return {name: drafter.failures for name, drafter in self.core.drafters.items()}
