"""EAGLE-3: one decoder layer over tokens and fused states of several layers, with its own head, trained as it is used.

"EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test" (arXiv:2503.01840),
section 3:

    g_t = fc(cat(low_t, middle_t, high_t))            the target's states, where there are any
    a_t = g_t, or at drafted positions the layer's own output at the position before
    state_t = layer(cat(norm_e(emb[token_t]), norm_h(a_t)))_{<= t}       logits_t = lm_head(norm(state_t))

Attention reads both halves. The residual stream starts from a_t (from norm_h(a_t) with `norm_before_residual`). No
feature is regressed: every depth is trained on its tokens, and reads the outputs of the depths above.

Layout: config.json with `architectures: ["LlamaForCausalLMEagle3"]` and `draft_vocab_size`; tensors `fc.weight`,
`midlayer.{input_layernorm,hidden_norm,post_attention_layernorm}.weight`, `midlayer.self_attn.{q,k,v,o}_proj.weight`,
`midlayer.mlp.{gate,up,down}_proj.weight`, `norm.weight`, `lm_head.weight`, `d2t` (target id minus drafted id) and `t2d`
(which target ids are drafted). The speculators layout (`speculators_model_type: eagle3`, `layers.0.` for `midlayer.`)
is read too. Copies of the target's `embed_tokens.weight` are passed over; the keys that shape the draft are ours.

Shapes: B sequences, T tokens, P positions trained on, R = B × P, N depths, F target width, W drafted vocabulary.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from draftsmith.drafters.attention.decoder_layer import DecoderLayer, RMSNorm
from draftsmith.drafters.attention.eagle_config import Eagle3Config, is_eagle3, taps_from_json
from draftsmith.drafters.attention.feature_drafter import FeatureDrafter
from draftsmith.drafters.attention.layer_sizes import LayerSizes
from draftsmith.drafters.trainable.batch import TrainingBatch
from draftsmith.native import NativeObject
from draftsmith.types import DraftsmithError

if TYPE_CHECKING:
    from draftsmith.targets import Target

ARCHITECTURE = "LlamaForCausalLMEagle3"


class Eagle3Layer(DecoderLayer):
    """The layer with a norm for each half of its input."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__(sizes, 2 * sizes.hidden_size)
        self.input_layernorm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.hidden_norm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)


class Eagle3(FeatureDrafter):
    """EAGLE-3. Weights start as PyTorch's linear layers do."""

    family_name = "an EAGLE-3 drafter"
    model_type = "llama"
    config_class = Eagle3Config
    config: Eagle3Config

    def __init__(self, config: Eagle3Config, draft_tokens: Tensor | None = None) -> None:
        super().__init__(config, draft_tokens)
        self.taps, width = config.taps, config.hidden_size
        self.fc = nn.Linear(len(self.taps) * width, width, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.scored, bias=False)

    def start_new(self, target: "Target") -> None:
        """Start the head as a copy of the target's, unless the config says otherwise."""
        if self.config.init_head_from_target:
            head_VF = target.logit_form.scaled(target.head_weight_VF.detach().float().cpu())
            with torch.no_grad():
                self.lm_head.weight.copy_(head_VF if self.d2t is None else head_VF[self.d2t])

    @property
    def layer(self) -> Eagle3Layer:
        """The only decoder layer."""
        return self.midlayer

    def fuse(self, features: Tensor) -> Tensor:
        """Project the tapped states to one state."""
        fused: Tensor = self.fc(features.to(self.embedding.weight.dtype))
        return fused

    def read(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Concatenate both halves, each normalised; the residual stream starts from the state."""
        normal = self.midlayer.hidden_norm(states)
        joined = torch.cat([self.midlayer.input_layernorm(embedded), normal], dim=-1)
        return joined, normal if self.config.norm_before_residual else states

    def score(self, states: Tensor) -> Tensor:
        """Apply the head; the state that is fed back is the one before this norm."""
        scores: Tensor = self.lm_head(self.norm(states))
        return scores

    def native_form(self) -> NativeObject | None:
        """Return the native operator."""
        layer = self.midlayer
        norms = [layer.post_attention_layernorm, layer.input_layernorm, layer.hidden_norm, self.norm]
        taps = len(self.taps) * self.config.hidden_size
        return self.native_layer(self.fc, self.lm_head, norms, taps, self.config.norm_before_residual)

    def losses(self, examples: TrainingBatch) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy of every depth, mixed with the divergence from the target if that is requested.

        This is the training-time test (section 3.2): depths below the first read the layer's own outputs.
        """
        depths = self.max_depth
        soft = examples.soft_labels(depths, self.d2t)
        labels_RN = examples.labels_RN(depths, self.d2t, self.vocab_size)
        losses, accuracies = [], []
        states = self.unroll(examples.tokens_BT, examples.features_BTF, depths, examples.positions_BP)
        for depth, state_BPF in enumerate(states):
            loss, accuracy = examples.loss_and_accuracy(depth, self.score(state_BPF).flatten(0, 1), labels_RN, soft)
            losses.append(loss)
            accuracies.append(accuracy)
        return torch.stack(losses), torch.stack(accuracies)

    def hidden_matrices(self) -> list[nn.Parameter]:
        """Return the matrices of the layer and of the fusing projection."""
        return [self.fc.get_parameter("weight"), *super().hidden_matrices()]

    def describe(self) -> dict[str, Any]:
        """Return the published keys and ours."""
        return {"architectures": [ARCHITECTURE], **super().describe()}

    @classmethod
    def recognises(cls, config: Mapping[str, Any]) -> bool:
        """Recognise it by the architecture, or as a Llama of one layer with a drafted vocabulary."""
        return is_eagle3(config)

    @classmethod
    def read_config(
        cls, config: Mapping[str, Any], origin: Path, tensors: Mapping[str, Tensor]
    ) -> tuple[Eagle3Config, Tensor | None]:
        """Return what config.json and the tensors say; DraftsmithError for a model that computes something else."""
        # The speculators layout has the layer's sizes in a nested object, and another default.
        nested = config.get("transformer_layer_config")
        flat = config if nested is None else {**nested, **config}
        if flat.get("norm_before_fc") or flat.get("eagle_config", {}).get("use_aux_hidden_state") is False:
            raise DraftsmithError(f"{origin} fuses states in another way than EAGLE-3 published; retrain the drafter.")
        tokens = draft_tokens(flat, tensors, origin)
        told = Eagle3Config.from_json(
            flat, origin, draft_vocab_size=0 if tokens is None else len(tokens), taps=taps_from_json(flat),
            norm_before_residual=bool(flat.get("norm_before_residual", nested is not None)),
        )
        width = flat.get("target_hidden_size") or told.hidden_size
        if width != told.hidden_size:
            raise DraftsmithError(
                f"{origin} has states {told.hidden_size} wide for a target of {width}; use a drafter as wide as its "
                "target."
            )
        return told, tokens

    def to_published(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Write the drafted vocabulary as offsets and as a mask."""
        if self.d2t is None:
            return tensors
        mask_V = torch.zeros(self.vocab_size, dtype=torch.bool, device=self.d2t.device)
        mask_V[self.d2t] = True
        return tensors | {"d2t": self.d2t - torch.arange(len(self.d2t), device=self.d2t.device), "t2d": mask_V}

    @torch.no_grad()
    def load_published(self, tensors: Mapping[str, Tensor], origin: Path) -> None:
        """Copy checkpoint tensors in, also those of the speculators layout; the target's embedding is ignored."""
        own = {
            name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name: tensor
            for name, tensor in tensors.items() if name not in ("embed_tokens.weight", "d2t", "t2d")
        }
        if self.d2t is not None and "d2t" in tensors:
            own["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        super().load_published(own, origin)


def draft_tokens(config: Mapping[str, Any], tensors: Mapping[str, Tensor], origin: Path) -> Tensor | None:
    """Return the token ids that a checkpoint scores (W), or None for all; the checkpoint's mask has to agree."""
    whole = config.get("vocab_size")
    size = config.get("draft_vocab_size") or whole
    offsets_W = tensors.get("d2t")
    if offsets_W is None or (size == whole and not offsets_W.any()):
        if size != whole:
            raise DraftsmithError(f"{origin.parent} scores {size} tokens but lacks the tensor d2t; restore it.")
        return None
    tokens_W = offsets_W.to(torch.int64) + torch.arange(len(offsets_W))
    mask_V = tensors.get("t2d")
    if mask_V is not None:
        listed_W = mask_V.nonzero().squeeze(1)
        if len(listed_W) != len(tokens_W) or not torch.equal(listed_W, tokens_W.sort().values):
            raise DraftsmithError(f"d2t and t2d in {origin.parent} name different tokens; restore both.")
    return tokens_W
