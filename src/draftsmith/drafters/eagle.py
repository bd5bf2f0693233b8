"""EAGLE: one decoder layer over (next token, feature) pairs predicts the next feature, and the target's head scores it.

"EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" (arXiv:2401.15077), section 4:

    state_t = layer(fc(cat(emb[token_t], feature_t)))_{<= t}        logits_t = target's head · state_t

feature_t is the state that predicted token_t, so token and feature are shifted against each other by one as in the
paper; the layer has no norm before its attention, as published. state_t stands in for feature_{t+1} at the next depth.
With the tree "dynamic" it is EAGLE-2 (arXiv:2406.16858): the same weights, another draft.

Layout, as in the authors' code and checkpoints: a Llama-like config.json, often with the key `bias`, tensors
`fc.weight`, `fc.bias`, `layers.0.self_attn.{q,k,v,o}_proj.weight`, `layers.0.mlp.{gate,up,down}_proj.weight` and
`layers.0.post_attention_layernorm.weight`; a copy of the target's `embed_tokens.weight` is passed over. The keys that
shape the draft, and `draft_vocab_size` with the tensor `d2t` (token ids), are ours.

Shapes: B sequences, T tokens, P positions trained on, F target width, V vocabulary, W drafted vocabulary.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.drafters.decoder_layer import DecoderLayer, LayerSizes
from draftsmith.drafters.eagle_config import EagleOptions, Tree, sizes_from_json, sizes_to_json
from draftsmith.drafters.family import Compared, Family
from draftsmith.drafters.feature_drafter import FeatureDrafter
from draftsmith.drafters.lesson import Lesson
from draftsmith.drafters.static_tree import EAGLE_TREE
from draftsmith.drafters.storage import TENSOR_NAMES
from draftsmith.drafters.trainable import FrozenTable, check_target
from draftsmith.types import DraftsmithError

if TYPE_CHECKING:
    from draftsmith.target import Target

ARCHITECTURES = ("LlamaForCausalLMEagle", "EagleLlamaForCausalLM")
NOISE_LENGTH = 512
JOINING = "fc.weight"


class Eagle(FeatureDrafter):
    """EAGLE and EAGLE-2. Weights start as PyTorch's linear layers do, as in the authors' code.

    Args:
        bias: whether `fc` has one.
        draft_tokens: the tokens to score (W), or None for all.
        options: the weights of the loss, and the noise; only training reads them.
    """

    taps = (-1,)
    family_name = "an EAGLE drafter"

    def __init__(
        self, sizes: LayerSizes, vocab_size: int, tree: Tree, bias: bool = False, draft_tokens: Tensor | None = None,
        options: EagleOptions | None = None,
    ) -> None:
        super().__init__(sizes, vocab_size, tree)
        self.options = options or EagleOptions()
        width = sizes.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=bias)
        self.layers = nn.ModuleList([DecoderLayer(sizes, width)])
        self.limit_vocabulary(draft_tokens, 0 if draft_tokens is None else len(draft_tokens))
        self.head: nn.Module = FrozenTable(vocab_size if draft_tokens is None else len(draft_tokens), width)

    @property
    def layer(self) -> DecoderLayer:
        """The only one."""
        layer = self.layers[0]
        assert isinstance(layer, DecoderLayer)
        return layer

    def fuse(self, features: Tensor) -> Tensor:
        """Take the target's states as they are."""
        return features.to(self.embedding.weight.dtype)

    def read(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Join both; the residual stream starts from the same."""
        joined: Tensor = self.fc(torch.cat([embedded, states], dim=-1))
        return joined, joined

    def score(self, states: Tensor) -> Tensor:
        """Apply the target's head."""
        scores: Tensor = self.head(states)
        return scores

    def losses(self, lesson: Lesson) -> tuple[Tensor, Tensor]:
        """Return the regression of the next feature plus the cross-entropy against the target's law (section 4.2).

        The law is the target's head on its true feature. Only the first depth is trained, as in the paper, on features
        with noise, which stands for what the depths below will see.
        """
        positions_BP = lesson.positions_BP
        features_BTF = self.fuse(lesson.features_BTF)
        noisy_BTF = features_BTF
        if self.options.noise:
            generator = torch.Generator(features_BTF.device).manual_seed(lesson.seed)
            shape, device = features_BTF.shape, features_BTF.device
            draw_BTF = torch.rand(shape, generator=generator, device=device, dtype=features_BTF.dtype) - 0.5
            noisy_BTF = features_BTF + draw_BTF * (self.options.noise * NOISE_LENGTH / shape[1])
        state_BPF = self.unroll(lesson.tokens_BT, noisy_BTF, 1, positions_BP)[0]
        batch_B1 = torch.arange(len(positions_BP), device=positions_BP.device).unsqueeze(1)
        next_BPF = features_BTF[batch_B1, positions_BP + 1]
        regression = F.smooth_l1_loss(state_BPF.float(), next_BPF.float())
        scores_RW = self.score(state_BPF).flatten(0, 1).float()
        with torch.no_grad():
            p_RW = self.score(next_BPF).flatten(0, 1).float().softmax(-1)
        cross_entropy = (scores_RW.logsumexp(-1) - (p_RW * scores_RW).sum(-1)).mean()
        loss = self.options.feature_weight * regression + self.options.token_weight * cross_entropy
        labels_R = lesson.labels_RN(1, self.d2t, self.vocab_size)[:, 0]
        hits = (scores_RW.detach().argmax(-1) == labels_R).float().mean()
        return loss.unsqueeze(0), hits.unsqueeze(0)

    @torch.no_grad()
    def bind(self, target: "Target") -> None:
        """Point embedding and head at the target's."""
        super().bind(target)
        head_VF = target.head_weight_VF.detach().to(self.fc.weight)
        assert isinstance(self.head, FrozenTable)
        self.head.weight = head_VF if self.d2t is None else head_VF[self.d2t]

    def pack(self, pack_layers: Callable[[nn.Module], bool]) -> None:
        """Pack the borrowed head too: scoring is a product like any other."""
        assert isinstance(self.head, FrozenTable)
        self.head = self.head.as_layer()
        super().pack(pack_layers)

    def native_form(self) -> Any:
        """Return the operator."""
        norm = self.layer.post_attention_layernorm
        return self.native_layer(self.fc, self.head, [norm], self.layer_sizes.hidden_size)

    def hidden_matrices(self) -> list[nn.Parameter]:
        """Return the matrices of the layer and the one that joins its inputs."""
        return [self.fc.get_parameter("weight"), *super().hidden_matrices()]

    def restricted(self, draft_tokens: Tensor) -> "Eagle":
        """Return a copy that scores only these tokens (W)."""
        if self.d2t is not None:
            raise DraftsmithError(f"this drafter scores {len(self.d2t)} tokens only; start from a whole one.")
        fewer = Eagle(
            self.layer_sizes, self.vocab_size, self.tree, self.fc.bias is not None, draft_tokens, self.options
        ).to(self.fc.weight)
        fewer.load_state_dict(self.state_dict() | {"d2t": fewer.d2t})
        return fewer

    def describe(self) -> dict[str, Any]:
        """Return the published keys and ours."""
        config = {"architectures": [ARCHITECTURES[0]], **sizes_to_json(self.layer_sizes)}
        config |= {"vocab_size": self.vocab_size, "bias": self.fc.bias is not None, **self.tree.to_json()}
        return config if self.d2t is None else config | {"draft_vocab_size": len(self.d2t)}

    @classmethod
    def recognises(cls, config: Mapping[str, Any]) -> bool:
        """Tell by the architecture, or by the key `bias` or the tensor `fc.weight`: a Llama has neither."""
        named = set(config.get("architectures") or ())
        if named & set(ARCHITECTURES):
            return True
        llama = config.get("model_type") == "llama" and config.get("num_hidden_layers") == 1
        told = "bias" in config or JOINING in config.get(TENSOR_NAMES, ())
        return llama and told and "draft_vocab_size" not in config and not any(
            "eagle3" in name.lower() for name in named
        )

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], origin: Path, target: "Target | None", tensors: Mapping[str, Tensor]
    ) -> "Eagle":
        """Build what config.json describes; without the key `bias` the tensors tell."""
        sizes = sizes_from_json(config, origin)
        if target is None:
            raise DraftsmithError(f"{origin.parent} borrows its target's embedding and head; load it with that target.")
        made_for = {"hidden_size": sizes.hidden_size, "vocab_size": config["vocab_size"]}
        check_target(origin.parent, made_for, target.facts())
        tree, bias = Tree.from_json(config, "static"), bool(config.get("bias", "fc.bias" in tensors))
        return cls(sizes, config["vocab_size"], tree, bias, tensors.get("d2t"))

    @torch.no_grad()
    def load_published(self, tensors: Mapping[str, Tensor], origin: Path) -> None:
        """Copy checkpoint tensors in; the embedding in published files is the target's own and is passed over."""
        own = {name: tensor for name, tensor in tensors.items() if name != "embed_tokens.weight"}
        super().load_published(own, origin)


def make_eagle(options: EagleOptions, target: "Target", draft_tokens: Tensor | None) -> Eagle:
    """Make an untrained drafter that borrows the target's embedding and head."""
    drafter = Eagle(
        options.layer_sizes(target), target.vocab_size, options.default_tree(), options.bias, draft_tokens, options
    )
    drafter.bind(target)
    return drafter


FAMILY = Family(
    "eagle", "EAGLE: one decoder layer predicts the target's next state (arXiv:2401.15077, 2406.16858)",
    EagleOptions, make_eagle, Eagle.load, Eagle.recognises, trainable=True, reopen=Eagle.from_pretrained,
    tree=EAGLE_TREE, compared=Compared(static_tree=True, confident_twin="eagle2"),
)
