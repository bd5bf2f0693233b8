"""Noise without state: every number is a hash of (seed, position, stream, index), so no order of calls can change it.

Every use of noise has a stream of its own. Two uses that shared one would be correlated: a guess drawn with the
number that later verifies it is accepted too often or too rarely, and the text is no longer the target's.
"""

from enum import IntEnum

import torch
from torch import Tensor

# The odd constants of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014,
# with Stafford's variant 13 of the finaliser), as signed 64-bit integers; products wrap around.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
_STREAMS = 8


class Stream(IntEnum):
    """What a random number is for."""

    TARGET = 0
    """The target's own choice of the token at an absolute position."""
    ACCEPT = 1
    """Whether a sampled guess stays."""
    RESIDUAL = 2
    """The target's choice after all sampled guesses were rejected."""
    DRAFT = 3
    """The drafter's guesses."""
    BLOCK_ACCEPT = 4
    """Whether a prefix of a chain that is verified as a block stays."""
    BLOCK_DRAFT = 5
    """The drafter's guesses of a chain that is to be verified as a block."""


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift in zeros; >> alone repeats the sign of an int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """Scramble 64 bits one-to-one, so that one flipped bit flips each other one with probability 1/2."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def uniform(seeds: Tensor, positions: Tensor, stream: Stream, index: int | Tensor) -> Tensor:
    """Return float64 in [0, 1) with 53 random bits; int64 `seeds`, `positions` and `index` (from 0) broadcast."""
    # Exclusive or rather than sums: the compiler does the arithmetic of constants in integers that never wrap.
    hashed = _mix(_mix(_mix(seeds ^ _GOLDEN) ^ positions) ^ (index * _STREAMS + int(stream)))
    return _shift_right(hashed, 11).to(torch.float64) * 2.0**-53


def categorical(weights: Tensor, u: Tensor) -> Tensor:
    """Draw along the last dimension (…, V) by inverting the distribution function at u (…) in [0, 1).

    The weights are non-negative float64 and need no normalisation; a weight of zero is never drawn. Where all are
    zero there is nothing to draw, and the result is an arbitrary valid index.
    """
    cumulative = weights.cumsum(-1)
    target = u.unsqueeze(-1) * cumulative[..., -1:]
    # The first entry that exceeds the target: entries of weight zero equal their predecessor and cannot be it.
    drawn = torch.searchsorted(cumulative, target, right=True).clamp(max=weights.shape[-1] - 1)
    if weights.device.type != "cpu":
        # A parallel prefix sum rounds differently from entry to entry, so that an entry of weight zero may differ.
        drawn = torch.where(weights.gather(-1, drawn) > 0, drawn, weights.argmax(-1, keepdim=True))
    return drawn.squeeze(-1)
