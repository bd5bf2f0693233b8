"""A wrapped model says what the model's own `generate` says, in the same tensors: text, ends, padding, lengths."""

from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

import draftsmith
from draftsmith.drafters.lookup.ngram import NgramLookup
from draftsmith.targets import Target
from draftsmith.types import DraftsmithError
from tests.engine.wrapped.wrapped_toy import PAD, padded, pair, same
from tests.helpers.tiny import ARCHITECTURES, CONTEXT, VOCABULARY, greedy_reference, prompts, tiny_model, tiny_tokenizer

# ---- greedy text


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_batches_are_those_of_transformers(architecture: str):
    questions = prompts(4)
    model, fast = pair(questions, architecture)
    same(fast, model, **padded(questions), max_new_tokens=24, pad_token_id=PAD)
    assert fast.statistics.accepted > 20
    one = torch.tensor([questions[0]])
    same(fast, model, one, attention_mask=torch.ones_like(one), max_new_tokens=9)


def test_greedy_batches_in_float32():
    questions = prompts(3)
    model, fast = pair(questions, dtype=torch.float32)
    same(fast, model, **padded(questions), max_new_tokens=24, pad_token_id=PAD)


def test_prompt_lookup_drafts_where_no_drafter_is_named():
    model, fast = tiny_model(), draftsmith.wrap(tiny_model())
    assert isinstance(fast.drafter, NgramLookup)
    question = prompts(1, shortest=6, longest=6)[0]
    text = question + greedy_reference(model, question, 30)
    # What comes next was in the prompt, behind the same tokens, though the model need not say it again.
    same(fast, model, torch.tensor([text + text[:8]]), attention_mask=torch.ones(1, 44), max_new_tokens=20)
    assert fast.statistics.drafted > 0


def test_no_drafter_is_plain_decoding():
    model, fast = tiny_model(), draftsmith.wrap(tiny_model(), None)
    same(fast, model, **padded(prompts(2)), max_new_tokens=10)
    assert fast.statistics.drafted == 0 and fast.statistics.steps == 2 * 9


# ---- ends and padding


@pytest.mark.parametrize("pad", [None, PAD])
def test_rows_end_at_an_end_token_and_are_padded_behind_it(pad: int | None):
    questions = prompts(5)
    model, fast = pair(questions)
    texts = [greedy_reference(model, question, 24) for question in questions]
    ends = [texts[0][4], texts[1][11], texts[2][0]]
    out = same(fast, model, **padded(questions), max_new_tokens=24, eos_token_id=ends, pad_token_id=pad)
    filler = ends[0] if pad is None else pad
    width = padded(questions)["input_ids"].shape[1]
    assert out[0, width + 5 :].tolist() == [filler] * (out.shape[1] - width - 5)
    # When every row has ended, the tensor ends with the longest.
    out = same(fast, model, **padded(questions[:3]), max_new_tokens=24, eos_token_id=ends, pad_token_id=pad)
    assert out.shape[1] < width + 24


def test_the_end_token_is_the_models_own_unless_said_otherwise():
    question = prompts(1)[0]
    text = greedy_reference(tiny_model(), question, 24)
    model, fast = pair([question], eos_token_id=text[6])
    ids = {"input_ids": torch.tensor([question]), "attention_mask": torch.ones(1, len(question))}
    assert same(fast, model, **ids, max_new_tokens=24).shape[1] == len(question) + 7
    assert same(fast, model, **ids, max_new_tokens=24, eos_token_id=None).shape[1] == len(question) + 24
    assert same(fast, model, **ids, max_new_tokens=24, eos_token_id=text[2]).shape[1] == len(question) + 3
    assert same(fast, model, **ids, max_new_tokens=24, eos_token_id=torch.tensor(text[2])).shape[1] == len(question) + 3
    # An id that no token has is allowed, and never comes.
    assert same(fast, model, **ids, max_new_tokens=24, eos_token_id=VOCABULARY + 5).shape[1] == len(question) + 24


def test_without_a_mask_the_pad_token_tells_the_padding():
    questions = [[token for token in question if token != PAD] for question in prompts(3)]
    model, fast = pair(questions)
    ids = padded(questions)["input_ids"]
    hidden = same(fast, model, ids, max_new_tokens=10, pad_token_id=PAD)
    # Where it is an end token as well, padding cannot be told from text, and all is read.
    shown = same(fast, model, ids, max_new_tokens=10, pad_token_id=PAD, eos_token_id=PAD)
    assert hidden[:, ids.shape[1]].tolist() != shown[:, ids.shape[1]].tolist()


def test_without_a_prompt_a_text_begins_with_bos():
    model, fast = pair(prompts(1))
    same(fast, model, bos_token_id=5, max_new_tokens=6)
    with pytest.raises(DraftsmithError, match="bos_token_id"):
        fast.generate(max_new_tokens=6)


# ---- how much


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize(
    "config", [None, {"max_length": 30}, {"max_new_tokens": 3}, {"max_length": 28, "max_new_tokens": 9}]
)
@pytest.mark.parametrize(
    "arguments", [{}, {"max_length": 33}, {"max_new_tokens": 5}, {"max_length": 29, "max_new_tokens": 5}]
)
@pytest.mark.parametrize("own", [{}, {"max_length": 31}, {"max_new_tokens": 4}])
def test_lengths_have_transformers_precedence_and_defaults(
    config: dict[str, int] | None, arguments: dict[str, int], own: dict[str, int]
):
    model, fast = tiny_model(), draftsmith.wrap(tiny_model(), None)
    for one in (model, fast):
        one.generation_config = GenerationConfig(**own)
    given = None if config is None else GenerationConfig(**config)
    same(fast, model, **padded(prompts(2, shortest=10, longest=23)), generation_config=given, **arguments)


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_the_default_length_ends_with_the_context():
    question = prompts(1, shortest=CONTEXT - 6, longest=CONTEXT - 6)[0]
    model, fast = tiny_model(), draftsmith.wrap(tiny_model(), None)
    assert same(fast, model, torch.tensor([question])).shape == (1, CONTEXT)


def test_prompts_that_do_not_fit_are_refused_with_the_way_out():
    fast = draftsmith.wrap(tiny_model(), None)
    ids = torch.tensor(prompts(1, shortest=20, longest=20))
    with pytest.raises(DraftsmithError, match=r"20 tokens.*max_length is 20.*max_new_tokens"):
        fast.generate(ids, max_length=20)
    with pytest.raises(DraftsmithError, match=r"20 tokens.*109 more.*128.*lower max_new_tokens"):
        fast.generate(ids, max_new_tokens=109)
    with pytest.raises(DraftsmithError, match="max_new_tokens is 0"):
        fast.generate(ids, max_new_tokens=0)
    assert fast.generate(ids, max_new_tokens=108).shape == (1, 128)


# ---- wrapping


def test_everything_else_of_the_model_stays_readable():
    model, tokenizer = tiny_model(eos_token_id=3), tiny_tokenizer()
    fast = draftsmith.wrap(model, None, tokenizer)
    assert fast.model is model and fast.config is model.config and fast.tokenizer is tokenizer
    assert fast.generation_config is model.generation_config and fast.generation_config.eos_token_id == 3
    assert fast.device == model.device and fast.dtype == torch.float64


def test_wrapping_twice_is_refused_and_a_target_may_be_given():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    fast = draftsmith.wrap(model, None)
    with pytest.raises(DraftsmithError, match="wrapped already"):
        draftsmith.wrap(model)
    again = draftsmith.wrap(fast.engine.target, "ngram:max_length=3")
    ids = torch.tensor(prompts(1))
    assert again.generate(ids, max_new_tokens=8).tolist() == fast.generate(ids, max_new_tokens=8).tolist()
    with pytest.raises(DraftsmithError, match="tokenizer of its own"):
        draftsmith.wrap(Target(tiny_model()), None, tokenizer)


def test_a_drafter_that_is_not_there_is_named():
    with pytest.raises(DraftsmithError, match="nowhere"):
        draftsmith.wrap(tiny_model(), "./nowhere")


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]):
    page = (Path(__file__).parents[3] / "docs" / "transformers.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    exec(compile(code, "docs/transformers.md", "exec"), {})
    text, tokens_per_step = capsys.readouterr().out.strip().splitlines()[-2:]
    assert "acknowledged, that it was a good" in text and float(tokens_per_step) > 1.5
