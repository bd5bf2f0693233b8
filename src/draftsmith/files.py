"""Files that a kill or a full disk cannot spoil: replaced whole or not at all, or appended to and repaired if cut."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftsmith.types import DraftsmithError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path`, and put it in place when all went well; OSError if that cannot be done."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all; OSError if it cannot be written."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


class JsonLines:
    """A log of one JSON value a line. What a kill left of the last line is dropped when the file is opened.

    Args:
        path: need not exist yet.
        fix: what a user should do about a file that is damaged.
        go_on: what to do when there is space on the disk again.
    """

    def __init__(self, path: Path, fix: str, go_on: str) -> None:
        self.path, self.fix, self.go_on = path, fix, go_on

    def read(self) -> list[Any]:
        """Return every whole line's value, and cut off what is left of one that is not whole.

        Raises:
            DraftsmithError: a line in the middle is no JSON; it is named.
        """
        if not self.path.exists():
            return []
        values: list[Any] = []
        whole = 0
        with self.path.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                try:
                    values.append(json.loads(line))
                except ValueError as error:
                    raise self.damaged(len(values) + 1) from error
                whole += len(line)
        os.truncate(self.path, whole)
        return values

    def damaged(self, line: int) -> DraftsmithError:
        """Return the error that names a line."""
        return DraftsmithError(f"line {line} of {self.path} is damaged; {self.fix}.")

    def append(self, value: Any, flush: bool = True) -> None:
        """Add a line, and wait until the disk has it unless `flush` is off; DraftsmithError if it cannot be written."""
        try:
            with self.path.open("a", encoding="utf-8") as handle:
                handle.write(json.dumps(value) + "\n")
                if flush:
                    handle.flush()
                    os.fsync(handle.fileno())
        except OSError as error:
            raise self.unwritten(error) from error

    def rewrite(self, values: list[Any]) -> None:
        """Put these lines in place of all that there are; DraftsmithError if they cannot be written."""
        try:
            replace_text(self.path, "".join(json.dumps(value) + "\n" for value in values))
        except OSError as error:
            raise self.unwritten(error) from error

    def unwritten(self, error: OSError) -> DraftsmithError:
        """Return the error that says why nothing could be written."""
        return DraftsmithError(f"cannot write {self.path} ({error.strerror}); free some space, then {self.go_on}.")
