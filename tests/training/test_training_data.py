"""The loader goes on exactly where it was, at any place of an epoch and with any number of ranks."""

import gzip
import json
import lzma
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftsmith.training.data.generated import GeneratedText
from draftsmith.training.data.loader import Loader, Windowing
from draftsmith.training.data.reader import Reader
from draftsmith.training.data.record_files import missing_file
from draftsmith.training.data.split import is_held_out
from draftsmith.training.sections import DataSection, OnPolicySection
from draftsmith.types import DraftsmithError

END = 30_000


@cache
def reader_of_numbers() -> Reader:
    """Return the reader of a target whose tokens are the numbers below 30,000, without BOS."""
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(END)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Reader(PreTrainedTokenizerFast(tokenizer_object=tokenizer), frozenset([END]), "numbers", "assistant")


def tokenize(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def write(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def numbered(count: int, words: int = 7) -> list[str]:
    """Documents whose tokens tell them apart: document i holds the words 100 i … 100 i + 6."""
    return [" ".join(str(100 * i + w) for w in range(words)) for i in range(1, count + 1)]


def loader(*paths: Path, length: int = 8, rank: int = 0, world: int = 1, seed: int = 5, **section) -> Loader:
    values = {"sources": [{"path": str(path)} for path in paths], "shuffle_documents": 5, "shuffle_windows": 3}
    return Loader(
        DataSection.model_validate(values | section), reader_of_numbers(), Windowing(length), seed=seed, rank=rank,
        world=world,
    )


def training(documents: list[str]) -> list[str]:
    return [text for text in documents if text.strip() and not is_held_out(text)]


def take(reader: Loader, count: int) -> list[list[int]]:
    return [reader.next_window().tokens for _ in range(count)]


def test_an_epoch_has_every_document_once_and_no_held_out_one(tmp_path: Path):
    documents = numbered(200)
    expected = {tokenize(text)[0] for text in training(documents)}
    assert len(expected) < 200
    reader = loader(write(tmp_path / "a.jsonl", documents), shuffle_windows=1)
    first = [window[0] for window in take(reader, len(expected))]
    assert set(first) == expected
    assert first != sorted(first)
    second = [window[0] for window in take(reader, len(expected))]
    assert set(second) == expected and second != first
    assert reader.epochs == [1]


@pytest.mark.parametrize("length", [8, 5, 30], ids=["a-document", "less", "more"])
def test_resume_anywhere(tmp_path: Path, length: int):
    """In mid-epoch, at its end, after it, and twice in one epoch: the windows that follow are the same."""
    paths = [write(tmp_path / "a.jsonl", numbered(23)), write(tmp_path / "b.jsonl", numbered(9, words=11))]
    calm = take(loader(*paths, length=length), 120)
    reader, seen = loader(*paths, length=length), []
    while len(seen) < 120:
        seen += take(reader, 1)
        state = json.loads(json.dumps(reader.state_dict()))
        reader = loader(*paths, length=length)
        reader.load_state_dict(state)
    assert seen == calm


def test_what_an_earlier_version_wrote_is_refused_in_one_sentence(tmp_path: Path):
    reader = loader(write(tmp_path / "a.jsonl", numbered(23)))
    state = reader.state_dict()
    del state["unusable"]
    with pytest.raises(DraftsmithError, match="written by an earlier version; start a new run"):
        reader.load_state_dict(state)
    kept = tmp_path / "generated.jsonl"
    kept.write_text('{"sequences": [[1, 2, 3]]}\n')
    with pytest.raises(DraftsmithError, match="generated.jsonl was written by an earlier version; start a new run"):
        GeneratedText(kept, OnPolicySection(), 0)


def test_a_window_belongs_to_one_document_and_an_end_token_stands_at_its_end_only(tmp_path: Path):
    documents = numbered(30, words=7)
    windows = take(loader(write(tmp_path / "a.jsonl", documents), length=5, shuffle_windows=1), 40)
    for window in windows:
        first = window[0]
        assert first % 100 in (0, 5)
        expected = list(range(first, first + 5)) if first % 100 == 0 else [first, first + 1, END]
        assert window == expected
    assert {len(window) for window in windows} == {3, 5}


def test_windows_of_a_batch_are_alike_in_length_and_none_is_lost(tmp_path: Path):
    documents = [text for pair in zip(numbered(40, words=4), numbered(80, words=31)[40:], strict=True) for text in pair]
    path = write(tmp_path / "a.jsonl", documents)
    settings = {"length": 32, "shuffle_windows": 24, "shuffle_documents": 100}
    expected = Counter(tokenize(text)[0] for text in training(documents))
    reader, seen, padded = loader(path, **settings), Counter(), 0
    for _ in range(12):
        batch = reader.next_batch(4)
        lengths = batch.learnt_BL.sum(1)
        padded += int((batch.learnt_BL.shape[1] - lengths).sum())
        seen.update(batch.tokens_BL[:, 0].tolist())
        again = loader(path, **settings)
        again.load_state_dict(json.loads(json.dumps(reader.state_dict())))
        reader = again
    assert seen <= expected and max(seen.values()) == 1
    assert padded < 48 * 27 / 4, "at random, about half of the windows would be padded by 27"


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_resume_with_another_number_of_ranks(tmp_path: Path, before: int, after: int):
    """Over one epoch and a resize in its middle, every document is seen once, by one rank."""
    documents = numbered(120)
    path = write(tmp_path / "a.jsonl", documents)
    expected = Counter(tokenize(text)[0] for text in training(documents))
    seen: Counter[int] = Counter()
    old = [loader(path, rank=r, world=before) for r in range(before)]
    for rank, reader in enumerate(old):
        seen.update(window[0] for window in take(reader, 10 + 7 * rank))
    states = [reader.state_dict() for reader in old]
    new = [loader(path, rank=r, world=after) for r in range(after)]
    for reader in new:
        reader.load_state_dict(*states)
    for reader in new:
        while reader.pieces < sum(expected.values()):
            reader._read_piece()
        seen.update(window.tokens[0] for window in reader._pool)
    assert seen == expected


def test_two_ranks_share_and_resume_alike(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", numbered(50))
    readers = [loader(path, rank=r, world=2) for r in range(2)]
    both = [take(reader, 12) for reader in readers]
    assert not {w[0] for w in both[0]} & {w[0] for w in both[1]}
    states = [reader.state_dict() for reader in readers]
    after = [take(reader, 6) for reader in readers]
    for rank in range(2):
        again = loader(path, rank=rank, world=2)
        again.load_state_dict(*states)
        assert take(again, 6) == after[rank]
    with pytest.raises(DraftsmithError, match="1 loader states were given, but 2 ranks"):
        loader(path).load_state_dict(states[0])


def test_weights_share_the_tokens(tmp_path: Path):
    short, long = write(tmp_path / "s.jsonl", numbered(60, 4)), write(tmp_path / "l.jsonl", numbered(60, 40))
    values = {"sources": [{"path": str(short), "weight": 3}, {"path": str(long), "weight": 1}], "shuffle_windows": 1}
    reader = Loader(DataSection.model_validate(values), reader_of_numbers(), Windowing(10), seed=1)
    drawn = [0, 0]
    for piece in range(4000):
        source = reader._pick(piece)
        drawn[reader.sources.index(source)] += (4, 40)[reader.sources.index(source)]
    assert drawn[0] / sum(drawn) == pytest.approx(0.75, abs=0.04)


def test_weights_share_the_prompts(tmp_path: Path):
    """A piece gives one prompt, however long it is."""
    short, long = write(tmp_path / "s.jsonl", numbered(60, 8)), write(tmp_path / "l.jsonl", numbered(60, 80))
    values = {"sources": [{"path": str(short), "weight": 3}, {"path": str(long), "weight": 1}], "shuffle_windows": 1}
    reader = Loader(DataSection.model_validate(values), reader_of_numbers(), Windowing(6, prompts=9), seed=1)
    drawn = [reader.sources.index(reader._pick(piece)) for piece in range(4000)]
    assert drawn.count(0) / len(drawn) == pytest.approx(0.75, abs=0.04)


def test_a_prompt_is_cut_from_a_text_without_spaces(tmp_path: Path):
    """Chinese has none, nor has minified code."""
    tokenizer = Tokenizer(models.WordLevel({chr(0x4E00 + i): i for i in range(3000)}, unk_token=chr(0x4E00)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    reader = Reader(PreTrainedTokenizerFast(tokenizer_object=tokenizer), frozenset([2999]), "characters", "assistant")
    path = write(tmp_path / "a.jsonl", ["".join(chr(0x4E00 + i) for i in range(2900)) + "\n"] * 3)
    section = DataSection.model_validate(
        {"sources": [{"path": str(path)}], "shuffle_windows": 1, "held_out_every": 0, "piece_characters": 10_000}
    )
    windows = take(Loader(section, reader, Windowing(20, prompts=99), seed=2), 30)
    assert all(window == list(range(window[0], window[0] + 20)) for window in windows)
    assert len({window[0] for window in windows}) > 20


def test_long_documents_are_cut_and_shuffled_apart(tmp_path: Path):
    text = " ".join(str(i) for i in range(10_000, 11_000))
    (tmp_path / "a.txt").write_text(text)
    reader = loader(tmp_path / "a.txt", piece_characters=600, shuffle_documents=20, shuffle_windows=1, length=21,
        held_out_every=0)
    windows = take(reader, 50)
    starts = [window[0] for window in windows]
    assert starts != sorted(starts)
    ended = [window for window in windows if END in window]
    assert len(ended) == 1 and ended[0][-2:] == [10_999, END], "only where the document ends"


def test_a_prompt_begins_with_a_word_anywhere_in_a_piece(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", numbered(40, words=60))
    section = DataSection.model_validate({"sources": [{"path": str(path)}], "shuffle_windows": 1})
    windows = take(Loader(section, reader_of_numbers(), Windowing(6, prompts=9), seed=2), 30)
    assert len({window[0] // 100 for window in windows}) == 30
    assert all(window == list(range(window[0], window[0] + 6)) for window in windows)
    assert len({window[0] % 100 for window in windows}) > 3


def test_formats_give_the_same_documents(tmp_path: Path):
    documents = numbered(12)
    plain = write(tmp_path / "a.jsonl", documents)
    for suffix, opener in (("gz", gzip.open), ("xz", lzma.open)):
        with opener(tmp_path / f"a.jsonl.{suffix}", "wt") as handle:
            handle.write(plain.read_text())
        assert take(loader(tmp_path / f"a.jsonl.{suffix}"), 9) == take(loader(plain), 9)
    folder = tmp_path / "folder"
    folder.mkdir()
    for i, text in enumerate(documents):
        (folder / f"{i:02}.txt").write_text(text)
    assert take(loader(folder), 9) == take(loader(plain), 9)


def test_empty_documents_are_counted_and_passed_over(tmp_path: Path):
    documents = numbered(10)
    path = write(tmp_path / "a.jsonl", ["", *documents[:5], "  \n", *documents[5:]])
    reader = loader(path, held_out_every=0)
    assert take(reader, 8) == take(loader(write(tmp_path / "b.jsonl", documents), held_out_every=0), 8)
    (account,) = reader.account()["sources"]
    assert account["left_out"] == {"empty": 2} and account["documents"] == 12


def test_bad_data_is_named(tmp_path: Path):
    path = write(tmp_path / "code.jsonl", ["", " "])
    with pytest.raises(DraftsmithError, match=r"code\.jsonl has no document to train on \(2 are empty"):
        loader(path)
    with pytest.raises(DraftsmithError, match=r"cod\.jsonl does not exist; did you mean .*code\.jsonl"):
        loader(tmp_path / "cod.jsonl")
    (tmp_path / "link.jsonl").symlink_to("gone.jsonl")
    with pytest.raises(DraftsmithError, match=r"link\.jsonl does not exist; it is a link to gone\.jsonl"):
        loader(tmp_path / "link.jsonl")
    with pytest.raises(DraftsmithError, match=r"data\.sources is empty"):
        loader()
    (tmp_path / "bad.jsonl").write_text('{"text": "1 2"}\n{"text": \n')
    with pytest.raises(DraftsmithError, match=r"bad\.jsonl, line 2, is no JSON"):
        loader(tmp_path / "bad.jsonl")
    whole = lzma.compress(path.read_bytes() * 100)
    (tmp_path / "cut.jsonl.xz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DraftsmithError, match=r"cut\.jsonl\.xz is cut short or broken"):
        loader(tmp_path / "cut.jsonl.xz")
    assert "check the path" in str(missing_file(tmp_path / "nowhere" / "x"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "1 2 3"}', r"\(9: shorter than 50 tokens\); add longer ones, or lower stage2.prompt_tokens"),
        (
            '{"prompt": "1 2 3 4", "completion": "5"}',
            r"\(9: prompt longer than 3 tokens\); give shorter ones, lower stage2.new_tokens to leave them room, or",
        ),
    ],
)
def test_prompts_of_which_none_fits_are_refused_with_what_helps(tmp_path: Path, line: str, message: str):
    (tmp_path / "some.jsonl").write_text(f"{line}\n" * 9)
    section = DataSection.model_validate({"sources": [{"path": str(tmp_path / "some.jsonl")}], "held_out_every": 0})
    prompts = Loader(section, reader_of_numbers(), Windowing(50, prompts=3), seed=1)
    with pytest.raises(DraftsmithError, match=f"no document in data.sources can be used {message}"):
        prompts.next_window()


def test_shrunken_source_is_noticed(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", numbered(30))
    reader = loader(path)
    take(reader, 20)
    write(path, numbered(5))
    with pytest.raises(DraftsmithError, match="is shorter than when the checkpoint was saved"):
        loader(path).load_state_dict(reader.state_dict())
