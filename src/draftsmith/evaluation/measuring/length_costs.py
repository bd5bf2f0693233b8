"""Measures what longer texts add to a step: a short text and a long one decode, with drafts and without."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

from draftsmith.drafters.base import Drafter
from draftsmith.engine import Choice, Engine, Load, Policy, RowHistory
from draftsmith.engine.profile import LengthCost
from draftsmith.evaluation.measuring.steps import raise_failures
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.targets import Target
from draftsmith.types import SamplingParams

TURNS, STEPS = 4, 4
"""In each round a text takes so many turns of so many steps with drafts and as many without. The first step of a turn
is not timed: what it takes is what a change costs."""
LONGER = 4
"""Times as long as the short text: what less adds is not told from noise."""

Clock = Callable[[], float]


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
    """Decodes one text at a time, some steps a call.

    Args:
        drafter: None decodes plainly.
        plan: of its drafts.
        new_tokens: as many as a text may get.
        longest: tokens of the longest prompt.
        clock: tells seconds.
    """

    def __init__(
        self, target: Target, drafter: Drafter | None, plan: Plan, new_tokens: int, longest: int, clock: Clock
    ) -> None:
        self._policy, self._clock = Told(plan), clock
        # What was read of a prompt is kept for the next round.
        self._engine = Engine(
            target, drafter, policy=None if drafter is None else self._policy, max_batch=1,
            max_length=longest + new_tokens, piece_tokens=longest, share_prefixes=True,
        )
        self._params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)

    @contextmanager
    def of(self, prompt: list[int]) -> Iterator[Callable[[bool], float]]:
        """Read a prompt; yield what decodes a turn behind it, with drafts or without, and returns seconds of a step."""
        [request] = self._engine.admit_call([prompt], self._params)

        def step() -> float:
            before = self._clock()
            self._engine.core.step()
            raise_failures([request])
            return self._clock() - before

        def turn(drafts: bool) -> float:
            self._policy.drafts = drafts
            return statistics.median([step() for _ in range(STEPS)][1:])

        self._engine.core.add(request)
        try:
            while not request.tokens:
                step()
            yield turn
        finally:
            self._engine.core.abort(request.id)


def measure_length_cost(
    target: Target, drafter: Drafter, plan: Plan, texts: Sequence[Sequence[int]], short: int, long: int,
    rounds: int = 3, clock: Clock = time.perf_counter,
) -> LengthCost:
    """Return what every further token of a text adds to a step; nothing where the target takes no long texts.

    What is not clearly more than nothing counts as nothing, as it would be multiplied by thousands of tokens.

    Args:
        plan: whose guesses are checked, a chain of a lookup's stand-in; or NO_DRAFT.
        texts: of the target's tokens, taken one after the other for as many as are wanted.
        short, long: tokens of the two prompts; of the long one fewer where the context or the texts are shorter.
        rounds: of turns of both texts.

    Raises:
        DraftsmithError: the target, or the drafter, cannot read the long text.
    """
    room = max(rounds, 2 + plan.depth) * TURNS * STEPS + 1 + plan.depth
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
    """Return what a plain step takes longer behind the second prompt than behind the first."""
    new_tokens = rounds * TURNS * STEPS + 1
    short, long = (Decoding(target, None, NO_DRAFT, new_tokens, len(prompt), clock) for prompt in prompts)
    with short.of(prompts[0]) as beside, long.of(prompts[1]) as behind:
        return _clearly([behind(False) - beside(False) for _ in range(rounds * TURNS)])


def _more_of_guesses_s(
    target: Target, drafter: Drafter, plan: Plan, prompts: Sequence[list[int]], rounds: int, clock: Clock
) -> float:
    """Return by how much more guesses make a step longer behind the second prompt than behind the first.

    One text after the other, as a drafter that remembers rows is for one engine at a time.
    """
    decoding = Decoding(target, drafter, plan, TURNS * STEPS * (2 + plan.depth) + 1, len(prompts[1]), clock)
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for prompt, more in zip(prompts, found, strict=True):
            with decoding.of(prompt) as turn:
                for _ in range(TURNS):
                    without, drafted = turn(False), turn(True)
                    more.append(drafted - without)
    return _clearly([behind - beside for beside, behind in zip(*found, strict=True)])


def _clearly(differences: Sequence[float]) -> float:
    """Return the usual one of some differences; 0 where a quarter of them, or more, are no gain."""
    return statistics.median(differences) if statistics.quantiles(differences)[0] > 0 else 0.0
