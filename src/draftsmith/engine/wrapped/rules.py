"""Reads the arguments of transformers' `generate`, and refuses by name those that cannot be honoured."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitNormalization,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftsmith.types import DraftsmithError, SamplingParams

DEFAULT_NEW_TOKENS = 20
"""How many tokens transformers generates if no length is given."""

_DEFAULTS = {"top_k": 50}

# Settings that would change the text in ways that the engine does not support, each with the values that change
# nothing. None changes nothing for any of them.
_REFUSED: dict[str, tuple[Any, ...]] = {
    # searches other than one token after the other
    "num_beams": (1,), "num_beam_groups": (1,), "constraints": (), "force_words_ids": (), "penalty_alpha": (0,),
    "dola_layers": (), "guidance_scale": (1,), "token_healing": (False,),
    # rules about tokens
    "min_length": (0,), "min_new_tokens": (0,), "no_repeat_ngram_size": (0,), "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,), "bad_words_ids": (), "sequence_bias": (), "suppress_tokens": (),
    "begin_suppress_tokens": (), "forced_bos_token_id": (), "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (), "remove_invalid_values": (False,), "watermarking_config": (),
    # time, and what is returned beside the text
    "max_time": (), "output_attentions": (False,), "output_hidden_states": (False,),
    # transformers' own speculation
    "prompt_lookup_num_tokens": (), "assistant_early_exit": (), "use_mtp": (False,), "assistant_ensemble_weight": (),
    "speculation_type": (), "is_assistant": (False,),
    "continuous_batching_config": (),
    # keys and values in another precision, or outputs of another shape
    "cache_implementation": (
        "dynamic", "static", "offloaded", "offloaded_static", "sliding_window", "hybrid", "hybrid_chunked",
        "offloaded_hybrid", "offloaded_hybrid_chunked",
    ),
}
_REFUSED_IN_SAMPLING: dict[str, tuple[Any, ...]] = {
    "typical_p": (1,), "top_h": (), "epsilon_cutoff": (0, 1), "eta_cutoff": (0, 1),
}

_HONOURED = {
    "max_new_tokens", "max_length", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
    "renormalize_logits", "eos_token_id", "pad_token_id", "bos_token_id", "num_return_sequences", "stop_strings",
    "return_dict_in_generate", "output_scores", "output_logits",
}
# What to do about inputs of models, which transformers passes on to them.
_FIXES = {"inputs_embeds": "give input_ids and leave it out"} | dict.fromkeys(
    ("position_ids", "past_key_values", "token_type_ids", "logits_to_keep"), "leave it out"
)
# How transformers computes, settings that only its beams and assistants read, and where a configuration comes from.
_WITHOUT_EFFECT = {
    "use_cache", "cache_config", "max_cache_len", "compile_config", "disable_compile", "prefill_chunk_size",
    "low_memory", "early_stopping", "length_penalty", "diversity_penalty", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind",
    "max_matching_ngram_size", "decoder_start_token_id", "transformers_version", "_from_model_config",
    "_original_object_hash", "_commit_hash",
}


@dataclass(frozen=True)
class GenerateRules:
    """What one call of `generate` asks for, with a value for every setting.

    Args:
        max_new_tokens: overrides `max_length`, which includes the padded prompt.
        eos: tokens that end a row.
        pad: the token that fills a row after its end; None if neither a pad token nor an end token is known.
        masks_pad: whether the pad token marks the padding of a prompt if there is no mask.
        bos: the token that a call without prompts begins with.
        copies: continuations of every prompt.
        stop_strings: strings that end a row, together with the token that completes them.
        normalizes: whether scores are log-probabilities.
        returns_dict, wants_scores, wants_logits: what to return.
    """

    max_new_tokens: int | None
    max_length: int | None
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    eos: tuple[int, ...]
    pad: int | None
    masks_pad: bool
    bos: int | None
    copies: int
    stop_strings: tuple[str, ...]
    normalizes: bool
    returns_dict: bool
    wants_scores: bool
    wants_logits: bool

    def new_tokens(self, width: int, positions: int) -> int:
        """Return the most tokens to add to prompts of this width, by transformers' rules of precedence.

        Args:
            positions: how many the model has; they bound the length only if the call gives none.
        """
        if self.max_new_tokens is not None:
            if self.max_new_tokens < 1:
                raise DraftsmithError(f"max_new_tokens is {self.max_new_tokens}; use at least 1.")
            return self.max_new_tokens
        if self.max_length is not None:
            whole, said = self.max_length, f"max_length is {self.max_length}"
        else:
            whole = min(width + DEFAULT_NEW_TOKENS, positions)
            said = f"the model has {positions} positions"
        if whole <= width:
            raise DraftsmithError(
                f"the prompts take {width} tokens with their padding, but {said}; shorten them or set max_new_tokens."
            )
        return whole - width

    def params(self, new_tokens: int, vocab_size: int, seed: int) -> SamplingParams:
        """Return the engine's rules for one row, which ends at the end tokens of the call, not at the target's."""
        return SamplingParams(
            temperature=self.temperature if self.do_sample else 0.0,
            top_k=self.top_k if self.do_sample else 0,
            top_p=self.top_p if self.do_sample else 1.0,
            min_p=self.min_p if self.do_sample else 0.0,
            repetition_penalty=self.repetition_penalty,
            max_tokens=new_tokens,
            # As in transformers, an id outside the vocabulary is allowed; it is never generated.
            stop_token_ids=[token for token in self.eos if 0 <= token < vocab_size],
            ignore_eos=True,
            seed=seed,
        )

    def processors(self) -> LogitsProcessorList:
        """Return transformers' own processors for these settings, in its order; they turn logits into scores."""
        processors = LogitsProcessorList()
        if self.repetition_penalty != 1:
            processors.append(RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        if self.do_sample:
            if self.temperature != 1:
                processors.append(TemperatureLogitsWarper(self.temperature))
            if self.top_k:
                processors.append(TopKLogitsWarper(self.top_k))
            if self.top_p < 1:
                processors.append(TopPLogitsWarper(self.top_p))
            if self.min_p:
                processors.append(MinPLogitsWarper(self.min_p))
        if self.normalizes:
            processors.append(LogitNormalization())
        return processors


def read_rules(
    own: GenerationConfig, given: GenerationConfig | None, arguments: Mapping[str, Any]
) -> GenerateRules:
    """Merge settings as transformers does: arguments over the given configuration over the model's own.

    Raises:
        DraftsmithError: for an argument that does not exist, and for a setting that cannot be honoured.
    """
    if given is not None and not isinstance(given, GenerationConfig):
        raise DraftsmithError(
            f"generation_config is of type {type(given).__name__}; give a transformers GenerationConfig."
        )
    settings: dict[str, Any] = dict(_DEFAULTS)
    for config in (own, given or GenerationConfig()):
        settings |= {name: value for name, value in vars(config).items() if value is not None}
    known = vars(GenerationConfig()).keys() | settings.keys()
    for name, value in arguments.items():
        if name not in known and value is not None:
            raise refusal(name, value, _FIXES.get(name, "fix its spelling or leave it out"))
    lengths = {name: settings.get(name) for name in ("max_length", "max_new_tokens") if arguments.get(name) is None}
    # An argument of None switches a setting off, except that a length of None falls back on the configurations.
    settings |= {**arguments, **lengths}
    refuse(settings, _REFUSED)
    if settings.get("do_sample"):
        refuse(settings, _REFUSED_IN_SAMPLING)
    # Settings that a later transformers adds must not be ignored silently.
    refuse(settings, dict.fromkeys(sorted(unknown_settings()), (False,)))
    return _rules_of(settings)


def unknown_settings() -> set[str]:
    """Return the settings of the installed transformers that this module does not know."""
    return vars(GenerationConfig()).keys() - _HONOURED - _WITHOUT_EFFECT - _REFUSED.keys() - _REFUSED_IN_SAMPLING.keys()


def _rules_of(settings: Mapping[str, Any]) -> GenerateRules:
    """Return the rules of merged settings, in which None means that a setting changes nothing."""

    def number(name: str, neutral: float) -> float:
        value = settings.get(name)
        if value is None:
            return neutral
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise DraftsmithError(f"{name} is {value!r}; it must be a number.")
        return float(value)

    def whole(name: str) -> int | None:
        value = settings.get(name)
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise DraftsmithError(f"{name} is {value!r}; it must be a whole number.")
        return value

    do_sample = bool(settings.get("do_sample"))
    temperature = number("temperature", 1.0)
    if do_sample and temperature <= 0:
        raise DraftsmithError(
            f"temperature is {temperature:g} with do_sample=True; use do_sample=False for greedy text."
        )
    copies = whole("num_return_sequences")
    copies = 1 if copies is None else copies
    if copies < 1:
        raise DraftsmithError(f"num_return_sequences is {copies}; use at least 1.")
    if copies > 1 and not do_sample:
        raise DraftsmithError(
            f"num_return_sequences is {copies}, but greedy text is the same every time; use 1, or do_sample=True."
        )
    stop = settings.get("stop_strings")
    stop_strings = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop_strings, (list, tuple)) or not all(isinstance(one, str) and one for one in stop_strings):
        raise DraftsmithError(f"stop_strings is {stop!r}; it must be a string or several, none of them empty.")
    eos = _end_tokens(settings.get("eos_token_id"))
    pad = whole("pad_token_id")
    top_k = whole("top_k")
    return GenerateRules(
        max_new_tokens=whole("max_new_tokens"),
        max_length=whole("max_length"),
        do_sample=do_sample,
        temperature=temperature,
        top_k=0 if top_k is None else top_k,
        top_p=number("top_p", 1.0),
        min_p=number("min_p", 0.0),
        repetition_penalty=number("repetition_penalty", 1.0),
        eos=eos,
        pad=eos[0] if pad is None and eos else pad,
        masks_pad=pad is not None and pad not in eos,
        bos=whole("bos_token_id"),
        copies=copies,
        stop_strings=tuple(stop_strings),
        normalizes=bool(settings.get("renormalize_logits")),
        returns_dict=bool(settings.get("return_dict_in_generate")),
        wants_scores=bool(settings.get("output_scores")),
        wants_logits=bool(settings.get("output_logits")),
    )


def _end_tokens(given: Any) -> tuple[int, ...]:
    """Return end tokens as a tuple, given as one id, several, or a tensor."""
    values = given.tolist() if isinstance(given, Tensor) else given
    if values is None:
        return ()
    several = values if isinstance(values, (list, tuple)) else [values]
    if not all(isinstance(token, int) for token in several):
        raise DraftsmithError(f"eos_token_id is {given!r}; it must be a token id, which is a whole number, or several.")
    return tuple(several)


def refuse(settings: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise DraftsmithError for the first setting whose value is neither None nor one of its neutral values."""
    for name, harmless in neutral.items():
        value = settings.get(name)
        if value is None or (isinstance(value, (bool, int, float, str)) and value in harmless):
            continue
        raise refusal(name, value, f"leave it out, or pass {name}={harmless[0] if harmless else None!r}")


def refusal(name: str, value: Any, fix: str) -> DraftsmithError:
    """Return the error for an argument that cannot be honoured."""
    shown = f"a {type(value).__name__}" if not isinstance(value, (bool, int, float, str)) else repr(value)
    return DraftsmithError(
        f"{name} is {shown}, which generate cannot honour on a wrapped model; {fix}, or call the generate of a model "
        "that was not wrapped."
    )
