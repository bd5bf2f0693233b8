"""Measures what drafts cost and bring: plans of more and more guesses decode a little, until larger ones clearly lose.

Costs and acceptance are those of decoding itself, on texts that nothing is evaluated on. Plain decoding takes a turn
beside every plan.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from draftsmith.drafters.base import Drafter, StagewiseDrafter
from draftsmith.engine import Engine
from draftsmith.engine.profile import Arm, Profile, candidates
from draftsmith.evaluation.prompts import Prompt, cut, embedded_prompts
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.processor import Watch
from draftsmith.targets import Target
from draftsmith.types import SamplingParams, require_finished

ROWS = (1, 2, 4, 8, 16)
PROMPT_TOKENS, NEW_TOKENS = 48, 20
FEWEST_TEXTS = 24
"""For few rows as well: acceptance differs from text to text."""
SLOW_STEP_S, FEW_TOKENS, FEW_PLANS = 0.02, 10, 4
"""Where a plain step takes longer, fewer tokens are decoded, and fewer plans are timed with more than one row."""
HOPELESS, MISSES = 0.85, 2
"""Larger drafts are not tried after so many in a row had less than this share of the best speed so far."""
TASKS = 3
"""Of the embedded training texts, which take turns."""
FEWEST_TURNS, FEWEST_OF_SEVERAL, MOST_TURNS, ENOUGH_S = TASKS, 2, 6, 0.2
"""How often a plan is timed, with one row and with several, which see several tasks at once; no oftener than the fewest
where that takes so long."""
ALONE = 3
"""So many times as long, and up to so many times as often, where there is one number of rows only: it alone shows which
guesses stay."""
NOISY = 1.4
"""Times the least: where a plain step usually takes longer, other programs disturbed it."""
MOST_NODES = 64

Taken = dict[Plan, dict[int, list[float]]]
"""Seconds of a step: by plan, by number of rows, of every time it was measured."""


class Sampler:
    """Decodes a little with one plan after the other; every call goes on to other prompts.

    With one row every plan begins at other prompts, by whole turns of their tasks.

    Args:
        engine: with room for all plans.
        prompts: texts that begin again when all were used.
    """

    def __init__(self, engine: Engine, prompts: Sequence[list[int]], new_tokens: int) -> None:
        self.engine, self.prompts, self.new_tokens = engine, prompts, new_tokens
        self.stayed: dict[Plan, list[int]] = {}
        self.steps: dict[Plan, int] = {}
        self._drafted: dict[Plan, int] = {}
        self._taken: dict[tuple[Plan, int], int] = {}

    def seconds(self, plan: Plan, rows: int) -> float:
        """Return what a step takes now with so many rows, and note which guesses stayed."""
        # What stays of all chains is told together, so they see more texts if each sees some of its own.
        at = self._taken.get((plan, rows), 0 if plan == NO_DRAFT else len(self.steps) * TASKS * rows)
        self._taken[plan, rows] = at + rows
        some = [self.prompts[(at + row) % len(self.prompts)] for row in range(rows)]
        params = SamplingParams(max_tokens=self.new_tokens, ignore_eos=True)
        done = [text.statistics for text in require_finished(self.engine.generate(some, params, plan))]
        stayed, steps = self.stayed.setdefault(plan, [0] * plan.depth), sum(one.steps for one in done)
        for one in done:
            for depth, count in enumerate(one.accepted_by_depth[: plan.depth]):
                stayed[depth] += count
        self.steps[plan] = self.steps.get(plan, 0) + steps
        self._drafted[plan] = self._drafted.get(plan, 0) + sum(one.drafted for one in done)
        return rows * sum(one.decode_s for one in done) / max(1, steps)

    def drafted(self, plan: Plan) -> float:
        """Return how many guesses a step verified."""
        return self._drafted[plan] / max(1, self.steps[plan])

    def survival(self, plan: Plan) -> tuple[float, ...]:
        """Return the shares of steps that accepted at least 1, 2, … guesses; of chains, by all chains as deep."""
        alike = [plan]
        if is_chain(plan):
            alike = [
                one for one in self.steps
                if is_chain(one) and one.sampled == plan.sampled and one.match == plan.match
            ]
        found = []
        for depth in range(plan.depth):
            deep = [one for one in alike if one.depth > depth]
            found.append(sum(self.stayed[one][depth] for one in deep) / max(1, sum(self.steps[one] for one in deep)))
        return tuple(found)


def is_chain(plan: Plan) -> bool:
    """Whether every node has one child."""
    return bool(plan.branching) and plan.max_nodes == plan.depth


class Contest:
    """Times plans, smaller ones first, for as long as larger ones may pay.

    Args:
        rows: numbers of rows to time steps with, rising.
        on_progress: gets what is being measured.
    """

    def __init__(self, sampler: Sampler, rows: Sequence[int], on_progress: Callable[[str], None]) -> None:
        self.sampler, self.rows, self.on_progress = sampler, tuple(rows), on_progress
        self.taken: Taken = {}

    def time(self, plan: Plan, rows: int) -> None:
        """Time a plan, and plain decoding beside it, until there is enough of both."""
        waiting = " behind long matches" if plan.match else ""
        self.on_progress(f"{rows} row{'s' if rows > 1 else ''}, {plan.max_nodes} guesses{waiting}")
        begun, longer = time.monotonic(), ALONE if len(self.rows) == 1 else 1
        fewest = FEWEST_TURNS if rows == 1 else FEWEST_OF_SEVERAL
        for turn in range(MOST_TURNS * longer):
            for one in dict.fromkeys((NO_DRAFT, plan)):
                took = self.sampler.seconds(one, rows)
                self.taken.setdefault(one, {}).setdefault(rows, []).append(took)
            if turn + 1 >= fewest and time.monotonic() - begun > ENOUGH_S * longer:
                return

    def speed(self, plan: Plan) -> float:
        """Return tokens a second of one row."""
        return (1 + sum(self.sampler.survival(plan))) / self.seconds(plan, self.rows[0])

    def seconds(self, plan: Plan, rows: int) -> float:
        """Return what a step takes when nobody disturbs it: a chain, and no draft, no more than longer chains took."""
        alike = [plan]
        if plan == NO_DRAFT or is_chain(plan):
            alike += [
                one for one in self.taken
                if is_chain(one) and one.depth > plan.depth and one.match == plan.match and rows in self.taken[one]
            ]
        return min(took for one in alike for took in self.taken[one][rows])

    def run(self, plans: Sequence[Plan], looked_up: bool) -> Profile:
        """Time them and return what came of it; guesses that are looked up are not made at every step."""
        self.time(NO_DRAFT, self.rows[0])
        misses, best = 0, 0.0
        for plan in plans:
            # What waits for long matches seldom drafts, so it is no worse where others clearly lose.
            if misses == MISSES and not plan.match:
                continue
            self.time(plan, self.rows[0])
            best = max(best, self.speed(plan), self.speed(NO_DRAFT))
            if misses < MISSES:
                misses = misses + 1 if self.speed(plan) < HOPELESS * best else 0
        plain = self.speed(NO_DRAFT)
        kept = [
            plan for plan in self.taken if plan == NO_DRAFT or plan.match or self.speed(plan) >= HOPELESS * plain
        ]
        if self.seconds(NO_DRAFT, self.rows[0]) > SLOW_STEP_S:
            # Every plan takes seconds with many rows, where those that are best for one are about as good as any.
            best_few = sorted(kept, key=lambda plan: (plan != NO_DRAFT, -self.speed(plan)))[: 1 + FEW_PLANS]
            kept = [plan for plan in kept if plan in best_few]
        for rows in self.rows[1:]:
            for plan in kept:
                self.time(plan, rows)
        return Profile(self.rows, tuple(
            Arm(
                plan, self.sampler.survival(plan), tuple(self.seconds(plan, rows) for rows in self.rows),
                self.sampler.drafted(plan) if looked_up else None,
            )
            for plan in kept
        ))

    @property
    def is_steady(self) -> bool:
        """Whether a plain step took about as long whenever it was timed."""
        return all(statistics.median(some) < NOISY * min(some) for some in self.taken[NO_DRAFT].values())


def up_to(rows: int) -> tuple[int, ...]:
    """Return the numbers of rows to time for an engine that takes so many; what lies beyond them is extrapolated."""
    return tuple(count for count, before in zip(ROWS, (0, *ROWS), strict=False) if before < rows)


def measure_profile(
    target: Target, drafter: Drafter, rows: Sequence[int], on_progress: Callable[[str], None] = lambda _: None
) -> tuple[Profile, bool]:
    """Decode with plans of more and more nodes; return what that brought, and whether the machine was quiet meanwhile.

    Args:
        rows: numbers of rows to time steps with, rising.
        on_progress: gets what is being measured.
    """
    default, most = drafter.default_plan(), rows[-1]
    longest = drafter.max_depth if isinstance(drafter, StagewiseDrafter) else default.depth
    plans = candidates(default, isinstance(drafter, StagewiseDrafter), MOST_NODES, longest, drafter.matches)
    length = min(PROMPT_TOKENS + NEW_TOKENS, target.max_length)
    new_tokens = min(NEW_TOKENS, length - 1)
    prompts = texts_for(target, length - new_tokens, max(FEWEST_TEXTS, 3 * most))
    largest = max([NO_DRAFT, *plans], key=lambda plan: plan.max_nodes)
    engine = Engine(target, drafter, plan=largest, max_batch=most, max_length=max(map(len, prompts)) + new_tokens)
    sampler = Sampler(engine, prompts, new_tokens)
    sampler.seconds(NO_DRAFT, 1)  # warms up
    if sampler.seconds(NO_DRAFT, 1) > SLOW_STEP_S:
        sampler.new_tokens = min(FEW_TOKENS, new_tokens)
    contest, watch = Contest(sampler, rows, on_progress), Watch()
    return contest.run(plans, bool(drafter.matches)), contest.is_steady and not watch.is_disturbed


def texts_for(target: Target, tokens: int, count: int) -> list[list[int]]:
    """Return beginnings of the embedded training texts; for a target without a tokenizer, random tokens."""
    if target.tokenizer is not None:
        return cut(target, mixed(), tokens, count, exact=False)
    rng = random.Random(0)
    return [[rng.randrange(target.vocab_size) for _ in range(tokens)] for _ in range(count)]


def mixed() -> list[Prompt]:
    """Return the embedded training texts, the tasks taking turns."""
    texts = embedded_prompts(split="train")
    tasks = [[text for text in texts if text.task == task] for task in sorted({text.task for text in texts})]
    return list(islice(taking_turns(tasks), len(texts)))


def taking_turns(lists: Sequence[Sequence[Prompt]]) -> Iterator[Prompt]:
    """Give the first of each, the second of each, and so on."""
    for at in range(max(map(len, lists))):
        for one in lists:
            if at < len(one):
                yield one[at]
