"""Rounds weights with regard to their typical inputs, taken from a text that the target writes itself.

The rounding error of one weight can be made up for by other weights of the same output as far as their inputs vary
together, which a text shows. The inputs are rounded in order, and the weights behind each make up for its error: GPTQ
(arXiv:2210.17323, section 3), here within blocks of inputs. So the statistics of a layer's inputs grow with its width
and not with the square of it, and those of all layers together usually take less memory than the model in bf16.

Shapes: B texts, T tokens, R rows, K inputs, P = K up to whole groups of 32, W inputs of a block.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from draftsmith.system import bytes_in_words, free_memory
from draftsmith.targets.encode import encode_by_model
from draftsmith.types import DraftsmithError

if TYPE_CHECKING:
    from draftsmith.targets.target import Target

GROUP, BLOCK = 32, 1024
"""Number of inputs that share a scale and a zero point, and of those among which errors are made up for. The native
kernels contain the same numbers."""
DAMPING = 0.01
"""This share of the mean square of a block's inputs is added to each, since a text does not show every input."""
LONGEST = 64
"""Tokens per text. Many short texts differ more than one long text, and are written together."""
TOGETHER = 16
"""Number of texts that are written, and read, at a time."""
SEED = 0
METHOD = "fed back within blocks of 1024, 1"
"""The method and its version. Increase the version when the same tokens give other weights."""
TOLD_S = 10.0
"""Seconds after which it is said again how far the text is."""

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
        """Return for each of these layers, by name, the factors (P, W) of its inputs that native packing takes."""
        needed, free = sum(4 * size * min(size, BLOCK) for size in self._sizes(names)), free_memory()
        sentence = (
            f"{self.name}: {self.target.name} writes {self.tokens:,} tokens, by which the weights are rounded; that "
            f"takes up to {bytes_in_words(needed)} for a while"
        )
        if free is not None and needed > free:
            raise DraftsmithError(
                f"{sentence}, and {bytes_in_words(free)} are free; end other programs, grant this one more memory, or "
                "leave out calibrate."
            )
        progress.info("%s.", sentence)
        products, readers = products_of(self.target, names, own_texts(self.target, self.tokens))
        found: dict[str, Tensor] = {}
        while products:
            name, own_PW = products.popitem()  # so that both are never held of all layers
            if own_PW.isfinite().all():
                found |= dict.fromkeys(readers[name], factors_of(own_PW))
        return found

    def _sizes(self, names: Sequence[str]) -> Iterator[int]:
        """Give the number of inputs of layers, up to whole groups."""
        for name in names:
            layer: Any = self.target.model.get_submodule(name)
            inputs = layer.weight.shape[0] if isinstance(layer, Conv1D) else layer.in_features
            yield inputs + -inputs % GROUP


def own_texts(target: "Target", tokens: int, longest: int = LONGEST) -> Tensor:
    """Return texts (B, T) of a target on a CPU, drawn at temperature 1 after random tokens: `tokens` or a few more.

    Args:
        longest: the most tokens of a text.
    """
    dice = torch.Generator().manual_seed(SEED)
    texts = -(-tokens // longest)
    length = -(-tokens // texts)
    first_B1 = torch.randint(target.vocab_size, (texts, 1), generator=dice)
    written, begun, told = list[Tensor](), time.monotonic(), 0.0
    for some_B1 in first_B1.split(TOGETHER):
        written.append(_written(target, some_B1, length, dice))
        done, took = sum(map(len, written)), time.monotonic() - begun
        if took > told + TOLD_S and done < texts:
            told, left = took, took / done * (texts - done)
            progress.info("%s tokens written; %.0f s to go.", f"{done * length:,}", left)
    return torch.cat(written)


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
def products_of(
    target: "Target", names: Sequence[str], tokens_BT: Tensor
) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """Return the mean products of a layer's inputs with those of their block, for the layers that are read.

    Returns:
        products (P, W), by layer, with zeros behind the last input; and which layers read the same inputs as that one,
        itself included: a model's queries, keys and values do, of which only one is computed.
    """
    sums: dict[str, Tensor] = {}
    calls, alike = Counter[str](), Counter[tuple[str, str]]()
    layers = {target.model.get_submodule(name): name for name in names}
    last: tuple[Tensor, str] | None = None

    def note(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        nonlocal last
        name, inputs = layers[module], given[0]
        calls[name] += 1
        if last is not None and inputs is last[0]:
            alike[last[1], name] += 1
            return
        last = inputs, name
        rows_RK = inputs.flatten(0, -2).float()
        padded = rows_RK.shape[1] + -rows_RK.shape[1] % GROUP
        if name not in sums:
            sums[name] = torch.zeros(padded, min(padded, BLOCK))
        for first, some_RW in zip(range(0, padded, BLOCK), rows_RK.split(BLOCK, 1), strict=True):
            size = some_RW.shape[1]
            sums[name][first : first + size, :size] += some_RW.T @ some_RW / tokens_BT.numel()

    hooks = [module.register_forward_pre_hook(note) for module in layers]
    try:
        for some_BT in tokens_BT.split(TOGETHER):
            encode_by_model(target, some_BT, (), logits=True)
            last = None
    finally:
        for hook in hooks:
            hook.remove()
    readers = {name: [name] for name in sums}
    for (first_of_them, name), times in alike.items():
        if name not in sums and times == calls[name] == calls[first_of_them]:  # the same at every call
            readers[first_of_them].append(name)
    return sums, readers


def factors_of(products_PW: Tensor) -> Tensor:
    """Return the lower Cholesky factors, fp32, of the inverses of blocks of products (P, W), whatever their scale."""
    factors_PW = torch.zeros_like(products_PW)
    for first in range(0, len(products_PW), products_PW.shape[1]):
        own = products_PW[first : first + products_PW.shape[1]].double()
        size = len(own)
        own, even = own[:, :size], torch.eye(size, dtype=torch.float64)
        mean = own.diagonal().mean()
        damped = (own / mean if mean > 0 else even) + DAMPING * even
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
        factors_PW[first : first + size, :size] = torch.linalg.cholesky(inverse).float()
    return factors_PW
