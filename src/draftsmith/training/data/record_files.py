"""Records from files and data sets: text, JSON lines (also .gz and .xz), JSON lists, tables, parquet, and the hub."""

import csv
import gzip
import lzma
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from io import TextIOWrapper
from pathlib import Path
from typing import BinaryIO, cast

from draftsmith.targets.records import Document, read_record
from draftsmith.text_files import ENCODING, NotUtf8, check_width, names_in_words, not_utf8, read_text
from draftsmith.training.data.json_files import Located, json_lines, records_of
from draftsmith.training.sections import SourceSection
from draftsmith.types import DraftsmithError

JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.xz", ".ndjson")
TABLES = {".csv": ",", ".tsv": "\t"}
"""The endings of tables, with what most often stands between their columns."""
COLUMNS = ("text", "prompt")
"""A table whose first line names one of these columns has a record a line; any other is a text."""
LONGEST_FIELD = 2**31 - 1
SEPARATORS = (",", ";", "\t", "|")
"""What may stand between the columns of a table: where a comma is in numbers, programs write `;` into a .csv file."""
LOOKED_AT = 8192
"""Number of bytes at a file's beginning that decide whether it is text."""


def ends_in(path: Path, *endings: str) -> bool:
    """Whether a name has one of these endings, in small letters or in capitals."""
    return path.name.lower().endswith(endings)


def files_of(path: Path) -> tuple[list[Path], Counter[str]]:
    """Return the files to read at a path, and how many files of a folder are left out, by reason.

    Raises:
        DraftsmithError: the path is a file that is not text, or a table without a column of texts.
    """
    if not path.is_dir():
        with _named_if_unreadable(path):
            check_width(path)
        if _is_binary(path):
            raise DraftsmithError(
                f"{path} is no text; give text in UTF-8, {', '.join([*JSON_LINES, *TABLES])} or .parquet, or unpack it."
            )
        if path.suffix.lower() in TABLES and _separator(path) is None:
            raise _no_texts(path)
        return [path], Counter()
    files, left_out = [], Counter[str]()
    for file in sorted(path.rglob("*")):
        if not file.is_file():
            continue
        if any(part.startswith(".") for part in file.relative_to(path).parts):
            left_out["hidden"] += 1
        elif _is_binary(file):
            left_out["binary"] += 1
        else:
            files.append(file)
    return files, left_out


def _is_binary(file: Path) -> bool:
    """Whether a file is neither text nor of a compressed kind that can be read here."""
    if ends_in(file, *JSON_LINES, ".parquet"):
        return False
    with _named_if_unreadable(file), file.open("rb") as opened:
        return b"\0" in opened.read(LOOKED_AT) or ends_in(file, ".gz", ".xz", ".zip", ".bz2", ".zst")


@contextmanager
def _named_if_unreadable(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DraftsmithError(f"{file} cannot be read ({error.strerror}); check its permissions.") from error


def records_at(path: Path) -> Iterator[Located]:
    """Yield the records of a file or of the files in a folder, read as a source of training data.

    Raises:
        DraftsmithError: a file that is no text in UTF-8, or is broken; of a folder, plain texts in another encoding are
            left out.
    """
    alone = not path.is_dir()
    for file in files_of(path)[0]:
        try:
            records = records_in(file, alone)
        except NotUtf8:
            if alone:
                raise
            continue
        yield from records


def documents_in(file: Path) -> Iterator[Document]:
    """Yield the documents in a file; its name says of which kind it is."""
    for record, where in records_in(file):
        yield read_record(record, where)


def records_in(file: Path, alone: bool = True) -> Iterator[Located]:
    """Return the records of a file, with all their fields; a file of plain text is one record with a `text`.

    Args:
        alone: whether the file was named by itself; JSON that holds no records is then refused, and a text in a folder.

    Raises:
        NotUtf8: at once, if it is a plain text of another encoding; of records, when the first line of them is reached.
    """
    if ends_in(file, *JSON_LINES):
        return json_lines(_lines(file), file)
    if ends_in(file, ".parquet"):
        return _parquet(file)
    if file.suffix.lower() in TABLES and (separator := _separator(file)) is not None:
        return _table(file, separator)
    text = read_text(file)
    records = records_of(text, file, alone) if ends_in(file, ".json") else None
    return iter([({"text": text}, str(file))]) if records is None else records


def records_on_hub(section: SourceSection) -> Iterator[Located]:
    """Yield the records of a hub data set, as they come over the network."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DraftsmithError(
            f"reading the data set {section.name!r} needs datasets; install draftsmith[train]."
        ) from error
    try:
        rows = load_dataset(section.name, section.configuration, split=section.split, streaming=True)
    except Exception as error:  # the library, the hub and the network raise their own kinds of exceptions
        raise DraftsmithError(
            f"cannot open the data set {section.name!r} ({error}); check its name, configuration and split, or the "
            "network."
        ) from error
    for record in rows:
        yield record, str(section.name)


def _unpacked(path: Path) -> BinaryIO:
    if ends_in(path, ".xz"):
        return cast(BinaryIO, lzma.open(path, "rb"))
    if ends_in(path, ".gz"):
        return cast(BinaryIO, gzip.open(path, "rb"))
    return path.open("rb")


def _lines(path: Path) -> Iterator[str]:
    # Nothing is yielded inside the try: a generator that is dropped would run its handlers while Python shuts down.
    with _broken_if_cut(path), _unpacked(path) as opened:
        check_width(path, opened)
    with _unpacked(path) as opened, TextIOWrapper(opened, encoding=ENCODING) as lines:
        while True:
            with _broken_if_cut(path):
                try:
                    line = next(lines, None)
                except UnicodeDecodeError as error:
                    with _unpacked(path) as again:
                        raise not_utf8(path, again) from error
            if line is None:
                return
            yield line


@contextmanager
def _broken_if_cut(path: Path) -> Iterator[None]:
    """Raise what is wrong with a packed file as a DraftsmithError."""
    try:
        yield
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
        raise DraftsmithError(f"{path} is cut short or broken ({error}); fetch it again.") from error


@contextmanager
def _long_fields() -> Iterator[None]:
    """Let fields of a table be long; by default a text may have 131,072 letters. The limit is that of the process."""
    before = csv.field_size_limit(LONGEST_FIELD)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _columns(path: Path, separator: str) -> list[str]:
    """Return the names in the first line of a table."""
    try:
        with path.open(encoding=ENCODING, errors="replace", newline="") as lines, _long_fields():
            return next(csv.reader(lines, delimiter=separator), [])
    except csv.Error:
        return []


def _ways(path: Path) -> dict[str, list[str]]:
    """Return the names of a table's columns by what may stand between them, what its ending says first."""
    return {separator: _columns(path, separator) for separator in (TABLES[path.suffix.lower()], *SEPARATORS)}


def _separator(path: Path) -> str | None:
    """Return what stands between the columns of a table; None if it has no column of texts."""
    return next((way for way, names in _ways(path).items() if any(name in COLUMNS for name in names)), None)


def _no_texts(path: Path) -> DraftsmithError:
    """Return the error for a table whose first line names no column of texts."""
    return DraftsmithError(
        f"{path} is a table with the columns {names_in_words(max(_ways(path).values(), key=len))}; name the one with "
        "the texts `text`, or two of them `prompt` and `completion`, in its first line."
    )


def _table(path: Path, separator: str) -> Iterator[Located]:
    with path.open(encoding=ENCODING, newline="") as lines:
        rows = csv.DictReader(lines, delimiter=separator, strict=True)
        while True:
            with _long_fields():
                try:
                    row = next(rows, None)
                except UnicodeDecodeError as error:
                    raise not_utf8(path) from error
                except csv.Error as error:
                    where = f"{path}, line {rows.reader.line_num},"
                    raise DraftsmithError(f"{where} cannot be read as a table ({error}); fix or remove it.") from error
            if row is None:
                return
            # Fields beyond the named columns have no name.
            yield {name: value for name, value in row.items() if name is not None}, f"{path}, line {rows.line_num},"


def _parquet(path: Path) -> Iterator[Located]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise DraftsmithError(f"reading {path} needs pyarrow; install draftsmith[train].") from error
    with _named_as(f"{path} is no parquet file"):
        batches = parquet.ParquetFile(path).iter_batches()
    damaged = f"{path} is a damaged parquet file"
    # As in _lines, nothing is yielded inside the with. Batches are read, and damage is found, as they are asked for.
    while True:
        with _named_as(damaged):
            batch = next(batches, None)
            records = [] if batch is None else batch.to_pylist()
        if batch is None:
            return
        for record in records:
            yield record, str(path)


@contextmanager
def _named_as(what: str) -> Iterator[None]:
    """Raise what pyarrow says of a file's bytes as a DraftsmithError; a file that cannot be read stays an OSError.

    Of damaged bytes pyarrow raises its own kinds of ValueError, or an OSError without the system's words.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        if isinstance(error, OSError) and error.strerror is not None:
            raise
        reason = str(error).strip().partition("\n")[0]
        raise DraftsmithError(f"{what} ({reason}); fetch it again.") from error


def missing_file(path: Path) -> DraftsmithError:
    """Return the error for a path that does not exist; it names the most similar path that does."""
    return DraftsmithError(f"data file {path} does not exist; {advice_on_missing(path)}")


def advice_on_missing(path: Path) -> str:
    """Return what to do about a path that does not exist, as the end of a sentence."""
    if path.is_symlink():
        return f"it is a link to {path.readlink()}, which is gone: correct the link."
    siblings = [p.name for p in path.parent.iterdir() if p.exists()] if path.parent.is_dir() else []
    near = get_close_matches(path.name, siblings, n=1)
    return f"did you mean {path.parent / near[0]}?" if near else "check the path."
