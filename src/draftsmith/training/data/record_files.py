"""Records from files and data sets: text, JSON lines (also .gz and .xz), JSON lists, tables, parquet, and the hub."""

import csv
import gzip
import json
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TextIO

from draftsmith.targets.records import FIELDS, Document, read_record
from draftsmith.training.sections import SourceSection
from draftsmith.types import DraftsmithError

JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.xz", ".ndjson")
TABLES = {".csv": ",", ".tsv": "\t"}
"""The endings of tables, with what stands between their columns."""
COLUMNS = ("text", "prompt")
"""A table whose first line names one of these columns has a record a line; any other is a text."""
LONGEST_FIELD = 2**31 - 1
Located = tuple[Mapping[str, Any], str]
"""A record, and where it was found."""

_BEGINS_RECORDS = re.compile(r"\s*\[\s*\{")
LOOKED_AT = 8192
"""Number of bytes at a file's beginning that decide whether it is text."""


def files_of(path: Path) -> tuple[list[Path], Counter[str]]:
    """Return the files to read at a path, and how many files of a folder are left out, by reason.

    Raises:
        DraftsmithError: the path is a file that is not text, or a table without a column of texts.
    """
    if not path.is_dir():
        if _is_binary(path):
            raise DraftsmithError(
                f"{path} is no text; give text in UTF-8, {', '.join([*JSON_LINES, *TABLES])} or .parquet, or unpack it."
            )
        names = _columns(path) if path.suffix in TABLES else []
        if path.suffix in TABLES and not any(name in COLUMNS for name in names):
            raise DraftsmithError(
                f"{path} is a table with the columns {', '.join(names) or '(none)'}; name the one with the texts "
                "`text`, or two of them `prompt` and `completion`."
            )
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
    if file.name.endswith((*JSON_LINES, ".parquet")):
        return False
    try:
        with file.open("rb") as opened:
            return b"\0" in opened.read(LOOKED_AT) or file.name.endswith((".gz", ".xz", ".zip", ".bz2", ".zst"))
    except OSError as error:
        raise DraftsmithError(f"{file} cannot be read ({error.strerror}); check its permissions.") from error


def records_at(path: Path) -> Iterator[Located]:
    """Yield the records of a file or of the files in a folder, read as a source of training data.

    Raises:
        DraftsmithError: a file that is no text, or is broken; one that is named by itself has to be UTF-8 throughout.
    """
    for file in files_of(path)[0]:
        yield from records_in(file, strict=not path.is_dir())


def documents_in(file: Path) -> Iterator[Document]:
    """Yield the documents in a file; its name says of which kind it is."""
    for record, where in records_in(file):
        yield read_record(record, where)


def records_in(file: Path, strict: bool = False) -> Iterator[Located]:
    """Yield the records of a file, with all their fields; a file of plain text is one record with a `text`.

    Args:
        strict: bytes that are not UTF-8 are refused; otherwise a mark stands in their place.
    """
    errors = "strict" if strict else "replace"
    if file.name.endswith(JSON_LINES):
        return _json_lines(file, errors)
    if file.suffix == ".parquet":
        return _parquet(file)
    if file.suffix in TABLES and any(name in COLUMNS for name in _columns(file)):
        return _table(file, errors)
    try:
        text = file.read_text(encoding="utf-8", errors=errors)
    except UnicodeDecodeError as error:
        raise DraftsmithError(f"{file} is not UTF-8 text; convert it, or give another file.") from error
    if file.suffix == ".json" and (records := _records(text, file)):
        return _json_list(records, file)
    return iter([({"text": text}, str(file))])


def documents_on_hub(section: SourceSection) -> Iterator[Document]:
    """Yield the documents of a hub data set, as they come over the network."""
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
        yield read_record(record, str(section.name))


def _records(text: str, file: Path) -> list[Any]:
    """Return the items of a JSON list of records, as conversations are often published; none for other JSON.

    Raises:
        DraftsmithError: the text begins as a list of records and is broken.
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        if _BEGINS_RECORDS.match(text):
            raise DraftsmithError(
                f"{file} begins as a list of records but is no JSON ({error}); fetch it again, or fix it."
            ) from error
        return []
    known = isinstance(found, list) and any(isinstance(item, Mapping) and set(item) & set(FIELDS) for item in found)
    return found if known else []


def _json_list(records: list[Any], file: Path) -> Iterator[Located]:
    for number, record in enumerate(records, 1):
        where = f"{file}, record {number},"
        if not isinstance(record, Mapping):
            raise DraftsmithError(f"{where} is no JSON object; fix or remove it.")
        yield record, where


def _open_text(path: Path, errors: str) -> TextIO:
    if path.name.endswith(".xz"):
        return lzma.open(path, "rt", encoding="utf-8")
    if path.name.endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8", errors=errors)


def _lines(path: Path, errors: str) -> Iterator[str]:
    # Nothing is yielded inside the try: a generator that is dropped would run its handlers while Python shuts down.
    with _open_text(path, errors) as lines:
        while True:
            try:
                line = next(lines, None)
            except UnicodeDecodeError as error:
                raise DraftsmithError(f"{path} is not UTF-8 text ({error}); convert it, or fetch it again.") from error
            except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
                raise DraftsmithError(f"{path} is cut short or broken ({error}); fetch it again.") from error
            if line is None:
                return
            yield line


def _json_lines(path: Path, errors: str) -> Iterator[Located]:
    for number, line in enumerate(_lines(path, errors), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number},"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DraftsmithError(f"{where} is no JSON ({error}); fix or remove that line.") from error
        if not isinstance(record, dict):
            raise DraftsmithError(f"{where} is no JSON object; fix or remove that line.")
        yield record, where


def _columns(path: Path) -> list[str]:
    """Return the names in the first line of a table."""
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as lines:
            return next(csv.reader(lines, delimiter=TABLES[path.suffix]), [])
    except csv.Error:
        return []


def _table(path: Path, errors: str) -> Iterator[Located]:
    with path.open(encoding="utf-8-sig", errors=errors, newline="") as lines:
        rows = csv.DictReader(lines, delimiter=TABLES[path.suffix], strict=True)
        while True:
            before = csv.field_size_limit(LONGEST_FIELD)  # of the process; by default a text may have 131,072 letters
            try:
                row = next(rows, None)
            except (csv.Error, UnicodeDecodeError) as error:
                where = f"{path}, line {rows.reader.line_num},"
                raise DraftsmithError(f"{where} cannot be read as a table ({error}); fix or remove it.") from error
            finally:
                csv.field_size_limit(before)
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
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = get_close_matches(path.name, siblings, n=1)
    return f"did you mean {path.parent / near[0]}?" if near else "check the path."
