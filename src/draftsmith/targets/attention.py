"""Attention of an unmodified transformers model over our own cache, with a draft tree behind every row.

The function below is registered with transformers' attention interface. A forward that carries a `TreePass` writes the
keys and values of its nodes behind the committed tokens and attends under the tree mask; one without is plain causal
attention over its own tokens (training, encoding).

Shapes: B rows, M nodes (root first), S cached tokens looked at, H query heads, G query heads a key head, D head width,
K = B · M nodes of all rows.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.targets.cache.cache import KVCache
from draftsmith.targets.cache.nodes import Nodes, neighbours

ATTENTION_NAME = "draftsmith_tree"
# Arguments that change nothing here. Others (attention sinks, position biases, indices) must not be ignored silently.
HARMLESS = frozenset({
    "dropout", "is_causal", "position_ids", "position_embeddings", "use_cache", "cache_position", "output_attentions",
    "output_hidden_states", "output_router_logits", "return_dict", "past_key_values", "token_type_ids",
    "logits_to_keep",
})


@dataclass
class TreePass:
    """What one verification or prefill needs in every layer.

    Args:
        cache: where keys and values live.
        tokens_BM: token of every node.
        writes_K: the storage entry that every node writes.
        sources_K: the node whose keys and values are written there; None writes each node's own.
        rows: the slots of the rows as a slice, to be read in place; None if `reads_BS` says what to gather.
        reads_BS: the storage entries that are looked at.
        positions_BM: absolute position of every node.
        key_positions_BS: absolute position of every entry that is looked at.
        allowed_BMS: the entries that each node may see, without regard to sliding windows.
        span: S.
    """

    cache: KVCache
    tokens_BM: Tensor
    writes_K: Tensor
    sources_K: Tensor | None
    rows: slice | None
    reads_BS: Tensor | None
    positions_BM: Tensor
    key_positions_BS: Tensor
    allowed_BMS: Tensor
    span: int
    masks: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)

    def store(self, layer: int, key_BHMD: Tensor, value_BHMD: Tensor) -> tuple[Tensor, Tensor]:
        """Write the keys and values of the nodes; return those of all entries looked at, both (B, H, S, D)."""
        sides = []
        for storage_NEHD, new_BHMD in (
            (self.cache.keys_NEHD[layer], key_BHMD), (self.cache.values_NEHD[layer], value_BHMD)
        ):
            new_KHD = new_BHMD.transpose(1, 2).flatten(0, 1)
            if self.sources_K is not None:
                new_KHD = new_KHD.index_select(0, self.sources_K)
            entries_KHD = storage_NEHD.flatten(0, 1)
            entries_KHD.index_copy_(0, self.writes_K, new_KHD)
            if self.reads_BS is None:
                held_BSHD = storage_NEHD[self.rows, : self.span]
            else:
                held_BSHD = entries_KHD.index_select(0, self.reads_BS.flatten()).unflatten(0, self.reads_BS.shape)
            sides.append(held_BSHD.transpose(1, 2))
        return sides[0], sides[1]

    def mask(self, window: int | None, groups: int, dtype: torch.dtype) -> Tensor:
        """Return the additive mask (B, 1, G·M, S) for layers of this window and grouping; built once a pass."""
        key = (window, groups)
        if key not in self.masks:
            allowed_BMS = self.allowed_BMS
            if window is not None:
                distance_BMS = self.positions_BM.unsqueeze(2) - self.key_positions_BS.unsqueeze(1)
                allowed_BMS = allowed_BMS & (distance_BMS < window)
            mask_BMS = torch.zeros(allowed_BMS.shape, dtype=dtype, device=allowed_BMS.device)
            mask_BMS = mask_BMS.masked_fill(~allowed_BMS, float("-inf"))
            self.masks[key] = mask_BMS.repeat(1, groups, 1).unsqueeze(1)
        return self.masks[key]


@dataclass
class ShapeProbe:
    """Records in one forward the shapes and the window of every layer, and which other inputs attention receives."""

    shapes: dict[int, tuple[int, int, int, int]] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)
    softcaps: set[float | None] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)
    modules: dict[int, nn.Module] = field(default_factory=dict)
    """The attending module of every layer."""


def _masked_attention(
    query_BHMD: Tensor,
    key_BHSD: Tensor,
    value_BHSD: Tensor,
    mask: Tensor,
    scaling: float,
    softcap: float | None,
    sinks_HM: Tensor | None,
) -> Tensor:
    if softcap is None and sinks_HM is None:
        return F.scaled_dot_product_attention(query_BHMD, key_BHSD, value_BHSD, attn_mask=mask, scale=scaling)
    scores_BHMS = query_BHMD @ key_BHSD.transpose(2, 3) * scaling
    if softcap is not None:
        scores_BHMS = softcap * torch.tanh(scores_BHMS / softcap)
    scores_BHMS = scores_BHMS + mask
    if sinks_HM is not None:  # one more entry, which takes a share of the attention and contributes nothing
        sinks_BHM1 = sinks_HM.to(scores_BHMS.dtype).expand(len(scores_BHMS), -1, -1).unsqueeze(3)
        scores_BHMS = torch.cat([scores_BHMS, sinks_BHM1], dim=3)
    exact = torch.promote_types(torch.float32, scores_BHMS.dtype)
    weights_BHMS = torch.softmax(scores_BHMS, dim=-1, dtype=exact).to(value_BHSD.dtype)
    return weights_BHMS[..., : key_BHSD.shape[2]] @ value_BHSD


def _causal_mask(length: int, window: int | None, like: Tensor) -> Tensor:
    distance_TT = torch.arange(length, device=like.device).unsqueeze(1) - torch.arange(length, device=like.device)
    allowed_TT = distance_TT >= 0
    if window is not None:
        allowed_TT = allowed_TT & (distance_TT < window)
    return torch.zeros((length, length), dtype=like.dtype, device=like.device).masked_fill(~allowed_TT, float("-inf"))


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    tree_pass: TreePass | None = None,
    shape_probe: ShapeProbe | None = None,
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Attend for one layer; called by transformers with query, key, value as (B, heads, M, D).

    `s_aux` are attention sinks: one score per query head, which competes with the scores of the keys.
    Grouped heads are folded into the query length, so that cached keys are read once and never repeated.
    Returns (B, M, H, D) and no weights, as the interface expects.
    """
    batch, heads, nodes, width = query.shape
    key_heads = key.shape[1]
    groups = heads // key_heads
    scale = width**-0.5 if scaling is None else scaling
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if shape_probe is not None:
        shape_probe.shapes[layer] = (key_heads, key.shape[3], value.shape[1], value.shape[3])
        shape_probe.windows[layer] = sliding_window
        shape_probe.softcaps.add(softcap)
        shape_probe.modules[layer] = module
        shape_probe.unknown |= {name for name, value in others.items() if value is not None} - HARMLESS
        if attention_mask is not None:  # our masks come from the pass, so this is the model's own
            shape_probe.unknown.add("attention_mask")
    if tree_pass is None:
        if key.shape[2] != nodes:
            raise RuntimeError("a model wrapped in a Target reads through the Target, not through caches of its own.")
        mask = _causal_mask(nodes, sliding_window, query).repeat(groups, 1)
        keys_BHSD, values_BHSD = key, value
    else:
        keys_BHSD, values_BHSD = tree_pass.store(layer, key, value)
        mask = tree_pass.mask(sliding_window, groups, query.dtype)
    folded_BHMD = query.reshape(batch, key_heads, groups * nodes, width)
    sinks_HM = None if s_aux is None else s_aux.view(key_heads, groups).repeat_interleave(nodes, dim=1)
    out_BHMD = _masked_attention(folded_BHMD, keys_BHSD, values_BHSD, mask, scale, softcap, sinks_HM)
    return out_BHMD.reshape(batch, heads, nodes, -1).transpose(1, 2).contiguous(), None


def lay_out_pass(cache: KVCache, nodes: Nodes, max_length: int) -> TreePass:
    """Determine where every node is written, its position, and what it may see.

    A node that its row does not have is read like the last node that it has, and written in the same place.
    """
    tokens_BM, cached_B1 = nodes.tokens_BM, nodes.cached_B.unsqueeze(1)
    batch, count = tokens_BM.shape
    device = tokens_BM.device
    number_BM = torch.arange(count, device=device).expand(batch, -1)
    depths_BM, visible_BMM = nodes.depths_BM, nodes.visible_BMM
    if depths_BM is None or visible_BMM is None:
        depths_BM = number_BM
        visible_BMM = torch.ones((count, count), dtype=torch.bool, device=device).tril().expand(batch, -1, -1)
    sources_K = None
    if nodes.counts_B is not None:
        first_B1 = torch.arange(batch, device=device).unsqueeze(1) * count
        number_BM = torch.minimum(number_BM, nodes.counts_B.unsqueeze(1) - 1)
        sources_K = (first_B1 + number_BM).flatten()
        tokens_BM, depths_BM = tokens_BM.gather(1, number_BM), depths_BM.gather(1, number_BM)
        visible_BMM = visible_BMM.gather(1, number_BM.unsqueeze(2).expand(-1, -1, count))
    # Guesses beyond the context can never be committed; clamping keeps learned position tables from overflowing.
    positions_BM = (cached_B1 + depths_BM).clamp(max=max_length - 1)
    writes_K = cache.entries(nodes.slots_B, cached_B1 + number_BM).flatten()
    columns_S = nodes.columns_S
    if columns_S is None:
        columns_S = torch.arange(int(nodes.cached_B.max()) + count, device=device)
    node_BS = columns_S - cached_B1
    inside_BS = (node_BS >= 0) & (node_BS < count)
    node_BS = node_BS.clamp(0, count - 1)
    key_positions_BS = torch.where(inside_BS, positions_BM.gather(1, node_BS), columns_S)
    tree_BMS = visible_BMM.gather(2, node_BS.unsqueeze(1).expand(-1, count, -1))
    allowed_BMS = (columns_S < cached_B1).unsqueeze(1) | (tree_BMS & inside_BS.unsqueeze(1))
    rows = neighbours(nodes.slots_B, batch) if cache.tables_RJ is None else None
    reads_BS = None
    if rows is None:
        # Entries behind a row's last node are not looked up; the last node is read in their place, and masked.
        reads_BS = cache.entries(nodes.slots_B, torch.minimum(columns_S, cached_B1 + number_BM[:, -1:]))
    return TreePass(
        cache, tokens_BM, writes_K, sources_K, rows, reads_BS, positions_BM, key_positions_BS, allowed_BMS,
        columns_S.shape[0],
    )
