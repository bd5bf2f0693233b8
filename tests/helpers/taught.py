"""Drafters that know what a tiny target says, so that their guesses are accepted."""

from collections.abc import Sequence
from typing import TypeVar

import torch

from draftsmith.drafters.base import NoDrafter
from draftsmith.drafters.trainable.model import TrainableModel
from draftsmith.evaluation.checking.parity import own_texts
from draftsmith.targets import Target

L = TypeVar("L", bound=TrainableModel)


def taught(target: Target, trained_model: L, starts: Sequence[list[int]], new_tokens: int) -> L:
    """Let it learn the target's texts behind some prompts by heart, so that guesses are accepted."""
    trained_model.to(target.dtype)
    examples = []
    for text in own_texts(target, NoDrafter(), 0, list(starts), new_tokens, batch=9):
        tokens_1T = torch.tensor([text.prompt_tokens + text.tokens])
        features_1TF, _ = target.encode(tokens_1T[:, :-1], trained_model.taps)
        examples.append((tokens_1T[:, 1:], features_1TF))
    optimizer = torch.optim.Adam(trained_model.parameters(), lr=0.01)
    for _ in range(25):
        loss = torch.zeros((), dtype=target.dtype)
        for tokens_1T, features_1TF in examples:
            for d, logits_1TV in enumerate(trained_model(tokens_1T, features_1TF)):
                loss = loss + torch.nn.functional.cross_entropy(logits_1TV[0, :-1], tokens_1T[0, d + 1 :])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return trained_model.eval().requires_grad_(False)
