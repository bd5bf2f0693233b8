"""What a source of training data may be, and the account of what is left out of it."""

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from draftsmith.targets.records import Completion, read_record
from draftsmith.targets.token_ids import Conversation
from draftsmith.training.data.record_files import documents_in
from draftsmith.training.data.sources import Piece, Source
from draftsmith.training.data.split import is_held_out
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
        ("names.json", b'[{"body": "one"}]', r"names.json, record 1, has neither `text` nor .* \(it has body\)"),
        ("data.json", b'{"data": [{"body": 1}], "v": 2}', "holds an object with the fields data, v, not records"),
        (
            "two.json", b'{"train": [{"text": "a"}], "test": [{"text": "b"}]}',
            r"holds an object with several lists of records \(train, test\), not records; give a list of texts or of",
        ),
        ("numbers.json", b"[1, 2]", "numbers.json holds a list that begins with a number, not records; give a list"),
        ("none.json", b"[]", "none.json holds an empty list, not records"),
        ("a.json", b'"one"', "a.json holds a text alone, not records"),
        ("a.json", b"{one: 2}", r"a.json is no JSON \(.*\); fix it, or let its name end in .txt to read it as a text"),
        ("a.json", b'{"text": "one"}\n{"te', r"a.json, line 2, is no JSON"),
        ("a.txt", "one\ncafé".encode("latin-1"), r"a.txt, line 2, is not UTF-8 text \(byte 0xe9\); convert"),
        ("a.json", '["café"]'.encode("latin-1"), r"a.json, line 1, is not UTF-8 text \(byte 0xe9\)"),
        ("a.jsonl", '{"text": "a"}\n{"text": "é"}'.encode("latin-1"), r"a.jsonl, line 2, is not UTF-8 text"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "\xe9"}', mtime=0), r"a.jsonl.gz, line 1, is not UTF-8 text"),
        ("a.csv", "text\none\ncafé\n".encode("latin-1"), r"a.csv, line 3, is not UTF-8 text \(byte 0xe9\)"),
        ("a.jsonl", '{"text": "a"}'.encode("utf-16"), r"a.jsonl is UTF-16 instead of UTF-8; convert it"),
        ("a.jsonl", '{"text": "a"}'.encode("utf-16-le"), r"a.jsonl is UTF-16 instead of UTF-8"),
        ("a.jsonl.gz", gzip.compress('{"text": "a"}'.encode("utf-16-be"), mtime=0), r"a.jsonl.gz is UTF-16 instead"),
        ("a.csv", "text\none\n".encode("utf-16"), r"a.csv is UTF-16 instead of UTF-8"),
        ("a.txt", "one".encode("utf-32"), r"a.txt is UTF-32 instead of UTF-8; .* iconv -f UTF-32 -t UTF-8"),
        ("data.jsonl.zst", b"\x28\xb5\x2f\xfd", r"data.jsonl.zst is no text; give text in UTF-8, .jsonl"),
        ("book.bin", b"a\0b", r"book.bin is no text"),
    ],
)
def test_what_is_damaged_is_never_read_as_text(tmp_path: Path, name: str, content: bytes, words: str):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DraftsmithError, match=words):
        texts(source(path=str(path)))


@pytest.mark.parametrize(
    "content",
    [
        ["one", "two"], [{"text": "one"}, {"text": "two"}], {"data": [{"text": "one"}, {"text": "two"}], "version": 3},
        {"conversations": [{"text": "one"}, {"text": "two"}]},
    ],
)
def test_json_is_read_as_it_is_plainly_meant(tmp_path: Path, content: Any):
    (tmp_path / "a.json").write_text(json.dumps(content), encoding="utf-8-sig")
    assert texts(source(path=str(tmp_path / "a.json"))) == texts(source(path=str(tmp_path))) == ["one", "two"]


def test_a_record_alone_and_json_lines_are_read_under_the_name_of_json(tmp_path: Path):
    (tmp_path / "a.json").write_text(json.dumps({"messages": CHAT}, indent=2))
    (tmp_path / "b.json").write_text('{"text": "one"}\n\n{"text": "two"}\n')
    assert texts(source(path=str(tmp_path / "a.json"))) == [Conversation(CHAT, {})]
    assert texts(source(path=str(tmp_path / "b.json"))) == ["one", "two"]
    (tmp_path / "c.json").write_text('{"prompt": "$", "text": 80}')
    (tmp_path / "d.json").write_text('{"a": 1}\n{"b": 1}')
    assert texts(source(path=str(tmp_path))) == [
        Conversation(CHAT, {}), "one", "two", '{"prompt": "$", "text": 80}', '{"a": 1}\n{"b": 1}'
    ], "and settings among other files are texts"


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.jsonl.xz"])
def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path, name: str):
    content = {"txt": "é", "csv": "text\né\n"}.get(name[2:], '{"text": "é"}\n').encode("utf-8-sig")
    (tmp_path / name).write_bytes(lzma.compress(content) if name.endswith(".xz") else content)
    assert texts(source(path=str(tmp_path / name))) == ["é"]


def test_a_text_of_another_encoding_is_left_out_of_a_folder_and_counted(tmp_path: Path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_bytes("café".encode("latin-1"))
    found = source(path=str(tmp_path))
    assert texts(found) == texts(found) == ["one"]
    account = found.account()
    assert account["files"] == 1 and account["files_left_out"] == {"not in UTF-8": 1}
    (tmp_path / "c.jsonl").write_bytes('{"text": "café"}'.encode("latin-1"))
    with pytest.raises(DraftsmithError, match=r"c.jsonl, line 1, is not UTF-8 text"):
        texts(found := source(path=str(tmp_path)))


def test_what_is_no_text_is_counted_as_what_it_is(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    wrong = [{"text": 5}, {"text": 0.5}, {"prompt": 1, "completion": "b"}, {"text": ["a"]}, {"text": True}]
    missing = [{"text": None}, {"text": float("nan")}, {"text": []}]
    path.write_text("".join(json.dumps(record) + "\n" for record in [*wrong, *missing, {"text": "one"}]))
    found = source(path=str(path), held_out_every=2)
    texts(found)
    assert found.account()["used"] == 1 and found.account()["documents"] == 9
    assert {name: count for name, count in found.left_out.items() if name.startswith(("with", "empty"))} == {
        "with a number instead of a text": 3, "with a list instead of a text": 1,
        "with true or false instead of a text": 1, "empty": 3,
    }
    path.write_text('{"text": 5}\n{"text": ""}\n')
    with pytest.raises(DraftsmithError, match=r"\(1 are empty, 0 held out, 1 with a number instead of a text\)"):
        texts(source(path=str(path)))
    with pytest.raises(DraftsmithError, match=r"x has a number as `text` \(5\) instead of a text; put it in quotes"):
        read_record({"text": 5}, "x")


@pytest.mark.parametrize("cut", [
    {"text": "cut \ud83d"}, {"messages": [CHAT[0], {"role": "assistant", "content": "\udc00"}]},
    {"prompt": "a\ud83d", "completion": "b"}, {"messages": CHAT, "tools": [{"name": "\ud83d"}]},
])  # fmt: skip
def test_records_with_half_a_character_are_left_out_and_counted(cut: dict[str, Any], tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in ({"text": "one 😀"}, cut, {"text": "two"})))
    found = source(path=str(path))
    assert texts(found) == ["one 😀", "two"] and found.left_out == {"with half a character": 1}
    with pytest.raises(DraftsmithError, match="x has half a character"):
        read_record(cut | {"text": "\ud83d"}, "x")


def test_lines_of_json_end_where_files_say_and_not_within_a_text(tmp_path: Path):
    (tmp_path / "a.json").write_text('{"text": "one\u2028\x85two"}\n{"text": "three"}\r\n')
    assert texts(source(path=str(tmp_path / "a.json"))) == ["one\u2028\x85two", "three"]


def test_endings_in_capitals_mean_the_same(tmp_path: Path):
    for name, content in (
        ("A.JSONL", '{"text": "one"}\n'), ("B.Json", '[{"text": "one"}]'), ("C.CSV", "text\none\n"),
    ):  # fmt: skip
        (tmp_path / name).write_text(content)
    with gzip.open(tmp_path / "D.JSONL.GZ", "wt") as packed:
        packed.write('{"text": "one"}\n')
    assert texts(source(path=str(tmp_path))) == ["one"] * 4
    assert all(texts(source(path=str(file))) == ["one"] for file in tmp_path.iterdir())


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
        ({"messages": CHAT, "chat_template_kwargs": '{"enable_thinking": false}'},
         Conversation(CHAT, {"enable_thinking": False})),
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
        ({"messages": CHAT, "chat_template_kwargs": "["}, "x has `chat_template_kwargs` that are no JSON"),
        ({"messages": CHAT, "chat_template_kwargs": "[1]"}, r"x has a list as `chat_template_kwargs` \(\[1\]\); give"),
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
    turns = [[{"role": "user", "content": what}, {"role": "assistant", "content": "that"}] for what in ("how?", "who?")]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
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


@pytest.mark.parametrize("way", [";", "\t", "|", ","])
@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_a_table_is_read_by_what_stands_between_its_columns_alone_and_in_a_folder(
    tmp_path: Path, way: str, ending: str
):
    table = tmp_path / f"texts.{ending}"
    table.write_text(f'"source"{way}"text"\na{way}"one, two; three"\n')
    for path in (table, tmp_path):
        found = Source(SourceSection(path=str(path)), 8, 1000)
        assert list(found.documents()) == ["one, two; three"]


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


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", "year;price\n1;2\n", "a.csv is a table with the columns year, price; name the one with the texts"),
        ("a.csv", "word " * 50_000, r"with the columns (word ){7}word…; name the one with .* in its first line"),
        ("a.csv", ",".join(f"c{i}" for i in range(2000)), r"the columns c0, c1, c2, c3, c4, c5, c6, c7 and 1992 more"),
    ],
)  # fmt: skip
def test_a_table_without_a_column_of_texts_is_described_in_short(tmp_path: Path, name: str, content: str, words: str):
    (tmp_path / name).write_text(content)
    with pytest.raises(DraftsmithError, match=words) as raised:
        source(path=str(tmp_path / name))
    assert len(str(raised.value)) < 400 + len(str(tmp_path))


def test_a_wrong_value_is_shown_in_short():
    with pytest.raises(DraftsmithError, match="x has messages that are no list but 'a a a .*…; give a list") as raised:
        read_record({"messages": "a " * 9999}, "x")
    assert len(str(raised.value)) < 120


def both_sides(path: Path, records: list[dict[str, Any]], every: int = 3) -> tuple[list[Any], list[Any]]:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    trained, held_out = (
        [piece.content for piece in Source(SourceSection(path=str(path)), every, 1000, held_out=which).pieces()]
        for which in (False, True)
    )
    assert trained and held_out and len(trained) + len(held_out) == len(records)
    return trained, held_out


def test_all_completions_of_a_prompt_are_on_one_side(tmp_path: Path):
    pairs = [
        {"prompt": f"question {i}{' ' * more}", "completion": f"answer {more}"} for i in range(30) for more in range(3)
    ]
    trained, held_out = both_sides(tmp_path / "a.jsonl", pairs)
    assert not {pair.prompt.strip() for pair in trained} & {pair.prompt.strip() for pair in held_out}


def test_all_answers_to_the_same_beginning_of_a_conversation_are_on_one_side(tmp_path: Path):
    chats = [
        {"prompt": f"question {i}" + "\n" * more, "completion": [{"role": "assistant", "content": f"answer {more}"}]}
        for i in range(30) for more in range(3)
    ]
    more = [{"messages": [{"role": "user", "content": f"question {i}"}, *CHAT[1:], *CHAT]} for i in range(30)]
    trained, held_out = both_sides(tmp_path / "a.jsonl", [*chats, *more])
    asked = [{chat.messages[0]["content"].strip() for chat in side} for side in (trained, held_out)]
    assert not asked[0] & asked[1] and len(asked[0] | asked[1]) == 30


@pytest.mark.parametrize("count", [4, 40])
def test_texts_that_differ_in_white_space_around_them_are_on_one_side(tmp_path: Path, count: int):
    words = "one two three four five six seven eight nine"
    forms = (f"{{}} {words}", f"{{}} {words}\n", f"\n {{}} {words} {' ' * 40}\n")
    if count == 4:  # the ends of a few texts are held out, and then all forms have the same one
        path = tmp_path / "a.jsonl"
        path.write_text("".join(json.dumps({"text": form.format("a")}) + "\n" for form in forms))
        held_out = Source(SourceSection(path=str(path)), 50, 1000, held_out=True)
        assert [str(piece.content).strip() for piece in held_out.pieces()] == ["nine"] * 3
        return
    records = [{"text": form.format(i)} for i in range(count) for form in forms]
    trained, held_out = both_sides(tmp_path / "a.jsonl", records)
    assert not {text.strip() for text in trained} & {text.strip() for text in held_out}
    assert all(is_held_out(text.strip(), 3) for text in held_out), "and which side it is, is known without the others"
