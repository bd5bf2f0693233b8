"""A model as it is, a wrapped copy of it that drafts well, and padded prompts for both."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import draftsmith
from draftsmith.engine.wrapped.model import WrappedModel
from draftsmith.plan import Plan
from tests.helpers.oracle import OracleDrafter
from tests.helpers.tiny import VOCABULARY, greedy_reference, tiny_model

PAD = 7
"""Not the first id, so that a zero where a pad belongs is seen; it occurs in prompts and texts as well."""


def padded(questions: Sequence[Sequence[int]], pad: int = PAD) -> dict[str, Tensor]:
    """Return prompts as a tokenizer with padding on the left does."""
    width = max(map(len, questions))
    return {
        "input_ids": torch.tensor([[pad] * (width - len(one)) + list(one) for one in questions]),
        "attention_mask": torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in questions]),
    }


def oracle_of(model: PreTrainedModel, questions: Sequence[list[int]], vocabulary: int = VOCABULARY) -> OracleDrafter:
    """Return a drafter that knows most of the model's own text behind these prompts."""
    texts = [question + greedy_reference(model, question, 40) for question in questions]
    return OracleDrafter(texts, vocabulary, error_rate=0.3, ragged=True, plan=Plan((2, 1, 1)))


def pair(
    questions: Sequence[list[int]], architecture: str = "llama", **options: Any
) -> tuple[PreTrainedModel, WrappedModel]:
    """Return a model as it is, and a wrapped copy of it that drafts well for these prompts."""
    model = tiny_model(architecture, **options)
    oracle = oracle_of(model, questions, options.get("vocabulary", VOCABULARY))
    return model, draftsmith.wrap(tiny_model(architecture, **options), oracle, max_batch=3)


def same(fast: WrappedModel, model: PreTrainedModel, *args: Any, **kwargs: Any) -> Tensor:
    """Assert that both generate the same tensor; return it."""
    own, expected = fast.generate(*args, **kwargs), model.generate(*args, **kwargs)
    assert isinstance(own, Tensor) and isinstance(expected, Tensor)
    assert own.dtype == expected.dtype and own.device == expected.device
    assert own.tolist() == expected.tolist()
    return own
