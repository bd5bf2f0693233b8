"""Rounding weights by what goes through them: of a text that the target writes by itself, so that none has to be given.

One weight's rounding can make up for another's only as far as the inputs of both go together, and how they do is seen
in a few hundred tokens. Within each group of 32 inputs, one after the other, what rounding leaves of one is made up for
by those behind it: GPTQ (arXiv:2210.17323), here within groups alone, so that what has to be known of the inputs is
small, and soon known.

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
"""Inputs that share a scale and a zero point. The native kernels know this number."""
DAMPING = 0.01
"""Of the mean square of a group's inputs, added to each: what the text does not show is not taken for never."""
LONGEST = 64
"""Tokens of a text. Many short ones differ more than one long one, and are written together."""
TOGETHER = 8
"""Texts that are written, and read, at a time."""
SEED = 0
METHOD = "fed back within groups, 1"
"""How it is done, and which version of that. To be raised when other weights come of the same tokens."""

progress = logging.getLogger("draftsmith.progress")


class Calibration:
    """How the layers of a target are rounded by its own text.

    Args:
        target: what writes the text; a copy of its weights is to be rounded.
        tokens: how many it writes.
        name: what to call the copy where it is said.
    """

    def __init__(self, target: "Target", tokens: int, name: str) -> None:
        self.target, self.tokens, self.name = target, tokens, name

    @property
    def key(self) -> str:
        """Names all that the rounding depends on besides the weights of the layers."""
        return f"{METHOD}; {self.tokens} tokens; {self.target.weights_hash}"

    def factors(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """Return of the inputs of these layers, by their names, what the native packing asks for (G, I, I)."""
        progress.info(
            "%s: %s writes %d tokens, by which the weights are rounded.", self.name, self.target.name, self.tokens
        )
        found = products_of(self.target, names, own_texts(self.target, self.tokens))
        return {name: factors_of(one) for name, one in found.items() if one.isfinite().all()}


def own_texts(target: "Target", tokens: int) -> Tensor:
    """Return texts (B, T) of a target on a CPU, drawn at temperature 1 behind random tokens: `tokens` or a few more."""
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
        chances_BV = logits_B1V[:, 0].double().softmax(-1).nan_to_num(1.0)  # a row that cannot be read goes on anyhow
        tokens_BT = torch.cat([tokens_BT, torch.multinomial(chances_BV, 1, generator=dice)], 1)
    return tokens_BT


@torch.no_grad()
def products_of(target: "Target", names: Sequence[str], tokens_BT: Tensor) -> dict[str, Tensor]:
    """Return mean products of the inputs of a group with each other (G, I, I), by layer; none of one that is not read.

    Behind the last input of a layer the products are zero.
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
    """Return the upper Cholesky factors of the inverses of products (G, I, I), fp32, whatever size the inputs have."""
    wide_GII = products_GII.double()
    mean_G11 = wide_GII.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    even_II = torch.eye(GROUP, dtype=torch.float64)
    sized_GII = torch.where(mean_G11 > 0, wide_GII / mean_G11, even_II) + DAMPING * even_II
    return torch.linalg.cholesky(torch.linalg.inv(sized_GII), upper=True).float().contiguous()
