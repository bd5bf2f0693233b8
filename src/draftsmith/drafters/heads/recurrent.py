"""The recurrent drafter (ReDrafter): a small recurrent network reads each drafted token, besides the target's state.

"Recurrent Drafter for Fast Speculative Decoding in Large Language Models" (arXiv:2403.09919), section 3.1, as its
published code (apple/ml-recurrent-drafter) computes it:

    s_0 = 0        s_d = SiLU(U s_{d-1} + b + W e_{d-1})        logits_d = head([h, s_d])

h is the state of the target that predicted the root, e_0 the root's embedding and e_d that of the d-th drafted token.
Without `rnn`, s_d = s_{d-1} + e_{d-1}. The head is an optional projection, residual blocks x + SiLU(A x + a), and the
output projection. The paper writes s_1 = e_0 instead of a first step from zero. `grow` provides the beam search of
section 3.2 and the packing of shared prefixes of section 3.3, with branching w at all depths, beam w and paths w.

Checkpoints have the published layout: `model_type` recurrent_drafting_drafter, the keys vocab_size, hidden_size,
exit_dim, num_draft_layers and rnn, the tensors input_proj.{weight,bias} (only if exit_dim is not 2 F),
lm_head.{i}.linear.{weight,bias}, lm_head.{num_draft_layers}.weight, rnn_u.{weight,bias} and rnn_w.weight. Only
Draftsmith uses beam_width, beam_length, own_embeddings with embeddings.weight, and draft_vocab_size with d2t.

Shapes: R rows of any origin, F target width, E width of the residual blocks, V vocabulary, W drafted vocabulary.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.drafters.heads.base import ResidualBlock, native_steps
from draftsmith.drafters.heads.recurrent_config import MODEL_TYPE, RecurrentConfig
from draftsmith.drafters.trainable.drafter import FrozenTable, RowwiseDrafter
from draftsmith.native import NativeObject
from draftsmith.native.heads import PROJECT, RECURRENT, SUM, NativeHead, native_heads
from draftsmith.plan import Plan

if TYPE_CHECKING:
    from draftsmith.targets import Target


class RecurrentDrafter(RowwiseDrafter):
    """The drafter itself. Its state, the head's input, is [h, s] (…, 2 F). Weights start as PyTorch's layers do."""

    taps = (-1,)
    can_compile = True
    family_name = "a recurrent drafter"
    model_type = MODEL_TYPE
    config_class = RecurrentConfig
    config: RecurrentConfig

    def __init__(self, config: RecurrentConfig, draft_tokens: Tensor | None = None) -> None:
        super().__init__(config, draft_tokens)
        width = config.hidden_size
        self.embeddings: nn.Module = FrozenTable(config.vocab_size, width)
        if config.own_embeddings:
            self.embeddings = nn.Embedding(config.vocab_size, width)
        self.input_proj: nn.Module = nn.Identity()
        if config.width != 2 * width:
            self.input_proj = nn.Linear(2 * width, config.width)
        blocks = [ResidualBlock(config.width, drawn=True) for _ in range(config.num_draft_layers)]
        self.lm_head = nn.Sequential(*blocks, nn.Linear(config.width, config.scored, bias=False))
        if config.rnn:
            self.rnn_u = nn.Linear(width, width)
            self.rnn_w = nn.Linear(width, width, bias=False)

    @property
    def _table_VF(self) -> Tensor:
        table: Tensor = self.embeddings.weight  # type: ignore[assignment]
        return table

    def start(self, features: Tensor) -> Tensor:
        """Turn tapped states (…, F) into [h, 0]."""
        features = features.to(self._table_VF.dtype)
        return torch.cat([features, torch.zeros_like(features)], dim=-1)

    def stage(self, depth: int, state: Tensor, tokens: Tensor) -> Tensor:
        """Let the recurrent half of [h, s] read the token that was chosen from it."""
        context, recurrent = state.split(self.config.hidden_size, dim=-1)
        read = F.embedding(tokens, self._table_VF)
        recurrent = F.silu(self.rnn_w(read) + self.rnn_u(recurrent)) if self.config.rnn else recurrent + read
        return torch.cat([context, recurrent], dim=-1)

    def score(self, depth: int, state: Tensor) -> Tensor:
        """Return the logits (…, W) over the drafted vocabulary."""
        scores: Tensor = self.lm_head(self.input_proj(state))
        return scores

    def native_form(self) -> NativeObject | None:
        """Return the operator of heads over a recurrent state; all depths share one head."""
        steps = native_steps(self.lm_head[:-1])
        if not isinstance(self.input_proj, nn.Identity):
            steps.insert(0, (PROJECT, [self.input_proj]))
        heads = [NativeHead(steps, self.lm_head[-1])] * self.max_depth
        reads, cell = (RECURRENT, [self.rnn_w, self.rnn_u]) if self.config.rnn else (SUM, [])
        return native_heads(heads, self.config.hidden_size, reads, self._table_VF, cell, self.d2t)

    def default_plan(self) -> Plan:
        """Return the beam search of the config: `beam_width` sequences of `beam_length` tokens, prefixes shared."""
        width, length = self.config.beam_width, self.config.beam_length
        return Plan((1,) * length) if width == 1 else Plan((width,) * length, paths=width, beam=width)

    @property
    def max_depth(self) -> int:
        """The number of depths it was trained for."""
        return self.config.beam_length

    @torch.no_grad()
    def bind(self, target: "Target") -> None:
        """Point the embedding at the target's, unless it has its own."""
        if isinstance(self.embeddings, FrozenTable):
            like = next(self.parameters())
            self.embeddings.weight = target.embedding_weight_VF.detach().to(like)[: self.config.vocab_size]

    def hidden_matrices(self) -> list[nn.Parameter]:
        """Return the recurrent matrices, the projection and the matrices of the residual blocks."""
        tables = ("embeddings.weight", f"lm_head.{self.config.num_draft_layers}.weight")
        return [one for name, one in self.named_parameters() if one.ndim == 2 and name not in tables]

    def describe(self) -> dict[str, Any]:
        """Return the published config.json, and our keys beside its own."""
        return {"architectures": ["Drafter"], **super().describe()}

    def start_new(self, target: "Target") -> None:
        """Initialise the drafter's own embedding, if it has one, from the target's."""
        if self.config.own_embeddings:
            with torch.no_grad():
                self._table_VF.copy_(target.embedding_weight_VF)
