"""Times the steps of an engine while no request comes or goes."""

import time
from collections.abc import Sequence

from draftsmith.engine import Engine
from draftsmith.engine.requests.request import Request
from draftsmith.types import DraftsmithError


def step_seconds(engine: Engine, requests: Sequence[Request], tokens: int) -> float:
    """Decode until the first request has `tokens` tokens; return the mean seconds of a step while all were decoding.

    If each request asks for as many tokens more as a step may bring, no step is cut short by the end of a text.
    """
    core = engine.core
    for request in requests:
        core.add(request)
    try:
        while not all(request.tokens for request in requests):
            core.step()
            raise_failures(requests)
        steps, begun = 0, time.perf_counter()
        while all(request.finish_reason is None and len(request.tokens) < tokens for request in requests):
            core.step()
            steps += 1
        took = time.perf_counter() - begun
        raise_failures(requests)
        return took / max(1, steps)
    finally:
        for request in requests:
            core.abort(request.id)


def raise_failures(requests: Sequence[Request]) -> None:
    """Raise a DraftsmithError for the first request that failed, if any did."""
    for request in requests:
        if request.error is not None:
            raise DraftsmithError(request.error)
