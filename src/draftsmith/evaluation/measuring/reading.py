"""Measures what longer texts add to a step: a short text and a long one decode in turn, with drafts and without."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

from draftsmith.drafters.base import Drafter
from draftsmith.engine import Choice, Engine, Load, Policy, RowHistory
from draftsmith.engine.profile import Reading
from draftsmith.evaluation.measuring.steps import raise_failures
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.targets import Target
from draftsmith.types import SamplingParams

ROUNDS, TURNS, STEPS = 3, 4, 4
"""So often both texts are decoded, and in each round of each so many steps with drafts and so many without in turn. The
first of these steps is not timed: what it takes is what a change costs."""
LONGER = 4
"""Times as long as the short text: what less adds is not told from noise."""


class Told(Policy):
    """Does what it was told last."""

    def __init__(self, plan: Plan) -> None:
        self._choices = (Choice(NO_DRAFT), Choice(plan))
        self.drafts = False

    @property
    def choices(self) -> tuple[Choice, ...]:
        return self._choices

    def choose(self, load: Load, rows: Sequence[RowHistory]) -> Sequence[Choice]:
        return [self._choices[self.drafts]] * len(rows)


class Decoding:
    """One text after the other, which go on for some steps as they are asked to.

    Args:
        drafter: None decodes plainly.
        plan: of its drafts.
        new_tokens: as many as a text may get.
        longest: tokens of the longest prompt.
    """

    def __init__(self, target: Target, drafter: Drafter | None, plan: Plan, new_tokens: int, longest: int) -> None:
        self._policy = Told(plan)
        # What was read of a prompt is kept for the next round.
        self._engine = Engine(
            target, drafter, policy=None if drafter is None else self._policy, max_batch=1,
            max_length=longest + new_tokens, piece_tokens=longest, share_prefixes=True,
        )
        self._params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)

    @contextmanager
    def begun(self, prompt: list[int]) -> Iterator[Callable[[bool], list[float]]]:
        """Read a prompt; give what takes some steps behind it, with drafts or without, and returns their seconds."""
        [request] = self._engine.admit_call([prompt], self._params)

        def step() -> float:
            begun = time.perf_counter()
            self._engine.core.step()
            raise_failures([request])
            return time.perf_counter() - begun

        def go(drafts: bool) -> list[float]:
            self._policy.drafts = drafts
            return [step() for _ in range(STEPS)][1:]

        self._engine.core.add(request)
        try:
            while not request.tokens:
                step()
            yield go
        finally:
            self._engine.core.abort(request.id)


def measure_reading(
    target: Target, drafter: Drafter, plan: Plan, texts: Sequence[Sequence[int]], short: int, long: int
) -> Reading:
    """Return what every further token of a text adds to a step; nothing where the target takes no long texts.

    Args:
        plan: whose guesses are checked, or NO_DRAFT.
        texts: of the target's tokens, taken one after the other for as many as are wanted.
        short, long: tokens of the two prompts.
    """
    room = max(ROUNDS, 2 + plan.depth) * TURNS * STEPS + 1 + plan.depth
    stream = list(chain.from_iterable(texts))[: max(0, min(long, target.max_length - room))]
    if len(stream) < LONGER * short:
        return Reading(short)
    both, tokens = (stream[:short], stream), len(stream) - short
    plain = _more_plain_s(target, both)
    guesses = _more_of_guesses_s(target, drafter, plan, both) if plan.depth else 0.0
    return Reading(short, plain / tokens, guesses / tokens / max(1, plan.max_nodes))


def _more_plain_s(target: Target, prompts: Sequence[list[int]]) -> float:
    """Return what a plain step takes longer behind the second prompt than behind the first."""
    new_tokens = ROUNDS * TURNS * STEPS + 1
    each = [Decoding(target, None, NO_DRAFT, new_tokens, len(prompt)) for prompt in prompts]
    found = list[float]()
    with each[0].begun(prompts[0]) as beside, each[1].begun(prompts[1]) as behind:
        for _ in range(ROUNDS * TURNS):
            less, more = statistics.median(beside(False)), statistics.median(behind(False))
            found.append(more - less)
    return max(0.0, statistics.median(found))


def _more_of_guesses_s(target: Target, drafter: Drafter, plan: Plan, prompts: Sequence[list[int]]) -> float:
    """Return by how much more guesses make a step longer behind the second prompt than behind the first.

    One after the other, as a drafter that remembers rows is for one engine at a time.
    """
    decoding = Decoding(target, drafter, plan, TURNS * STEPS * (2 + plan.depth) + 1, len(prompts[1]))
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for prompt, longer in zip(prompts, found, strict=True):
            with decoding.begun(prompt) as go:
                for _ in range(TURNS):
                    without, drafted = statistics.median(go(False)), statistics.median(go(True))
                    longer.append(drafted - without)
    return max(0.0, statistics.median(found[1]) - statistics.median(found[0]))
