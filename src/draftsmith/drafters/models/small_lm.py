"""A small language model, trained to draft: the classic draft model, made here rather than found.

It is a Llama of few layers with the target's vocabulary, and learns from the same training batches as all other
families, from the target's text and, with distillation, from its distributions (DistillSpec, arXiv:2310.08461); it
reads no hidden states. Its checkpoint is an ordinary transformers folder, which drafts as a `draft-model`.
Shapes: B sequences, T positions, R rows, V vocabulary, F width of the target's states (none are tapped).
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.models.draft_model import draft_with, make_draft_model
from draftsmith.drafters.models.draft_model_config import DraftModelConfig
from draftsmith.drafters.models.model_drafter import DraftModel
from draftsmith.drafters.models.small_lm_config import DRAWN, SmallLMConfig, guesses_told, is_llama
from draftsmith.drafters.trainable import storage
from draftsmith.drafters.trainable.batch import TrainingBatch
from draftsmith.drafters.trainable.model import TrainableModel, check_target
from draftsmith.dtypes import cast_parameters
from draftsmith.targets import Target as DraftTarget
from draftsmith.types import DraftsmithError

if TYPE_CHECKING:
    from draftsmith.targets import Target

HEAD_WIDTH = 64


class SmallLM(TrainableModel):
    """The model while it learns; `for_decoding` turns it into a draft model."""

    taps = ()
    family_name = "a small language model"

    config: SmallLMConfig

    def __init__(self, config: SmallLMConfig, llama: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.lm = LlamaForCausalLM(llama)
        self.limit_vocabulary(None)

    @property
    def max_depth(self) -> int:
        """The length of the drafted chain; the model itself could go on."""
        return self.config.guesses

    def published_name(self, name: str) -> str:
        """Return the name in transformers."""
        return name.removeprefix("lm.")

    def logits(self, tokens_BT: Tensor) -> Tensor:
        """Read whole sequences (B, T) and return what follows every token (B, T, V)."""
        logits_BTV: Tensor = self.lm(input_ids=tokens_BT, use_cache=False, return_dict=True).logits
        return logits_BTV

    def forward(self, tokens_BT: Tensor, features_BTF: Tensor) -> list[Tensor]:
        """Predict at every depth, see `TrainableModel.forward`; a language model does the same at all depths."""
        logits_BTV = self.logits(tokens_BT)
        return [logits_BTV[:, depth:] for depth in range(min(self.config.guesses, tokens_BT.shape[1]))]

    def losses(self, examples: TrainingBatch) -> tuple[Tensor, Tensor]:
        """Return the loss at the batch's positions, as one entry, because all depths have the same."""
        batch, reads_BP1 = examples.reads_BPN(1)
        first_BX = [] if examples.first_B is None else [examples.first_B.unsqueeze(1)]
        logits_BTV = self.logits(torch.cat([*first_BX, examples.tokens_BT], dim=1))[:, len(first_BX) :]
        logits_RV = logits_BTV[batch.squeeze(2), reads_BP1.squeeze(2)].flatten(0, 1)
        labels_RN = examples.labels_RN(1, None, self.vocab_size)
        loss, accuracy = examples.loss_and_accuracy(0, logits_RV, labels_RN, examples.soft_labels(1, None))
        return loss.unsqueeze(0), accuracy.unsqueeze(0)

    def describe(self) -> dict[str, Any]:
        """Return the config.json of transformers, with the number of tokens to draft, which transformers ignores."""
        return {**self.lm.config.to_dict(), "architectures": ["LlamaForCausalLM"], "guesses": self.config.guesses}

    @classmethod
    def recognises(cls, config: Mapping[str, Any]) -> bool:
        """Recognise it by the class that the config names."""
        return is_llama(config)

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], origin: Path, target: "Target | None", tensors: Mapping[str, Tensor]
    ) -> "SmallLM":
        """Build the model that config.json describes."""
        llama = LlamaConfig.from_dict(dict(config))
        if target is not None:
            check_target(origin.parent, {"vocab_size": llama.vocab_size}, target.facts())
        sizes = {"layers": llama.num_hidden_layers, "width": llama.hidden_size}
        told = SmallLMConfig.read(sizes | guesses_told(config), f"{origin}: ")
        return cls(told.changed(vocab_size=llama.vocab_size), llama)

    def sizes(self) -> dict[str, Any]:
        """Return the settings that may differ between models of the same shapes and change what they compute."""
        config = self.lm.config
        return {
            "layers": config.num_hidden_layers, "width": config.hidden_size, "inner width": config.intermediate_size,
            "heads": config.num_attention_heads, "key/value heads": config.num_key_value_heads,
            "rotary parameters": config.rope_parameters, "norm's epsilon": config.rms_norm_eps,
        }

    def for_decoding(self, target: "Target") -> Drafter:
        """Return a draft model with a copy of the weights."""
        lm = copy.deepcopy(self.lm)
        cast_parameters(lm, target.dtype)
        torch.nn.Module.to(lm, device=target.device)
        model = DraftTarget(lm, target.tokenizer, f"small draft of {target.name}", native=target.backend.native)
        return draft_with(model, target, self.config.guesses)


def make_small_lm(config: SmallLMConfig, target: "Target", draft_tokens: Tensor | None) -> SmallLM:
    """Make an untrained one with the target's vocabulary and context."""
    if draft_tokens is not None:
        raise DraftsmithError("a small language model scores all tokens; set drafter.draft_vocab_size to 0.")
    config = config.for_target(target)
    width = config.width or target.hidden_size
    heads = max(1, width // HEAD_WIDTH)
    if width % heads or (width // heads) % 2:
        raise DraftsmithError(f"drafter.width is {width}; use a multiple of {HEAD_WIDTH}, or an even number below it.")
    llama = LlamaConfig(
        vocab_size=target.vocab_size, hidden_size=width, intermediate_size=-(-8 * width // 3 // 16) * 16,
        num_hidden_layers=config.layers, num_attention_heads=heads, max_position_embeddings=target.max_length,
        initializer_range=DRAWN * config.init_width, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=min(target.eos_token_ids, default=None),
    )
    made = SmallLM(config, llama)
    if config.init_from_target and width == target.hidden_size:
        with torch.no_grad():
            made.lm.model.embed_tokens.weight.copy_(target.embedding_weight_VF[: target.vocab_size])
            made.lm.lm_head.weight.copy_(target.head_weight_VF)
    return made


def load_small_lm(folder: Path, target: "Target") -> DraftModel:
    """Load one as a draft model, which drafts as many tokens as it was trained and measured with."""
    origin = storage.standing(folder) / "config.json"
    values = {"path": str(folder), **guesses_told(storage.read_json(origin))}
    return make_draft_model(DraftModelConfig.read(values, f"{origin}: "), target, None)
