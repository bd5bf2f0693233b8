"""Hooks on a model that take states out of its layers, and pass fewer states into its head.

Shapes: B rows, M nodes, U of them that logits are wanted of, F feature width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.targets.layers import layer_stack
from draftsmith.types import DraftsmithError


class Hooks:
    """The hooks of one model. Before a forward, `want` says what is needed; after it, `take` returns it.

    Args:
        layers: how many the model has.
        width: of the states that go from layer to layer.
        name: of the model, with its type, for messages.
    """

    def __init__(self, model: PreTrainedModel, layers: int, width: int, name: str) -> None:
        self._width, self._name = width, name
        self._wanted: set[int] = set()
        self._caught: dict[int, Tensor] = {}
        self._columns_BU: Tensor | None = None
        base = model.base_model
        path, stack = layer_stack(model, layers, name)
        # Some heads call the decoder inside the base model directly; if both are called, the outer one comes last.
        for module in {base.get_submodule(path.rpartition(".")[0]), base}:
            module.register_forward_hook(self._catcher(-1))
        for index, layer in enumerate(stack):
            layer.register_forward_hook(self._catcher(index))

    def limit(self, head: nn.Module) -> None:
        """Make this head, which may have been replaced since, read only the requested columns."""
        head.register_forward_pre_hook(self._pick)

    def want(self, taps: tuple[int, ...], columns_BU: Tensor | None = None) -> None:
        """Set the states that the next forward has to keep, and the nodes that need logits if rows differ in them."""
        self._wanted, self._columns_BU = set(taps), columns_BU

    def take(self, taps: tuple[int, ...]) -> Tensor:
        """Return the states of these taps, at least one, side by side (…, F · taps), and forget them."""
        states = [self._caught[tap] for tap in taps]
        self._caught.clear()
        return states[0] if len(states) == 1 else torch.cat(states, dim=-1)

    def _catcher(self, tap: int) -> Callable[[nn.Module, Any, Any], None]:
        def catch(_: nn.Module, __: Any, output: Any) -> None:
            if tap in self._wanted:
                state = output if isinstance(output, Tensor) else output[0]
                if state.dim() != 3 or state.shape[2] != self._width:
                    raise DraftsmithError(
                        f"{self._name} hands states of shape {tuple(state.shape)} from layer to layer, where one of "
                        f"{self._width} a token is needed; it is not supported yet."
                    )
                self._caught[tap] = state

        return catch

    def _pick(self, _: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Select the wanted nodes of every row from (B, M, F)."""
        if self._columns_BU is None:
            return None
        states_BMF = given[0]
        index_BUF = self._columns_BU.unsqueeze(2).expand(-1, -1, states_BMF.shape[2])
        return (states_BMF.gather(1, index_BUF), *given[1:])
