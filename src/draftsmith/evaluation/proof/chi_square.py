"""Do draws follow a distribution? Chi-square tests, total variation against a perfect sampler's, what tests can find.

Shapes: C outcomes, J cells after pooling.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from draftsmith.types import DraftsmithError

LEAST_EXPECTED = 5.0
POWER = 0.9


@dataclass(frozen=True)
class Fit:
    """How well counts fit a distribution; `outside` counts impossible draws, and with any of them p is 0."""

    statistic: float
    freedom: int
    p_value: float
    outside: int


def tail(statistic: float, freedom: int) -> float:
    """Return the probability that a chi-square variable with so many degrees of freedom exceeds the statistic."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def critical(freedom: int, alpha: float) -> float:
    """Return the statistic that is exceeded with probability alpha."""
    low, high = 0.0, 10.0 * freedom + 1000.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle, freedom) > alpha else (low, middle)
    return high


def pool(p_C: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Return the cell of every outcome.

    Rare outcomes share one cell, which takes in larger ones until it is big enough. If that takes in all of them, they
    are dealt out to as many cells as are big enough, from the rarest on.
    """
    order_C = np.argsort(p_C)
    sums_C = np.cumsum(p_C[order_C]) * count
    rare = int((p_C * count < LEAST_EXPECTED).sum())
    if rare:
        rare = max(rare, int(np.searchsorted(sums_C, LEAST_EXPECTED)) + 1)
    cells_C = np.empty(len(p_C), dtype=np.int64)
    if rare < len(p_C):
        cells_C[order_C] = np.maximum(np.arange(len(p_C)) - max(rare - 1, 0), 0)
        return cells_C
    cell, expected = 0, 0.0
    for outcome in order_C:
        if expected >= LEAST_EXPECTED:
            cell, expected = cell + 1, 0.0
        cells_C[outcome] = cell
        expected += p_C[outcome] * count
    if expected < LEAST_EXPECTED:
        cells_C[cells_C == cell] = max(0, cell - 1)
    return cells_C


def pooled(values: NDArray[Any], cells_C: NDArray[np.int64]) -> NDArray[np.float64]:
    """Add up values (…, C) by cell (…, J)."""
    order_C = np.argsort(cells_C, kind="stable")
    starts_J = np.searchsorted(cells_C[order_C], np.arange(int(cells_C.max()) + 1))
    summed: NDArray[np.float64] = np.add.reduceat(values[..., order_C].astype(np.float64), starts_J, axis=-1)
    return summed


def fit(counts_C: NDArray[np.int64], outside: int, p_C: NDArray[np.float64]) -> Fit:
    """Test counts against a distribution (Pearson); outcomes expected fewer than 5 times are pooled."""
    total = int(counts_C.sum()) + outside
    cells_C = pool(p_C, total)
    expected_J = total * pooled(p_C, cells_C)
    statistic = float(((pooled(counts_C, cells_C) - expected_J) ** 2 / expected_J).sum())
    freedom = len(expected_J) - 1
    if freedom < 1:
        raise DraftsmithError(f"{total} draws are too few for {len(p_C)} continuations; ask for more with --draws.")
    return Fit(statistic, freedom, 0.0 if outside else tail(statistic, freedom), outside)


def variation(counts_C: NDArray[np.int64], outside: int, p_C: NDArray[np.float64]) -> float:
    """Return the total variation between the draws and the distribution."""
    total = int(counts_C.sum()) + outside
    return float((np.abs(counts_C / total - p_C).sum() + outside / total) / 2)


def variation_of_perfect(p_C: NDArray[np.float64], count: int, seed: int, trials: int = 200) -> tuple[float, float]:
    """Simulate a perfect sampler: mean and 99.9 % point (of a normal fit) of its total variation."""
    drawn = np.random.default_rng(seed).multinomial(count, p_C / p_C.sum(), size=trials) / count
    found = np.abs(drawn - p_C).sum(axis=1) / 2
    return float(found.mean()), float(found.mean() + 3.09 * found.std())


def detectable(p_C: NDArray[np.float64], count: int, alpha: float, seed: int, trials: int = 100) -> float:
    """Return the smallest total variation that the test finds nine times out of ten.

    The shift raises a random half of the outcomes and lowers the others, each in proportion to its probability.
    """
    rng = np.random.default_rng(seed)
    cells_C = pool(p_C, count)
    expected_J = count * pooled(p_C, cells_C)
    limit = critical(len(expected_J) - 1, alpha)
    sign_C = np.where(rng.permutation(len(p_C)) % 2 == 0, 1.0, -1.0)
    low, high = 0.0, 0.4
    for _ in range(11):
        size = (low + high) / 2
        shifted_C = p_C * (1 + 2 * size * sign_C)
        drawn = rng.multinomial(count, shifted_C / shifted_C.sum(), size=trials)
        statistics = ((pooled(drawn, cells_C) - expected_J) ** 2 / expected_J).sum(axis=1)
        low, high = (low, size) if (statistics > limit).mean() >= POWER else (size, high)
    shifted_C = p_C * (1 + 2 * high * sign_C)
    return float(np.abs(shifted_C / shifted_C.sum() - p_C).sum() / 2)
