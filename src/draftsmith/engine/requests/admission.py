"""Prompts and rules in, requests out: what cannot be decoded is refused before anything runs."""

import secrets
from collections.abc import Sequence

from draftsmith.engine.requests.prompts import Prompt, list_of_prompts, tokens_of
from draftsmith.engine.requests.request import Request
from draftsmith.targets import Target
from draftsmith.types import DraftsmithError, SamplingParams
from draftsmith.verify.distribution import check_bias

__all__ = ["SEED_STRIDE", "Prompt", "admit"]

SEED_STRIDE = 0x9E3779B97F4A7C15


def admit(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None, target: Target, max_length: int
) -> list[Request]:
    """Return a request for every continuation, in the order of the prompts; their seeds are drawn where not given.

    Args:
        prompts: what `Prompt` says, in any mixture.
        params: one for all, or one for each; greedy by default.
        max_length: most tokens that a prompt and its continuation may have.

    Raises:
        DraftsmithError: see `Engine.generate`.
    """
    listed = list_of_prompts(prompts)
    if params is None:
        params = SamplingParams()
    each = [params] * len(listed) if isinstance(params, SamplingParams) else list(params)
    if len(each) != len(listed):
        raise DraftsmithError(f"{len(each)} sampling parameters for {len(listed)} prompts; give one, or one each.")
    requests: list[Request] = []
    for number, (prompt, rules) in enumerate(zip(listed, each, strict=True)):
        tokens = tokens_of(prompt, number, target)
        _check_room(len(tokens), rules.max_tokens, number, max_length)
        _check_rules(rules, target)
        seed = rules.seed if rules.seed is not None else secrets.randbits(62)
        for copy in range(rules.n):
            own = (seed + copy * SEED_STRIDE) % 2**63
            requests.append(Request.make(len(requests), tokens, rules, own, target.eos_token_ids, target.tokenizer))
    return requests


def _check_room(prompt_tokens: int, max_tokens: int, number: int, max_length: int) -> None:
    if prompt_tokens + max_tokens <= max_length:
        return
    ways = []
    if max_tokens < max_length:
        ways.append(f"shorten the prompt to at most {max_length - max_tokens} tokens")
    if prompt_tokens < max_length:
        ways.append(f"lower max_tokens to {max_length - prompt_tokens}")
    if not ways:
        ways.append(f"shorten the prompt to at most {max_length - 1} tokens and lower max_tokens to what that leaves")
    raise DraftsmithError(
        f"prompt {number} has {prompt_tokens} tokens and asks for {max_tokens} more, but the context holds "
        f"{max_length}; {' or '.join(ways)}."
    )


def _check_rules(rules: SamplingParams, target: Target) -> None:
    """Raise DraftsmithError for what the target does not have."""
    if target.tokenizer is None and rules.stop:
        raise DraftsmithError(f"stop strings need a tokenizer, and {target.name} has none; use stop_token_ids.")
    for name, asked in (("logprobs", rules.logprobs), ("prompt_logprobs", rules.prompt_logprobs)):
        if asked is not None and asked > target.vocab_size:
            raise DraftsmithError(
                f"{name} is {asked}, but {target.name} has {target.vocab_size} tokens; ask for fewer."
            )
    check_bias(rules.logit_bias, target.vocab_size)
    for token in rules.stop_token_ids:
        if not 0 <= token < target.vocab_size:
            raise DraftsmithError(
                f"stop_token_ids names token {token}, but the model's tokens go from 0 to {target.vocab_size - 1}; "
                "use an id in this range."
            )
