"""EAGLE: one decoder layer over (next token, feature) pairs predicts the next feature, and the target's head scores it.

"EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" (arXiv:2401.15077), section 4:

    state_t = layer(fc(cat(emb[token_t], feature_t)))_{<= t}        logits_t = target's head · state_t

feature_t is the state that predicted token_t, so token and feature are shifted against each other by one as in the
paper. As published, the layer has no norm before its attention. state_t takes the place of feature_{t+1} at the next
depth. With the tree "dynamic" it is EAGLE-2 (arXiv:2406.16858): the same weights, another draft.

Layout, as in the authors' code and checkpoints: a Llama-like config.json, often with the key `bias`, tensors
`fc.weight`, `fc.bias`, `layers.0.self_attn.{q,k,v,o}_proj.weight`, `layers.0.mlp.{gate,up,down}_proj.weight` and
`layers.0.post_attention_layernorm.weight`; a copy of the target's `embed_tokens.weight` is ignored. The keys that
shape the draft, and `draft_vocab_size` with the tensor `d2t` (token ids), are Draftsmith's own.

Shapes: B sequences, T tokens, L tokens of one of them, P positions trained on, F target width, V vocabulary,
W drafted vocabulary.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.drafters.attention.decoder_layer import DecoderLayer
from draftsmith.drafters.attention.eagle_config import ARCHITECTURES, EagleConfig, is_eagle
from draftsmith.drafters.attention.feature_drafter import FeatureDrafter
from draftsmith.drafters.trainable.batch import TrainingBatch
from draftsmith.drafters.trainable.divergence import Divergence, divergence, entropy
from draftsmith.drafters.trainable.drafter import FrozenTable
from draftsmith.native import NativeObject

if TYPE_CHECKING:
    from draftsmith.targets import Target

NOISE_LENGTH = 512


class Eagle(FeatureDrafter):
    """EAGLE and EAGLE-2. Weights start as PyTorch's linear layers do, as in the authors' code."""

    taps = (-1,)
    family_name = "an EAGLE drafter"
    model_type = "llama"
    config_class = EagleConfig
    config: EagleConfig

    def __init__(self, config: EagleConfig, draft_tokens: Tensor | None = None) -> None:
        super().__init__(config, draft_tokens)
        width = config.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=config.bias)
        self.layers = nn.ModuleList([DecoderLayer(config, width)])
        self.head: nn.Module = FrozenTable(config.scored, width)

    @property
    def layer(self) -> DecoderLayer:
        """The only decoder layer."""
        layer = self.layers[0]
        assert isinstance(layer, DecoderLayer)
        return layer

    def fuse(self, features: Tensor) -> Tensor:
        """Take the target's states as they are."""
        return features.to(self.embedding.weight.dtype)

    def read(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Join both; the residual stream starts from the result too."""
        joined: Tensor = self.fc(torch.cat([embedded, states], dim=-1))
        return joined, joined

    def score(self, states: Tensor) -> Tensor:
        """Score as the target does, by its head."""
        return self.logit_form(self.head(states))

    def losses(self, examples: TrainingBatch) -> tuple[Tensor, Tensor]:
        """Return the next feature's regression plus the cross-entropy with the target's distribution (section 4.2).

        The target's distribution is that of its head on the true feature; another divergence replaces the cross-entropy
        if one is chosen. As in the paper, only the first depth is trained, on noisy features; the noise stands for the
        inputs of the depths below.
        """
        positions_BP = examples.positions_BP
        features_BTF = self.fuse(examples.features_BTF)
        noisy_BTF = features_BTF + self._noise_BTF(examples, features_BTF) if self.config.noise else features_BTF
        state_BPF = self.unroll(examples.tokens_BT, noisy_BTF, 1, positions_BP)[0]
        batch_B1 = torch.arange(len(positions_BP), device=positions_BP.device).unsqueeze(1)
        next_BPF = features_BTF[batch_B1, positions_BP + 1]
        distance_BPF = F.smooth_l1_loss(state_BPF.float(), next_BPF.float(), reduction="none")
        regression = examples.mean(distance_BPF.mean(-1).flatten(), 0)
        scores_RW = self.score(state_BPF).flatten(0, 1).float()
        with torch.no_grad():
            own_RW = self.score(next_BPF).flatten(0, 1).float()
        distance = examples.mean(self._distance_R(examples.divergence, own_RW, scores_RW), 0)
        loss = self.config.feature_weight * regression + self.config.token_weight * distance
        labels_R = examples.labels_RN(1, self.d2t, self.vocab_size)[:, 0]
        accuracy = examples.mean((scores_RW.detach().argmax(-1) == labels_R).float(), 0)
        return loss.unsqueeze(0), accuracy.unsqueeze(0)

    def _distance_R(self, kind: Divergence, own_RW: Tensor, scores_RW: Tensor) -> Tensor:
        """Return the distance of the scores from the target's own."""
        if kind == "forward_kl":
            return scores_RW.logsumexp(-1) - (own_RW.softmax(-1) * scores_RW).sum(-1)
        log_p_RW = own_RW.log_softmax(-1)
        return divergence(kind, log_p_RW, scores_RW, entropy(log_p_RW))

    def _noise_BTF(self, examples: TrainingBatch, features_BTF: Tensor) -> Tensor:
        """Draw the noise of every row by itself, so that neither neighbours nor padding change it.

        As in the authors' code, the noise is weaker for longer texts. The length counts up to the last learnt token,
        because nothing behind it affects the loss.
        """
        noise_BTF, width = torch.zeros_like(features_BTF), features_BTF.shape[2]
        generator = torch.Generator(features_BTF.device)
        for row, length in enumerate(self._lengths(examples)):
            generator.manual_seed((examples.seed + row) % 2**63)
            draw_LF = torch.rand(
                (length, width), generator=generator, device=features_BTF.device, dtype=features_BTF.dtype
            )
            noise_BTF[row, :length] = (draw_LF - 0.5) * (self.config.noise * NOISE_LENGTH / max(1, length))
        return noise_BTF

    @staticmethod
    def _lengths(examples: TrainingBatch) -> list[int]:
        """Return the number of tokens of each row up to its last learnt one."""
        rows, most = examples.tokens_BT.shape
        if examples.learnt_BT is None:
            return [most] * rows
        places_T = torch.arange(1, most + 1, device=examples.learnt_BT.device)
        lengths: list[int] = (examples.learnt_BT * places_T).amax(1).tolist()
        return lengths

    @torch.no_grad()
    def bind(self, target: "Target") -> None:
        """Point embedding and head at the target's."""
        super().bind(target)
        head_VF = target.head_weight_VF.detach().to(self.fc.weight)
        assert isinstance(self.head, FrozenTable)
        self.head.weight = head_VF if self.d2t is None else head_VF[self.d2t]
        self.logit_form = target.logit_form

    def pack(self, pack_layers: Callable[[nn.Module], bool]) -> None:
        """Pack the borrowed head too, because scoring is a product like any other."""
        assert isinstance(self.head, FrozenTable)
        self.head = self.head.as_layer()
        super().pack(pack_layers)

    def native_form(self) -> NativeObject | None:
        """Return the native operator; it drafts the best tokens, which are the same whatever the form of the logits."""
        norm = self.layer.post_attention_layernorm
        return self.native_layer(self.fc, self.head, [norm], self.config.hidden_size)

    def hidden_matrices(self) -> list[nn.Parameter]:
        """Return the matrices of the layer and of the projection that joins its inputs."""
        return [self.fc.get_parameter("weight"), *super().hidden_matrices()]

    def describe(self) -> dict[str, Any]:
        """Return the published keys and ours."""
        return {"architectures": [ARCHITECTURES[0]], **super().describe()}

    @classmethod
    def recognises(cls, config: Mapping[str, Any]) -> bool:
        """Recognise it by the architecture, or by what a Llama lacks."""
        return is_eagle(config)

    @classmethod
    def read_config(
        cls, config: Mapping[str, Any], origin: Path, tensors: Mapping[str, Tensor]
    ) -> tuple[EagleConfig, Tensor | None]:
        """Return what config.json and the tensors say; if the key `bias` is missing, the tensors decide that too."""
        draft_tokens = tensors.get("d2t")
        known = {**config, "bias": bool(config.get("bias", "fc.bias" in tensors))}
        scored = 0 if draft_tokens is None else len(draft_tokens)
        return EagleConfig.from_json(known, origin, draft_vocab_size=scored), draft_tokens

    @torch.no_grad()
    def load_published(self, tensors: Mapping[str, Tensor], origin: Path) -> None:
        """Copy checkpoint tensors in; the embedding in published files is the target's own and is ignored."""
        own = {name: tensor for name, tensor in tensors.items() if name != "embed_tokens.weight"}
        super().load_published(own, origin)
