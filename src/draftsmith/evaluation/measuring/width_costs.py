"""Measures what a step costs the target by how many tokens it verifies."""

import statistics
import time
from collections.abc import Sequence

from draftsmith.engine import Engine
from draftsmith.engine.profile import WidthCost
from draftsmith.evaluation.measuring.copying import CopyingAtOnce
from draftsmith.evaluation.measuring.steps import Clock, raise_failures
from draftsmith.evaluation.measuring.told import Told
from draftsmith.plan import Plan
from draftsmith.targets import Target
from draftsmith.types import SamplingParams

WIDTHS = (2, 3, 4, 6, 8, 10, 12, 14, 15, 16, 17, 18, 19, 24, 25, 30, 31, 32, 33, 36, 37, 42, 48, 49, 64)
"""Tokens of the steps that are timed. They are close together where products of known processors fill their registers
or tiles."""
STEPS, ROUNDS = 2, 3
"""Steps of each width in a round, and as many without guesses; one more before each of them is not timed, because it
includes the cost of the change."""


def measure_width_cost(target: Target, prompt: list[int], clock: Clock = time.perf_counter) -> WidthCost | None:
    """Return the seconds of steps of one row by their number of tokens; None if its context allows no wider ones.

    Wider steps are timed in turn with plain ones, and no wider step is taken to cost less than a narrower one.
    """
    # All guesses of all steps may stay, with room for those of one more.
    rooms = {width: 2 + STEPS + (1 + STEPS) * width for width in WIDTHS}
    widths = [width for width, room in rooms.items() if len(prompt) + room + width <= target.max_length]
    if not widths:
        return None
    most = widths[-1] - 1
    policy = Told(Plan((1,) * guesses) for guesses in range(most + 1))
    engine = Engine(
        target, CopyingAtOnce(Plan((1,) * most)), policy=policy, max_batch=1,
        max_length=len(prompt) + rooms[widths[-1]] + most, piece_tokens=len(prompt), share_prefixes=True,
    )

    def step() -> float:
        before = clock()
        engine.core.step()
        raise_failures([request])
        return clock() - before

    def turn(guesses: int) -> float:
        policy.taken = guesses
        return statistics.median([step() for _ in range(1 + STEPS)][1:])

    plain, extra = list[float](), dict[int, list[float]]()
    for width in [*widths] * ROUNDS:
        [request] = engine.admit_call([prompt], SamplingParams(max_tokens=rooms[width], ignore_eos=True))
        engine.core.add(request)
        try:
            policy.taken = 0
            while not request.tokens:
                step()
            plain.append(turn(0))
            extra.setdefault(width, []).append(turn(width - 1) - plain[-1])
        finally:
            engine.core.abort(request.id)
    usual, more = statistics.median(plain), [statistics.median(extra[width]) for width in widths]
    return WidthCost((1, *widths), tuple(usual + each for each in rising([0.0, *more])))


def rising(values: Sequence[float]) -> list[float]:
    """Return the numbers nearest to some numbers of which none is below the one before it; the first stays.

    The others may fall below the first only by chance, and are raised to it at the end.
    """
    blocks = list[tuple[float, int]]()  # means of neighbours that fall, and how many each is of
    for value in values[1:]:
        mean, count = value, 1
        while blocks and blocks[-1][0] > mean:
            before, others = blocks.pop()
            mean, count = (before * others + mean * count) / (others + count), others + count
        blocks.append((mean, count))
    return [values[0], *(max(values[0], mean) for mean, count in blocks for _ in range(count))]
