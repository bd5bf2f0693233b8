"""When each request is to be sent, decided before the first is sent: the same seed gives the same times."""

from math import isinf

import numpy as np

from draftsmith.evaluation.load.settings import Arrivals


def planned_times(arrivals: Arrivals, count: int, seed: int) -> list[float]:
    """Return when each of `count` requests is due, in seconds from the start, in order; the first is due at 0.

    Gaps are drawn from a gamma distribution of shape `burstiness` whose mean is 1 / rate, and then stretched so that
    their mean is exactly 1 / rate; an infinite shape makes them equal. With a ramp, a gap has the rate of the request
    that ends it, and nothing is stretched.
    """
    if not arrivals.open:
        return [0.0] * count
    draws = np.random.default_rng((seed, 1))
    gaps = [0.0]
    for index in range(1, count):
        rate = rate_of(arrivals, index / max(1, count - 1))
        shape = arrivals.burstiness
        gaps.append(1.0 / rate if isinf(shape) else float(draws.gamma(shape, 1.0 / (rate * shape))))
    times = np.cumsum(gaps[:count])
    if arrivals.ramp is None and times[-1] > 0:
        times *= (count - 1) / arrivals.rate / times[-1]
    return [float(time) for time in times]


def rate_of(arrivals: Arrivals, progress: float) -> float:
    """Return the requests a second to send at a point of the measurement, from 0 (start) to 1 (end)."""
    start, end = arrivals.ramp_start, arrivals.ramp_end
    if arrivals.ramp is None or start is None or end is None:
        return arrivals.rate
    if arrivals.ramp == "linear":
        return start + (end - start) * progress
    return float(start * (end / start) ** progress)
