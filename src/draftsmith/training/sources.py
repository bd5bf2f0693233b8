"""Documents from text files, JSON lines (also .gz and .xz), parquet files and hub data sets, one at a time."""

import gzip
import json
import lzma
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TextIO

from draftsmith.training.recipe import SourceSection
from draftsmith.training.split import is_held_out
from draftsmith.types import DraftsmithError

JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.xz")


def document_text(record: Mapping[str, Any], where: str) -> str:
    """Return the text of a record: its `text`, or its `messages` as turns that each begin with <|role|>."""
    if isinstance(record.get("text"), str):
        return str(record["text"])
    turns = record.get("messages")
    if isinstance(turns, list):
        if not all(isinstance(turn, Mapping) and {"role", "content"} <= turn.keys() for turn in turns):
            raise DraftsmithError(f"{where} has a message without `role` or `content`; give each message both.")
        return "\n".join(f"<|{turn['role']}|>{turn['content']}" for turn in turns)
    raise DraftsmithError(f"{where} has neither `text` nor `messages` (it has {', '.join(record) or 'nothing'}).")


def _open_text(path: Path) -> TextIO:
    if path.name.endswith(".xz"):
        return lzma.open(path, "rt", encoding="utf-8")
    if path.name.endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8", errors="replace")


def _json_lines(path: Path) -> Iterator[str]:
    try:
        with _open_text(path) as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                where = f"{path}, line {number},"
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise DraftsmithError(f"{where} is no JSON ({error}); mend or remove that line.") from error
                if not isinstance(record, dict):
                    raise DraftsmithError(f"{where} is no JSON object; mend or remove that line.")
                yield document_text(record, where)
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, UnicodeDecodeError) as error:
        raise DraftsmithError(f"{path} is cut short or broken ({error}); fetch it again.") from error


def _parquet(path: Path) -> Iterator[str]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise DraftsmithError(f"reading {path} needs pyarrow; install draftsmith[train].") from error
    for batch in parquet.ParquetFile(path).iter_batches():
        for record in batch.to_pylist():
            yield document_text(record, str(path))


def _hub(name: str, split: str) -> Iterator[str]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DraftsmithError(f"reading the data set {name!r} needs datasets; install draftsmith[train].") from error
    try:
        rows = load_dataset(name, split=split, streaming=True)
    except Exception as error:  # the library raises its own, the hub's and the network's kinds
        raise DraftsmithError(f"cannot open the data set {name!r} ({error}); check its name or the network.") from error
    for record in rows:
        yield document_text(record, name)


def _file(path: Path) -> Iterator[str]:
    if path.name.endswith(JSON_LINES):
        return _json_lines(path)
    if path.suffix == ".parquet":
        return _parquet(path)
    return iter([path.read_text(encoding="utf-8", errors="replace")])


def missing_file(path: Path) -> DraftsmithError:
    """Return the error that names a path which does not exist and its nearest neighbour."""
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = get_close_matches(path.name, siblings, n=1)
    hint = f"did you mean {path.parent / near[0]}?" if near else "check the path."
    return DraftsmithError(f"data file {path} does not exist; {hint}")


@dataclass
class Source:
    """The training documents of one source, always in the same order, cut into pieces.

    Held-out and empty documents are passed over; `empty` counts the latter in the last pass. Pieces are what is
    shuffled, so that one long book does not fill a batch.
    """

    section: SourceSection
    held_out_every: int
    piece_characters: int
    empty: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if (self.section.path is None) == (self.section.name is None):
            raise DraftsmithError("a source in data.sources takes either a path or a name; give one of them.")
        if self.section.path is not None and not Path(self.section.path).expanduser().exists():
            raise missing_file(Path(self.section.path).expanduser())

    @property
    def label(self) -> str:
        """What to call it in messages."""
        return str(self.section.path or self.section.name)

    def documents(self) -> Iterator[str]:
        """Yield all texts of the source, the held-out and empty ones too."""
        if self.section.name is not None:
            yield from _hub(self.section.name, self.section.split)
            return
        path = Path(str(self.section.path)).expanduser()
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            yield from _file(file)

    def pieces(self) -> Iterator[str]:
        """Yield one pass over the training documents; DraftsmithError when there is none."""
        self.empty, seen = 0, 0
        for text in self.documents():
            if not text.strip():
                self.empty += 1
            elif not is_held_out(text, self.held_out_every):
                for start in range(0, len(text), self.piece_characters):
                    seen += 1
                    yield text[start : start + self.piece_characters]
        if not seen:
            raise DraftsmithError(
                f"{self.label} has no document to train on ({self.empty} are empty, the rest held out); add text to it."
            )
