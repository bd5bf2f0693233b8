"""Autoregression on features: one decoder layer whose own output takes the place of the target's next state.

This is what EAGLE (arXiv:2401.15077) and EAGLE-3 (arXiv:2503.01840) share. The entry at position t is the pair (token
t, state that predicted it). Entries of committed tokens are made from the target's true states, those of drafted tokens
from the layer's own outputs: the root's output predicts the first guess, and together with that guess it is the next
entry.

Because there is only one layer, the key and value of an entry depend on that entry alone. So to read a prompt, or the
tokens that a step committed, only the new entries are projected, and the rest of the layer runs at the root alone.

Shapes: B rows, T positions, P positions asked for, Q nodes of a frontier, R = B × Q, N new entries, S committed
entries, d drafted entries on a path, F target width, E width of what attention reads, G key/value heads, W head
width, V vocabulary.
"""

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.drafters.attention.decoder_layer import (
    DecoderLayer,
    RMSNorm,
    Rotary,
    attend_committed,
    attend_with_path,
)
from draftsmith.drafters.attention.eagle_config import FeatureConfig
from draftsmith.drafters.attention.row_cache import NewTokens, RowCache, attached
from draftsmith.drafters.draws import shared_noise
from draftsmith.drafters.grow import grow
from draftsmith.drafters.trainable.batch import TrainingBatch
from draftsmith.drafters.trainable.drafter import FrozenTable, TrainableDrafter
from draftsmith.native import NativeObject
from draftsmith.native.layers import packed_parts
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.types import Context, Draft

if TYPE_CHECKING:
    from draftsmith.targets import KVCache, Target

DraftedPath = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Committed:
    """What all nodes of a draft share: entries of their rows (B, S, G, W), and the angles of the coming depths.

    Args:
        mask_B1S: which entries a row has; None if all rows have all entries.
        cos_BDW, sin_BDW: of the positions of the root and of those after it.
    """

    keys_BSGW: Tensor
    values_BSGW: Tensor
    mask_B1S: Tensor | None
    cos_BDW: Tensor
    sin_BDW: Tensor


State = tuple[Tensor, Tensor | None, Tensor | None, Committed]
"""The layer's output at every node (R, F), keys and values of its path (R, d, G, W), and the committed entries."""


class FeatureDrafter(TrainableDrafter):
    """A drafter of one decoder layer with its own cache; a family defines the layer's inputs and the scoring.

    A family implements `layer`, `fuse`, `read` and `score`, sets `taps`, and describes its checkpoints. This class
    provides caches, chains, trees, sampled drafts, `forward` and `losses`; most families override `losses` and use what
    `unroll` returns. `fuse`, `read` and `score` must treat each position by itself: only the layer's attention may look
    at other positions, because drafting and the training forward lay it out alike.

    In an engine, `attach` allocates the storage (`RowCache`) before a call decodes. Every step then calls `propose` or,
    if nothing is drafted, `follow`. Both first store the entries that the context adds: each row's in the slot that
    `context.slots_B` names, behind the entries it has. `reset_rows` names the rows that ended, whose slots are reused.

    Args:
        config: the sizes of the layer, and the draft to make if no plan was chosen.
    """

    config_class: type[FeatureConfig] = FeatureConfig
    config: FeatureConfig

    reads_prompt = True

    def __init__(self, config: FeatureConfig, draft_tokens: Tensor | None = None) -> None:
        super().__init__(config, draft_tokens)
        self._rotary = Rotary(config)
        self._memory: RowCache | None = None
        self.embedding = FrozenTable(config.vocab_size, config.hidden_size)

    @property
    @abstractmethod
    def layer(self) -> DecoderLayer:
        """The layer, a module of the drafter; its `inputs` is the width E of the first tensor that `read` returns."""

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """Turn tapped states (…, F · taps) into states (…, F) like the layer's own outputs, in its dtype."""

    @abstractmethod
    def read(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Join embedded tokens and states, both (…, F).

        The state is the one that predicted the token: for a committed token the target's state, for a drafted token the
        layer's own output from which it was chosen.

        Returns:
            the input of queries, keys and values (…, E), and the start of the residual stream (…, F).
        """

    @abstractmethod
    def score(self, states: Tensor) -> Tensor:
        """Return the logits (…, W) over the drafted vocabulary for outputs of the layer (…, F)."""

    @property
    def max_depth(self) -> int:
        """The configured depth; the layer itself has no limit."""
        return self.config.depth

    def default_plan(self) -> Plan:
        """Return the tree that config.json asks for."""
        return self.config.plan()

    def hidden_matrices(self) -> list[nn.Parameter]:
        """Return the matrices of the layer."""
        return [parameter for parameter in self.layer.parameters() if parameter.ndim == 2]

    @torch.no_grad()
    def bind(self, target: "Target") -> None:
        """Point the embedding at the target's."""
        self.embedding.weight = target.embedding_weight_VF.detach().to(self.layer.mlp.down_proj.weight)

    def pack(self, pack_layers: Callable[[nn.Module], bool]) -> None:
        """Merge products that read the same input, and pack the layers; native operators draft chains."""
        self.layer.merge()
        super().pack(pack_layers)

    def native_layer(
        self, entry: nn.Module, head: nn.Module, norms: Sequence[RMSNorm], taps: int, keeps_normal: bool = False
    ) -> NativeObject | None:
        """Return the native operator made of the layer, the module that makes its entries, its head and its norms.

        None for odd widths, which the operator does not support.
        """
        if self.config.hidden_size % 2 or self.config.intermediate_size % 2:
            return None
        sizes, attention, mlp = self.config, self.layer.self_attn, self.layer.mlp
        layers = [entry, attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj, head]
        return NativeObject(
            "make_feature_layer", "draft_by_features", *packed_parts(layers), [norm.weight.detach() for norm in norms],
            self.embedding.weight.detach().contiguous(),
            torch.empty(0, dtype=torch.long) if self.d2t is None else self.d2t, self._rotary.frequencies,
            [
                taps, sizes.hidden_size, sizes.num_attention_heads, sizes.num_key_value_heads, sizes.head_dim,
                sizes.intermediate_size, self.config.scored,
            ],
            [sizes.rms_norm_eps, self._rotary.scale], keeps_normal,
        )

    def attach(self, cache: "KVCache", plan: Plan) -> None:
        """Start with empty storage of the same slots and capacity, in the dtype that drafts of this plan read."""
        wanted = (self.config, cache, self.embedding.weight, self._knows(plan))
        if plan.depth and self._memory is not None and self._memory.suits(*wanted):
            self._memory.empty()
            return
        self._memory = None  # released first, so that there are never two
        if plan.depth:
            self._memory = RowCache(*wanted)

    def ready(self, context: Context) -> Hashable | None:
        """Note where rows are; the rest of a draft needs the device alone, if it is known how long rows may be."""
        return None if self._native is not None else RowCache.ready(self._memory, context)

    def _knows(self, plan: Plan) -> bool:
        """Whether the native operator can make drafts of this plan: it makes chains."""
        return self._native is not None and plan.is_chain and not plan.sampled and plan.depth <= self.max_depth

    def propose(self, context: Context, plan: Plan) -> Draft:
        """Draft a chain or tree; chains natively if the layer is native."""
        memory = self._memory
        if memory is None or memory.dtype != torch.bfloat16 or not self._knows(plan):
            return grow(self, context, plan)
        return Draft(*self._chain(context, memory, plan), plan.depth, branching=plan.branching)

    def _chain(self, context: Context, memory: RowCache, plan: Plan) -> tuple[Tensor, Tensor]:
        assert self._native is not None
        tokens_BN, parents_BN = self._native(
            context.tokens_BT, context.features_BTF.bfloat16().contiguous(), context.counts_B, memory.settle(context),
            context.slots_B, memory.keys_RCGW, memory.values_RCGW, plan.depth,
            plan.confidence or 0.0, shared_noise(plan, context),
        )
        return tokens_BN, parents_BN

    def reset_rows(self, rows: list[int]) -> None:
        """Forget rows that ended."""
        if self._memory is not None:
            self._memory.forget(rows)

    def _enter(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        return self.read(F.embedding(tokens, self.embedding.weight), states)

    def _store(self, context: Context) -> tuple[NewTokens, Tensor, Tensor, Tensor, Tensor]:
        """Store the committed tokens.

        Returns:
            where they went; their queries (N, H, W) and residual stream (N, F); the rows' keys and values (B, S, G, W).
        """
        memory = attached(self._memory)
        new = memory.lay_out(context)
        inputs_NE, residual_NF = self._enter(new.tokens_N, self.fuse(new.features_NF))
        q_NHW, keys_BSGW, values_BSGW = memory.store(new, self.layer.self_attn, self._rotary, inputs_NE)
        return new, q_NHW, residual_NF, keys_BSGW, values_BSGW

    def follow(self, context: Context) -> None:
        """Store the committed tokens, without guessing."""
        memory = self._memory
        if self._native is not None and memory is not None and memory.dtype == torch.bfloat16:
            self._chain(context, memory, NO_DRAFT)
        else:
            self._store(context)

    def begin(self, context: Context) -> tuple[Tensor, State]:
        """Store the committed tokens, and run the layer at the roots."""
        new, q_NHW, residual_NF, keys_BSGW, values_BSGW = self._store(context)
        cos_PW, sin_PW = self._rotary.tables(new.span + self.max_depth, q_NHW.dtype, q_NHW.device)
        if isinstance(new.places, slice):
            ahead = slice(new.span - 1, new.span - 1 + self.max_depth)
            cos_BDW, sin_BDW = cos_PW[ahead].unsqueeze(0), sin_PW[ahead].unsqueeze(0)
        else:
            # The positions of padding rows may be anything.
            ahead_BD = (new.last_B1 + torch.arange(self.max_depth, device=q_NHW.device)).clamp(max=len(cos_PW) - 1)
            cos_BDW, sin_BDW = cos_PW[ahead_BD], sin_PW[ahead_BD]
        committed = Committed(keys_BSGW, values_BSGW, new.mask_B1S, cos_BDW, sin_BDW)
        roots = new.roots
        attended_B1A = attend_committed(q_NHW[roots].unsqueeze(1), keys_BSGW, values_BSGW, new.mask_B1S)
        state_BF = self.layer.finish(attended_B1A.squeeze(1).to(residual_NF.dtype), residual_NF[roots])
        return new.tokens_N[roots], (state_BF, None, None, committed)

    def _deeper(
        self, tokens_BQ: Tensor, states_BQF: Tensor, path: DraftedPath | None, committed: Committed,
        mask_BQS: Tensor | None, cos: Tensor, sin: Tensor,
    ) -> tuple[Tensor, DraftedPath]:
        """Read one drafted token per node; return the layer's outputs (B, Q, F), and the paths with one more entry.

        `cos` and `sin` broadcast to (B, Q, heads, W).
        """
        attention = self.layer.self_attn
        inputs_BQE, residual_BQF = self._enter(tokens_BQ, states_BQF)
        heads = attention.project(inputs_BQE).to(committed.keys_BSGW.dtype)
        q_BQHW, k_BQGW, v_BQGW = attention.turn(heads, cos, sin)
        keys_BQdGW, values_BQdGW = k_BQGW.unsqueeze(2), v_BQGW.unsqueeze(2)
        if path is not None:
            keys_BQdGW, values_BQdGW = torch.cat([path[0], keys_BQdGW], 2), torch.cat([path[1], values_BQdGW], 2)
        attended_BQA = attend_with_path(
            q_BQHW, committed.keys_BSGW, committed.values_BSGW, mask_BQS, keys_BQdGW, values_BQdGW
        )
        # The cache may have a wider dtype than the weights.
        attended_BQA = attended_BQA.to(inputs_BQE.dtype)
        return self.layer.finish(attended_BQA, residual_BQF), (keys_BQdGW, values_BQdGW)

    def _advance(self, depth: int, state: State, tokens_R: Tensor) -> State:
        # The roots were already read, together with the committed tokens.
        if depth == 0:
            return state
        states_RF, path_keys, path_values, committed = state
        batch = len(committed.keys_BSGW)
        path = None
        if path_keys is not None and path_values is not None:
            path = (path_keys.unflatten(0, (batch, -1)), path_values.unflatten(0, (batch, -1)))
        cos, sin = committed.cos_BDW[:, depth, None, None], committed.sin_BDW[:, depth, None, None]
        states_BQF, path = self._deeper(
            tokens_R.view(batch, -1), states_RF.unflatten(0, (batch, -1)), path, committed, committed.mask_B1S, cos, sin
        )
        return states_BQF.flatten(0, 1), path[0].flatten(0, 1), path[1].flatten(0, 1), committed

    def step(self, depth: int, state: State, tokens_R: Tensor) -> tuple[Tensor, State]:
        """Return log q (R, V) and the state after this depth."""
        state = self._advance(depth, state, tokens_R)
        log_q_RW = torch.log_softmax(self.score(state[0]).float(), dim=-1)
        return self.to_vocabulary(log_q_RW), state

    def top_k(
        self, depth: int, state: State, tokens_R: Tensor, k: int, scores: bool
    ) -> tuple[Tensor | None, Tensor, State]:
        """Find the best k in the drafted vocabulary, without a softmax unless scores are wanted."""
        state = self._advance(depth, state, tokens_R)
        return *self.best_tokens(self.score(state[0]), k, scores), state

    def unroll(
        self, tokens_BT: Tensor, features_BTF: Tensor, depths: int, positions_BP: Tensor | None = None
    ) -> list[Tensor]:
        """Return the layer's outputs at every depth, (B, P, F); it reads true tokens and, below depth 0, its outputs.

        At depth d, position t attends to the true entries up to t and to its own d entries behind them, as decoding
        does from root t: the "training-time test" of EAGLE-3 (section 3.2). Keys and values are computed at all
        positions, everything else only at `positions_BP`; None stands for all T - d positions that still have a token
        to read.
        """
        attention, length = self.layer.self_attn, tokens_BT.shape[1]
        inputs_BTE, residual_BTF = self._enter(tokens_BT, self.fuse(features_BTF))
        heads = attention.project(inputs_BTE)
        cos_PW, sin_PW = self._rotary.tables(length + depths, heads.dtype, heads.device)
        q_BPHW, k_BTGW, v_BTGW = attention.turn(heads, cos_PW[:length].unsqueeze(1), sin_PW[:length].unsqueeze(1))
        columns_T = torch.arange(length, device=tokens_BT.device)
        batch_B1 = torch.arange(len(tokens_BT), device=tokens_BT.device).unsqueeze(1)
        residual_BPF, given = residual_BTF, positions_BP is not None
        if positions_BP is not None:
            q_BPHW, residual_BPF = q_BPHW[batch_B1, positions_BP], residual_BTF[batch_B1, positions_BP]
            roots_P = positions_BP
        else:
            roots_P = columns_T.unsqueeze(0)
        mask_BPT = columns_T <= roots_P.unsqueeze(2)
        committed = Committed(k_BTGW, v_BTGW, None, cos_PW, sin_PW)
        state_BPF = self.layer.finish(attend_committed(q_BPHW, k_BTGW, v_BTGW, mask_BPT), residual_BPF)
        states, path = [state_BPF], None
        for depth in range(1, min(depths, length)):
            if not given:
                keep = length - depth
                roots_P, mask_BPT, state_BPF = roots_P[:, :keep], mask_BPT[:, :keep], state_BPF[:, :keep]
                path = None if path is None else (path[0][:, :keep], path[1][:, :keep])
            reads_BP = roots_P + depth
            cos, sin = cos_PW[reads_BP].unsqueeze(2), sin_PW[reads_BP].unsqueeze(2)
            tokens_BP = tokens_BT[batch_B1, reads_BP]
            state_BPF, path = self._deeper(tokens_BP, state_BPF, path, committed, mask_BPT, cos, sin)
            states.append(state_BPF)
        return states

    def forward(self, tokens_BT: Tensor, features_BTF: Tensor) -> list[Tensor]:
        """Predict at every depth, see `TrainableDrafter.forward`."""
        return [self.to_vocabulary(self.score(state)) for state in self.unroll(tokens_BT, features_BTF, self.max_depth)]

    def losses(self, examples: TrainingBatch) -> tuple[Tensor, Tensor]:
        """Return the loss of every depth; as in a draft, each reads the layer's own outputs of the depth before."""
        depths = self.max_depth
        soft, labels_RN = examples.soft_labels(depths, self.d2t), examples.labels_RN(depths, self.d2t, self.vocab_size)
        states = self.unroll(examples.tokens_BT, examples.features_BTF, depths, examples.positions_BP)
        scored = [
            examples.loss_and_accuracy(depth, self.score(state_BPF).flatten(0, 1), labels_RN, soft)
            for depth, state_BPF in enumerate(states)
        ]
        return torch.stack([loss for loss, _ in scored]), torch.stack([accuracy for _, accuracy in scored])
