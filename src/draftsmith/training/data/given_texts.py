"""What a file named as `stage2.texts` has to be: token ids as another run wrote them, not texts to learn from."""

import json
from pathlib import Path
from typing import Any

from draftsmith.targets.records import kind_of
from draftsmith.text_files import names_in_words
from draftsmith.types import DraftsmithError

OTHERWISE = "give the generated.jsonl of a run, or name a file of texts in data.sources"


def check_given(path: Path) -> None:
    """Refuse a path that is no file, or a file whose first line a run does not write; the rest is not read.

    Raises:
        DraftsmithError: it says what the path is instead.
    """
    if path.is_dir():
        inside = path / "generated.jsonl"
        advice = f"give {inside}" if inside.is_file() else OTHERWISE
        raise DraftsmithError(f"stage2.texts {path} is a folder; {advice}.")
    if not path.is_file():
        raise DraftsmithError(f"stage2.texts {path} does not exist; give the generated.jsonl of a run.")
    try:
        with path.open("rb") as lines:
            first = lines.readline()
    except OSError as error:
        reason = f"cannot be read ({error.strerror}); check its permissions"
        raise DraftsmithError(f"stage2.texts {path} {reason}.") from error
    try:
        record = json.loads(first)
    except ValueError as error:
        raise DraftsmithError(f"stage2.texts {path} is not what a run writes; {OTHERWISE}.") from error
    check_line(record, path, 1)


def check_line(record: Any, path: Path, number: int) -> None:
    """Refuse a line that holds no sequences of token ids with the lengths of their prompts; the message shows it."""
    if isinstance(record, dict) and "sequences" in record and "prompts" not in record:
        raise DraftsmithError(f"stage2.texts {path} was written by an earlier version; give that of a new run.")
    if not _is_batch(record):
        held = f"the fields {names_in_words(list(record))}" if isinstance(record, dict) else kind_of(record)
        raise DraftsmithError(
            f"stage2.texts {path}, line {number}, has {held} instead of token ids as a run writes them; {OTHERWISE}."
        )


def _is_batch(record: Any) -> bool:
    if not isinstance(record, dict):
        return False
    sequences, prompts = record.get("sequences"), record.get("prompts")
    if not (isinstance(sequences, list) and isinstance(prompts, list) and len(sequences) == len(prompts)):
        return False
    return all(_are_ids(tokens) and tokens for tokens in sequences) and _are_ids(prompts)


def _are_ids(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
