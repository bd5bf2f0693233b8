"""Noise without state: every number is a hash of (seed, position, stream, index), so no order of calls can change it.

Every use of noise has a stream of its own. Two uses that shared one would be correlated: a guess drawn with the
number that later verifies it is accepted too often or too rarely, and the text is no longer the target's. There is one
exception: guesses that are only ever compared with the target's own choice may use its noise, because that choice is
the same whatever was guessed. Such guesses are never tested against a q, and nothing may depend on guesses that
verification never reached.
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
# The constants of lowbias32 (Wellons, Prospecting for Hash Functions, 2018).
_SCRAMBLE_1, _SCRAMBLE_2 = 0x7FEB352D, 0x846CA68B - 2**32


class Stream(IntEnum):
    """What a random number is for."""

    TARGET = 0
    """The target's own choice of the token at an absolute position, and guesses that are compared with it."""
    ACCEPT = 1
    """Whether a sampled guess stays."""
    RESIDUAL = 2
    """The target's choice after all sampled guesses were rejected."""
    DRAFT = 3
    """The drafter's guesses."""
    BLOCK_ACCEPT = 4
    """Whether a prefix of a chain that is verified as a block stays."""
    BLOCK_DRAFT = 5
    """The drafter's guesses in a chain that is to be verified as a block."""


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
    return _shift_right(_hash(seeds, positions, stream, index), 11).to(torch.float64) * 2.0**-53


def _hash(seeds: Tensor, positions: Tensor, stream: Stream, index: int | Tensor) -> Tensor:
    # Exclusive or instead of sums, because the compiler evaluates constants in integers that do not wrap around.
    return _mix(_mix(_mix(seeds ^ _GOLDEN) ^ positions) ^ (index * _STREAMS + int(stream)))


def _scramble(x: Tensor) -> Tensor:
    """Scramble 32 bits (int32) one-to-one; products wrap around."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * _SCRAMBLE_1
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _SCRAMBLE_2
    return x ^ ((x >> 16) & 0xFFFF)


def _words(tokens: Tensor, keys: Tensor) -> Tensor:
    """Return a 32-bit word (as int64) for every token (…, V; int32), by a 64-bit key (…)."""
    low, high = keys.to(torch.int32).unsqueeze(-1), (keys >> 32).to(torch.int32).unsqueeze(-1)
    return _scramble(_scramble(tokens ^ low) + high).to(torch.int64) & (2**32 - 1)


def arrivals(tokens: Tensor, seeds: Tensor, positions: Tensor, stream: Stream) -> Tensor:
    """Return for every token (…, V) its time of arrival in a race: float64, exponentially distributed with mean 1.

    `seeds` and `positions` (…, int64) broadcast. The leading 32 bits come from one word, so that a search for early
    arrivals need not compute the other 21 bits of tokens that the first word already shows to be late.
    """
    tokens = tokens.to(torch.int32)
    indices = torch.arange(1, 3, device=tokens.device)
    keys = _hash(seeds.unsqueeze(-1), positions.unsqueeze(-1), stream, indices)
    first, second = _words(tokens.unsqueeze(-2), keys).unbind(-2)
    v = ((first << 21) | (second >> 11)).to(torch.float64).add_(0.5).mul_(-(2.0**-53))
    return v.log1p_().neg_()


def race(
    weights: Tensor, seeds: Tensor, positions: Tensor, stream: Stream, alphabet: Tensor | None = None
) -> Tensor:
    """Draw along the last dimension (…, V): the token that arrives first if each is as fast as its weight.

    A token is drawn in proportion to its weight (the Gumbel-max trick: Gumbel, 1954; Maddison et al., arXiv:1411.0030,
    section 2). A draw from other weights with the same noise gives the same token with probability (1 - TV) / (1 + TV)
    or more, TV being the total variation between them (Daliri et al., arXiv:2408.07978, section 3). The weights are
    non-negative float64 and need no normalisation; a weight of zero is never drawn. If all are zero there is nothing
    to draw, and the result is the last index. `alphabet` (…, V) holds the ids of the tokens, by default their indices;
    the result is an index.
    """
    if alphabet is None:
        alphabet = torch.arange(weights.shape[-1], device=weights.device)
    times = arrivals(alphabet, seeds, positions, stream)
    times = torch.where(weights > 0, times / weights, torch.inf)
    first = times.argmin(-1)
    return torch.where(times.gather(-1, first.unsqueeze(-1)).squeeze(-1) < torch.inf, first, weights.shape[-1] - 1)


def categorical(weights: Tensor, u: Tensor) -> Tensor:
    """Draw along the last dimension (…, V) by inverting the distribution function at u (…) in [0, 1).

    The weights are non-negative float64 and need no normalisation; a weight of zero is never drawn. If all are zero
    there is nothing to draw, and the result is an arbitrary valid index.
    """
    cumulative = weights.cumsum(-1)
    target = u.unsqueeze(-1) * cumulative[..., -1:]
    # The first entry that exceeds the target; an entry of weight zero equals its predecessor, so it is never the first.
    drawn = torch.searchsorted(cumulative, target, right=True).clamp(max=weights.shape[-1] - 1)
    if weights.device.type != "cpu":
        # A parallel prefix sum rounds differently from entry to entry, so that an entry of weight zero may differ.
        drawn = torch.where(weights.gather(-1, drawn) > 0, drawn, weights.argmax(-1, keepdim=True))
    return drawn.squeeze(-1)
