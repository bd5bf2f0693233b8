"""Builds the native operator that guesses with heads over the target's last state.

Shapes: F width of the target's states, V vocabulary, W drafted vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draftsmith.native.layers import PackedLayer, packed_parts
from draftsmith.native.library import NativeObject

# What of the drafted tokens a head reads beside the state: nothing, their embeddings side by side, the sum of these, or
# a recurrent state.
NOTHING, ALL, SUM, RECURRENT = range(4)
# Steps: linear x; x + SiLU(linear x); kept x + SiLU(linear x).
PROJECT, RESIDUAL, NARROW = range(3)


@dataclass(frozen=True)
class NativeHead:
    """One head, its layers packed: steps, each with its kind and layers (what is kept comes last), then the scores."""

    steps: Sequence[tuple[int, Sequence[nn.Module]]]
    scores: nn.Module


def native_heads(
    heads: Sequence[NativeHead],
    features: int,
    reads: int = NOTHING,
    embedding_VF: Tensor | None = None,
    cell: Sequence[nn.Module] = (),
    d2t: Tensor | None = None,
) -> NativeObject:
    """Return the operator.

    Args:
        features: F.
        embedding_VF: what tokens are read as, bf16.
        cell: of a recurrent state: the layer that reads the embedding, and the one that reads the state.
        d2t: the tokens (W) that are scored, None for all.
    """
    layers = list(cell)
    for head in heads:
        layers += [layer for _, parts in head.steps for layer in parts]
        layers.append(head.scores)
    sizes = []
    for layer in layers:
        assert isinstance(layer, PackedLayer)
        sizes += [layer.out_features, layer.in_features]
    return NativeObject(
        "make_heads",
        "draft_by_heads",
        *packed_parts(layers),
        sizes,
        [[kind for kind, _ in head.steps] for head in heads],
        reads,
        torch.empty(0) if embedding_VF is None else embedding_VF.detach().contiguous(),
        torch.empty(0, dtype=torch.long) if d2t is None else d2t,
        features,
    )
