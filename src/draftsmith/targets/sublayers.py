"""The two parts of every layer, attention and feed-forward, and views of a model that leave some of them out.

A part that is left out adds nothing to the states that go from layer to layer: "Draft & Verify" (arXiv:2309.08168),
section 3.2. Every weight is shared with the whole model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.targets.attention import ShapeProbe
from draftsmith.targets.encode import encode_by_model
from draftsmith.targets.layers import layer_stack, twin, with_stack
from draftsmith.types import DraftsmithError

if TYPE_CHECKING:
    from draftsmith.targets.target import Target


@dataclass(frozen=True)
class Skipped:
    """Parts that are left out: the numbers of the layers without attention, and of those without feed-forward."""

    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()

    @property
    def whole(self) -> bool:
        """Whether only whole layers are left out, or nothing."""
        return self.attention == self.mlp

    def __or__(self, other: "Skipped") -> "Skipped":
        """Return the parts that either of the two leaves out."""
        return Skipped(self.attention | other.attention, self.mlp | other.mlp)


def whole_layers(layers: Sequence[int] | range) -> Skipped:
    """Return these layers as parts to leave out, attention and feed-forward."""
    return Skipped(frozenset(layers), frozenset(layers))


class _Nothing(nn.Module):
    """Takes the place of a part; it adds zero."""

    def __init__(self, entries: int) -> None:
        super().__init__()
        self.entries = entries

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        """Return zeros in the form of the part's output."""
        return in_form(torch.zeros_like(hidden_states), self.entries)


class _Passing(_Nothing):
    """Takes the place of a layer; it passes states through unchanged."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        """Return the states in the form of the layer's output."""
        return in_form(hidden_states, self.entries)


def in_form(states: Tensor, entries: int) -> Any:
    """Return states alone, or as the first of `entries` entries of a tuple."""
    return (states, *[None] * (entries - 1)) if entries else states


class Sublayers:
    """Finds the parts of a target's layers by one forward.

    Raises:
        DraftsmithError: layers that are not sums of their input and two parts.
    """

    def __init__(self, target: "Target") -> None:
        self.path, stack = layer_stack(target.model, target.layers, target.name)
        self.stack: list[nn.Module] = list(stack)
        self._refusal = DraftsmithError(
            f"the layers of {target.name} ({target.config.model_type}) are not made of an attention and a feed-forward "
            "that are added to what comes in, so neither can be left out; use early-exit."
        )
        self._entries: dict[nn.Module, int] = {}
        """How many entries the output tuple of each layer or part has; 0 if it is the states alone."""
        tokens_1T = self._tokens(target)
        attending = self._listen(target, tokens_1T)
        self.attention: list[str] = []
        """The name of the attending child of every layer."""
        self.mlp: list[list[str]] = []
        """The names of the children that hold all other matrices."""
        for number, layer in enumerate(self.stack):
            called = {name: child for name, child in layer.named_children() if child in self._entries}
            own = [name for name, child in called.items() if attending.get(number) in set(child.modules())]
            others = [name for name, child in called.items() if name not in own and _has_matrix(child)]
            if len(own) != 1 or not others:
                raise self._refusal
            self.attention += own
            self.mlp.append(others)
        self._check(target, tokens_1T)

    def without(self, number: int, attention: bool, mlp: bool) -> nn.Module:
        """Return a layer without its attention, its feed-forward or both."""
        if attention and mlp:
            return _Passing(self._entries[self.stack[number]])
        return self._thinned(number, attention, mlp)

    def _thinned(self, number: int, attention: bool, mlp: bool) -> nn.Module:
        """Return a layer in which these parts add nothing."""
        layer = self.stack[number]
        left_out = [self.attention[number]] * attention + self.mlp[number] * mlp
        if not left_out:
            return layer
        thin = twin(layer)
        for name in left_out:
            child = layer._modules[name]
            assert child is not None
            thin._modules[name] = _Nothing(self._entries[child])
        return thin

    @staticmethod
    def _tokens(target: "Target") -> Tensor:
        count = min(8, target.max_length)
        return torch.arange(1, count + 1, device=target.device).unsqueeze(0) * (target.vocab_size // (count + 1))

    def _listen(self, target: "Target", tokens_1T: Tensor) -> dict[int, nn.Module]:
        """Note the form of the outputs of layers and their children; return the attending module of each layer."""

        def note(module: nn.Module, _: Any, output: Any) -> None:
            self._entries[module] = len(output) if isinstance(output, tuple) else 0

        heard = [module for layer in self.stack for module in (layer, *layer.children())]
        handles = [module.register_forward_hook(note) for module in heard]
        probe = ShapeProbe()
        encode_by_model(target, tokens_1T, (), logits=True, probe=probe)
        for handle in handles:
            handle.remove()
        return probe.modules

    def _check(self, target: "Target", tokens_1T: Tensor) -> None:
        """Compare layers whose parts add nothing with layers that pass their input through."""
        numbers = range(len(self.stack))
        thin = [self._thinned(number, True, True) for number in numbers]
        passing: list[nn.Module] = [_Passing(self._entries[layer]) for layer in self.stack]
        try:
            with torch.no_grad():
                found = [
                    with_layers(target.model, self.path, layers)(input_ids=tokens_1T, use_cache=False, return_dict=True)
                    for layers in (thin, passing)
                ]
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise self._refusal from error
        if not torch.equal(found[0].logits, found[1].logits):
            raise self._refusal


def model_without(target: "Target", skipped: Skipped) -> PreTrainedModel:
    """Return a target's model without these parts; it ends behind the last layer that still has a part.

    Raises:
        DraftsmithError: a layer that does not exist, nothing that is left, or layers that have no such parts.
    """
    path, stack = layer_stack(target.model, target.layers, target.name)
    beyond = [number for number in sorted(skipped.attention | skipped.mlp) if not 0 <= number < len(stack)]
    if beyond:
        raise DraftsmithError(
            f"{target.name} has the layers 0 to {len(stack) - 1}, so layer {beyond[0]} cannot be left out; name others."
        )
    left = [number for number in range(len(stack)) if number not in skipped.attention & skipped.mlp]
    if not left:
        raise DraftsmithError(f"no part of {target.name} is left to draft with; leave out fewer layers.")
    kept = list(stack)[: left[-1] + 1]
    # If only the first layers remain, nothing has to be known about the parts of layers.
    if skipped != whole_layers(range(len(kept), len(stack))):
        find = target.sublayers.without
        kept = [find(number, number in skipped.attention, number in skipped.mlp) for number in range(len(kept))]
    return with_layers(target.model, path, kept)


def with_layers(model: PreTrainedModel, path: str, layers: Sequence[nn.Module]) -> PreTrainedModel:
    """Return a model with other layers; modules around them are copied without hooks, everything else is shared."""
    changed = twin(model)
    changed._modules[model.base_model_prefix] = with_stack(model.base_model, path, nn.ModuleList(layers))
    return changed


def share_read(target: "Target", skipped: Skipped) -> float:
    """Return the share of the weight bytes that a token passes through if these parts are left out.

    Layers and head count; the embedding does not, because it is looked up. In mixtures of experts all experts count.
    """
    _, stack = layer_stack(target.model, target.layers, target.name)
    whole = sum(map(_bytes, stack)) + _bytes(target.model.get_output_embeddings())
    if skipped.whole:
        return 1 - sum(_bytes(stack[number]) for number in skipped.mlp) / whole
    parts, saved = target.sublayers, 0
    for number, layer in enumerate(stack):
        if number in skipped.attention & skipped.mlp:
            saved += _bytes(layer)
            continue
        names = [parts.attention[number]] * (number in skipped.attention) + parts.mlp[number] * (number in skipped.mlp)
        saved += sum(_bytes(layer.get_submodule(name)) for name in names)
    return 1 - saved / whole


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _has_matrix(module: nn.Module) -> bool:
    return any(tensor.ndim > 1 for tensor in _tensors(module))


def _bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in _tensors(module))
