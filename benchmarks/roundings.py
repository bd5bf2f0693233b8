"""Ways to round weights in groups of 32 with a scale and a zero point each, for rounding.py.

A rounded weight is (8 · q - zero) · scale · unit, as `draftsmith.native` packs it: q is 0 … levels - 1, scale and zero
are whole numbers of 8 bits for each group, and unit is an output's own. The native layout holds 16 levels; fewer lie in
it as well, for what they guess, though not for what they would cost.

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
MOST = 255
"""Of scales and zero points."""
ROOM = 1.2
"""How much farther a group may spread by what is handed on than the widest group of its output."""


@dataclass(frozen=True)
class Steps:
    """Scales and zero points (N, G), and units (N, 1)."""

    scale_NG: Tensor
    zero_NG: Tensor
    unit_N1: Tensor

    @property
    def step_NG(self) -> Tensor:
        """What lies between levels."""
        return 8 * self.scale_NG * self.unit_N1

    def back(self, levels_NGI: Tensor) -> Tensor:
        """Return the weights of levels (N, G, I)."""
        return (levels_NGI - self.zero_NG.unsqueeze(-1) / 8) * self.step_NG.unsqueeze(-1)


@dataclass(frozen=True)
class Rounded:
    """Levels (N, G, I) with their steps."""

    levels_NGI: Tensor
    steps: Steps

    def packed(self) -> Tensor:
        """Return the bytes of the native int4 layout, `Int4Panel` in kernels.h."""
        outputs, groups, _ = self.levels_NGI.shape
        panels = -(-outputs // PANEL)
        missing = (0, 0) * 2 + (0, panels * PANEL - outputs)
        levels = torch.nn.functional.pad(self.levels_NGI.to(torch.uint8), missing).view(panels, PANEL, groups, 4, 2, 4)
        nibbles = levels[..., 0, :] | levels[..., 1, :] << 4
        lines = nibbles.permute(0, 2, 3, 1, 4).reshape(panels, groups, 4, 64)
        both = torch.stack([self.steps.zero_NG, self.steps.scale_NG], -1).to(torch.uint8)  # (N, G, 2)
        both = torch.nn.functional.pad(both, (0, 0, 0, groups % 2, 0, panels * PANEL - outputs))
        pairs = both.view(panels, PANEL, -1, 2, 2).transpose(-1, -2).transpose(1, 2).reshape(panels, -1, 64)
        parts = []
        for g in range(groups):
            parts.append(lines[:, g])
            if g % 2 or g + 1 == groups:
                parts.append(pairs[:, g // 2, None])
        units_N = torch.nn.functional.pad(self.steps.unit_N1[:, 0].float(), (0, panels * PANEL - outputs))
        parts.append(units_N.view(panels, 1, PANEL).contiguous().view(torch.uint8))
        return torch.cat(parts, 1).contiguous()


def in_groups(weight_NK: Tensor) -> Tensor:
    """Return weights as (N, G, I) in fp32; K has to be whole groups."""
    return weight_NK.float().unflatten(1, (-1, GROUP))


def to_levels(weight_NGI: Tensor, steps: Steps, levels: int) -> Tensor:
    """Return the nearest levels."""
    at_NGI = weight_NGI / steps.step_NG.unsqueeze(-1) + steps.zero_NG.unsqueeze(-1) / 8
    return at_NGI.round().clamp(0, levels - 1)


def ends(weight_NGI: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ends (N, G) of the range of every group, as far as zero points can tell."""
    low_NG = weight_NGI.amin(-1).clamp(max=0)
    return low_NG, weight_NGI.amax(-1).maximum(low_NG / 2)


def units(weight_NGI: Tensor, levels: int, room: float = 1.0) -> Tensor:
    """Return for every output (N, 1) the unit with which the scales of all its groups fit their bits."""
    low_NG, high_NG = ends(weight_NGI)
    widest_N1 = (high_NG - low_NG).amax(1, keepdim=True) / (levels - 1)
    return (widest_N1 / (8 * MOST) * room).clamp(min=2.0**-121)


def even(weight_NGI: Tensor, levels: int) -> Steps:
    """Return steps of levels from the least weight to the largest."""
    low_NG, high_NG = ends(weight_NGI)
    return in_format(low_NG, (high_NG - low_NG) / (levels - 1), units(weight_NGI, levels))


def in_format(low_NG: Tensor, step_NG: Tensor, unit_N1: Tensor) -> Steps:
    """Return a step between levels and the value of the lowest as the format has them."""
    scale_NG = (step_NG / (8 * unit_N1)).round().clamp(1, MOST)
    return Steps(scale_NG, (-low_NG / (scale_NG * unit_N1)).round().clamp(0, MOST), unit_N1)


def candidates(
    weight_NGI: Tensor, levels: int, unit_N1: Tensor, shares: Sequence[float] = SHARES,
    asides: Sequence[float] = ASIDES,
) -> Iterator[Steps]:
    """Give steps of shares of the range, with the levels moved aside by parts of a step."""
    low_NG, high_NG = ends(weight_NGI)
    for share in shares:
        step_NG = (high_NG - low_NG) / (levels - 1) * share
        bottom_NG = low_NG + (1 - share) / 2 * (high_NG - low_NG)
        for aside in asides:
            yield in_format(bottom_NG - aside * step_NG, step_NG, unit_N1)


def searched(
    weight_NGI: Tensor,
    importance_GI: Tensor,
    levels: int,
    shares: Sequence[float] = MORE_SHARES,
    asides: Sequence[float] = MORE_ASIDES,
    fits: int = FITS,
    unit_N1: Tensor | None = None,
) -> Steps:
    """Return the steps with the least squared error that were found, an input's times its importance.

    All shares of the range are tried with the levels moved aside by parts of a step; then scale and zero point are
    fitted to the levels of the best by least squares, and the levels chosen anew.
    """
    unit_N1 = units(weight_NGI, levels) if unit_N1 is None else unit_N1
    best = torch.full_like(weight_NGI[..., 0], torch.inf)
    found = Steps(torch.zeros_like(best), torch.zeros_like(best), unit_N1)

    def offer(steps: Steps) -> None:
        nonlocal best, found
        back_NGI = steps.back(to_levels(weight_NGI, steps, levels))
        error = ((back_NGI - weight_NGI).square() * importance_GI).sum(-1)
        better = error < best
        best = torch.where(better, error, best)
        found = Steps(
            torch.where(better, steps.scale_NG, found.scale_NG), torch.where(better, steps.zero_NG, found.zero_NG),
            unit_N1,
        )

    for steps in candidates(weight_NGI, levels, unit_N1, shares, asides):
        offer(steps)
    for _ in range(fits):
        q_NGI = to_levels(weight_NGI, found, levels)
        total_G = importance_GI.sum(-1)
        q_mean = (q_NGI * importance_GI).sum(-1) / total_G
        w_mean = (weight_NGI * importance_GI).sum(-1) / total_G
        away_NGI = (q_NGI - q_mean.unsqueeze(-1)) * importance_GI
        spread = (away_NGI * q_NGI).sum(-1)
        step_NG = (away_NGI * weight_NGI).sum(-1) / spread.clamp(min=1e-30)
        step_NG = torch.where(spread > 0, step_NG, found.step_NG)
        offer(in_format(w_mean - step_NG * q_mean, step_NG, unit_N1))
    return found


def rounded(weight_NGI: Tensor, steps: Steps, levels: int) -> Rounded:
    """Round every weight to the nearest level of its group."""
    return Rounded(to_levels(weight_NGI, steps, levels), steps)


def fed_back(weight_NGI: Tensor, products_KK: Tensor, levels: int) -> Rounded:
    """Round input after input, and let the later ones of a group make up for the error (GPTQ, arXiv:2210.17323).

    Of the scales and zero points that the native packing tries, those are taken that leave the least error of products.

    Args:
        products_KK: mean products of the inputs with each other.
    """
    factors_GII = factors(torch.stack([block_of(products_KK, g) for g in range(weight_NGI.shape[1])]))
    best, unit_N1 = torch.full(weight_NGI.shape[:2], torch.inf), units(weight_NGI, levels)
    levels_NGI, scale_NG, zero_NG = torch.zeros_like(weight_NGI), torch.zeros_like(best), torch.zeros_like(best)
    for steps in candidates(weight_NGI, levels, unit_N1):
        tried_NGI, errors_NGI = in_turn(weight_NGI, steps, factors_GII, levels)
        error_NG = errors_NGI.square().sum(-1)
        better = error_NG < best
        best = torch.where(better, error_NG, best)
        levels_NGI = torch.where(better.unsqueeze(-1), tried_NGI, levels_NGI)
        scale_NG = torch.where(better, steps.scale_NG, scale_NG)
        zero_NG = torch.where(better, steps.zero_NG, zero_NG)
    return Rounded(levels_NGI, Steps(scale_NG, zero_NG, unit_N1))


def fed_across(weight_NGI: Tensor, products_KK: Tensor, levels: int) -> Rounded:
    """Hand errors on to later groups too, whose scales are then searched for what they have become."""
    groups, unit_N1 = weight_NGI.shape[1], units(weight_NGI, levels, ROOM)
    left_NK = weight_NGI.flatten(1).clone()
    upper_KK = factors(products_KK)
    found: list[Rounded] = []
    for g in range(groups):
        own = slice(g * GROUP, (g + 1) * GROUP)
        importance_GI = block_of(products_KK, g).diagonal()[None] + DAMPING * products_KK.diagonal().mean()
        own_N1I, rest = left_NK[:, None, own], slice(own.stop, None)
        steps = searched(own_N1I, importance_GI, levels, unit_N1=unit_N1)
        levels_N1I, errors_N1I = in_turn(own_N1I, steps, upper_KK[None, own, own], levels)
        left_NK[:, rest] -= errors_N1I[:, 0] @ upper_KK[own, rest]
        found.append(Rounded(levels_N1I, steps))
    return Rounded(
        torch.cat([one.levels_NGI for one in found], 1),
        Steps(
            torch.cat([one.steps.scale_NG for one in found], 1), torch.cat([one.steps.zero_NG for one in found], 1),
            unit_N1,
        ),
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


def in_turn(weight_NGI: Tensor, steps: Steps, factors_GII: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Round one input of every group after the other; return levels and errors over the factors' diagonal (N, G, I)."""
    left_NGI, chosen, errors = weight_NGI.clone(), [], []
    for i in range(GROUP):
        q_NG1 = to_levels(left_NGI[..., i : i + 1], steps, levels)
        error_NG = (left_NGI[..., i] - steps.back(q_NG1)[..., 0]) / factors_GII[:, i, i]
        left_NGI[..., i + 1 :] -= error_NG.unsqueeze(-1) * factors_GII[:, i, i + 1 :]
        chosen.append(q_NG1[..., 0])
        errors.append(error_NG)
    return torch.stack(chosen, -1), torch.stack(errors, -1)
