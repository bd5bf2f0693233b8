"""The last layers of a target, applied to hidden states that enter between two of its layers.

Shapes: B rows, T tokens of a text, P positions in it, M nodes, S keys, F width.
"""

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from draftsmith.targets.attention import TreePass, lay_out_pass
from draftsmith.targets.cache.cache import KVCache
from draftsmith.targets.cache.nodes import Nodes
from draftsmith.targets.layers import layer_stack, with_stack
from draftsmith.types import DraftsmithError

if TYPE_CHECKING:
    from draftsmith.targets.target import Target

# How far the states may differ from the target's own, relative to their size; bf16 gives less than 0.01.
TOLERANCE = 0.05


class _Entrance(nn.Module):
    """Takes the place of a layer that is left out; it returns the states that were handed in."""

    def forward(self, hidden_states: Tensor, *_: Any, entry_states: Tensor, **__: Any) -> Tensor:
        """Ignore what the layers before it made."""
        return entry_states


class UpperLayers:
    """The layers of a target behind layer `layer`, its final norm and its head: its own modules, not copies.

    They use the target's attention, over any cache of its form: its own, or one made for a text.

    Raises:
        DraftsmithError: no layer is left, or the model passes more than one state from layer to layer.
    """

    def __init__(self, target: "Target", layer: int) -> None:
        if not 0 <= layer < target.layers - 1:
            raise DraftsmithError(
                f"layer is {layer}, but {target.name} has {target.layers} layers, of which at least one has to follow; "
                f"use 0 to {target.layers - 2}."
            )
        self.target, self.layer = target, layer
        path, stack = layer_stack(target.model, target.layers, target.name)
        # The layers keep their places, because some models choose a layer's inputs by its place.
        entrances = [_Entrance() for _ in range(layer + 1)]
        base: nn.Module = target.model.base_model
        self._base = with_stack(base, path, nn.ModuleList([*entrances, *stack[layer + 1 :]]))
        self._check()

    def __deepcopy__(self, _: Any) -> "UpperLayers":
        """Return itself, so that copies of a drafter that borrows these layers borrow the same ones."""
        return self

    @property
    def head(self) -> nn.Module:
        """The target's output projection, from F to V."""
        head: nn.Module = self.target.model.get_output_embeddings()
        return head

    @cached_property
    def differentiable(self) -> "UpperLayers":
        """The same layers with operations that gradients pass through, for training; native layers are copied."""
        with torch.autocast(self.target.device.type, enabled=False):  # a copy is compared with the model as it is
            plain = self.target.backend.differentiable()
            return self if plain is self.target else UpperLayers(plain, self.layer)

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        """Allocate keys and values of these layers alone, for `rows` texts."""
        shapes = [
            shape if place > self.layer else (0, 0, 0, 0) for place, shape in enumerate(self.target.kv_shapes)
        ]
        return KVCache(shapes, rows, capacity, self.target.dtype, self.target.device)

    def chain(
        self, cache: KVCache, cached_B: Tensor, length: int, span: int, slots_B: Tensor | None = None
    ) -> TreePass:
        """Lay out `length` states per row, one behind the other, behind what the cache holds of the rows.

        Args:
            cached_B: tokens that the cache holds per row.
            span: at least the largest `cached_B` + `length`.
            slots_B: slot of every row; None for row b in slot b.
        """
        batch, device = cached_B.shape[0], cached_B.device
        # States are read, not tokens, so the tokens can be anything.
        tokens_BM = torch.zeros((batch, length), dtype=torch.long, device=device)
        nodes = Nodes(tokens_BM, cached_B, slots_B, columns_S=torch.arange(span, device=device))
        return lay_out_pass(cache, nodes, self.target.max_length)

    def branches(self, cache: KVCache, length: int, positions_BP: Tensor, depths: int) -> TreePass:
        """Lay out a chain of `depths` states behind each of these positions of texts that the cache holds.

        A chain sees the text up to its position, and itself; its first state is one position further on. Nodes are
        numbered chain by chain.

        Args:
            length: T, the tokens that the cache holds of every row.
        """
        batch, chains = positions_BP.shape
        device = positions_BP.device
        depth_M = torch.arange(depths, device=device).repeat(chains)
        chain_M = torch.arange(chains, device=device).repeat_interleave(depths)
        origins_BM = positions_BP.repeat_interleave(depths, dim=1)
        positions_BM = (origins_BM + 1 + depth_M).clamp(max=self.target.max_length - 1)
        text_T, node_M = torch.arange(length, device=device), torch.arange(len(depth_M), device=device)
        own_MM = (chain_M.unsqueeze(1) == chain_M) & (depth_M.unsqueeze(1) >= depth_M)
        allowed_BMS = torch.cat([text_T <= origins_BM.unsqueeze(2), own_MM.expand(batch, -1, -1)], dim=2)
        writes_K = cache.entries(None, (length + node_M).expand(batch, -1)).flatten()
        key_positions_BS = torch.cat([text_T.expand(batch, -1), positions_BM], dim=1)
        span = length + len(node_M)
        tokens_BM = torch.zeros_like(positions_BM)
        return TreePass(
            cache, tokens_BM, writes_K, None, slice(0, batch), None, positions_BM, key_positions_BS, allowed_BMS, span
        )

    def refine(self, states_BMF: Tensor, tree_pass: TreePass) -> Tensor:
        """Pass outputs of layer `layer` through the remaining layers; return the states after the final norm (B, M, F).

        Their keys and values are written into the cache of the pass.
        """
        states_BMF = states_BMF.to(self.target.dtype)
        with torch.autocast(self.target.device.type, enabled=False):
            out = self._base(
                inputs_embeds=states_BMF, position_ids=tree_pass.positions_BM, use_cache=False, tree_pass=tree_pass,
                entry_states=states_BMF,
            )
        final_BMF: Tensor = out[0]
        return final_BMF

    @torch.no_grad()
    def read_text(self, states_BTF: Tensor, cache: KVCache) -> Tensor:
        """Read the states of whole texts into a fresh cache as the target did; return those after the final norm."""
        batch, length, _ = states_BTF.shape
        start_B = torch.zeros(batch, dtype=torch.long, device=states_BTF.device)
        return self.refine(states_BTF, self.chain(cache, start_B, length, length))

    def _check(self) -> None:
        target = self.target
        count = min(8, target.max_length)
        tokens_1T = torch.arange(1, count + 1, device=target.device).unsqueeze(0) * (target.vocab_size // (count + 1))
        states_1TF, _ = target.encode(tokens_1T, (self.layer, -1), by_model=True)
        entry_1TF, own_1TF = states_1TF.chunk(2, dim=-1)
        refusal = DraftsmithError(
            f"the layers of {target.name} ({target.config.model_type}) behind layer {self.layer} do not go on from "
            "that layer's output alone, so future states cannot be handed to them; use another drafter."
        )
        try:
            final_1TF = self.read_text(entry_1TF, self.new_cache(1, count))
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, IndexError, TypeError, ValueError) as error:  # they look for the tokens as well
            raise refusal from error
        distance = (final_1TF.float() - own_1TF.float()).norm() / own_1TF.float().norm()
        if not distance < TOLERANCE:
            raise refusal
