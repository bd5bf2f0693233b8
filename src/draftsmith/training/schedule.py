"""The learning rate of a stage: a parabolic warm-up, then a cosine down to the final rate."""

import math

WARMUP_STEPS = 2000
WARMUP_SHARE = 0.05
LAST_SHARE = 0.05
"""Where nobody says at which rate a stage ends, it ends at this share of the rate that it falls from."""


def last_rate(peak: float) -> float:
    """Return the rate at which a stage ends if nobody says it, in as many digits as one would write."""
    return float(f"{peak * LAST_SHARE:.6g}")


def learning_rate(step: int, steps: int, peak: float, final: float) -> float:
    """Return the rate of step 0 … steps - 1 of a stage.

    Over the first w = min(2000, 5 % of the stage) steps it rises as 1 - (1 - x/w)²; then a cosine takes it to `final`.
    x counts from 1, so that the first step has a rate above 0.
    """
    warmup = min(WARMUP_STEPS, WARMUP_SHARE * steps)
    done = step + 1
    if done < warmup:
        return peak * (1 - (1 - done / warmup) ** 2)
    share = min(1.0, (done - warmup) / max(1.0, steps - warmup))
    return final + (peak - final) * (1 + math.cos(math.pi * share)) / 2
