"""Texts kept apart: embedded ones by source, the user's by source, document or place, and what two parts share."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from draftsmith.evaluation.prompts import Prompt, embedded_prompts
from draftsmith.targets.records import Completion
from draftsmith.targets.token_ids import Conversation
from draftsmith.types import DraftsmithError
from draftsmith.workflows.comparison_texts import ComparisonTexts, comparison_texts, embedded_texts
from draftsmith.workflows.partition import (
    DOCUMENT,
    MEASURED,
    PARTS,
    PLACE,
    SAME_TEXT,
    SAME_WORDS,
    SOURCE,
    TRAINING,
    TUNING,
    Text,
    deal,
    keep_apart,
    said,
)
from tests.helpers.tiny import tiny_target


def sources(texts: ComparisonTexts, part: str, task: str) -> set[str]:
    return {text.source for text in texts.parts[part] if text.task == task}


def words(start: int, count: int = 40) -> str:
    """Text of which no 13 words in a row come twice."""
    return " ".join(f"w{number}" for number in range(start, start + count))


def jsonl(path: Path, records: Sequence[Mapping[str, object]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def embedded() -> ComparisonTexts:
    return comparison_texts(None, None)


@pytest.mark.parametrize("task", ["code", "prose", "dialogue"])
def test_embedded_texts_of_every_task_share_no_source(embedded: ComparisonTexts, task: str):
    named = {part: sources(embedded, part, task) for part in PARTS}
    assert all(named.values()) and sum(map(len, named.values())) == len(set.union(*named.values()))
    assert "" not in set.union(*named.values())
    every = {text.source for name in ("train", "prompts") for text in embedded_texts(name) if text.task == task}
    assert set.union(*named.values()) == every
    assert {part: len(own) for part, own in named.items()} == (
        {TRAINING: 5, TUNING: 2, MEASURED: 4} if task == "code" else {TRAINING: 1, TUNING: 1, MEASURED: 1}
    )


def test_embedded_texts_share_no_words(embedded: ComparisonTexts):
    found = embedded.found
    assert embedded.by == SOURCE and dict(found.left_out) == {}
    assert (list(found.shared_sources), found.shared_texts, found.shared_windows, found.common) == ([], 0, 0, 0)


def test_what_is_measured_on_is_held_out_from_all_that_was_trained_before(embedded: ComparisonTexts):
    held_out = {prompt.text for prompt in embedded_prompts()}
    by_template = {text.content for text in embedded_texts("prompts") if text.task == "dialogue"}
    for text in embedded.parts[MEASURED]:
        assert text.content in (by_template if text.task == "dialogue" else held_out)


def test_pieces_of_the_dialogues_are_their_texts():
    prompts = [prompt.text for prompt in embedded_prompts("dialogue")]
    taken_apart = [str(text.content) for text in embedded_texts("prompts") if text.task == "dialogue"]
    assert sorted("\n".join(prompts).split("\n")) == sorted("\n".join(taken_apart).split("\n"))
    openings = {"booking": "book a table", "order": "Hi, could I get", "arithmetic": "boxes with"}
    for text in embedded_texts("prompts"):
        if text.task == "dialogue":
            assert openings[text.source] in str(text.content).splitlines()[0]
            assert not any(said in str(text.content) for name, said in openings.items() if name != text.source)


@pytest.mark.parametrize(
    ("count", "sizes"), [(1, (1, 0, 0)), (2, (1, 0, 1)), (3, (1, 1, 1)), (11, (5, 2, 4)), (300, (240, 20, 40))]
)
def test_names_are_dealt_by_themselves(count: int, sizes: tuple[int, int, int]):
    names = [f"name {number}" for number in range(count)]
    dealt = deal(names)
    assert tuple(list(dealt.values()).count(part) for part in PARTS) == sizes
    assert deal(reversed(names)) == dealt
    assert MEASURED not in deal(names, measured=False).values()


def test_data_are_told_apart_by_source(tmp_path: Path):
    records = [{"text": words(1000 * i + 100 * k), "source": f"book {i}"} for i in range(6) for k in range(3)]
    texts = comparison_texts(jsonl(tmp_path / "data.jsonl", records), None)
    named = [sources(texts, part, "text") for part in PARTS]
    assert texts.by == SOURCE and [len(own) for own in named] == [3, 1, 2] and len(set.union(*named)) == 6
    assert (texts.data, texts.prompts_of) == ("data.jsonl", None)
    assert texts.account()["shared_sources"] == [] and texts.found.shared_windows == 0
    again = comparison_texts(jsonl(tmp_path / "data.jsonl", records[::-1]), None)
    assert [sources(again, part, "text") for part in PARTS] == named, "whatever their order"


def test_data_without_sources_are_told_apart_by_document(tmp_path: Path):
    path = jsonl(tmp_path / "data.jsonl", [{"text": words(100 * i)} for i in range(12)])
    texts = comparison_texts(path, None)
    assert texts.by == SOURCE, "a document stands for the source that nobody named"
    assert [len(texts.parts[part]) for part in PARTS] == [6, 2, 4]
    assert sum(part["without_source"] for part in texts.account()["parts"]) == 12


def test_one_source_for_all_is_told(tmp_path: Path):
    path = jsonl(tmp_path / "data.jsonl", [{"text": words(100 * i), "source": "crawl"} for i in range(12)])
    texts = comparison_texts(path, None)
    assert texts.by == DOCUMENT and list(texts.found.shared_sources) == ["crawl"]


def test_a_single_text_is_told_apart_by_place(tmp_path: Path):
    (tmp_path / "book.txt").write_text(words(0, 2000))
    texts = comparison_texts(tmp_path / "book.txt", None)
    parts = ["".join(str(text.content) for text in texts.parts[part]) for part in PARTS]
    assert texts.by == PLACE and sum(map(len, parts)) == len(words(0, 2000))
    assert len(parts[0]) > 7 * max(len(parts[1]), len(parts[2])) and texts.found.shared_windows == 0


def test_texts_that_data_and_prompts_share_are_found_and_left_out(tmp_path: Path):
    planted = [
        {"text": words(0).upper() + "!"},  # the first prompt, in other letters
        {"text": f"before {words(105, 13)} after"},
        {"text": f"before {words(105, 12)} after"},
    ]
    data = jsonl(tmp_path / "data.jsonl", [*planted, *({"text": words(1000 + 100 * i)} for i in range(20))])
    prompts = jsonl(tmp_path / "prompts.jsonl", [{"text": words(0)}, {"text": words(100)}])
    texts = comparison_texts(data, prompts)
    assert dict(texts.found.left_out) == {SAME_TEXT: 1, SAME_WORDS: 1}
    assert (texts.found.shared_texts, texts.found.shared_windows) == (0, 0)
    kept = [str(text.content) for part in (TRAINING, TUNING) for text in texts.parts[part]]
    assert len(kept) == 21 and f"before {words(105, 12)} after" in kept
    assert [prompt.text for prompt in texts.given or []] == [words(0), words(100)]


def test_sources_that_prompts_have_are_left_out_of_the_data(tmp_path: Path):
    records = [{"text": words(100 * i), "source": f"book {i % 5}"} for i in range(20)]
    data = jsonl(tmp_path / "data.jsonl", records)
    texts = comparison_texts(data, [Prompt("text", "book 2", words(9000)), Prompt("text", "book 3", words(9100))])
    assert sources(texts, TRAINING, "text") | sources(texts, TUNING, "text") == {"book 0", "book 1", "book 4"}
    assert sum(texts.found.left_out.values()) == 8 and not texts.found.shared_sources


def test_data_that_are_the_prompts_are_refused(tmp_path: Path):
    data = jsonl(tmp_path / "data.jsonl", [{"text": words(100 * i)} for i in range(6)])
    with pytest.raises(DraftsmithError, match="nothing is left for tuning: every text shares 13 words"):
        comparison_texts(data, data)


def test_what_many_texts_have_in_common_makes_nothing_known():
    licence = words(0, 20)
    parts = {
        part: [Text("code", part, f"{licence} {words(1000 * n + 100 * i)}") for i in range(5)]
        for n, part in enumerate(PARTS, 1)
    }
    kept, found = keep_apart(parts)
    assert kept == parts and dict(found.left_out) == {} and found.shared_windows == 0 and found.common == 8


def test_too_little_data_are_refused(tmp_path: Path):
    chat = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    with pytest.raises(DraftsmithError, match="the data hold too little to be told apart .1 documents"):
        comparison_texts(jsonl(tmp_path / "one.jsonl", [chat]), None)


def test_a_part_is_written_as_it_is_read(tmp_path: Path):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": words(0)}]
    records = [
        {"messages": turns, "chat_template_kwargs": {"deep": True}, "source": "a"},
        {"prompt": words(100), "completion": words(200), "source": "b"},
        *({"text": words(1000 + 100 * i), "task": "prose", "source": f"c{i}"} for i in range(4)),
    ]
    texts = comparison_texts(jsonl(tmp_path / "data.jsonl", records), [Prompt("text", "", words(9000))])
    texts.write(tmp_path)
    again = comparison_texts(tmp_path / "training.jsonl", [Prompt("text", "", words(9000))])
    read = {text.source: text for part in (TRAINING, TUNING) for text in again.parts[part]}
    assert read == {text.source: text for text in texts.parts[TRAINING]}
    assert texts.digest() != again.digest() and texts.digest() == comparison_texts(
        tmp_path / "data.jsonl", [Prompt("text", "", words(9000))]
    ).digest()


def test_system_prompts_are_not_compared():
    chat = Conversation([{"role": "system", "content": words(0)}, {"role": "user", "content": "Hi"}])
    assert said(chat) == "Hi" and said(Completion("a", "b")) == "ab"


def test_prompts_are_made_of_a_part(tmp_path: Path):
    records = [{"text": words(100 * i), "source": f"s{i}"} for i in range(6)]
    texts = comparison_texts(jsonl(tmp_path / "data.jsonl", records), None)
    prompts = texts.prompts(MEASURED, tiny_target(), 8)
    assert [(prompt.source, prompt.text) for prompt in prompts] == [
        (text.source, text.content) for text in texts.parts[MEASURED]
    ]
