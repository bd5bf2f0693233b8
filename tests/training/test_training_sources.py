"""What a source of training data may be, and the account of what is left out of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.targets.records import Completion, read_record
from draftsmith.targets.token_ids import Conversation
from draftsmith.training.data.record_files import documents_in
from draftsmith.training.data.sources import Piece, Source
from draftsmith.training.sections import SourceSection
from draftsmith.types import DraftsmithError

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


def source(piece_characters: int = 1000, held_out_every: int = 0, **section: Any) -> Source:
    return Source(SourceSection(**section), held_out_every, piece_characters)


def texts(found: Source) -> list[Any]:
    return [piece.content for piece in found.pieces()]


def test_a_folder_is_read_by_names_without_hidden_and_binary_files(tmp_path: Path):
    (tmp_path / "sub" / ".git").mkdir(parents=True)
    (tmp_path / "a.py").write_text("x = 1")
    (tmp_path / "sub" / "b.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n')
    (tmp_path / "sub" / "list.json").write_text(json.dumps([{"conversations": CHAT}, {"text": "three"}]))
    (tmp_path / "sub" / "package.json").write_text('{"name": "x"}')
    (tmp_path / "sub" / ".git" / "config").write_text("secret")
    (tmp_path / ".hidden").write_text("secret")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "packed.gz").write_bytes(b"\x1f\x8b")
    found = source(path=str(tmp_path))
    assert texts(found) == ["x = 1", "one", "two", Conversation(CHAT, {}), "three", '{"name": "x"}']
    assert found.files_left_out == {"hidden": 2, "binary": 2} and len(found.files) == 4
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / ".x").write_text("x")
    with pytest.raises(DraftsmithError, match=r"alone has no document to train on"):
        texts(source(path=str(tmp_path / "alone")))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("cut.json", b'[{"text": "one"}, {"te', r"cut.json begins as a list of records but is no JSON .*; fetch it"),
        ("odd.json", b'[{"text": "one"}, {"body": "two"}]', r"odd.json, record 2, has neither `text` nor"),
        ("word.json", b'[{"text": "one"}, "two"]', r"word.json, record 2, is no JSON object; fix or remove it"),
        ("data.jsonl.zst", b"\x28\xb5\x2f\xfd", r"data.jsonl.zst is no text; give text in UTF-8, .jsonl"),
        ("book.bin", b"a\0b", r"book.bin is no text"),
    ],
)
def test_what_is_damaged_is_never_read_as_text(tmp_path: Path, name: str, content: bytes, words: str):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DraftsmithError, match=words):
        texts(source(path=str(path)))


def test_what_is_empty_or_held_out_is_counted(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    records = [{"text": ""}, {"text": None, "messages": CHAT}, {"messages": []}, *({"text": str(i)} for i in range(40))]
    path.write_text("\n".join(json.dumps(record) for record in records))
    found = source(path=str(path), held_out_every=4)
    kept = texts(found)
    assert found.read == 43 and found.left_out["empty"] == 2 and 3 < found.left_out["held out"] < 20
    assert len(kept) + found.left_out.total() == 43


def test_parquet_and_data_sets_give_the_same_documents(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("datasets")
    rows = [{"messages": CHAT}, {"messages": CHAT[:1]}]
    for name, some in (("one", rows), ("two", rows[1:])):
        (tmp_path / name).mkdir()
        parquet.write_table(pyarrow.Table.from_pylist(some), tmp_path / name / "test.parquet")
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n" + "".join(
            f"- config_name: {name}\n  data_files:\n  - split: test\n    path: {name}/test.parquet\n"
            for name in ("one", "two")
        ) + "---\n"
    )
    for name, some in (("one", rows), ("two", rows[1:])):
        expected = [Conversation(row["messages"], {}) for row in some]
        assert list(documents_in(tmp_path / name / "test.parquet")) == expected
        assert texts(source(name=str(tmp_path), configuration=name, split="test")) == expected
    with pytest.raises(DraftsmithError, match="cannot open the data set .* check its name, configuration and split"):
        texts(source(name=str(tmp_path), configuration="three", split="test"))


def test_long_texts_are_cut_where_a_word_begins_and_end_once():
    text = "".join(f"word{i} " for i in range(100))

    class Long(Source):
        def documents(self):
            yield text

    pieces = list(Long(SourceSection(name="x"), 0, 64).pieces())
    assert "".join(str(piece.content) for piece in pieces) == text and len(pieces) > 10
    assert all(str(piece.content).startswith("word") for piece in pieces)
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert max(piece.characters for piece in pieces) <= 64


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"text": "a"}, "a"), ({"text": "a", "messages": CHAT}, "a"), ({"text": None}, ""), ({"messages": None}, ""),
        ({"prompt": "a", "completion": "b"}, Completion("a", "b")),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, Conversation(CHAT, {})),
        ({"prompt": CHAT[:1], "completion": "yes"}, Conversation(CHAT, {})),
        ({"prompt": "hi", "completion": CHAT[1:]}, Conversation(CHAT, {})),
        ({"prompt": "", "completion": []}, ""), ({"text": " ", "messages": CHAT}, Conversation(CHAT, {})),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}], "system": "S"},
         Conversation([{"role": "system", "content": "S"}, *CHAT], {})),
        ({"messages": CHAT, "tools": [{"name": "t"}], "documents": None},
         Conversation(CHAT, {"tools": [{"name": "t"}]})),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [1], "name": None}]},
         Conversation([{"role": "assistant", "content": None, "tool_calls": [1]}], {})),
    ],
)  # fmt: skip
def test_records(record: dict[str, Any], expected: Any):
    assert read_record(record, "x") == expected


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"body": 1}, r"x has neither `text` nor .* \(it has body\); name one"),
        ({"prompt": "a"}, r"x has neither .* \(it has prompt\)"),
        ({"messages": [{"content": "a"}]}, "x has a message without `role` or `content`"),
        ({"messages": [{"role": "user"}]}, "x has a message without `role` or `content`"),
        ({"messages": "hi"}, "x has messages that are no list but 'hi'"),
        ({"messages": CHAT, "tools": "{"}, "x has `tools` that are no JSON"),
    ],
)
def test_what_is_no_record_is_one_sentence(record: dict[str, Any], words: str):
    with pytest.raises(DraftsmithError, match=words):
        read_record(record, "x")


def test_a_piece_knows_its_length():
    assert Piece("abc").characters == 3 and Piece(Completion("ab", "c")).characters == 3


@pytest.mark.parametrize("count", [5, 20])
def test_at_least_one_document_is_held_out_and_one_is_not(count: int, tmp_path: Path):
    path = tmp_path / "a.jsonl"
    for start in range(0, 2000, 97):
        documents = [f"document {i}" for i in range(start, start + count)]
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
        trained, held_out = (
            [piece.content for piece in Source(SourceSection(path=str(path)), 50, 1000, held_out=which).pieces()]
            for which in (False, True)
        )
        assert trained and held_out and sorted([*trained, *held_out]) == sorted(documents)


@pytest.mark.parametrize("every", [2, 50])
def test_of_a_few_texts_every_end_is_held_out_and_no_whole_text(every: int, tmp_path: Path):
    path = tmp_path / "a.jsonl"
    documents = [f"{name} two three four five six seven eight nine {name}s" for name in ("cat", "dog", "cow", "pig")]
    for count in (2, 3, 4):
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents[:count]))
        trained, held_out = (
            [piece.content for piece in Source(SourceSection(path=str(path)), every, 1000, held_out=which).pieces()]
            for which in (False, True)
        )
        assert [a + b for a, b in zip(trained, held_out, strict=True)] == documents[:count]


def test_of_two_conversations_one_is_held_out(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    turns = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "that"}]
    path.write_text("".join(json.dumps({"messages": turns * more}) + "\n" for more in (1, 2)))
    section = SourceSection(path=str(path))
    trained, held_out = (list(Source(section, 50, 1000, held_out=which).pieces()) for which in (False, True))
    assert len(trained) == len(held_out) == 1 and trained[0].content != held_out[0].content


def test_of_the_only_text_the_end_is_held_out(tmp_path: Path):
    path = tmp_path / "book.txt"
    path.write_text("one two three four five six seven eight nine ten")
    section = SourceSection(path=str(path))
    (trained,), (held_out,) = (list(Source(section, 50, 1000, held_out=which).pieces()) for which in (False, True))
    assert (trained.content, held_out.content) == ("one two three four five six seven eight ", "nine ten")
    assert not trained.ends and held_out.ends, "an end token stands only where the document ends"


def test_a_table_has_a_record_a_line(tmp_path: Path):
    long = "word " * 40_000
    rows = '\ufefftext,source\n"one, with a comma and\na new line",a\n,b\n"' + long + '",c,more\n'
    (tmp_path / "texts.csv").write_text(rows, encoding="utf-8")
    (tmp_path / "pairs.tsv").write_text('prompt\tcompletion\nwhat "now"?\tthat\n', encoding="utf-8")
    assert list(documents_in(tmp_path / "texts.csv")) == ["one, with a comma and\na new line", "", long]
    assert list(documents_in(tmp_path / "pairs.tsv")) == [Completion('what "now"?', "that")]


def test_a_table_that_is_cut_short_is_refused(tmp_path: Path):
    (tmp_path / "texts.tsv").write_text('text\n"never closed\none\ntwo\n')
    with pytest.raises(DraftsmithError, match=r"line 4, cannot be read as a table \(unexpected end of data\)"):
        list(documents_in(tmp_path / "texts.tsv"))


def test_a_table_of_something_else_is_refused_by_itself_and_a_text_among_others(tmp_path: Path):
    table = tmp_path / "numbers.csv"
    table.write_text("year,price\n1999,3\n")
    with pytest.raises(DraftsmithError, match="is a table with the columns year, price; name the one with the texts"):
        Source(SourceSection(path=str(table)), 8, 1000)
    found = Source(SourceSection(path=str(tmp_path)), 8, 1000)
    assert list(found.documents()) == ["year,price\n1999,3\n"]
