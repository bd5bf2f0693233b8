"""What the tests of drafters without training share: contexts and drafts as lists, and a target that counts."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from draftsmith.types import UNUSED, Context, Draft
from tests.helpers.tiny import tiny_model


def context_of(rows: dict[int, Sequence[int]], width: int = 0) -> Context:
    """Hand newly committed tokens to a drafter, by row number."""
    counts = [len(tokens) for tokens in rows.values()]
    width = max(width, *counts)
    zeros_B = torch.zeros(len(rows), dtype=torch.long)
    return Context(
        tokens_BT=torch.tensor([[*tokens, *[0] * (width - len(tokens))] for tokens in rows.values()]),
        features_BTF=torch.zeros((len(rows), width, 0)),
        counts_B=torch.tensor(counts),
        lengths_B=torch.tensor(counts) + 1,
        rows_B=torch.tensor(list(rows)),
        temperature_B=torch.zeros(len(rows)),
        seeds_B=zeros_B,
    )


def trees(draft: Draft) -> list[tuple[list[int], list[int]]]:
    """Return the tokens and parents of every row without the padding."""
    return [
        ([t for t, p in zip(tokens, parents, strict=True) if p != UNUSED], [p for p in parents if p != UNUSED])
        for tokens, parents in zip(draft.tokens_BN.tolist(), draft.parents_BN.tolist(), strict=True)
    ]


def counting_model() -> PreTrainedModel:
    """Build a model that counts: after token t it says t + 1, whatever came before, and 0 after the last one."""
    model = tiny_model()
    with torch.no_grad():
        table_VD = torch.nn.functional.normalize(model.model.embed_tokens.weight, dim=1)
        model.model.embed_tokens.weight.copy_(table_VD)
        model.lm_head.weight.copy_(table_VD.roll(1, dims=0))
        model.model.norm.weight.fill_(1.0)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model
