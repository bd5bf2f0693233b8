"""Builds the native forward of a Llama-shaped model, and makes sure that it says what the model itself says.

Shapes: B rows, M nodes, N pieces of a cache of E entries, R slots, J blocks of a slot, H key heads,
D head width, F width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.native.layers import PackedLayer, packed_parts
from draftsmith.native.library import NativeObject

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Model types of this shape. What they have besides (biases, norms on the heads, windows) is read from the model."""


@dataclass(frozen=True)
class Bound:
    """Where chains of guesses end: behind the first one that makes it unlikely that the target chooses them all.

    With a bound, a chain also has other tokens beside it, which the target may well choose instead.

    Args:
        least: the chain goes on for as long as the chance that the target chooses the same tokens is no smaller; 0 lets
            it go on for ever.
        spread: standard deviation of the difference between the leads that two tokens have over each other by the
            scores of both models.
    """

    least: float = 0.0
    spread: float = 0.0


NO_BOUND = Bound()


@dataclass(frozen=True)
class Noise:
    """What guesses are drawn by.

    Args:
        temperature_B: of every row, fp32 and above 0.
        seeds_B: of every row.
        positions_B: absolute positions of the first guesses.
        stream: a number of `draftsmith.verify.Stream`: `TARGET` for the target's own noise, see `shares_noise` in
            drafters/draws.py; of the others a guess has its depth as index.
    """

    temperature_B: Tensor
    seeds_B: Tensor
    positions_B: Tensor
    stream: int


class NativeDecoder:
    """Reads draft trees through the packed weights of a model, whose layers it shares.

    Args:
        model: after `pack_model`.
        layers: the numbers of those to read, in order.
        windows: the sliding window of every layer, None for full attention.
    """

    def __init__(
        self, model: PreTrainedModel, layers: Sequence[int], windows: Sequence[int | None], max_length: int
    ) -> None:
        config = model.config.get_text_config(decoder=True)
        base: Any = model.base_model
        first = base.layers[layers[0]].self_attn
        linears: list[nn.Module] = []
        norms: list[Tensor] = []
        head_norms: list[Tensor] = []
        for number in layers:
            layer = base.layers[number]
            attention, feed_forward = layer.self_attn, layer.mlp
            linears += [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
            linears += [feed_forward.gate_proj, feed_forward.up_proj, feed_forward.down_proj]
            norms += [layer.input_layernorm.weight, layer.post_attention_layernorm.weight]
            if config.model_type == "qwen3":
                head_norms += [attention.q_norm.weight, attention.k_norm.weight]
        norms.append(base.norm.weight)
        embedding = base.embed_tokens
        head = model.get_output_embeddings()
        rotary = base.rotary_emb
        linears.append(head)
        self._decode = NativeObject(
            "make_decoder",
            "decode",
            embedding.weight.detach() if isinstance(embedding, nn.Embedding) else head.packed,
            *packed_parts(linears),
            [norm.detach() for norm in norms],
            [norm.detach() for norm in head_norms],
            rotary.inv_freq,
            [
                config.hidden_size, config.num_attention_heads, config.num_key_value_heads, first.head_dim,
                config.intermediate_size, head.out_features, max_length,
            ],
            [config.rms_norm_eps, first.scaling, rotary.attention_scaling],
            [windows[layer] or 0 for layer in layers],
        )

    def forward(
        self,
        tokens_BM: Tensor,
        depths_BM: Tensor | None,
        visible_BMM: Tensor | None,
        cached_B: Tensor,
        keys_NEHD: list[Tensor],
        values_NEHD: list[Tensor],
        tables_RJ: Tensor | None,
        slots_B: Tensor | None,
        counts_B: Tensor | None,
        taps: tuple[int, ...],
        columns: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return logits and tapped states, as `Target.forward` does."""
        logits_BMV, features_BMF = self._decode(
            tokens_BM.contiguous(),
            None if depths_BM is None else depths_BM.contiguous(),
            None if visible_BMM is None else visible_BMM.contiguous(),
            cached_B.contiguous(), keys_NEHD, values_NEHD, tables_RJ, slots_B, counts_B, taps,
            None if columns is None else columns.contiguous(),
        )
        return logits_BMV, features_BMF

    def guess(
        self,
        roots_B: Tensor,
        cached_B: Tensor,
        keys_NEHD: list[Tensor],
        values_NEHD: list[Tensor],
        tables_RJ: Tensor | None,
        slots_B: Tensor | None,
        depth: int,
        bound: Bound,
    ) -> tuple[Tensor, Tensor]:
        """Return chains of choices (B, depth) and what comes next to them, as `Backend.guess` does."""
        tokens_BD, others_BD = self._decode.by(
            "guess", roots_B.contiguous(), cached_B.contiguous(), keys_NEHD, values_NEHD, tables_RJ, slots_B, depth,
            bound.least, bound.spread,
        )
        return tokens_BD, others_BD

    def draw(
        self,
        roots_B: Tensor,
        cached_B: Tensor,
        keys_NEHD: list[Tensor],
        values_NEHD: list[Tensor],
        tables_RJ: Tensor | None,
        slots_B: Tensor | None,
        depth: int,
        noise: Noise,
        bound: Bound,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same of chains that are drawn, and what from (B, depth, V; fp32), as `Backend.draw` does."""
        tokens_BD, others_BD, q_BDV = self._decode.by(
            "guess_drawn", roots_B.contiguous(), cached_B.contiguous(), keys_NEHD, values_NEHD, tables_RJ, slots_B,
            depth, noise.temperature_B.contiguous(), noise.seeds_B.contiguous(), noise.positions_B.contiguous(),
            noise.stream, bound.least, bound.spread,
        )
        return tokens_BD, others_BD, q_BDV


def has_native_form(model: PreTrainedModel) -> bool:
    """Whether the model is one that `NativeDecoder` can read: of a known family, plain in all that it assumes."""
    config = model.config.get_text_config(decoder=True)
    if config is not model.config:
        return False  # the text part of a model that sees or hears, one level further down
    if config.model_type not in FAMILIES or config.hidden_act != "silu":
        return False
    base: Any = model.base_model
    first = base.layers[0].self_attn
    if first.head_dim != 2 * base.rotary_emb.inv_freq.numel():
        return False  # rotary positions on a part of the head
    if any(width % 2 for width in (config.hidden_size, config.intermediate_size, first.head_dim)):
        return False
    if any(parameter.dtype != torch.bfloat16 for parameter in model.parameters()):
        return False
    head = model.get_output_embeddings()
    inside = [module for layer in base.layers for module in layer.modules() if isinstance(module, PackedLayer)]
    return isinstance(head, PackedLayer) and head.bias_N is None and len(inside) == 7 * len(base.layers)
