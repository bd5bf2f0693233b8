"""Turns prompts and rules into requests; what cannot be decoded is refused before anything runs."""

import secrets
from collections.abc import Sequence

from draftsmith.drafters.lookup.prediction import Prediction
from draftsmith.engine.requests.grammars import Grammars
from draftsmith.engine.requests.prompts import Prompt, list_of_prompts, tokens_of
from draftsmith.engine.requests.request import Request
from draftsmith.targets import Target
from draftsmith.targets.token_ids import continuation_ids
from draftsmith.types import DraftsmithError, SamplingParams
from draftsmith.verify.distribution import check_bias

__all__ = ["SEED_STRIDE", "Prompt", "admit"]

SEED_STRIDE = 0x9E3779B97F4A7C15


def admit(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None, target: Target,
    max_length: int, grammars: Grammars,
) -> list[Request]:
    """Return a request for every continuation, in the order of the prompts; a seed that is not given is drawn.

    Args:
        prompts: of the kinds that `Prompt` lists, in any mixture.
        params: one for all, or one for each; greedy by default.
        max_length: most tokens that a prompt and its continuation may have.
        grammars: compiles their constraints.

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
        _check_room(len(tokens), rules.max_tokens, number if len(listed) > 1 else None, max_length)
        _check_rules(rules, target)
        expected = _predicted_tokens(rules, number, target)
        seed = rules.seed if rules.seed is not None else secrets.randbits(62)
        for copy in range(rules.n):
            own = (seed + copy * SEED_STRIDE) % 2**63
            request = Request.make(
                len(requests), tokens, rules, own, target.eos_token_ids, target.tokenizer, grammars.guide(rules)
            )
            if expected is not None:
                request.prediction = Prediction(expected, rules.max_tokens)
            requests.append(request)
    return requests


def _predicted_tokens(rules: SamplingParams, number: int, target: Target) -> list[int] | None:
    """Return the tokens of a prediction as the target would write them; None without a prediction."""
    if rules.prediction is None:
        return None
    if isinstance(rules.prediction, str):
        if target.tokenizer is None:
            raise DraftsmithError(
                f"{target.name} has no tokenizer, which a prediction in text needs; give its token ids."
            )
        try:
            rules.prediction.encode()
        except UnicodeEncodeError as error:
            raise DraftsmithError(
                f"prediction of prompt {number} has half of a character at {error.start}; fix the text."
            ) from error
        return continuation_ids(target.tokenizer, rules.prediction)
    wrong = next((token for token in rules.prediction if not 0 <= token < target.vocab_size), None)
    if wrong is not None:
        raise DraftsmithError(
            f"prediction of prompt {number} has token {wrong}, but the model's tokens go from 0 to "
            f"{target.vocab_size - 1}; use ids in this range."
        )
    return list(rules.prediction)


def _check_room(prompt_tokens: int, max_tokens: int, number: int | None, max_length: int) -> None:
    if prompt_tokens + max_tokens <= max_length:
        return
    ways = []
    if max_tokens < max_length:
        ways.append(f"shorten the prompt to at most {max_length - max_tokens} tokens")
    if prompt_tokens < max_length:
        ways.append(f"lower max_tokens to {max_length - prompt_tokens}")
    if not ways:
        ways.append(f"shorten the prompt to at most {max_length - 1} tokens and lower max_tokens to what that leaves")
    which = "the prompt" if number is None else f"prompt {number}"
    raise DraftsmithError(
        f"{which} has {prompt_tokens} token{'s' if prompt_tokens > 1 else ''} and asks for {max_tokens} more, but the "
        f"context holds {max_length}; {' or '.join(ways)}."
    )


def _check_rules(rules: SamplingParams, target: Target) -> None:
    """Raise DraftsmithError for rules that need what the target does not have, such as a tokenizer or a token id."""
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
