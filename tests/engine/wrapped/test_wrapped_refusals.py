"""A wrapped model reads transformers' configurations, and refuses by name what it cannot honour."""

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, TopKLogitsWarper

import draftsmith
from draftsmith.engine.wrapped.model import WrappedModel
from draftsmith.engine.wrapped.rules import unknown_settings
from draftsmith.types import DraftsmithError
from tests.engine.wrapped.wrapped_toy import PAD, padded, pair, same
from tests.helpers.tiny import greedy_reference, prompts, tiny_model

# ---- configurations and what is refused


def test_the_given_configuration_goes_before_the_models_own_and_keywords_before_both():
    questions = prompts(2)
    model, fast = pair(questions)
    text = greedy_reference(model, questions[0], 20)
    for one in (model, fast):
        one.generation_config = GenerationConfig(repetition_penalty=1.4, eos_token_id=text[9], pad_token_id=PAD)
    batch = padded(questions)
    same(fast, model, **batch, max_new_tokens=20)
    same(fast, model, **batch, generation_config=GenerationConfig(repetition_penalty=1.1, max_new_tokens=20))
    same(fast, model, **batch, generation_config=GenerationConfig(eos_token_id=text[3], max_new_tokens=20))
    same(fast, model, **batch, max_new_tokens=20, repetition_penalty=None)
    assert model.generation_config.to_dict() == fast.generation_config.to_dict()


REFUSED: list[tuple[str, Any]] = [
    ("num_beams", 2), ("assistant_model", tiny_model()), ("penalty_alpha", 0.6), ("constraints", [object()]),
    ("logits_processor", LogitsProcessorList([TopKLogitsWarper(3)])), ("stopping_criteria", [lambda *_: True]),
    ("prefix_allowed_tokens_fn", lambda *_: [1]), ("output_attentions", True), ("output_hidden_states", True),
    ("past_key_values", object()), ("inputs_embeds", torch.zeros(1, 4, 32)), ("guidance_scale", 1.5),
    ("no_repeat_ngram_size", 2), ("bad_words_ids", [[3]]), ("sequence_bias", {(3,): 1.0}), ("min_new_tokens", 3),
    ("min_length", 9), ("suppress_tokens", [4]), ("begin_suppress_tokens", [4]), ("forced_eos_token_id", 3),
    ("encoder_repetition_penalty", 1.2), ("prompt_lookup_num_tokens", 3), ("token_healing", True), ("max_time", 3.0),
    ("cache_implementation", "quantized"), ("negative_prompt_ids", torch.ones(1, 3)), ("custom_generate", "somewhere"),
    ("synced_gpus", True), ("position_ids", torch.ones(1, 4)), ("token_type_ids", torch.zeros(1, 4)),
    ("max_new_token", 9), ("remove_invalid_values", True), ("exponential_decay_length_penalty", (3, 1.2)),
]


@pytest.fixture(scope="module")
def plain() -> WrappedModel:
    return draftsmith.wrap(tiny_model(), None)


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=[name for name, _ in REFUSED])
def test_what_cannot_be_honoured_is_refused_by_name(plain: WrappedModel, name: str, value: Any):
    with pytest.raises(DraftsmithError, match=f"^{name} is .*leave it out"):
        plain.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, **{name: value})


@pytest.mark.parametrize("name", ["typical_p", "top_h", "epsilon_cutoff", "eta_cutoff"])
def test_rules_of_sampling_are_refused_only_where_they_would_matter(plain: WrappedModel, name: str):
    ids = torch.tensor([[1, 2, 3]])
    with pytest.raises(DraftsmithError, match=f"^{name} is 0.5"):
        plain.generate(ids, max_new_tokens=4, do_sample=True, **{name: 0.5})
    assert plain.generate(ids, max_new_tokens=4, **{name: 0.5}).shape == (1, 7)


def test_refusals_look_into_configurations_too(plain: WrappedModel):
    config = GenerationConfig(no_repeat_ngram_size=2, max_new_tokens=4)
    ids = torch.tensor([[1, 2, 3]])
    with pytest.raises(DraftsmithError, match="no_repeat_ngram_size is 2.*pass no_repeat_ngram_size=0"):
        plain.generate(ids, generation_config=config)
    assert plain.generate(ids, generation_config=config, no_repeat_ngram_size=0).shape == (1, 7)


def test_every_setting_of_transformers_is_known_and_a_new_one_is_refused(
    plain: WrappedModel, monkeypatch: pytest.MonkeyPatch
):
    assert unknown_settings() == set()

    def of_a_later_transformers(config: GenerationConfig, novelty: float | None = None, **settings: Any) -> None:
        as_today(config, **settings)
        config.novelty = novelty

    as_today = GenerationConfig.__init__
    monkeypatch.setattr(GenerationConfig, "__init__", of_a_later_transformers)
    ids = torch.tensor([[1, 2, 3]])
    with pytest.raises(DraftsmithError, match="^novelty is 2.0"):
        plain.generate(ids, max_new_tokens=4, novelty=2.0)
    with pytest.raises(DraftsmithError, match="^novelty is 3.0"):
        plain.generate(ids, generation_config=GenerationConfig(max_new_tokens=4, novelty=3.0))
    assert plain.generate(ids, max_new_tokens=4).shape == (1, 7)


def test_neutral_values_of_what_is_refused_change_nothing(plain: WrappedModel):
    neutral = {
        "num_beams": 1, "guidance_scale": 1.0, "no_repeat_ngram_size": 0, "typical_p": 1.0, "penalty_alpha": None,
        "logits_processor": LogitsProcessorList(), "stopping_criteria": None, "output_attentions": False,
        "min_length": 0, "past_key_values": None, "use_cache": False, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
        "cache_implementation": "static", "assistant_model": None, "synced_gpus": False, "renormalize_logits": False,
    }
    out = plain.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=True, seed=1, **neutral)
    expected = plain.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=True, seed=1)
    assert out.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": [[1, 2]]}, "input_ids is a list"),
        ({"input_ids": torch.tensor([1, 2])}, r"input_ids is of shape \(2,\)"),
        ({"input_ids": torch.tensor([[1.0]])}, "float32; give token ids"),
        ({"inputs": torch.tensor([[1]]), "input_ids": torch.tensor([[1]])}, "inputs and input_ids are both given"),
        ({"input_ids": torch.tensor([[1, 96]])}, "token 96"),
        ({"input_ids": torch.tensor([[1, 2]]), "attention_mask": torch.ones(1, 3)}, "attention_mask is of shape"),
        ({"input_ids": torch.tensor([[1, 2]]), "attention_mask": torch.tensor([[1, 0]])}, 'padding_side="left"'),
        ({"input_ids": torch.tensor([[1, 2]]), "attention_mask": torch.tensor([[0, 0]])}, "row 0 .* all padding"),
        ({"input_ids": torch.tensor([[1]]), "num_return_sequences": 2}, "num_return_sequences is 2.*do_sample=True"),
        ({"input_ids": torch.tensor([[1]]), "do_sample": True, "temperature": 0.0}, "temperature is 0 .*=False"),
        ({"input_ids": torch.tensor([[1]]), "do_sample": True, "top_p": 1.5}, "top_p is 1.5"),
        ({"input_ids": torch.tensor([[1]]), "do_sample": True, "top_k": 2.5}, "top_k is 2.5"),
        ({"input_ids": torch.tensor([[1]]), "generation_config": {"top_k": 3}}, "generation_config is of type dict"),
        ({"input_ids": torch.tensor([[1]]), "eos_token_id": "x"}, "eos_token_id is 'x'"),
        ({"input_ids": torch.tensor([[1]]), "seed": -1}, "seed is -1"),
        ({"input_ids": torch.tensor([[1]]), "seed": 0.5}, "seed is 0.5"),
        ({"input_ids": torch.tensor([[1]]), "stop_strings": ["a", ""]}, "stop_strings is .*none of them empty"),
        ({"input_ids": torch.tensor([[1]]), "stop_strings": ""}, "stop_strings is .*none of them empty"),
        ({"input_ids": torch.tensor([[True]])}, "input_ids is of shape .* and torch.bool; give token ids"),
        ({"input_ids": torch.tensor([[1]]), "position_ids": torch.tensor([[0]])}, "position_ids is .*; leave it out"),
        ({"inputs_embeds": torch.zeros(1, 1, 4)}, "inputs_embeds is a Tensor.*; give input_ids"),
        ({"input_ids": torch.tensor([[1]]), "max_new_token": 9}, "max_new_token is 9.*fix its spelling"),
    ],
)
def test_wrong_input_is_named_in_one_sentence(plain: WrappedModel, arguments: dict[str, Any], message: str):
    with pytest.raises(DraftsmithError, match=message):
        plain.generate(**{"max_new_tokens": 4, **arguments})
    assert not plain.engine.core.has_work


def test_a_row_without_finite_logits_is_an_error():
    model = tiny_model()
    model.get_input_embeddings().weight[5] = float("nan")
    fast = draftsmith.wrap(model, None)
    with pytest.raises(DraftsmithError, match="no finite logits"):
        fast.generate(torch.tensor([[1, 5, 2]]), max_new_tokens=4)
    assert not fast.engine.core.has_work
