"""Prompts and rules in, requests out: what cannot be decoded is refused before anything runs."""

import operator
import secrets
from collections.abc import Sequence
from typing import SupportsIndex

from draftsmith.engine.request import Request
from draftsmith.target import Target
from draftsmith.types import DraftsmithError, SamplingParams

SEED_STRIDE = 0x9E3779B97F4A7C15

Prompt = str | Sequence[int]


def admit(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None, target: Target, max_length: int
) -> list[Request]:
    """Return a request for every continuation, in the order of the prompts; their seeds are drawn where not given.

    Args:
        prompts: texts or token ids.
        params: one for all, or one for each; greedy by default.
        max_length: most tokens that a prompt and its continuation may have.

    Raises:
        DraftsmithError: see `Engine.generate`.
    """
    if isinstance(prompts, str):
        raise DraftsmithError("prompts is a single text; give a list of prompts.")
    if not prompts:
        raise DraftsmithError("the list of prompts is empty; give at least one.")
    if params is None:
        params = SamplingParams()
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    if len(each) != len(prompts):
        raise DraftsmithError(f"{len(each)} sampling parameters for {len(prompts)} prompts; give one, or one each.")
    requests: list[Request] = []
    for number, (prompt, rules) in enumerate(zip(prompts, each, strict=True)):
        tokens = _tokens_of(prompt, number, target)
        _check_fit(tokens, rules, number, target, max_length)
        seed = rules.seed if rules.seed is not None else secrets.randbits(62)
        for copy in range(rules.n):
            own = (seed + copy * SEED_STRIDE) % 2**63
            requests.append(Request.make(len(requests), tokens, rules, own, target.eos_token_ids, target.tokenizer))
    return requests


def _tokens_of(prompt: Prompt, number: int, target: Target) -> list[int]:
    if isinstance(prompt, str):
        if target.tokenizer is None:
            raise DraftsmithError(f"prompt {number} is text, but {target.name} has no tokenizer; give token ids.")
        tokens = list(target.tokenizer(prompt)["input_ids"])
    else:
        tokens = [operator.index(t) if isinstance(t, SupportsIndex) else -1 for t in prompt]
    if not tokens:
        raise DraftsmithError(f"prompt {number} is empty; give at least one token.")
    wrong = [i for i, t in enumerate(tokens) if not 0 <= t < target.vocab_size]
    if wrong:
        given = tokens[wrong[0]] if isinstance(prompt, str) else prompt[wrong[0]]
        raise DraftsmithError(
            f"prompt {number} has token {given!r}, but {target.name} knows the whole numbers "
            f"from 0 to {target.vocab_size - 1}."
        )
    return tokens


def _check_fit(tokens: list[int], rules: SamplingParams, number: int, target: Target, max_length: int) -> None:
    if len(tokens) + rules.max_tokens > max_length:
        raise DraftsmithError(
            f"prompt {number} has {len(tokens)} tokens and asks for {rules.max_tokens} more, but the context holds "
            f"{max_length}; shorten the prompt or lower max_tokens to {max(0, max_length - len(tokens))}."
        )
    if target.tokenizer is None and rules.stop:
        raise DraftsmithError(f"stop strings need a tokenizer, and {target.name} has none; use stop_token_ids.")
    if rules.logprobs is not None and rules.logprobs > target.vocab_size:
        raise DraftsmithError(
            f"logprobs is {rules.logprobs}, but {target.name} has {target.vocab_size} tokens; ask for fewer."
        )
