"""Measures what longer texts add to a step: a short text and a long one decode, with drafts and without."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

from draftsmith.drafters.base import Drafter
from draftsmith.engine import Engine
from draftsmith.engine.pace import COLD_STEPS
from draftsmith.engine.profile import LengthCost
from draftsmith.evaluation.measuring.steps import Clock, raise_failures
from draftsmith.evaluation.measuring.told import Told
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.targets import Target
from draftsmith.types import SamplingParams

TURNS, STEPS = 4, 4
"""In each round a text takes `TURNS` turns, each of `STEPS` steps with drafts and as many without. The first step after
each change is not timed, because it includes the cost of the change."""
LONGER = 4
"""The long text is at least this many times as long as the short one: what less adds cannot be told from noise."""


class Decoding:
    """Decodes one text at a time, some steps a call.

    Args:
        drafter: None decodes plainly.
        plan: the plan of its drafts.
        new_tokens: the most new tokens of a text.
        longest: tokens of the longest prompt.
        clock: returns seconds.
    """

    def __init__(
        self, target: Target, drafter: Drafter | None, plan: Plan, new_tokens: int, longest: int, clock: Clock
    ) -> None:
        self._policy, self._clock = Told((NO_DRAFT, plan)), clock
        # Prefixes are shared, so that a prompt that was read is kept for the next round.
        self._engine = Engine(
            target, drafter, policy=None if drafter is None else self._policy, max_batch=1,
            max_length=longest + new_tokens, piece_tokens=longest, share_prefixes=True,
        )
        self._params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)

    @contextmanager
    def of(self, prompt: list[int]) -> Iterator[Callable[[bool], float]]:
        """Read a prompt and decode until the caches are warm.

        Yields:
            a function that decodes one turn, with drafts or without, and returns seconds a step.
        """
        [request] = self._engine.admit_call([prompt], self._params)

        def step() -> float:
            before = self._clock()
            self._engine.core.step()
            raise_failures([request])
            return self._clock() - before

        def turn(drafts: bool) -> float:
            self._policy.taken = int(drafts)
            return statistics.median([step() for _ in range(STEPS)][1:])

        self._engine.core.add(request)
        try:
            while not request.tokens:
                step()
            self._policy.taken = 0
            for _ in range(COLD_STEPS):
                step()
            yield turn
        finally:
            self._engine.core.abort(request.id)


def measure_length_cost(
    target: Target, drafter: Drafter, plan: Plan, texts: Sequence[Sequence[int]], short: int, long: int,
    rounds: int = 3, clock: Clock = time.perf_counter,
) -> LengthCost:
    """Return the seconds that every further token of a text adds to a step; 0 where the target takes no long texts.

    A cost that is not clearly above 0 counts as 0, because it would be multiplied by thousands of tokens.

    Args:
        plan: the plan whose guesses are verified, a chain for the stand-in of a lookup; or NO_DRAFT.
        texts: tokens of the target, joined one text after the other to the length that is needed.
        short, long: tokens of the two prompts; the long one is shorter where the context or the texts are.
        rounds: how often both texts take their turns.

    Raises:
        DraftsmithError: the target, or the drafter, cannot read the long text.
    """
    room = max(rounds, 2 + plan.depth) * TURNS * STEPS + COLD_STEPS + 1 + plan.depth
    stream = list(chain.from_iterable(texts))[: max(0, min(long, target.max_length - room))]
    if len(stream) < LONGER * short:
        return LengthCost(short)
    both, tokens = (stream[:short], stream), len(stream) - short
    plain = _more_plain_s(target, both, rounds, clock)
    if not plan.depth:
        return LengthCost(short, plain / tokens)
    guesses = _more_of_guesses_s(target, drafter, plan, both, rounds, clock)
    return LengthCost(short, plain / tokens, guesses / tokens / plan.max_nodes)


def _more_plain_s(target: Target, prompts: Sequence[list[int]], rounds: int, clock: Clock) -> float:
    """Return how many seconds longer a plain step takes after the second prompt than after the first."""
    new_tokens = rounds * TURNS * STEPS + COLD_STEPS + 1
    short, long = (Decoding(target, None, NO_DRAFT, new_tokens, len(prompt), clock) for prompt in prompts)
    with short.of(prompts[0]) as beside, long.of(prompts[1]) as behind:
        return _clearly([behind(False) - beside(False) for _ in range(rounds * TURNS)])


def _more_of_guesses_s(
    target: Target, drafter: Drafter, plan: Plan, prompts: Sequence[list[int]], rounds: int, clock: Clock
) -> float:
    """Return how many more seconds guesses add to a step after the second prompt than after the first.

    The texts decode one after the other, because a drafter that remembers rows serves one engine at a time.
    """
    new_tokens = TURNS * STEPS * (2 + plan.depth) + COLD_STEPS + 1
    decoding = Decoding(target, drafter, plan, new_tokens, len(prompts[1]), clock)
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for prompt, more in zip(prompts, found, strict=True):
            with decoding.of(prompt) as turn:
                for _ in range(TURNS):
                    without, drafted = turn(False), turn(True)
                    more.append(drafted - without)
    return _clearly([behind - beside for beside, behind in zip(*found, strict=True)])


def _clearly(differences: Sequence[float]) -> float:
    """Return the median of some differences; 0 where a quarter of them, or more, are not above 0."""
    return statistics.median(differences) if statistics.quantiles(differences)[0] > 0 else 0.0
