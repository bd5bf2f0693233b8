"""Says which models can be targets, refuses the others with a reason, and recognises models that Draftsmith changed."""

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
"""The key of config.json that marks a target which was changed together with its drafter."""

SAMPLES = 64
"""This many weights of every tensor identify a model, so that one that was trained further is recognised as another."""

SHORT_WINDOW = 4
"""The length to which sliding windows are shortened where a few tokens have to reach past them."""

FIXED_BY_ALPHA = frozenset({"hunyuan_v1_dense", "hunyuan_v1_moe"})
"""Model types whose rotary positions, though named dynamic, stay as they are where the config has an `alpha`."""

AttentionInterface.register(ATTENTION_NAME, tree_attention)


def refuse_unsupported(config: Any, name: str) -> None:
    """Raise DraftsmithError if a model's config shows that it cannot be a target yet."""
    if config.is_encoder_decoder:
        raise DraftsmithError(
            f"{name} ({config.model_type}) is an encoder-decoder; only decoder-only language models can be targets."
        )
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    settings = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    fixed = [value for value in settings if config.model_type in FIXED_BY_ALPHA and value.get("alpha")]
    moving = {str(value.get("rope_type")) for value in settings if value not in fixed} & {"dynamic", "longrope"}
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
    """Raise DraftsmithError for weights that are stored quantised, by whatever method."""
    for part in (config, config.get_text_config(decoder=True)):
        settings = getattr(part, "quantization_config", None)
        if settings:
            # In the time before methods had names, there was only this one.
            kind = settings.get("quant_method", "bitsandbytes")
            raise DraftsmithError(
                f"{name} is quantised ({kind}), and quantised checkpoints are not supported; give the unquantised one, "
                "with --quantize int4 or int8 (quantize=) if wanted."
            )


def refuse_attention(probe: ShapeProbe, layers: int, name: str) -> None:
    """Raise DraftsmithError if a layer needs more than our attention supports, or does not use it at all."""
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
    """Return how many tokens a model can read; DraftsmithError if its config does not say."""
    found = getattr(config, "max_position_embeddings", None)
    if not isinstance(found, int):
        raise DraftsmithError(
            f"{name} ({config.model_type}) does not say how long its texts may be (max_position_embeddings); "
            "it is not supported yet."
        )
    return found


def fingerprint(config: Any) -> str | None:
    """Return the fingerprint of a target that was changed together with its drafter; None for all other targets."""
    label = getattr(config, LABEL, None) or {}
    found: str | None = label.get("fingerprint")
    return found


def weights_hash(model: PreTrainedModel) -> str:
    """Return a hash that tells a model from another of the same shape, such as one that was trained further.

    It covers a few weights of every tensor, as bf16. So it is the same whatever precision a model is loaded in, and
    does not read all of a large model from its files.
    """
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        weights = tensor.detach().flatten()
        some = weights[:: max(1, len(weights) // SAMPLES)].to("cpu", torch.bfloat16)
        found.update(name.encode() + some.view(torch.int16).numpy().tobytes())
    return found.hexdigest()


def use_tree_attention(model: PreTrainedModel, name: str) -> str:
    """Make the model attend through `tree_attention`; return the name of the attention that it came with.

    If it came with ours already, or with one that cannot read a few tokens in any dtype, the name of transformers'
    plain attention is returned, which computes the same.

    Raises:
        DraftsmithError: the model cannot use our attention.
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
    """Let a model use its original attention inside the `with` block."""
    model.set_attn_implementation(own)
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


@contextmanager
def short_windows(model: PreTrainedModel, config: Any) -> Iterator[int | None]:
    """Shorten a model's sliding windows to `SHORT_WINDOW` inside the `with` block, so that few tokens reach past them.

    Masks are made from the config's window, but attention receives the layers' own window, so both are changed.
    Yields the original window, or None if there is none that is longer than `SHORT_WINDOW`.
    """
    window = vars(config).get("sliding_window")
    if not isinstance(window, int) or window <= SHORT_WINDOW:
        yield None
        return
    holders = [config, *(module for module in model.modules() if vars(module).get("sliding_window") == window)]
    for holder in holders:  # bypasses the checks of configs, which only know full sizes
        vars(holder)["sliding_window"] = SHORT_WINDOW
    try:
        yield window
    finally:
        for holder in holders:
            vars(holder)["sliding_window"] = window
