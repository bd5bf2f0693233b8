"""Records in files that are named .json: lists of texts or of records, and the other forms whose meaning is plain."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftsmith.targets.records import FIELDS, kind_of, plain_text, read_record
from draftsmith.text_files import names_in_words
from draftsmith.types import DraftsmithError

Located = tuple[Mapping[str, Any], str]
"""A record, and where it was found."""

_BEGINS_RECORDS = re.compile(r"\s*\[\s*\{")


def records_of(text: str, file: Path, alone: bool) -> Iterator[Located] | None:
    """Return the records that the text of a .json file holds.

    These are a list of records or of texts, such a list of records as a field of an object, one record, and JSON lines.

    Args:
        alone: whether the file was named by itself. In a folder, where settings and the like may lie beside programs,
            JSON of another kind is a text; None is returned for it.

    Raises:
        DraftsmithError: the text begins as a list of records and is broken; or the file was named by itself, and it is
            not plain what its records are.
    """
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        if _begins_with_record(text[: error.pos], alone):
            return json_lines(text.split("\n"), file)  # `splitlines` would split within strings, too
        if _BEGINS_RECORDS.match(text):
            raise DraftsmithError(
                f"{file} begins as a list of records but is no JSON ({error}); fetch it again, or fix it."
            ) from error
        if alone:
            raise DraftsmithError(
                f"{file} is no JSON ({error}); fix it, or let its name end in .txt to read it as a text."
            ) from error
        return None
    records = _items(found, file, alone)
    if records is None and alone:
        raise DraftsmithError(
            f"{file} holds {_in_words(found)}, not records; give a list of texts or of records such as "
            '{"text": "..."}, or let its name end in .txt to read it as a text.'
        )
    return records


def json_lines(lines: Iterator[str] | Sequence[str], file: Path) -> Iterator[Located]:
    """Yield a record for every line that is not empty; DraftsmithError names the line that is none."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{file}, line {number},"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DraftsmithError(f"{where} is no JSON ({error}); fix or remove that line.") from error
        if not isinstance(record, dict):
            raise DraftsmithError(f"{where} is no JSON object; fix or remove that line.")
        yield record, where


def _items(found: Any, file: Path, alone: bool) -> Iterator[Located] | None:
    if isinstance(found, list):
        if found and all(isinstance(item, str) for item in found):
            return iter([({"text": text}, f"{file}, text {number},") for number, text in enumerate(found, 1)])
        if _lists_records(found) or (alone and found and isinstance(found[0], Mapping)):
            return _listed(found, str(file))
    if isinstance(found, Mapping):
        if _is_record(found):
            return iter([(found, str(file))])
        lists = _lists_in(found)
        if len(lists) == 1:
            return _listed(found[lists[0]], f"{file}, field {lists[0]}")
        if alone and not lists and set(found) & set(FIELDS):
            return iter([(found, str(file))])
    return None


def _listed(records: Sequence[Any], place: str) -> Iterator[Located]:
    for number, record in enumerate(records, 1):
        where = f"{place}, record {number},"
        if not isinstance(record, Mapping):
            raise DraftsmithError(f"{where} is no JSON object; fix or remove it.")
        yield record, where


def _lists_records(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, Mapping) and set(item) & set(FIELDS) for item in value)


def _lists_in(found: Mapping[str, Any]) -> list[str]:
    """Return the fields of an object that are lists of records."""
    return [name for name, value in found.items() if _lists_records(value)]


def _is_record(value: Any) -> bool:
    """Whether a value can be nothing but a record: settings of programs may also have a field `text`, or `prompt`."""
    try:
        return isinstance(value, Mapping) and bool(plain_text(read_record(value, "")).strip())
    except DraftsmithError:
        return False


def _begins_with_record(text: str, alone: bool) -> bool:
    """Whether the text up to where it ceases to be JSON is one record, as the first line of JSON lines is."""
    try:
        first = json.loads(text)
    except ValueError:
        return False
    return _is_record(first) or (alone and isinstance(first, Mapping))


def _in_words(found: Any) -> str:
    if isinstance(found, Mapping):
        lists = _lists_in(found)
        if lists:
            return f"an object with several lists of records ({names_in_words(lists)})"
        return f"an object with the fields {names_in_words(list(found))}" if found else "an empty object"
    if isinstance(found, list):
        return f"a list that begins with {kind_of(found[0])}" if found else "an empty list"
    return f"{kind_of(found)} alone"
