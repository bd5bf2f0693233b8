"""One decoder layer of the Llama kind: grouped-query attention with rotary positions, then a SwiGLU MLP.

It attends in two ways that agree exactly: over committed entries alone, and over committed entries together with the
entries of a node's own drafted path, which no other node sees.

Shapes: B rows, Q queries a row (positions, or nodes of a frontier), S committed entries, D drafted entries on the path
of a query, H query heads, G key/value heads, W head width, P positions in a table.
"""


import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftsmith.drafters.attention.layer_sizes import LayerSizes


class Rotary:
    """Cosines and signed sines of rotary positions (RoPE, arXiv:2104.09864, section 3.4.2), in tables that grow."""

    def __init__(self, sizes: LayerSizes) -> None:
        config = LlamaConfig(
            hidden_size=sizes.head_dim, num_attention_heads=1, head_dim=sizes.head_dim,
            rope_parameters={"rope_theta": 10000.0, "rope_type": "default", **sizes.rope_parameters},
        )
        with torch.device("cpu"):
            rotary = LlamaRotaryEmbedding(config)
        self.frequencies: Tensor = rotary.inv_freq.double()
        self.scale = float(rotary.attention_scaling)
        self._tables: dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}
        # Outgrown ones are kept, because recordings of drafts read them where they lie; all of them are no larger than
        # the one in use.
        self._outgrown: list[tuple[Tensor, Tensor]] = []

    def tables(self, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cosines and sines (P, W), P at least `length`; the first half of the sines is negated."""
        held = self._tables.get((dtype, device))
        if held is None or len(held[0]) < length:
            positions_P1 = torch.arange(max(256, 2 * length), dtype=torch.float64).unsqueeze(1)
            angles_PW = positions_P1 * self.frequencies
            cos_PW = torch.cat([angles_PW.cos()] * 2, dim=1) * self.scale
            sin_PW = torch.cat([-angles_PW.sin(), angles_PW.sin()], dim=1) * self.scale
            if held is not None:
                self._outgrown.append(held)
            held = (cos_PW.to(device, dtype), sin_PW.to(device, dtype))
            self._tables[(dtype, device)] = held
        return held


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads (…, W) by their positions' angles, which broadcast; see `Rotary.tables` for the sign of `sin`."""
    swapped = x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return torch.addcmul(x * cos, swapped, sin)


class RMSNorm(nn.Module):
    """Division by the root mean square, and a learned scale."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Keep shape and dtype."""
        if x.dtype == self.weight.dtype:
            return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon) * self.weight).to(x.dtype)


class Attention(nn.Module):
    """Projections to heads and back. `inputs` is the width from which queries, keys and values are made."""

    def __init__(self, sizes: LayerSizes, inputs: int) -> None:
        super().__init__()
        self.sizes = sizes
        queries, keys = sizes.num_attention_heads * sizes.head_dim, sizes.num_key_value_heads * sizes.head_dim
        self.q_proj = nn.Linear(inputs, queries, bias=sizes.attention_bias)
        self.k_proj = nn.Linear(inputs, keys, bias=sizes.attention_bias)
        self.v_proj = nn.Linear(inputs, keys, bias=sizes.attention_bias)
        self.o_proj = nn.Linear(queries, sizes.hidden_size, bias=False)
        self.merged = False

    def merge(self) -> None:
        """Merge three products into one, in place; for decoding, where every call costs time."""
        self.qkv_proj = _stacked([self.q_proj, self.k_proj, self.v_proj])
        del self.q_proj, self.k_proj, self.v_proj
        self.merged = True

    def project(self, x: Tensor) -> Tensor:
        """Return queries, keys and values of inputs (…, F) as heads (…, H + 2 G, W), not rotated yet."""
        if self.merged:
            heads: Tensor = self.qkv_proj(x)
        else:
            heads = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)
        return heads.unflatten(-1, (-1, self.sizes.head_dim))

    def turn(self, heads: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split projected heads into rotated queries (…, H, W), rotated keys and values (…, G, W)."""
        queries, keys = self.sizes.num_attention_heads, self.sizes.num_key_value_heads
        turned = rotate(heads[..., : queries + keys, :], cos, sin)
        return turned[..., :queries, :], turned[..., queries:, :], heads[..., queries + keys :, :]


class MLP(nn.Module):
    """down(SiLU(gate x) · up x)."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.up_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate_size, sizes.hidden_size, bias=False)
        self.merged = False

    def merge(self) -> None:
        """Merge two products into one, in place."""
        self.gate_up_proj = _stacked([self.gate_proj, self.up_proj])
        del self.gate_proj, self.up_proj
        self.merged = True

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1) if self.merged else (self.gate_proj(x), self.up_proj(x))
        down: Tensor = self.down_proj(F.silu(gate) * up)
        return down


class DecoderLayer(nn.Module):
    """Attention and MLP around a residual stream; the caller makes the inputs of queries, keys and values.

    Args:
        inputs: width from which queries, keys and values are made.
    """

    def __init__(self, sizes: LayerSizes, inputs: int) -> None:
        super().__init__()
        self.self_attn = Attention(sizes, inputs)
        self.mlp = MLP(sizes)
        self.post_attention_layernorm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Apply the rest of the layer to the attention's result (…, H·W) and the residual stream (…, F)."""
        state: Tensor = residual + self.self_attn.o_proj(attended)
        state = state + self.mlp(self.post_attention_layernorm(state))
        return state

    def merge(self) -> None:
        """Merge the products that read the same input, in place; for decoding only."""
        self.self_attn.merge()
        self.mlp.merge()


def attend_committed(q_BQHW: Tensor, keys_BSGW: Tensor, values_BSGW: Tensor, mask_BQS: Tensor | None) -> Tensor:
    """Attend over committed entries; the bool mask may have size 1 for B. Returns (B, Q, H·W)."""
    batch, queries, heads, width = q_BQHW.shape
    kv_heads = keys_BSGW.shape[2]
    mask_B1QS = None if mask_BQS is None else mask_BQS.unsqueeze(1)
    keys_BGSW, values_BGSW = keys_BSGW.transpose(1, 2), values_BSGW.transpose(1, 2)
    if queries == 1:
        # The query heads that share a key head are treated as further queries, so that no key is copied.
        q_BGgW = q_BQHW.reshape(batch, kv_heads, -1, width)
        return F.scaled_dot_product_attention(q_BGgW, keys_BGSW, values_BGSW, mask_B1QS).reshape(batch, 1, -1)
    out_BHQW = F.scaled_dot_product_attention(
        q_BQHW.transpose(1, 2), keys_BGSW, values_BGSW, mask_B1QS, enable_gqa=heads != kv_heads
    )
    return out_BHQW.transpose(1, 2).flatten(2)


def attend_with_path(
    q_BQHW: Tensor, keys_BSGW: Tensor, values_BSGW: Tensor, mask_BQS: Tensor | None,
    path_keys_BQDGW: Tensor, path_values_BQDGW: Tensor,
) -> Tensor:
    """Attend over committed entries and, for each query, over the entries of its own path. Returns (B, Q, H·W).

    `mask_BQS` (bool) hides committed entries; it may have size 1 for B and Q. Committed entries are not copied.
    """
    batch, queries, _, width = q_BQHW.shape
    span, kv_heads = keys_BSGW.shape[1:3]
    q_BQGgW = (q_BQHW * width**-0.5).unflatten(2, (kv_heads, -1))
    folded_BGRW = q_BQGgW.transpose(1, 2).flatten(2, 3)
    scores_BGQgS = (folded_BGRW @ keys_BSGW.permute(0, 2, 3, 1)).unflatten(2, (queries, -1))
    if mask_BQS is not None:
        scores_BGQgS = scores_BGQgS.masked_fill(~mask_BQS[:, None, :, None], -torch.inf)
    own_BQGgD = q_BQGgW @ path_keys_BQDGW.permute(0, 1, 3, 4, 2)
    weights = torch.cat([scores_BGQgS, own_BQGgD.transpose(1, 2)], dim=-1).softmax(-1).to(values_BSGW.dtype)
    committed_BGRW = weights[..., :span].flatten(2, 3) @ values_BSGW.transpose(1, 2)
    own_BQGgW = weights[..., span:].transpose(1, 2) @ path_values_BQDGW.transpose(2, 3)
    out_BQGgW = committed_BGRW.unflatten(2, (queries, -1)).transpose(1, 2) + own_BQGgW
    return out_BQGgW.reshape(batch, queries, -1)


def _stacked(layers: list[nn.Linear]) -> nn.Linear:
    """Return one layer that computes the outputs of all these layers, in order."""
    outputs = sum(layer.out_features for layer in layers)
    whole = nn.Linear(layers[0].in_features, outputs, bias=layers[0].bias is not None, device="meta")
    whole.weight = nn.Parameter(torch.cat([layer.weight for layer in layers]), requires_grad=False)
    if layers[0].bias is not None:
        whole.bias = nn.Parameter(torch.cat([layer.bias for layer in layers]), requires_grad=False)
    return whole
