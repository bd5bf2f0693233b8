"""The training documents of one source, cut into pieces, with a record of what is left out."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from draftsmith.targets.records import Document, UnusableRecord, plain_text, read_record
from draftsmith.text_files import NotUtf8
from draftsmith.training.data.json_files import Located
from draftsmith.training.data.record_files import (
    JSON_LINES,
    ends_in,
    files_of,
    missing_file,
    records_in,
    records_on_hub,
)
from draftsmith.training.data.split import Split, find_split
from draftsmith.training.sections import SourceSection
from draftsmith.types import DraftsmithError

LOOKED_AT = 2000
"""So many pieces of a source are read before a model is loaded: most mistakes are in all records, or in the first."""
EMPTY, HELD_OUT, HELD_OUT_END = "empty", "held out", "held out at its end"
NOT_UTF8 = "not in UTF-8"


@dataclass(frozen=True)
class Piece:
    """A document, or a part of a long text; `ends` marks the last part."""

    content: Document
    ends: bool = True

    @property
    def characters(self) -> int:
        """How long it is."""
        return len(plain_text(self.content))


def names_of(sections: Sequence[SourceSection]) -> list[str]:
    """Return a short name for every source, for its measurements; the full names if two short ones are the same."""
    short = [_short_name(section) for section in sections]
    return [
        name if short.count(name) == 1 else _whole_name(section) for name, section in zip(short, sections, strict=True)
    ]


def _short_name(section: SourceSection) -> str:
    if section.path is None:
        return str(section.name)
    path = Path(section.path).expanduser()
    if path.is_dir():
        return path.resolve().name
    ending = next((ending for ending in JSON_LINES if ends_in(path, ending)), path.suffix)
    return path.name[: len(path.name) - len(ending)]


def _whole_name(section: SourceSection) -> str:
    if section.path is not None:
        return section.path
    return " ".join(filter(None, (section.name, section.configuration, section.split)))


@dataclass
class Source:
    """The training documents of one source, always in the same order, cut into pieces.

    Held-out and empty documents are skipped, records with a number, say, where a text belongs, and texts of a folder
    that are not UTF-8; `read` and `left_out` count documents in the last pass. Pieces are shuffled, not documents, so
    that one long book does not fill a batch. With `held_out` it is reversed: the pieces are those of the held-out
    documents.
    """

    section: SourceSection
    held_out_every: int
    piece_characters: int
    held_out: bool = False
    files: list[Path] = field(default_factory=list, init=False)
    files_left_out: Counter[str] = field(default_factory=Counter, init=False)
    read: int = field(default=0, init=False)
    left_out: Counter[str] = field(default_factory=Counter, init=False)
    _split: Split | None = field(default=None, init=False)
    _passed_over: set[Path] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        if (self.section.path is None) == (self.section.name is None):
            raise DraftsmithError("a source in data.sources takes either a path or a name; give one of them.")
        if self.section.path is None:
            return
        path = Path(self.section.path).expanduser()
        if not path.exists():
            raise missing_file(path)
        self.files, self.files_left_out = files_of(path)

    @property
    def label(self) -> str:
        """Its name in messages."""
        return str(self.section.path or self.section.name)

    def account(self) -> dict[str, Any]:
        """Return what the last pass has found so far, as plain JSON."""
        return {
            "source": self.label, "files": len(self.files) - len(self._passed_over),
            "files_left_out": dict(self.files_left_out), "documents": self.read,
            "used": self.read - self.left_out.total() + self.left_out[HELD_OUT_END], "left_out": dict(self.left_out),
        }

    def documents(self) -> Iterator[Document | UnusableRecord]:
        """Yield all documents of the source, including held-out and empty ones, and the errors of records without."""
        for record, where in self._records():
            try:
                document: Document | UnusableRecord = read_record(record, where)
            except UnusableRecord as error:
                document = error
            yield document

    def _records(self) -> Iterator[Located]:
        if self.section.name is not None:
            yield from records_on_hub(self.section)
            return
        alone = not Path(str(self.section.path)).expanduser().is_dir()
        for file in self.files:
            try:
                records = records_in(file, alone)
            except NotUtf8:
                if alone:
                    raise
                self._passed_over.add(file)
                self.files_left_out[NOT_UTF8] = len(self._passed_over)
                continue
            yield from records

    @property
    def split(self) -> Split:
        """Which of its documents are held out."""
        if self._split is None:
            documents = (found for found in self.documents() if not isinstance(found, UnusableRecord))
            self._split = find_split(documents, self.held_out_every)
        return self._split

    def pieces(self) -> Iterator[Piece]:
        """Yield one pass over the documents, as pieces; DraftsmithError if there is none to train on."""
        self.read, self.left_out, seen = 0, Counter(), 0
        for document in self.documents():
            self.read += 1
            if isinstance(document, UnusableRecord):
                self.left_out[document.reason] += 1
                continue
            if not plain_text(document).strip():
                self.left_out[EMPTY] += 1
                continue
            trained_on, held_out = self.split.parts(document)
            if held_out is not None:
                self.left_out[HELD_OUT if trained_on is None else HELD_OUT_END] += 1
            wanted = held_out if self.held_out else trained_on
            ends = self.held_out or held_out is None
            for piece in () if wanted is None else self._cut(wanted, ends):
                seen += 1
                yield piece
        if not seen and not self.held_out:
            raise self._nothing()

    def check(self) -> None:
        """Read the beginning of the documents, if they are on this machine.

        Raises:
            DraftsmithError: a record that cannot be read, or a source without a document to train on.
        """
        if self.section.name is None:
            for _ in islice(self.pieces(), LOOKED_AT):
                pass

    def _nothing(self) -> DraftsmithError:
        """Return the error for a source without a document to train on."""
        others = {**self.files_left_out, **self.left_out}
        counts = [f"{others.pop(EMPTY, 0)} are empty", f"{others.pop(HELD_OUT, 0)} held out"]
        counts += [f"{count} {reason}" for reason, count in others.items()]
        return DraftsmithError(f"{self.label} has no document to train on ({', '.join(counts)}); add text to it.")

    def _cut(self, document: Document, ends: bool = True) -> Iterator[Piece]:
        """Cut a long text, at the beginning of a word if there is one near; other documents stay whole.

        Args:
            ends: whether the document ends here.
        """
        if not isinstance(document, str):
            yield Piece(document)
            return
        *before, last = cut_text(document, self.piece_characters)
        yield from (Piece(part, ends=False) for part in before)
        yield Piece(last, ends)


def cut_text(text: str, characters: int) -> list[str]:
    """Cut a text into parts of at most `characters` characters, at the beginning of a word if there is one near."""
    parts, start = [], 0
    while len(text) - start > characters:
        end, near = start + characters, start + characters // 2
        space = max(text.rfind(" ", near, end), text.rfind("\n", near, end))
        end = space + 1 if space >= 0 else end
        parts.append(text[start:end])
        start = end
    return [*parts, text[start:]]
