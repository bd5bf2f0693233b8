"""Which tokens of a conversation or a completion are learnt, by chat template and kind of record."""

from pathlib import Path

import pytest

from draftsmith.targets.token_ids import Conversation, conversation_ids
from draftsmith.training.build import build_loader
from draftsmith.training.data.loader import Windowing
from draftsmith.training.data.windows import Window
from draftsmith.training.recipe import build_recipe
from draftsmith.types import DraftsmithError
from tests.helpers.tiny_tokenizers import CHAT
from tests.helpers.token_toy import (
    ENDING,
    KINDS,
    MARKING,
    MESSAGES,
    ONE_ONE,
    recipe_for,
    served,
    take,
    target_of,
)

FORGETFUL = ENDING.replace(
    "<|{{ message['role'] }}|>",
    "<|{{ message['role'] }}|>{% if loop.last and message['role'] == 'assistant' %}think {% endif %}",
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", [MARKING, ENDING], ids=["marked", "found"])
def test_of_a_conversation_only_the_assistants_words_are_learnt(kind: str, template: str, tmp_path: Path):
    target = target_of(kind, template)
    tokenizer = target.tokenizer
    assert tokenizer is not None
    end = min(target.eos_token_ids)
    tokens, spans = conversation_ids(tokenizer, Conversation(MESSAGES), target.eos_token_ids)
    assert tokens == tokenizer.apply_chat_template(MESSAGES)["input_ids"]
    said = [tokenizer.decode(tokens[begin:last]).replace(" ", "") for begin, last in spans]
    assert said == [MESSAGES[at]["content"].replace(" ", "") + "</s>" for at in (2, 4)]
    for (begin, _), at in zip(spans, (2, 4), strict=True):
        assert tokens[:begin] == served(target, MESSAGES[:at]), "the first word follows what serving reads"
    recipe = recipe_for(tmp_path, [{"messages": MESSAGES}])
    (window,) = take(build_loader(recipe, target, Windowing(1000), "stage1"), 1)
    assert window == Window(tokens, spans) and window.tokens.count(end) == 2
    everything = build_loader(
        build_recipe(recipe.model_dump(), ["data.learn=everything"]), target, Windowing(1000), "x"
    )
    assert take(everything, 1) == [Window(tokens, [(0, len(tokens))])]


@pytest.mark.parametrize("kind", KINDS)
def test_a_marked_part_that_ends_with_a_dropped_space_ends_there(kind: str):
    target = target_of(kind, MARKING.replace("{{ message['content'] }}</s>", "{{ message['content'] }} \n "))
    assert target.tokenizer is not None
    tokens, spans = conversation_ids(target.tokenizer, Conversation(MESSAGES), target.eos_token_ids)
    said = [target.tokenizer.decode(tokens[begin:last]).replace(" ", "").strip() for begin, last in spans]
    assert said == [MESSAGES[at]["content"].replace(" ", "") for at in (2, 4)]


def test_a_template_without_an_end_token_ends_the_turn_where_the_next_begins():
    target = target_of("llama", CHAT)
    assert target.tokenizer is not None
    tokens, spans = conversation_ids(target.tokenizer, Conversation(MESSAGES), target.eos_token_ids)
    said = [target.tokenizer.decode(tokens[begin:last]) for begin, last in spans]
    assert [words.strip() for words in said] == [MESSAGES[at]["content"] for at in (2, 4)]


def test_a_turn_that_the_template_rewrites_later_is_not_learnt():
    """As of templates that drop the reasoning of earlier turns: only the last turn stands as it was written."""
    target = target_of("llama", FORGETFUL)
    assert target.tokenizer is not None
    tokens, spans = conversation_ids(target.tokenizer, Conversation(MESSAGES), target.eos_token_ids)
    (said,) = [target.tokenizer.decode(tokens[begin:last]) for begin, last in spans]
    assert MESSAGES[4]["content"] in said


def test_what_else_a_record_has_goes_to_the_template(tmp_path: Path):
    template = "{{ bos_token }}{% for tool in tools %}{{ tool['name'] }} {% endfor %}{{ mood }}" + ENDING
    target = target_of("llama", template.replace("}}{{ bos_token }}", "}}"))
    record = {"messages": ONE_ONE, "tools": '[{"name": "house"}]', "chat_template_kwargs": {"mood": "strange"}}
    (window,) = take(build_loader(recipe_for(tmp_path, [record]), target, Windowing(1000), "stage1"), 1)
    assert target.tokenizer is not None
    assert target.tokenizer.decode(window.tokens).startswith("<s> house strange")


def test_records_of_every_kind_are_one_conversation(tmp_path: Path):
    target = target_of("llama", ENDING)
    shared = [{"from": "human", "value": ONE_ONE[0]["content"]}, {"from": "gpt", "value": ONE_ONE[1]["content"]}]
    records = [
        {"messages": ONE_ONE}, {"conversations": shared}, {"conversations": ONE_ONE},
        {"prompt": ONE_ONE[:1], "completion": ONE_ONE[1:]}, {"conversations": shared, "system": ""},
    ]
    windows = []
    for number, record in enumerate(records):
        (tmp_path / str(number)).mkdir()
        reader = build_loader(recipe_for(tmp_path / str(number), [record]), target, Windowing(1000), "stage1")
        windows += take(reader, 1)
    assert all(window == windows[0] for window in windows)


@pytest.mark.parametrize("kind", KINDS)
def test_of_a_completion_the_prompt_is_not_learnt(kind: str, tmp_path: Path):
    target = target_of(kind)
    record = {"prompt": "Who lives there?", "completion": " Nobody knew."}
    (window,) = take(build_loader(recipe_for(tmp_path, [record]), target, Windowing(1000), "stage1"), 1)
    ((begin, last),) = window.spans
    assert window.tokens[:begin] == served(target, "Who lives there?")
    assert last == len(window.tokens) and window.tokens[-1] == min(target.eos_token_ids)


def test_conversations_need_a_template_and_an_assistant(tmp_path: Path):
    target = target_of("llama", None)
    with pytest.raises(DraftsmithError, match="holds conversations, but toy-llama has no chat template; give texts"):
        take(build_loader(recipe_for(tmp_path, [{"messages": MESSAGES}]), target, Windowing(100), "stage1"), 1)
    records = [{"messages": MESSAGES[:2]}, {"messages": MESSAGES}, {"messages": []}]
    reader = build_loader(recipe_for(tmp_path, records), target_of("llama", ENDING), Windowing(1000), "stage1")
    take(reader, 2)
    account = reader.account()
    assert set(account["unusable"]) == {"no turn of an assistant"}
    assert account["sources"][0]["left_out"] == {"empty": 1}
