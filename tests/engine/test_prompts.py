"""What a prompt may be, that one BOS is enough, and that a whole call is checked before anything of it runs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from draftsmith.engine import Conversation, Engine
from draftsmith.targets import Target
from draftsmith.types import DraftsmithError, SamplingParams
from tests.helpers.tiny import CONTEXT, VOCABULARY, tiny_model, tiny_target
from tests.helpers.tiny_tokenizers import CHAT, tiny_tokenizer_of

ONE = SamplingParams(max_tokens=1)
TEXT = "Once upon a time"
MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Who lives there?"}]


def target_with(tokenizer: PreTrainedTokenizerFast) -> Target:
    return Target(tiny_model(vocabulary=len(tokenizer)), tokenizer, "tiny")


def chatting(template: str | None = CHAT) -> PreTrainedTokenizerFast:
    """Return a tokenizer that adds a BOS to what it reads, with a chat template."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer_of("llama").backend_tokenizer, unk_token="<unk>", bos_token="<s>",
        eos_token="</s>",
    )
    tokenizer.chat_template = template
    return tokenizer


def read(engine: Engine, prompt: Any) -> list[int]:
    return engine.generate([prompt], ONE)[0].prompt_tokens


@pytest.mark.parametrize(
    "given",
    [
        list,
        tuple,
        np.array,
        lambda ids: np.array(ids, dtype=np.int32),
        torch.tensor,
        lambda ids: torch.tensor([ids]),
        lambda ids: [np.int64(token) for token in ids],
        lambda ids: {"input_ids": ids},
        lambda ids: {"input_ids": [ids], "attention_mask": [[1] * len(ids)]},
    ],
)
def test_token_ids_come_in_many_forms(given: Callable[[list[int]], Any]):
    ids = [5, 1, 90]
    engine = Engine(tiny_target())
    assert read(engine, given(ids)) == ids
    assert [type(token) for token in read(engine, given(ids))] == [int] * 3
    assert engine.generate([given(ids), ids], ONE)[0].tokens == engine.generate([ids], ONE)[0].tokens


def test_a_matrix_of_tokens_is_a_list_of_prompts():
    batch = torch.tensor([[5, 1, 90], [7, 7, 7]])
    assert [done.prompt_tokens for done in Engine(tiny_target()).generate(batch, ONE)] == batch.tolist()


@pytest.mark.parametrize("options", [{}, {"return_tensors": "pt"}, {"return_tensors": "np"}])
def test_what_the_tokenizer_returned_is_a_prompt(options: dict[str, str]):
    tokenizer = tiny_tokenizer_of("llama")
    engine = Engine(target_with(tokenizer))
    assert read(engine, tokenizer(TEXT, **options)) == tokenizer(TEXT)["input_ids"] == read(engine, TEXT)
    assert read(engine, tokenizer([TEXT], **options)) == tokenizer(TEXT)["input_ids"]


def test_padding_is_not_a_part_of_the_prompt():
    tokenizer = tiny_tokenizer_of("llama")
    padded = tokenizer(TEXT, padding="max_length", max_length=40)
    assert len(padded["input_ids"]) == 40
    assert read(Engine(target_with(tokenizer)), padded) == tokenizer(TEXT)["input_ids"]


@pytest.mark.parametrize("text", [TEXT, "<s>Once", "<s> Once", "a<s>b", "<s><s>x", " <s>x", "x</s>y<tool>z", "<s>"])
@pytest.mark.parametrize("kind", ["llama", "metaspace-first", "byte-level", "word-piece"])
def test_a_text_is_what_the_tokenizer_makes_of_it_with_one_bos(kind: str, text: str):
    tokenizer = tiny_tokenizer_of(kind)
    ids = tokenizer(text)["input_ids"]
    adds = tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id
    written = tokenizer(text, add_special_tokens=False)["input_ids"]
    doubled = adds and written[0] == tokenizer.bos_token_id
    assert read(Engine(target_with(tokenizer)), text) == (ids[1:] if doubled else ids)
    assert adds == (kind != "byte-level")
    assert doubled or not (adds and text.startswith("<s>"))


def test_messages_go_through_the_chat_template():
    tokenizer = chatting()
    engine = Engine(target_with(tokenizer))
    asked = "<s><|system|>Be kind.\n<|user|>Who lives there?\n<|assistant|>"
    tokens = tokenizer(asked, add_special_tokens=False)["input_ids"]
    assert read(engine, MESSAGES) == tokens == read(engine, asked)
    assert read(engine, tuple(MESSAGES)) == tokens
    assert tokens.count(tokenizer.bos_token_id) == 1
    assert tokens == tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]


def test_tools_and_other_settings_of_a_conversation_reach_the_template():
    template = "{% for tool in tools %}{{ tool['name'] }} {% endfor %}{{ mood }}" + CHAT
    tokenizer = chatting(template)
    tools = [{"name": "house"}, {"name": "road"}]
    tokens = read(Engine(target_with(tokenizer)), Conversation(MESSAGES, {"tools": tools, "mood": "strange"}))
    assert tokens == tokenizer.apply_chat_template(
        MESSAGES, tools=tools, mood="strange", add_generation_prompt=True
    )["input_ids"]


def test_a_template_without_bos_gets_none():
    tokenizer = chatting(CHAT.replace("{{ bos_token }}", ""))
    tokens = read(Engine(target_with(tokenizer)), MESSAGES)
    assert tokens == tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    assert tokenizer.bos_token_id not in tokens


STRICT = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('the user speaks first') }}{% endif %}x"


@pytest.mark.parametrize(
    ("tokenizer", "prompt", "parts"),
    [
        (chatting(None), MESSAGES, ["prompt 1", "tiny has no chat template", "give text or token ids"]),
        (chatting(STRICT), MESSAGES, ["refuses prompt 1", "the user speaks first", "fix its messages"]),
        (chatting("{% nonsense %}"), MESSAGES, ["template of tiny is broken", "nonsense", "correct it"]),
        (chatting("{{ a.b.c }}"), MESSAGES, ["template of tiny is broken", "'a' is undefined", "prompt 1"]),
        (chatting(), [{"content": "x"}], ["message 0 of prompt 1 is {'content': 'x'}", "role"]),
        (chatting(), [MESSAGES[0], "x"], ["message 1 of prompt 1 is 'x'"]),
        (chatting(), [{"role": "user"}], ["message 0 of prompt 1", '"content"']),
        (chatting(), MESSAGES[0], ["prompt 1 is a mapping of role, content", "put a message into a list"]),
        (chatting(), {"ids": [1]}, ["prompt 1 is a mapping of ids", '"input_ids"']),
        (chatting(), {"input_ids": [[1], [2]]}, ["prompt 1 holds 2 texts", "a prompt of its own"]),
        (chatting(), {"input_ids": [1, 2], "attention_mask": [1]}, ["2 tokens and an attention mask of 1"]),
        (chatting(), {"input_ids": [1, 2], "attention_mask": [0, 0]}, ["prompt 1 is empty"]),
        (chatting(), torch.tensor(3), ["prompt 1 is 3 alone"]),
        (chatting(), 3, ["prompt 1 is of type int", "give text, token ids"]),
        (chatting(), b"bytes", ["prompt 1 is of type bytes"]),
        (chatting(), torch.zeros((2, 2), dtype=torch.long), ["prompt 1 holds 2 texts"]),
        (chatting(), np.array([0.5]), ["prompt 1 has token 0.5"]),
        (chatting(), np.array([], dtype=np.int64), ["prompt 1 is empty"]),
        (chatting(), "a\udcffb", [r"prompt 1 has '\udcff' at character 1", "fix the text"]),
    ],
)
def test_what_is_no_prompt_is_one_sentence(tokenizer: PreTrainedTokenizerFast, prompt: Any, parts: list[str]):
    with pytest.raises(DraftsmithError) as error:
        Engine(target_with(tokenizer)).generate([[1], prompt], ONE)
    assert all(part in str(error.value) for part in parts), str(error.value)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")


@pytest.mark.parametrize(
    ("prompts", "part"),
    [
        ("text", "prompts is a single text"),
        ({"input_ids": [[1]]}, "prompts is a mapping"),
        (7, "prompts is of type int"),
        ([1, 2], "prompt 0 is of type int"),
        (torch.tensor([1, 2]), "prompt 0 is 1 alone"),
        (torch.zeros((0, 4)), "the list of prompts is empty"),
        (MESSAGES, "put a message into a list"),
    ],
)
def test_what_is_no_list_of_prompts_is_one_sentence(prompts: Any, part: str):
    with pytest.raises(DraftsmithError, match=part):
        Engine(tiny_target()).generate(prompts, ONE)


@pytest.mark.parametrize("prompt", [TEXT, MESSAGES, Conversation(MESSAGES)])
def test_a_tokenizer_of_another_model_is_named(prompt: Any):
    target = Target(tiny_model(vocabulary=20), chatting(), "tiny")
    with pytest.raises(DraftsmithError, match="from 0 to 19; its tokenizer belongs to another model: put the one"):
        Engine(target).generate([prompt], ONE)
    with pytest.raises(DraftsmithError, match="from 0 to 19.$"):
        Engine(target).generate([[20]], ONE)


@pytest.mark.parametrize("prompt", ["a text", MESSAGES])
def test_a_target_without_tokenizer_says_so(prompt: Any):
    with pytest.raises(DraftsmithError, match="no tokenizer, which .* tokenizer.json .* token ids from Python"):
        Engine(tiny_target()).generate([prompt], ONE)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"logit_bias": {VOCABULARY: 1.0}},
            f"logit_bias names token {VOCABULARY}, but the model's tokens go from 0 to {VOCABULARY - 1}; "
            "use an id in this range.",
        ),
        (
            {"stop_token_ids": [3, -1]},
            f"stop_token_ids names token -1, but the model's tokens go from 0 to {VOCABULARY - 1}; "
            "use an id in this range.",
        ),
        ({"stop_token_ids": VOCABULARY}, f"stop_token_ids names token {VOCABULARY}"),
        ({"logprobs": VOCABULARY + 1}, f"logprobs is {VOCABULARY + 1}"),
        ({"stop": "END"}, "stop strings need a tokenizer"),
    ],
)
def test_the_last_request_is_checked_before_the_first_runs(fields: dict[str, Any], sentence: str):
    engine = Engine(tiny_target(), max_batch=1)
    good, bad = SamplingParams(max_tokens=3), SamplingParams(max_tokens=3, **fields)
    seen: list[int] = []
    with pytest.raises(DraftsmithError) as error:
        engine.generate([[1], [2]], [good, bad], on_progress=seen.append)
    assert sentence in str(error.value) and seen == []
    with pytest.raises(DraftsmithError) as streamed:
        next(engine.stream([[1], [2]], [good, bad]))
    assert str(streamed.value) == str(error.value)


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "advice"),
    [
        (100, 40, f"shorten the prompt to at most {CONTEXT - 40} tokens or lower max_tokens to 28."),
        (100, CONTEXT, "; lower max_tokens to 28."),
        (CONTEXT, 5, f"; shorten the prompt to at most {CONTEXT - 5} tokens."),
        (CONTEXT + 9, 5, f"; shorten the prompt to at most {CONTEXT - 5} tokens."),
        (
            CONTEXT, CONTEXT,
            f"; shorten the prompt to at most {CONTEXT - 1} tokens and lower max_tokens to what that leaves.",
        ),
    ],
)
def test_advice_for_what_does_not_fit_can_be_followed(prompt_tokens: int, max_tokens: int, advice: str):
    with pytest.raises(DraftsmithError) as error:
        Engine(tiny_target()).generate([[1] * prompt_tokens], SamplingParams(max_tokens=max_tokens))
    assert str(error.value).endswith(advice)


def test_one_stop_string_or_id_is_one():
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["END", "x"]).stop == ("END", "x")
    assert SamplingParams(stop_token_ids=5).stop_token_ids == (5,)
    assert SamplingParams(stop_token_ids=[5, 6]).stop_token_ids == (5, 6)
    assert SamplingParams(stop_token_ids=np.int64(5)).stop_token_ids == (5,)
    assert SamplingParams(stop=[], stop_token_ids=[]) == SamplingParams()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", None), ("stop", 5), ("stop", ["x", 5]), ("stop", ("x", "")),
        ("stop_token_ids", "5"), ("stop_token_ids", [1.5]), ("stop_token_ids", None),
        ("logit_bias", {"5": 1.0}), ("logit_bias", {5: "1"}), ("logit_bias", [5]),
        ("max_tokens", 2.5), ("n", "2"), ("top_k", 1.0), ("seed", 0.5), ("logprobs", 1.5), ("temperature", "1"),
    ],
)  # fmt: skip
def test_what_is_of_another_kind_is_named(field: str, value: Any):
    with pytest.raises(DraftsmithError, match=f"{field} is ") as error:
        SamplingParams(**{field: value})
    assert repr(value) in str(error.value)


def test_one_stop_token_ends_the_text():
    engine = Engine(tiny_target())
    tokens = engine.generate([[1, 2]], SamplingParams(max_tokens=9))[0].tokens
    cut = engine.generate([[1, 2]], SamplingParams(max_tokens=9, stop_token_ids=tokens[4]))[0]
    assert cut.tokens == tokens[: tokens.index(tokens[4]) + 1] and cut.finish_reason == "stop"
