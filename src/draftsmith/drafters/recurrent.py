"""The recurrent drafter (ReDrafter): a small recurrent network reads each drafted token, beside the target's state.

"Recurrent Drafter for Fast Speculative Decoding in Large Language Models" (arXiv:2403.09919), section 3.1, as its
published code (apple/ml-recurrent-drafter) computes it:

    s_0 = 0        s_d = SiLU(U s_{d-1} + b + W e_{d-1})        logits_d = head([h, s_d])

h is the state of the target that predicted the root, e_0 the root's embedding and e_d that of the d-th drafted token.
Without `rnn`, s_d = s_{d-1} + e_{d-1}. The head is an optional projection, residual blocks x + SiLU(A x + a), and the
output projection. The paper writes s_1 = e_0 instead of a first step from zero. The beam search of section 3.2 and the
packing of shared prefixes of section 3.3 are those of `grow`, with branching w at all depths, beam w and paths w.

Checkpoints have the published layout: `model_type` recurrent_drafting_drafter, the keys vocab_size, hidden_size,
exit_dim, num_draft_layers and rnn, the tensors input_proj.{weight,bias} (only if exit_dim is not 2 F),
lm_head.{i}.linear.{weight,bias}, lm_head.{num_draft_layers}.weight, rnn_u.{weight,bias} and rnn_w.weight. Ours alone
are beam_width, beam_length, own_embeddings with embeddings.weight, and draft_vocab_size with d2t.

Shapes: R rows of any origin, F target width, E width of the residual blocks, V vocabulary, W drafted vocabulary.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.drafters.family import Family
from draftsmith.drafters.heads import ResidualBlock, native_steps
from draftsmith.drafters.recurrent_config import MODEL_TYPE, RecurrentConfig, RecurrentOptions
from draftsmith.drafters.trainable import FrozenTable, RowwiseDrafter, check_target
from draftsmith.native.heads import PROJECT, RECURRENT, SUM, NativeHead, native_heads
from draftsmith.plan import Plan
from draftsmith.types import DraftsmithError

if TYPE_CHECKING:
    from draftsmith.target import Target


class RecurrentDrafter(RowwiseDrafter):
    """The drafter itself. Its state is [h, s] (…, 2 F): what the head reads. Weights start as PyTorch's layers do."""

    taps = (-1,)
    can_compile = True
    family_name = "a recurrent drafter"

    def __init__(self, config: RecurrentConfig, draft_tokens: Tensor | None = None) -> None:
        """Build an untrained one; `draft_tokens` (W) lists the tokens to score where the config limits them."""
        super().__init__()
        self.config = config
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
        self.limit_vocabulary(draft_tokens, config.draft_vocab_size)

    @property
    def _table_VF(self) -> Tensor:
        table: Tensor = self.embeddings.weight  # type: ignore[assignment]
        return table

    def start(self, features: Tensor) -> Tensor:
        """Turn tapped states (…, F) into [h, 0]."""
        features = features.to(self._table_VF.dtype)
        return torch.cat([features, torch.zeros_like(features)], dim=-1)

    def stage(self, depth: int, state: Tensor, tokens: Tensor) -> Tensor:
        """Let the recurrent half of [h, s] read the token chosen from it."""
        context, recurrent = state.split(self.config.hidden_size, dim=-1)
        read = F.embedding(tokens, self._table_VF)
        recurrent = F.silu(self.rnn_w(read) + self.rnn_u(recurrent)) if self.config.rnn else recurrent + read
        return torch.cat([context, recurrent], dim=-1)

    def score(self, depth: int, state: Tensor) -> Tensor:
        """Return the logits (…, W) over the drafted vocabulary."""
        scores: Tensor = self.lm_head(self.input_proj(state))
        return scores

    def native_form(self) -> Any:
        """Return the operator of heads over a recurrent state; all depths have the same one."""
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
        """The depths it was trained for."""
        return self.config.beam_length

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.config.vocab_size

    @torch.no_grad()
    def bind(self, target: "Target") -> None:
        """Point the embedding at the target's, unless it has its own."""
        if isinstance(self.embeddings, FrozenTable):
            like = next(self.parameters())
            self.embeddings.weight = target.embedding_weight_VF.detach().to(like)[: self.config.vocab_size]

    def hidden_matrices(self) -> list[nn.Parameter]:
        """Return the recurrent matrices, the projection and those of the residual blocks."""
        tables = ("embeddings.weight", f"lm_head.{self.config.num_draft_layers}.weight")
        return [one for name, one in self.named_parameters() if one.ndim == 2 and name not in tables]

    def sizes(self) -> dict[str, Any]:
        """Return the config without what only shapes the drafts."""
        sizes = asdict(self.config) | {"exit_dim": self.config.width}
        return {name: value for name, value in sizes.items() if name not in ("beam_width", "beam_length")}

    def restricted(self, draft_tokens: Tensor) -> "RecurrentDrafter":
        """Return a copy that scores only these tokens (W), with the rows of the head that stand for them."""
        if self.d2t is not None:
            raise DraftsmithError(f"this drafter scores {len(self.d2t)} tokens only; start from a whole one.")
        count = len(draft_tokens)
        config = replace(self.config, draft_vocab_size=count, beam_width=min(self.config.beam_width, count))
        fewer = RecurrentDrafter(config, draft_tokens.to(self.device)).to(next(self.parameters()))
        head = f"lm_head.{config.num_draft_layers}.weight"
        tensors = self.state_dict()
        fewer.load_state_dict(tensors | {head: tensors[head][draft_tokens], "d2t": fewer.d2t})
        return fewer

    def describe(self) -> dict[str, Any]:
        """Return the published config.json, and our keys beside its own."""
        return {"architectures": ["Drafter"], "model_type": MODEL_TYPE, **self.config.to_json()}

    @classmethod
    def recognises(cls, config: Mapping[str, Any]) -> bool:
        """Tell by the model_type."""
        return config.get("model_type") == MODEL_TYPE

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], origin: Path, target: "Target | None", tensors: Mapping[str, Tensor]
    ) -> "RecurrentDrafter":
        """Build what config.json describes."""
        sizes = RecurrentConfig.from_json(config, origin)
        if target is not None:
            made_for = {"hidden_size": sizes.hidden_size, "vocab_size": sizes.vocab_size}
            check_target(origin.parent, made_for, target.facts())
        elif not sizes.own_embeddings:
            raise DraftsmithError(f"{origin.parent} borrows its target's embedding; load it with that target.")
        return cls(sizes, tensors.get("d2t"))


def make_recurrent(options: RecurrentOptions, target: "Target", draft_tokens: Tensor | None) -> RecurrentDrafter:
    """Make an untrained drafter; an embedding of its own starts as the target's."""
    config = RecurrentConfig(target.vocab_size, target.hidden_size, **options.model_dump())
    drafter = RecurrentDrafter(config, draft_tokens)
    if config.own_embeddings:
        with torch.no_grad():
            drafter._table_VF.copy_(target.embedding_weight_VF)
    return drafter


FAMILY = Family(
    "recurrent", "recurrent drafter (ReDrafter): one small RNN and a beam search (arXiv:2403.09919)",
    RecurrentOptions, make_recurrent, RecurrentDrafter.load, RecurrentDrafter.recognises, trainable=True,
    reopen=RecurrentDrafter.from_pretrained,
)
