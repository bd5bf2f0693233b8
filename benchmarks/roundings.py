"""Ways to round weights in groups of 32 with a scale and a zero point each, for rounding.py.

A rounded weight is (16 · q - zero) · scale, as `draftsmith.native` packs it: q is 0 … levels - 1, scale is in bf16, and
zero a whole number of 16 bits. The native layout holds 16 levels; fewer lie in it as well, for what they guess, though
not for what they would cost.

Shapes: N outputs, K inputs, G groups of I = 32 inputs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
PANEL = 16
"""Outputs whose weights lie together."""
SHARES = (1.0, 0.95, 0.9, 0.85)
ASIDES = (-0.25, 0.25)
"""What the native packing tries: shares of a group's range, and how far levels stand from the least weight."""
MORE_SHARES = tuple(1 - 0.05 * step for step in range(11))
MORE_ASIDES = (-0.375, -0.25, -0.125, 0.0, 0.125, 0.25, 0.375)
FITS = 3
"""How often scale and zero point are fitted anew to the levels that were chosen."""
DAMPING = 0.01
"""Of the mean square of the inputs, added to each."""
MOST_ZERO = 32_767


@dataclass(frozen=True)
class Rounded:
    """Levels (N, G, I) with scales and zero points (N, G)."""

    levels_NGI: Tensor
    scale_NG: Tensor
    zero_NG: Tensor

    def weights(self) -> Tensor:
        """Return the weights that come back (N, K)."""
        whole_NGI = 16 * self.levels_NGI - self.zero_NG.unsqueeze(-1)
        return (whole_NGI * self.scale_NG.unsqueeze(-1)).flatten(1)

    def packed(self) -> Tensor:
        """Return the bytes of the native int4 layout."""
        outputs, groups, _ = self.levels_NGI.shape
        panels = -(-outputs // PANEL)
        missing = (0, 0) * 2 + (0, panels * PANEL - outputs)
        levels = torch.nn.functional.pad(self.levels_NGI.to(torch.uint8), missing).view(panels, PANEL, groups, 4, 2, 4)
        nibbles = levels[..., 0, :] | levels[..., 1, :] << 4
        lines = nibbles.permute(0, 2, 3, 1, 4).reshape(panels, groups, 4, 64)
        zeros, scales = self.zero_NG.to(torch.int16), self.scale_NG.bfloat16().view(torch.int16)
        steps = torch.nn.functional.pad(torch.stack([zeros, scales], -1), missing).view(panels, PANEL, groups, 2)
        last = steps.transpose(1, 2).contiguous().view(torch.uint8).view(panels, groups, 1, 64)
        return torch.cat([lines, last], 2).contiguous()


def in_groups(weight_NK: Tensor) -> Tensor:
    """Return weights as (N, G, I) in fp32; K has to be whole groups."""
    return weight_NK.float().unflatten(1, (-1, GROUP))


def to_levels(weight_NGI: Tensor, scale_NG: Tensor, zero_NG: Tensor, levels: int) -> Tensor:
    """Return the nearest levels."""
    at_NGI = (weight_NGI / scale_NG.unsqueeze(-1) + zero_NG.unsqueeze(-1)) / 16
    return at_NGI.round().clamp(0, levels - 1)


def even(weight_NGI: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Return scales and zero points (N, G) of levels from the least weight to the largest."""
    low_NG, high_NG = weight_NGI.amin(-1), weight_NGI.amax(-1)
    return in_format(low_NG, (high_NG - low_NG) / (levels - 1), low_NG.abs().maximum(high_NG.abs()))


def in_format(low_NG: Tensor, step_NG: Tensor, farthest_NG: Tensor) -> tuple[Tensor, Tensor]:
    """Return a step between levels and the value of the lowest as scale and zero point, as the format has them."""
    scale_NG = (step_NG.maximum(farthest_NG / 2000).clamp(min=2.0**-118) / 16).bfloat16().float()
    return scale_NG, (-low_NG / scale_NG).round().clamp(-MOST_ZERO, MOST_ZERO)


def candidates(
    weight_NGI: Tensor, levels: int, shares: Sequence[float] = SHARES, asides: Sequence[float] = ASIDES
) -> Iterator[tuple[Tensor, Tensor]]:
    """Give scales and zero points of shares of the range, with the levels moved aside by parts of a step."""
    low_NG, high_NG = weight_NGI.amin(-1), weight_NGI.amax(-1)
    farthest_NG = low_NG.abs().maximum(high_NG.abs())
    for share in shares:
        step_NG = (high_NG - low_NG) / (levels - 1) * share
        bottom_NG = low_NG + (1 - share) / 2 * (high_NG - low_NG)
        for aside in asides:
            yield in_format(bottom_NG - aside * step_NG, step_NG, farthest_NG)


def searched(
    weight_NGI: Tensor,
    importance_GI: Tensor,
    levels: int,
    shares: Sequence[float] = MORE_SHARES,
    asides: Sequence[float] = MORE_ASIDES,
    fits: int = FITS,
) -> tuple[Tensor, Tensor]:
    """Return the scales and zero points with the least squared error that were found, an input's times its importance.

    All shares of the range are tried with the levels moved aside by parts of a step; then scale and zero point are
    fitted to the levels of the best by least squares, and the levels chosen anew.
    """
    farthest_NG = weight_NGI.abs().amax(-1)
    best = torch.full_like(farthest_NG, torch.inf)
    scale_NG, zero_NG = torch.zeros_like(best), torch.zeros_like(best)

    def offer(scale: Tensor, zero: Tensor) -> None:
        nonlocal best, scale_NG, zero_NG
        back_NGI = (16 * to_levels(weight_NGI, scale, zero, levels) - zero.unsqueeze(-1)) * scale.unsqueeze(-1)
        error = ((back_NGI - weight_NGI).square() * importance_GI).sum(-1)
        better = error < best
        best, scale_NG = torch.where(better, error, best), torch.where(better, scale, scale_NG)
        zero_NG = torch.where(better, zero, zero_NG)

    for steps in candidates(weight_NGI, levels, shares, asides):
        offer(*steps)
    for _ in range(fits):
        q_NGI = to_levels(weight_NGI, scale_NG, zero_NG, levels)
        total_G = importance_GI.sum(-1)
        q_mean = (q_NGI * importance_GI).sum(-1) / total_G
        w_mean = (weight_NGI * importance_GI).sum(-1) / total_G
        away_NGI = (q_NGI - q_mean.unsqueeze(-1)) * importance_GI
        spread = (away_NGI * q_NGI).sum(-1)
        step_NG = (away_NGI * weight_NGI).sum(-1) / spread.clamp(min=1e-30)
        step_NG = torch.where(spread > 0, step_NG, 16 * scale_NG)
        offer(*in_format(w_mean - step_NG * q_mean, step_NG, farthest_NG))
    return scale_NG, zero_NG


def rounded(weight_NGI: Tensor, steps: tuple[Tensor, Tensor], levels: int) -> Rounded:
    """Round every weight to the nearest level of its group."""
    return Rounded(to_levels(weight_NGI, *steps, levels), *steps)


def fed_back(weight_NGI: Tensor, products_KK: Tensor, levels: int) -> Rounded:
    """Round input after input, and let the later ones of a group make up for the error (GPTQ, arXiv:2210.17323).

    Of the scales and zero points that the native packing tries, those are taken that leave the least error of products.

    Args:
        products_KK: mean products of the inputs with each other.
    """
    factors_GII = factors(torch.stack([block_of(products_KK, g) for g in range(weight_NGI.shape[1])]))
    best = torch.full(weight_NGI.shape[:2], torch.inf)
    found = Rounded(torch.zeros_like(weight_NGI), torch.zeros_like(best), torch.zeros_like(best))
    for scale_NG, zero_NG in candidates(weight_NGI, levels):
        levels_NGI, errors_NGI = in_turn(weight_NGI, scale_NG, zero_NG, factors_GII, levels)
        error_NG = errors_NGI.square().sum(-1)
        better = error_NG < best
        best = torch.where(better, error_NG, best)
        found = Rounded(
            torch.where(better.unsqueeze(-1), levels_NGI, found.levels_NGI),
            torch.where(better, scale_NG, found.scale_NG),
            torch.where(better, zero_NG, found.zero_NG),
        )
    return found


def fed_across(weight_NGI: Tensor, products_KK: Tensor, levels: int) -> Rounded:
    """Hand errors on to later groups too, whose scales are then searched for what they have become."""
    groups = weight_NGI.shape[1]
    left_NK = weight_NGI.flatten(1).clone()
    upper_KK = factors(products_KK)
    found: list[Rounded] = []
    for g in range(groups):
        own = slice(g * GROUP, (g + 1) * GROUP)
        importance_GI = block_of(products_KK, g).diagonal()[None] + DAMPING * products_KK.diagonal().mean()
        own_N1I, rest = left_NK[:, None, own], slice(own.stop, None)
        steps = searched(own_N1I, importance_GI, levels)
        levels_N1I, errors_N1I = in_turn(own_N1I, *steps, upper_KK[None, own, own], levels)
        left_NK[:, rest] -= errors_N1I[:, 0] @ upper_KK[own, rest]
        found.append(Rounded(levels_N1I, *steps))
    return Rounded(
        torch.cat([one.levels_NGI for one in found], 1),
        torch.cat([one.scale_NG for one in found], 1),
        torch.cat([one.zero_NG for one in found], 1),
    )


def block_of(products_KK: Tensor, group: int) -> Tensor:
    """Return the products of the inputs of a group with each other (I, I)."""
    own = slice(group * GROUP, (group + 1) * GROUP)
    return products_KK[own, own]


def factors(products: Tensor) -> Tensor:
    """Return the upper Cholesky factors of the inverses of damped products (…, I, I)."""
    wide = products.double()
    mean = wide.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=1e-30)
    damped = wide + DAMPING * mean[..., None, None] * torch.eye(wide.shape[-1], dtype=torch.float64)
    return torch.linalg.cholesky(torch.linalg.inv(damped), upper=True).float()


def in_turn(
    weight_NGI: Tensor, scale_NG: Tensor, zero_NG: Tensor, factors_GII: Tensor, levels: int
) -> tuple[Tensor, Tensor]:
    """Round one input of every group after the other; return levels and errors over the factors' diagonal (N, G, I)."""
    left_NGI, chosen, errors = weight_NGI.clone(), [], []
    for i in range(GROUP):
        q_NG = ((left_NGI[..., i] / scale_NG + zero_NG) / 16).round().clamp(0, levels - 1)
        error_NG = (left_NGI[..., i] - (16 * q_NG - zero_NG) * scale_NG) / factors_GII[:, i, i]
        left_NGI[..., i + 1 :] -= error_NG.unsqueeze(-1) * factors_GII[:, i, i + 1 :]
        chosen.append(q_NG)
        errors.append(error_NG)
    return torch.stack(chosen, -1), torch.stack(errors, -1)
