"""Rounds weights with regard to their typical inputs, taken from a text that the target writes itself.

The rounding error of one weight can be made up for by another weight only as far as the inputs of both vary together,
which a few hundred tokens show. Within each group of 32 inputs, in order, the error of rounding one weight is made up
for by the weights behind it. This is GPTQ (arXiv:2210.17323), here within groups only, so that the statistics of the
inputs are small and a short text suffices.

Shapes: B texts, T tokens, R rows, K inputs, G groups of I = 32 inputs.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from draftsmith.targets.encode import encode_by_model

if TYPE_CHECKING:
    from draftsmith.targets.target import Target

GROUP = 32
"""Number of inputs that share a scale and a zero point. The native kernels contain the same number."""
DAMPING = 0.01
"""This share of the mean square of a group's inputs is added to each, since a short text does not show every input."""
LONGEST = 64
"""Tokens per text. Many short texts differ more than one long text, and are written together."""
TOGETHER = 8
"""Number of texts that are written, and read, at a time."""
SEED = 0
METHOD = "fed back within groups, 1"
"""The method and its version. Increase the version when the same tokens give other weights."""

progress = logging.getLogger("draftsmith.progress")


class Calibration:
    """Says how the layers of a target are rounded with its own text.

    Args:
        target: writes the text; a copy of its weights will be rounded.
        tokens: the number of tokens that it writes.
        name: the name of the copy in messages.
    """

    def __init__(self, target: "Target", tokens: int, name: str) -> None:
        self.target, self.tokens, self.name = target, tokens, name

    @property
    def key(self) -> str:
        """Names everything that the rounding depends on besides the weights of the layers."""
        return f"{METHOD}; {self.tokens} tokens; {self.target.weights_hash}"

    def factors(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """Return for each of these layers, by name, the factors (G, I, I) of its inputs that native packing takes."""
        progress.info(
            "%s: %s writes %d tokens, by which the weights are rounded.", self.name, self.target.name, self.tokens
        )
        found = products_of(self.target, names, own_texts(self.target, self.tokens))
        return {name: factors_of(one) for name, one in found.items() if one.isfinite().all()}


def own_texts(target: "Target", tokens: int) -> Tensor:
    """Return texts (B, T) of a target on a CPU, drawn at temperature 1 after random tokens: `tokens` or a few more."""
    dice = torch.Generator().manual_seed(SEED)
    texts = -(-tokens // LONGEST)
    length = -(-tokens // texts)
    first_B1 = torch.randint(target.vocab_size, (texts, 1), generator=dice)
    return torch.cat([_written(target, some_B1, length, dice) for some_B1 in first_B1.split(TOGETHER)])


def _written(target: "Target", first_B1: Tensor, length: int, dice: torch.Generator) -> Tensor:
    texts = len(first_B1)
    cache = target.new_cache(texts, length)
    tokens_BT = first_B1
    for held in range(length - 1):
        logits_B1V, _ = target.read_chain(cache, tokens_BT[:, -1:], torch.full((texts,), held), (), longest=held)
        chances_BV = logits_B1V[:, 0].double().softmax(-1).nan_to_num(1.0)  # a row with NaN logits goes on all the same
        tokens_BT = torch.cat([tokens_BT, torch.multinomial(chances_BV, 1, generator=dice)], 1)
    return tokens_BT


@torch.no_grad()
def products_of(target: "Target", names: Sequence[str], tokens_BT: Tensor) -> dict[str, Tensor]:
    """Return the mean products (G, I, I) of the inputs within each group, by layer, for the layers that are read.

    For indices beyond the last input of a layer the products are zero.
    """
    sums: dict[str, Tensor] = {}
    layers = {target.model.get_submodule(name): name for name in names}

    def note(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        rows_RK = given[0].flatten(0, -2).float()
        rows_GRI = pad(rows_RK, (0, -rows_RK.shape[1] % GROUP)).unflatten(1, (-1, GROUP)).transpose(0, 1)
        own_GII = rows_GRI.transpose(1, 2) @ rows_GRI / tokens_BT.numel()
        name = layers[module]
        sums[name] = sums[name] + own_GII if name in sums else own_GII

    hooks = [module.register_forward_pre_hook(note) for module in layers]
    try:
        for some_BT in tokens_BT.split(TOGETHER):
            encode_by_model(target, some_BT, (), logits=True)
    finally:
        for hook in hooks:
            hook.remove()
    return sums


def factors_of(products_GII: Tensor) -> Tensor:
    """Return the upper Cholesky factors, fp32, of the inverses of products (G, I, I), whatever their scale."""
    wide_GII = products_GII.double()
    mean_G11 = wide_GII.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    even_II = torch.eye(GROUP, dtype=torch.float64)
    sized_GII = torch.where(mean_G11 > 0, wide_GII / mean_G11, even_II) + DAMPING * even_II
    return torch.linalg.cholesky(torch.linalg.inv(sized_GII), upper=True).float().contiguous()
