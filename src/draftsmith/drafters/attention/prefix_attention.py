"""One decoder layer over the target's states, with its own cache; its output also depends on the earlier states.

This is the prefix attention of Hydra++ (arXiv:2402.05109, section 4): the state that predicted a token goes through
norm, attention, norm and MLP, and a last norm, as in a Llama of one layer. It reads no tokens. Committed entries are
stored, and the layer runs at the roots alone, because the keys and values of one layer depend only on their own entry.

Shapes: B rows, T positions, P positions asked for, N new entries of all rows, S committed entries, F width of the
target's states, G key/value heads, H heads, W head width.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from draftsmith.drafters.attention.decoder_layer import DecoderLayer, RMSNorm, Rotary, attend_committed
from draftsmith.drafters.attention.layer_sizes import LayerSizes
from draftsmith.drafters.attention.row_cache import NewTokens, RowCache, attached
from draftsmith.types import Context

if TYPE_CHECKING:
    from draftsmith.targets import KVCache


class PrefixLayer(DecoderLayer):
    """The layer with the norm before its attention."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__(sizes, sizes.hidden_size)
        self.input_layernorm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)


class PrefixAttention(nn.Module):
    """The layer and the norm behind it. A new layer adds nothing, so at first the states are only normalised."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        self.sizes = sizes
        layer = PrefixLayer(sizes)
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
        self.layers = nn.ModuleList([layer])
        self.norm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self._rotary = Rotary(sizes)
        self._memory: RowCache | None = None

    @property
    def layer(self) -> PrefixLayer:
        """The only decoder layer."""
        layer = self.layers[0]
        assert isinstance(layer, PrefixLayer)
        return layer

    def attach(self, cache: "KVCache", weight: Tensor) -> None:
        """Start with empty storage of the same slots and capacity, for states of this tensor's dtype and device."""
        if self._memory is not None and self._memory.suits(self.sizes, cache, weight):
            self._memory.empty()
            return
        self._memory = None
        self._memory = RowCache(self.sizes, cache, weight)

    def ready(self, context: Context) -> RowCache | None:
        """See `Drafter.ready`."""
        return RowCache.ready(self._memory, context)

    def forget(self, rows: list[int]) -> None:
        """Forget rows that ended."""
        if self._memory is not None:
            self._memory.forget(rows)

    def store(self, context: Context, dtype: torch.dtype) -> tuple[NewTokens, Tensor, Tensor, Tensor, Tensor]:
        """Store the committed entries.

        Returns:
            where they went; their queries (N, H, W) and states (N, F); the rows' keys and values (B, S, G, W).
        """
        memory, layer = attached(self._memory), self.layer
        new = memory.lay_out(context)
        states_NF = new.features_NF.to(dtype)
        inputs_NF = layer.input_layernorm(states_NF)
        q_NHW, keys_BSGW, values_BSGW = memory.store(new, layer.self_attn, self._rotary, inputs_NF)
        return new, q_NHW, states_NF, keys_BSGW, values_BSGW

    def roots(self, context: Context, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Store the committed entries; return the root tokens (B) and the layer's outputs for their states (B, F)."""
        new, q_NHW, states_NF, keys_BSGW, values_BSGW = self.store(context, dtype)
        roots = new.roots
        attended_B1A = attend_committed(q_NHW[roots].unsqueeze(1), keys_BSGW, values_BSGW, new.mask_B1S)
        state_BF = self.layer.finish(attended_B1A.squeeze(1).to(dtype), states_NF[roots])
        return new.tokens_N[roots], self.norm(state_BF)

    def forward(self, states_BTF: Tensor, positions_BP: Tensor | None = None) -> Tensor:
        """Return the outputs that `roots` would give at every position (B, T, F), or at the given ones (B, P, F)."""
        attention, length = self.layer.self_attn, states_BTF.shape[1]
        heads = attention.project(self.layer.input_layernorm(states_BTF))
        cos_PW, sin_PW = self._rotary.tables(length, heads.dtype, heads.device)
        q_BPHW, k_BTGW, v_BTGW = attention.turn(heads, cos_PW[:length].unsqueeze(1), sin_PW[:length].unsqueeze(1))
        columns_T, residual_BPF = torch.arange(length, device=states_BTF.device), states_BTF
        roots_BP = columns_T.unsqueeze(0)
        if positions_BP is not None:
            batch_B1 = torch.arange(len(states_BTF), device=states_BTF.device).unsqueeze(1)
            q_BPHW, residual_BPF = q_BPHW[batch_B1, positions_BP], states_BTF[batch_B1, positions_BP]
            roots_BP = positions_BP
        attended_BPA = attend_committed(q_BPHW, k_BTGW, v_BTGW, columns_T <= roots_BP.unsqueeze(2))
        normed: Tensor = self.norm(self.layer.finish(attended_BPA, residual_BPF))
        return normed
