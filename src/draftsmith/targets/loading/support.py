"""Which models can be targets, the others being refused by name with the reason; and which were changed by us."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from draftsmith.targets.attention import ATTENTION_NAME, ShapeProbe, tree_attention
from draftsmith.types import DraftsmithError

LABEL = "draftsmith"
"""The key of config.json under which a target that was changed together with its drafter says so."""

SAMPLES = 64
"""Of every tensor, so many weights tell a model from one that was trained further."""

SHORT_WINDOW = 4
"""Of what windows are cut to where a few tokens have to reach past them."""

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


def refuse_quantised(config: Any, name: str) -> None:
    """Raise DraftsmithError for weights that were stored quantised, by whatever method."""
    for part in (config, config.get_text_config(decoder=True)):
        settings = getattr(part, "quantization_config", None)
        if settings:
            # Before methods had names there was only one.
            kind = settings.get("quant_method", "bitsandbytes")
            raise DraftsmithError(
                f"{name} is quantised ({kind}), and quantised checkpoints are not supported; give the unquantised one, "
                "with --quantize int4 or int8 (quantize=) if wanted."
            )


def refuse_attention(probe: ShapeProbe, layers: int, name: str) -> None:
    """Raise DraftsmithError if attention was asked for what it does not know, or not by every layer."""
    if probe.unknown:
        raise DraftsmithError(
            f"{name} hands its attention {', '.join(sorted(probe.unknown))}, which is not supported yet; leaving it "
            "out would change what the model says."
        )
    if len(probe.shapes) != layers:
        raise DraftsmithError(
            f"{name} sends {len(probe.shapes)} of its {layers} layers through the attention interface; recurrent or "
            "hybrid layers, and attention of another kind, are not supported yet."
        )


def longest_text(config: Any, name: str) -> int:
    """Return how many tokens a model can read; DraftsmithError where its config does not say."""
    found = getattr(config, "max_position_embeddings", None)
    if not isinstance(found, int):
        raise DraftsmithError(
            f"{name} ({config.model_type}) does not say how long its texts may be (max_position_embeddings); "
            "it is not supported yet."
        )
    return found


def fingerprint(config: Any) -> str | None:
    """Return what tells a target that was changed together with its drafter from all others; None for these."""
    label = getattr(config, LABEL, None) or {}
    found: str | None = label.get("fingerprint")
    return found


def weights_hash(model: PreTrainedModel) -> str:
    """Return what tells a model from one of the same shape with other weights, such as one trained further.

    A few weights of every tensor, as bf16: so it is the same whatever precision a model is loaded in, and looking at
    them does not read a large model from its files.
    """
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        weights = tensor.detach().flatten()
        some = weights[:: max(1, len(weights) // SAMPLES)].to("cpu", torch.bfloat16)
        found.update(name.encode() + some.view(torch.int16).numpy().tobytes())
    return found.hexdigest()


def use_tree_attention(model: PreTrainedModel, name: str) -> str:
    """Make the model attend through `tree_attention`; return the name of the attention that it came with.

    Where it came with ours already, or with one that is not made for a few tokens in any dtype, that is transformers'
    plain one, which says the same.

    Raises:
        DraftsmithError: when it cannot.
    """
    if model._is_stateful:
        raise DraftsmithError(
            f"{name} ({model.config.model_type}) keeps recurrent state, which cannot be rolled back after a rejected "
            "guess yet; only attention models are supported."
        )
    text = model.config.get_text_config(decoder=True)
    own = str(text._attn_implementation)
    model.set_attn_implementation(ATTENTION_NAME)
    if text._attn_implementation != ATTENTION_NAME:  # models that ignore the request only log a warning
        raise DraftsmithError(
            f"{name} ({model.config.model_type}) does not attend through transformers' attention interface; "
            "it is not supported yet."
        )
    if own in ("eager", "sdpa"):
        return own
    return "sdpa" if model._supports_sdpa else "eager"


@contextmanager
def original_attention(model: PreTrainedModel, own: str) -> Iterator[None]:
    """Let a model attend as it did when it came, for the time being."""
    model.set_attn_implementation(own)
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


@contextmanager
def short_windows(model: PreTrainedModel, config: Any) -> Iterator[int | None]:
    """Make the sliding windows of a model `SHORT_WINDOW` tokens for the time being, so that few tokens reach past them.

    Masks are made from the config's window, and what attention is handed comes from the layers': both are changed.
    Yields the window that was, None where there is none that is longer.
    """
    window = vars(config).get("sliding_window")
    if not isinstance(window, int) or window <= SHORT_WINDOW:
        yield None
        return
    holders = [config, *(module for module in model.modules() if vars(module).get("sliding_window") == window)]
    for holder in holders:  # past the checks of configs, which know of full sizes only
        vars(holder)["sliding_window"] = SHORT_WINDOW
    try:
        yield window
    finally:
        for holder in holders:
            vars(holder)["sliding_window"] = window
