"""Times the steps of an engine while no request comes or goes."""

import math
import time
from collections.abc import Callable, Sequence

from draftsmith.engine import Engine
from draftsmith.engine.pace import COLD_STEPS
from draftsmith.engine.requests.request import Request
from draftsmith.types import DraftsmithError

LEAST_S = 1e-9
"""No step takes less; where there was none at all, others can still be compared with it."""
Clock = Callable[[], float]


def step_seconds(
    engine: Engine, requests: Sequence[Request], tokens: int, clock: Clock = time.perf_counter, most: float = math.inf
) -> float:
    """Decode until the first request has `tokens` tokens; return the mean seconds of a step while all were decoding.

    It ends after `most` steps if none has so many by then. The first `COLD_STEPS` steps do not count, or the first half
    of all steps if there are fewer than twice as many. If each request asks for as many tokens more as a step may
    bring, no step is cut short by the end of a text.
    """
    core = engine.core
    for request in requests:
        core.add(request)
    try:
        while not all(request.tokens for request in requests):
            core.step()
            raise_failures(requests)
        ends = [clock()]
        while len(ends) <= most and all(
            request.finish_reason is None and len(request.tokens) < tokens for request in requests
        ):
            core.step()
            ends.append(clock())
        raise_failures(requests)
        steps = len(ends) - 1
        cold = min(COLD_STEPS, steps // 2)
        return max(LEAST_S, ends[-1] - ends[cold]) / max(1, steps - cold)
    finally:
        for request in requests:
            core.abort(request.id)


def raise_failures(requests: Sequence[Request]) -> None:
    """Raise a DraftsmithError for the first request that failed, if any did."""
    for request in requests:
        if request.error is not None:
            raise DraftsmithError(request.error)
