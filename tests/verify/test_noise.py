"""The noise is uniform, and independent between seeds, positions, streams and indices."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from draftsmith.verify import Stream, arrivals, categorical, race, uniform
from tests.helpers.toy import chi_square_p_value

ALPHA = 1e-6
DRAWS = 1_000_000
CELLS = 16
ALMOST_ONE = 1 - 2.0**-53


def written_out(seed: int, position: int, stream: int, index: int) -> float:
    """The hash in Python's own integers."""
    mask = 2**64 - 1
    golden, mix_1, mix_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * mix_1) & mask
        x = ((x ^ (x >> 27)) * mix_2) & mask
        return x ^ (x >> 31)

    x = mix(mix(mix(seed ^ golden) ^ position) ^ (index * 8 + stream))
    return (x >> 11) * 2.0**-53


def test_the_bits_are_those_of_the_written_out_hash() -> None:
    seeds, positions, indices = [0, 1, 12345, 2**63 - 1], [0, 1, 4096, 2**40], [0, 1, 77]
    for stream, index in itertools.product(Stream, indices):
        ours = uniform(torch.tensor(seeds).unsqueeze(1), torch.tensor(positions), stream, index)
        assert ours.dtype == torch.float64
        assert ours.tolist() == [[written_out(s, p, stream, index) for p in positions] for s in seeds]
        assert torch.equal(ours, uniform(torch.tensor(seeds).unsqueeze(1), torch.tensor(positions), stream,
                                         torch.tensor(index)))


def arrival_written_out(token: int, seed: int, position: int, stream: int) -> float:
    """When a token arrives, in Python's own integers."""
    def hashed(index: int) -> int:
        mask = 2**64 - 1

        def mix(x: int) -> int:
            x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
            x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
            return x ^ (x >> 31)

        return mix(mix(mix(seed ^ 0x9E3779B97F4A7C15) ^ position) ^ (index * 8 + stream))

    def word(key: int) -> int:
        def scramble(x: int) -> int:
            x = ((x ^ (x >> 16)) * 0x7FEB352D) & (2**32 - 1)
            x = ((x ^ (x >> 15)) * 0x846CA68B) & (2**32 - 1)
            return x ^ (x >> 16)

        return scramble((scramble(token ^ (key & (2**32 - 1))) + (key >> 32)) & (2**32 - 1))

    return -math.log1p(-((word(hashed(1)) * 2**21 + (word(hashed(2)) >> 11)) + 0.5) * 2.0**-53)


def test_arrivals_are_those_of_the_written_out_hash() -> None:
    seeds, positions, tokens = [0, 1, 12345, 2**62 - 1], [0, 1, 4096], [0, 1, 77, 151_935]
    for stream in (Stream.TARGET, Stream.DRAFT):
        ours = arrivals(torch.tensor(tokens), torch.tensor(seeds).unsqueeze(1), torch.tensor(positions), stream)
        assert ours.shape == (4, 3, 4) and ours.dtype == torch.float64
        expected = [[[arrival_written_out(t, s, p, stream) for t in tokens] for p in positions] for s in seeds]
        torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0)


@pytest.mark.parametrize("axis", ["seed", "position", "both"])
@pytest.mark.parametrize("kinds", [2, 50, 4096])
def test_a_race_draws_in_proportion_and_one_after_another_independently(axis: str, kinds: int) -> None:
    count = torch.arange(100_000 if kinds < 4096 else 2_000)
    seeds = torch.zeros_like(count) + 3 if axis == "position" else count
    positions = torch.zeros_like(count) + 9 if axis == "seed" else count * 2
    weights_V = torch.rand(kinds, generator=torch.Generator().manual_seed(1), dtype=torch.float64) ** 4
    first, second = (
        torch.cat([
            race(weights_V.expand(len(some), -1), some, where + shift, Stream.TARGET)
            for some, where in zip(seeds.split(10_000), positions.split(10_000), strict=True)
        ])
        for shift in (0, 1)
    )
    cells = min(kinds, 16)
    share_C = torch.zeros(cells, dtype=torch.float64).index_add_(0, torch.arange(kinds) % cells, weights_V)
    share_C /= share_C.sum()
    pairs = torch.bincount(first % cells * cells + second % cells, minlength=cells**2)
    assert chi_square_p_value(pairs, torch.outer(share_C, share_C).flatten() * len(count)) > ALPHA


def test_races_agree_where_weights_nearly_do_and_take_no_notice_of_scale_or_company() -> None:
    generator = torch.Generator().manual_seed(0)
    p_V = torch.rand(200, generator=generator, dtype=torch.float64) ** 6
    q_V = p_V * torch.exp(0.4 * torch.randn(200, generator=generator, dtype=torch.float64))
    p_V, q_V = p_V / p_V.sum(), q_V / q_V.sum()
    seeds = torch.arange(20_000)
    mine, other = (race(one.expand(len(seeds), -1), seeds, seeds * 0, Stream.TARGET) for one in (p_V, q_V))
    far = float((p_V - q_V).abs().sum()) / 2
    same = float((mine == other).double().mean())
    assert (1 - far) / (1 + far) - 0.015 < same < 1 - far + 0.015 and far > 0.1
    assert torch.equal(race(7 * p_V.expand(len(seeds), -1), seeds, seeds * 0, Stream.TARGET), mine)
    some = p_V.topk(9).indices.sort().values
    few = race(p_V[some].expand(len(seeds), -1), seeds, seeds * 0, Stream.TARGET, some)
    kept_V = torch.zeros_like(p_V).index_copy(0, some, p_V[some])
    assert torch.equal(some[few], race(kept_V.expand(len(seeds), -1), seeds, seeds * 0, Stream.TARGET))
    assert set(some[few].tolist()) == set(some.tolist()), "nothing without a weight is drawn"
    assert race(torch.zeros(1, 5).double(), seeds[:1], seeds[:1], Stream.TARGET).tolist() == [4]


def test_shapes_broadcast() -> None:
    u = uniform(torch.arange(3)[:, None, None], torch.arange(4)[:, None], Stream.DRAFT, torch.arange(5))
    assert u.shape == (3, 4, 5)
    assert u.unique().numel() == 60


def _line(axis: str, stream: Stream = Stream.TARGET, shift: int = 0) -> Tensor:
    count, zero = torch.arange(DRAWS) + shift, torch.zeros(1, dtype=torch.int64)
    if axis == "seed":
        return uniform(count, zero + 7, stream, 0)
    if axis == "position":
        return uniform(zero + 7, count, stream, 0)
    return uniform(zero + 7, zero + 7, stream, count)


def _pair_p_value(a: Tensor, b: Tensor) -> float:
    cells = (a * CELLS).long() * CELLS + (b * CELLS).long()
    counts = torch.bincount(cells, minlength=CELLS**2)
    return chi_square_p_value(counts, torch.full((CELLS**2,), len(a) / CELLS**2))


@pytest.mark.parametrize("axis", ["seed", "position", "index"])
def test_neighbours_are_uniform_and_independent(axis: str) -> None:
    for distance in (1, 2, 64):
        assert _pair_p_value(_line(axis), _line(axis, shift=distance)) > ALPHA


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(Stream, 2)))
def test_streams_are_independent(one: Stream, other: Stream) -> None:
    for axis in ("seed", "position"):
        assert _pair_p_value(_line(axis, one), _line(axis, other)) > ALPHA


def test_repeated_runs_with_fresh_seeds_have_uniform_p_values() -> None:
    """The chi-square test itself is calibrated: its p-values over independent seeds are uniform."""
    p_values = []
    for run in range(1_000):
        u = uniform(torch.arange(run * 1_000, run * 1_000 + 1_000), torch.zeros(1, dtype=torch.int64), Stream.DRAFT, 0)
        counts = torch.bincount((u * 10).long(), minlength=10)
        p_values.append(chi_square_p_value(counts, torch.full((10,), 100.0)))
    counts = torch.bincount((torch.tensor(p_values) * 10).long().clamp(max=9), minlength=10)
    assert chi_square_p_value(counts, torch.full((10,), 100.0)) > ALPHA


def test_one_flipped_bit_flips_half_of_the_others() -> None:
    """Over 4,096 inputs every one of the top 32 output bits flips with probability 1/2, within six deviations."""
    inputs = torch.arange(4096) * 7919
    zero = torch.zeros(1, dtype=torch.int64)

    def bits(u: Tensor) -> Tensor:
        return ((u * 2.0**32).long().unsqueeze(1) >> torch.arange(32)) & 1

    for bit in range(40):
        flipped = inputs ^ (1 << bit)
        for before, after in (
            (uniform(inputs, zero, Stream.DRAFT, 0), uniform(flipped, zero, Stream.DRAFT, 0)),
            (uniform(zero, inputs, Stream.DRAFT, 0), uniform(zero, flipped, Stream.DRAFT, 0)),
            (uniform(zero, zero, Stream.DRAFT, inputs), uniform(zero, zero, Stream.DRAFT, flipped)),
        ):
            share = (bits(before) != bits(after)).double().mean(0)
            assert (share - 0.5).abs().max() < 6 * 0.5 / 4096**0.5


def test_a_draw_inverts_the_distribution_function() -> None:
    weights = torch.tensor([[0.0, 2.0, 0.0, 1.0, 1.0, 0.0]], dtype=torch.float64)
    for u, token in ((0.0, 1), (0.49, 1), (0.5, 3), (0.74, 3), (0.75, 4), (ALMOST_ONE, 4)):
        assert categorical(weights, torch.tensor([u], dtype=torch.float64)).tolist() == [token]


@pytest.mark.parametrize("u", [0.0, ALMOST_ONE, 0.3])
def test_a_weight_of_zero_is_never_drawn(u: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-30, 1.0, 1e30):
        weights = torch.rand((2_000, 50), generator=generator, dtype=torch.float64) * scale
        weights[torch.rand((2_000, 50), generator=generator) < 0.8] = 0.0
        weights[:, 25] = 1e-3 * scale
        drawn = categorical(weights, torch.full((2_000,), u, dtype=torch.float64))
        assert (weights.gather(1, drawn.unsqueeze(1)) > 0).all()
