"""Turns the fields of a request into sampling parameters, and refuses what a request may not ask for."""

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from draftsmith.constraints import SURROGATES
from draftsmith.serving.constraints import Form
from draftsmith.serving.errors import ApiError, bad
from draftsmith.serving.openai_fields import Generation
from draftsmith.serving.settings import Settings
from draftsmith.types import DraftsmithError, SamplingParams

COLDEST = 0.01
"""Below this temperature decoding is greedy, as with vLLM."""
SEEDS = 2**63
"""Seeds that the engine tells apart."""
DRAWN_SEED = -1
"""The seed that asks vLLM and llama.cpp for another text each time."""
FIELDS = frozenset(Generation.model_fields) | {"logprobs"}
UNSERVED = {
    "use_beam_search": "leave it out",
    "guided_json": "give structured_outputs with json", "guided_regex": "give structured_outputs with regex",
    "guided_choice": "give structured_outputs with choice", "guided_grammar": "give structured_outputs with grammar",
    "grammar": "give structured_outputs with grammar (EBNF)", "json_schema": "give structured_outputs with json",
    "allowed_token_ids": "give logit_bias or structured_outputs", "bad_words": "give logit_bias",
    "include_stop_str_in_output": "leave it out", "truncate_prompt_tokens": "send the end of the prompt alone",
    "prompt_logprobs": "give echo with logprobs to /v1/completions",
}
"""Fields of other servers that would change the answer, with what to do instead."""


def check_general(fields: Generation, settings: Settings) -> None:
    """Refuse values that no request may have, whatever its other fields are."""
    if fields.n is not None and not 1 <= fields.n <= settings.max_texts:
        raise bad(f"n is {fields.n}; it must be from 1 to {settings.max_texts}.", "n")
    if fields.stream_options is not None and not fields.stream:
        raise bad("stream_options needs a stream; set stream to true, or leave it out.", "stream_options")
    if fields.min_tokens:
        raise bad(f"min_tokens is {fields.min_tokens}, which is not served; leave it out.", "min_tokens")
    if fields.prompt_embeds is not None:
        raise bad("prompt_embeds are not served; give text or token ids.", "prompt_embeds")
    for name, instead in UNSERVED.items():
        value = getattr(fields, name)
        if value is not None and value is not False:
            raise bad(f"{name} is not served; {instead}.", name)
    if fields.timeout is not None and not fields.timeout > 0:
        raise bad(f"timeout is {fields.timeout:g}; give seconds above 0.", "timeout")


def check_tools(tools: Sequence[Any] | None, settings: Settings) -> None:
    """Refuse more tools than one request may have, and texts in them that no tokenizer reads."""
    if tools is not None and len(tools) > settings.max_tools:
        raise bad(f"tools has {len(tools)} entries; the most is {settings.max_tools}.", "tools")
    for number, tool in enumerate(tools or ()):
        half = SURROGATES.search(json.dumps(tool.model_dump(), ensure_ascii=False))
        if half is not None:
            raise bad(f"tool {number} has {half[0]!r}, which is half of a character; fix the text.", "tools")


def check_copies(texts: int, settings: Settings) -> None:
    """Refuse more texts than one request may ask for."""
    if texts > settings.max_texts:
        raise bad(f"the request asks for {texts} texts; the most is {settings.max_texts}.", "prompt")


def check_logprobs(value: int | None, name: str, settings: Settings) -> int | None:
    """Return how many alternatives are asked for, as given; refuse more than are served."""
    if value is not None and not 0 <= value <= settings.max_logprobs:
        raise bad(f"{name} is {value}; it must be from 0 to {settings.max_logprobs}.", name)
    return value


def sampling_params(
    fields: Generation, settings: Settings, form: Form, max_tokens: int, logprobs: int | None,
    prompt_logprobs: int | None = None, stops: str = "stop",
) -> SamplingParams:
    """Return the sampling parameters of a request; temperature and top_p default to 1, as with OpenAI.

    Args:
        stops: what the client calls its stop strings.

    Raises:
        ApiError: 400 for values out of range.
    """
    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    top_k = 0 if fields.top_k in (None, -1) else fields.top_k
    temperature = given(fields.temperature, 1.0)
    try:
        return SamplingParams(
            temperature=0.0 if 0 < temperature < COLDEST else temperature, top_k=top_k or 0,
            top_p=given(fields.top_p, 1.0),
            min_p=given(fields.min_p, 0.0), repetition_penalty=given(fields.repetition_penalty, 1.0),
            presence_penalty=given(fields.presence_penalty, 0.0),
            frequency_penalty=given(fields.frequency_penalty, 0.0),
            logit_bias=_bias(fields.logit_bias, settings), max_tokens=max_tokens,
            stop=_stops(fields.stop, settings, stops), stop_token_ids=_stop_ids(fields.stop_token_ids, settings),
            ignore_eos=fields.ignore_eos, seed=_seed(fields.seed), n=given_whole(fields.n, 1), logprobs=logprobs,
            prompt_logprobs=prompt_logprobs, constraint=form.constraint, prediction=form.prediction,
        )
    except DraftsmithError as error:
        raise from_engine(error) from error


def given_whole(value: int | None, default: int) -> int:
    """Return a number, or the default where it is None."""
    return default if value is None else value


def from_engine(error: DraftsmithError, field: str | None = None) -> ApiError:
    """Return the engine's refusal as an error for the client.

    Args:
        field: the field to blame; None takes the first word of the message, if that is a field.
    """
    word = re.match(r"\w+", str(error))
    return bad(str(error), field or (word[0] if word is not None and word[0] in FIELDS else None))


def _seed(seed: int | None) -> int | None:
    """Return a seed of the engine for one of 64 bits with a sign; None, which draws one, for -1, as with others."""
    if seed is None or seed == DRAWN_SEED:
        return None
    if not -SEEDS <= seed < SEEDS:
        raise bad(f"seed is {seed}; it must be from -2**63 to 2**63 - 1.", "seed")
    return seed % SEEDS


def _bias(bias: dict[str, Any] | None, settings: Settings) -> dict[int, float]:
    if not bias:
        return {}
    if len(bias) > settings.max_bias:
        raise bad(f"logit_bias has {len(bias)} entries; the most is {settings.max_bias}.", "logit_bias")
    wrong = next((token for token in bias if not re.fullmatch(r"0|[1-9][0-9]{0,8}", token)), None)
    if wrong is not None:
        raise bad(f"logit_bias names {wrong[:40]!r}, which is no token id.", "logit_bias")
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in bias.values()):
        raise bad("logit_bias has a value that is no number.", "logit_bias")
    try:
        values = [float(value) for value in bias.values()]
    except OverflowError:
        values = [math.inf]
    if not all(map(math.isfinite, values)):
        raise bad("logit_bias has a value that is not finite.", "logit_bias")
    return {int(token): value for token, value in zip(bias, values, strict=True)}


def _stops(given: str | list[str] | None, settings: Settings, name: str) -> Sequence[str]:
    stops = [given] if isinstance(given, str) else given or []
    if len(stops) > settings.max_stops:
        raise bad(f"{name} has {len(stops)} strings; the most is {settings.max_stops}.", name)
    if "" in stops:
        raise bad(f"{name} has an empty string; leave it out.", name)
    longest = max(map(len, stops), default=0)
    if longest > settings.max_stop_characters:
        raise bad(f"a string of {name} has {longest} characters; the most is {settings.max_stop_characters}.", name)
    return stops


def _stop_ids(ids: list[int] | None, settings: Settings) -> Sequence[int]:
    if ids is not None and len(ids) > settings.max_stops:
        raise bad(f"stop_token_ids has {len(ids)} ids; the most is {settings.max_stops}.", "stop_token_ids")
    return ids or []
