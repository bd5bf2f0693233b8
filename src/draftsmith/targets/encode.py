"""Reads whole texts: by the model's own code, or piece by piece through the forward that decodes.

Shapes: B texts, T tokens, F feature width, V vocabulary.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftsmith.targets.attention import ShapeProbe

if TYPE_CHECKING:
    from draftsmith.targets.target import Target

# Tokens that are read at a time when whole texts are read in pieces: they need keys and values in all layers, and
# reading more at a time would not be faster.
ENCODED_TOKENS = 2048


def encode_by_model(
    target: "Target",
    tokens_BT: Tensor,
    taps: tuple[int, ...],
    logits: bool,
    gradients: bool = False,
    probe: ShapeProbe | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Read whole texts by the model's own code, with the attention that is set at the moment; see `Target.encode`."""
    target.hooks.want(taps)
    more = ({} if logits else {"logits_to_keep": 1}) | ({} if probe is None else {"shape_probe": probe})
    with torch.set_grad_enabled(gradients):
        out = target.model(input_ids=tokens_BT, use_cache=False, return_dict=True, **more)
    target.hooks.want(())
    features_BTF = target.hooks.take(taps) if taps else no_features(target, tokens_BT)
    return features_BTF, out.logits if logits else None


def encode_in_pieces(
    target: "Target", tokens_BT: Tensor, taps: tuple[int, ...], logits: bool
) -> tuple[Tensor, Tensor | None]:
    """Read whole texts into a cache of their own, a limited number of tokens at a time; see `Target.encode`."""
    batch, length = tokens_BT.shape
    some = max(1, ENCODED_TOKENS // max(1, length))
    keep = None if logits else torch.empty(0, dtype=torch.long)
    cache = target.new_cache(min(some, batch), length)
    if batch <= some and length <= ENCODED_TOKENS:
        start_B = torch.zeros(batch, dtype=torch.long)
        scores_BTV, features_BTF = target.read_chain(cache, tokens_BT, start_B, taps, keep_logits=keep, longest=0)
        return features_BTF, scores_BTV if logits else None
    features_BTF = torch.empty((batch, length, target.feature_size(taps)), dtype=target.dtype)
    scores_BTV = torch.empty((batch, length if logits else 0, target.vocab_size), dtype=target.dtype)
    for row in range(0, batch, some):
        for begin in range(0, length, ENCODED_TOKENS):
            piece = slice(row, row + some), slice(begin, begin + ENCODED_TOKENS)
            cached_B = torch.full((len(tokens_BT[piece]),), begin)
            logits_BMV, features_BTF[piece] = target.read_chain(
                cache, tokens_BT[piece], cached_B, taps, keep_logits=keep, longest=begin
            )
            if logits:
                scores_BTV[piece] = logits_BMV
    return features_BTF, scores_BTV if logits else None


def no_features(target: "Target", tokens_BT: Tensor) -> Tensor:
    """Return features of width zero (B, T, 0), for calls without taps."""
    return torch.empty((*tokens_BT.shape, 0), dtype=target.dtype, device=target.device)
