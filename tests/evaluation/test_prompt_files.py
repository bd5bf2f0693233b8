"""Prompts are read from the same files and folders as training data, and what is wrong with them is named."""

import gzip
import json
import lzma
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draftsmith.cli import app
from draftsmith.evaluation.prompts import load_prompts
from draftsmith.targets.token_ids import Conversation
from draftsmith.training.data.record_files import records_at
from draftsmith.training.data.sources import Source
from draftsmith.training.sections import SourceSection
from draftsmith.types import DraftsmithError
from draftsmith.workflows.sources import gather_prompts
from tests.helpers.tiny import save_tiny_target

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
RECORDS = [
    {"text": "one", "task": "code"}, {"prompt": "two"}, {"messages": CHAT},
    {"prompt": "three", "completion": "left to the target"},
]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS)


def found(path: Path, task: str | None = None) -> list[tuple[str, str, bool]]:
    prompts = gather_prompts(path, task)
    assert all(prompt.conversation in (None, Conversation(CHAT[:1])) for prompt in prompts)
    return [(prompt.task, prompt.text, prompt.conversation is not None) for prompt in prompts]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("p.jsonl", LINES.encode()), ("p.ndjson", LINES.encode()),
        ("p.jsonl.gz", gzip.compress(LINES.encode(), mtime=0)),
        ("p.jsonl.xz", lzma.compress(LINES.encode())), ("p.json", json.dumps(RECORDS).encode()),
        ("p.jsonl", b"\xef\xbb\xbf" + LINES.encode()), ("p.json", LINES.encode()),
        ("p.json", json.dumps({"data": RECORDS, "version": 1}).encode()),
    ],
)
def test_every_form_of_training_data_gives_the_same_prompts(tmp_path: Path, name: str, content: bytes):
    path = tmp_path / name
    path.write_bytes(content)
    assert found(path) == [
        ("code", "one", False), ("text", "two", False), ("text", "hi", True), ("text", "three", False)
    ]
    assert found(path, "code") == [("code", "one", False)]
    if name in ("p.jsonl", "p.ndjson"):
        assert gather_prompts(path) == load_prompts(path)


@pytest.mark.parametrize("name", ["p.jsonl", "p.txt"])
def test_prompts_for_a_load_test_are_utf_8_too(tmp_path: Path, name: str):
    line = '{"text": "one café"}\n'
    (tmp_path / name).write_bytes(line.encode("latin-1"))
    with pytest.raises(DraftsmithError, match=rf"{name}, line 1, is not UTF-8 text \(byte 0xe9\); convert the file"):
        load_prompts(tmp_path / name)
    (tmp_path / name).write_text(line, encoding="utf-16")
    with pytest.raises(DraftsmithError, match=rf"{name} is UTF-16 instead of UTF-8; convert it"):
        load_prompts(tmp_path / name)
    (tmp_path / name).write_text(line, encoding="utf-8-sig")
    assert load_prompts(tmp_path / name)[0].text == ("one café" if name == "p.jsonl" else line)


def test_prompts_may_come_through_a_pipe():
    reading, writing = os.pipe()
    os.write(writing, b"one\r\ntwo")
    os.close(writing)
    try:
        assert load_prompts(Path(f"/dev/fd/{reading}"))[0].text == "one\ntwo"
    finally:
        os.close(reading)


def test_a_folder_and_a_parquet_file_give_prompts(tmp_path: Path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([{"text": "four", "task": "prose"}]), tmp_path / "c.parquet")
    (tmp_path / "a.py").write_text("x = 1")
    (tmp_path / "b.jsonl").write_text('\n{"text": "two"}\n{"text": " "}\n')
    (tmp_path / ".hidden.txt").write_text("secret")
    (tmp_path / "d.txt").write_bytes("café".encode("latin-1"))
    assert found(tmp_path) == [
        ("text", "x = 1", False), ("text", "two", False), ("prose", "four", False)
    ], "and a text of another encoding is left out of a folder, as in training"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("p.jsonl", b'{"text": "one"}\n{"txt": 1}\n', r"p\.jsonl, line 2, has neither a string field .* with a user's"),
        ("p.jsonl", b'{"messages": [{"role": "assistant", "content": "x"}]}', r"line 1, has neither a string field"),
        ("p.jsonl", b"[1]\n", r"p\.jsonl, line 1, is no JSON object; fix or remove"),
        ("p.jsonl", b'{"text": "\xff"}\n', r"p\.jsonl, line 1, is not UTF-8 text \(byte 0xff\); convert the file"),
        ("p.json", b'[{"text": "one"}, {"txt": 1}]', r"p\.json, record 2, has neither a string field"),
        ("p.txt", b"  \n", r"p\.txt holds no text; give one with at least one prompt"),
        ("p.txt", b"one\ncaf\xe9", r"p\.txt, line 2, is not UTF-8 text \(byte 0xe9\); convert the file, .* -f LATIN1"),
        ("p.txt", "one".encode("utf-16"), r"p\.txt is UTF-16 instead of UTF-8; convert it, .* iconv -f UTF-16"),
        ("p.jsonl", b'{"text": "a \\ud83d"}\n', r"p\.jsonl, line 1, has half a character \('\\ud83d'\) in its text"),
        ("p.jsonl", b'{"text": 5}\n', r"p\.jsonl, line 1, has neither a string field `text`"),
        ("p.json", b'{"name": "one"}', r"p\.json holds an object with the fields name, not records; give a list of"),
        ("p.bin", b"a\0b", r"p\.bin is no text; give text in UTF-8, \.jsonl"),
        ("p.jsonl.gz", gzip.compress(LINES.encode() * 99, mtime=0)[:-20], r"p\.jsonl\.gz is cut short or broken"),
        (
            "p.jsonl.gz", gzip.compress(LINES.encode(), mtime=0)[:10] + b"\xff" * 20,
            r"p\.jsonl\.gz is cut short or broken",
        ),
    ],
)
def test_what_is_no_prompt_is_named(tmp_path: Path, name: str, content: bytes, words: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DraftsmithError, match=words):
        gather_prompts(tmp_path / name)


def test_a_broken_parquet_file_is_named(tmp_path: Path):
    pytest.importorskip("pyarrow")
    (tmp_path / "p.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(DraftsmithError, match=r"p\.parquet is no parquet file .*; fetch it again"):
        list(records_at(tmp_path / "p.parquet"))


def test_damage_within_a_parquet_file_is_named(tmp_path: Path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "p.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"text": f"{i} fox {i * i}"} for i in range(500)]), path)
    content = bytearray(path.read_bytes())
    content[200:400] = bytes(200)
    path.write_bytes(content)
    words = r"p\.parquet is a damaged parquet file \(\w.*\); fetch it again"
    with pytest.raises(DraftsmithError, match=words):
        gather_prompts(path)
    with pytest.raises(DraftsmithError, match=words):
        list(Source(SourceSection(path=str(path)), held_out_every=0, piece_characters=100).pieces())


def test_what_is_not_there_is_named(tmp_path: Path):
    (tmp_path / "p.jsonl").write_text(LINES)
    with pytest.raises(DraftsmithError, match=r"q\.jsonl cannot be read, because it does not .* mean .*p\.jsonl\?"):
        gather_prompts(tmp_path / "q.jsonl")
    with pytest.raises(DraftsmithError, match=r"p\.jsonl holds no prompt of task 'cod'; choose one of code, text"):
        gather_prompts(tmp_path / "p.jsonl", "cod")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DraftsmithError, match=r"empty holds no text"):
        gather_prompts(tmp_path / "empty")


def test_bench_measures_on_a_packed_file(tmp_path: Path):
    target = tmp_path / "model"
    save_tiny_target(target)
    texts = [json.dumps({"text": f"{i} the quick brown fox jumps over the lazy dog"}) for i in range(4)]
    with gzip.open(tmp_path / "texts.jsonl.gz", "wt") as opened:
        opened.write("\n".join(texts))
    words = ["bench", "--target", target, "--drafter", "ngram", "--data", tmp_path / "texts.jsonl.gz", "--batch", "1"]
    words += ["--prompt-tokens", "8", "--new-tokens", "4", "--trials", "1", "--warmups", "0", "--candidates", "0"]
    result = CliRunner().invoke(app, [str(word) for word in [*words, "--json", tmp_path / "bench.json"]])
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "bench.json").read_text())["provenance"]["data"] == "texts.jsonl.gz"
