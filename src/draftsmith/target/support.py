"""Which models can be targets, the others being refused by name with the reason; and which were changed by us."""

from typing import Any

from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from draftsmith.target.attention import ATTENTION_NAME, tree_attention
from draftsmith.types import DraftsmithError

LABEL = "draftsmith"
"""The key of config.json under which a target that was changed together with its drafter says so."""

AttentionInterface.register(ATTENTION_NAME, tree_attention)


def refuse_unsupported(config: Any, name: str) -> None:
    """Raise DraftsmithError for a kind of model, by its config, that cannot be a target yet."""
    if config.is_encoder_decoder:
        raise DraftsmithError(
            f"{name} ({config.model_type}) is an encoder-decoder; only decoder-only language models can be targets."
        )
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    settings = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    moving = {str(value.get("rope_type")) for value in settings} & {"dynamic", "longrope"}
    if moving:
        raise DraftsmithError(
            f"{name} ({config.model_type}) has rotary positions of type {', '.join(sorted(moving))}, which change with "
            "the longest row of a batch; text would depend on its neighbours, so they are not supported yet."
        )
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise DraftsmithError(
            f"{name} ({config.model_type}) has layers of kind {', '.join(sorted(kinds))}, whose state cannot be rolled "
            "back after a rejected guess yet; only full and sliding-window attention are supported."
        )


def fingerprint(config: Any) -> str | None:
    """Return what tells a target that was changed together with its drafter from all others; None for these."""
    label = getattr(config, LABEL, None) or {}
    found: str | None = label.get("fingerprint")
    return found


def use_tree_attention(model: PreTrainedModel, name: str) -> None:
    """Make the model attend through `tree_attention`; DraftsmithError when it cannot."""
    if model._is_stateful:
        raise DraftsmithError(
            f"{name} ({model.config.model_type}) keeps recurrent state, which cannot be rolled back after a rejected "
            "guess yet; only attention models are supported."
        )
    supported = model._supports_attention_backend
    if supported:
        model.set_attn_implementation(ATTENTION_NAME)
        # Models that ignore the request only log a warning.
        supported = model.config.get_text_config(decoder=True)._attn_implementation == ATTENTION_NAME
    if not supported:
        raise DraftsmithError(
            f"{name} ({model.config.model_type}) does not attend through transformers' attention interface; "
            "it is not supported yet."
        )
