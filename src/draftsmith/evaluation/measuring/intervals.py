"""Confidence intervals by the bootstrap, seeded, so that a report can be reproduced.

Shapes: T trials, R resamples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """An estimate with the ends of its interval."""

    value: float
    low: float
    high: float

    @property
    def ends(self) -> list[float]:
        """[low, high], as JSON reports it."""
        return [self.low, self.high]


def mean_interval(values: Sequence[float], level: float = 0.95, seed: int = 0) -> Interval:
    """Return the mean with its percentile bootstrap interval; of a single value, the value itself."""
    values_T = np.asarray(values, dtype=np.float64)
    if values_T.size == 0:
        raise ValueError("no values to estimate from")
    means = values_T[_draws(values_T.size, seed)].mean(axis=1)
    return _interval(float(values_T.mean()), means, level)


def ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float], level: float = 0.95, seed: int = 0
) -> Interval:
    """Return the ratio of two means, both measured in every round, resampling whole rounds to keep the pairing."""
    top_T, bottom_T = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    if top_T.size == 0 or top_T.size != bottom_T.size:
        raise ValueError(f"{top_T.size} numerators cannot be paired with {bottom_T.size} denominators")
    draws = _draws(top_T.size, seed)
    ratios = top_T[draws].mean(axis=1) / bottom_T[draws].mean(axis=1)
    return _interval(float(top_T.mean() / bottom_T.mean()), ratios, level)


def ratio_difference(
    first: tuple[Sequence[float], Sequence[float]],
    second: tuple[Sequence[float], Sequence[float]],
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Return one ratio of means minus another, (numerators, denominators) each, resampling whole trials of both."""
    tops_2T, bottoms_2T = (np.asarray(values, dtype=np.float64) for values in zip(first, second, strict=True))
    if tops_2T.ndim != 2 or tops_2T.shape != bottoms_2T.shape or tops_2T.size == 0:
        raise ValueError("the two ratios were not measured in the same trials")
    draws = _draws(tops_2T.shape[1], seed)
    ratios_2R = tops_2T[:, draws].mean(axis=2) / bottoms_2T[:, draws].mean(axis=2)
    values_2 = tops_2T.mean(axis=1) / bottoms_2T.mean(axis=1)
    return _interval(float(values_2[0] - values_2[1]), ratios_2R[0] - ratios_2R[1], level)


def _draws(size: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, size, (RESAMPLES, size))


def _interval(value: float, resampled: NDArray[np.float64], level: float) -> Interval:
    low, high = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high))
