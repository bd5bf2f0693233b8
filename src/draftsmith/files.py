"""Files that a kill or a full disk cannot spoil: replaced whole or not at all, or appended to and repaired if cut.

And locks, for what only one process at a time may write.
"""

import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from draftsmith.types import DraftsmithError

if sys.platform != "win32":
    import fcntl


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Hold the lock file `path` inside the block; gives False if `wait` is off and another process holds it.

    The kernel releases the lock when a process ends, in whatever way, so a file that is left over locks nothing. Where
    the system or the file system has no locks, every process gets True. OSError if the file cannot be made.
    """
    descriptor = _take(path, wait)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            with suppress(OSError):
                path.unlink()
            os.close(descriptor)


def _take(path: Path, wait: bool) -> int | None:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if sys.platform != "win32":
                fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:  # a file system without locks
            return descriptor
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)  # its last holder removed the file; by now the name may be that of a new one


def beside(path: Path, suffix: str) -> Path:
    """Return a hidden, unique path beside `path`."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{suffix}")


def is_special(path: Path) -> bool:
    """Return whether something is there that is neither a file nor a folder: a pipe or a device, or a link to one."""
    return path.exists() and not path.is_file() and not path.is_dir()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path`, and move it into place if the block succeeds; OSError if that fails.

    Where `path` is a link, what it leads to is replaced. A pipe or a device is written to.
    """
    if is_special(path):
        with tempfile.TemporaryDirectory() as folder:
            temporary = Path(folder) / path.name
            yield temporary
            with temporary.open("rb") as written, path.open("wb") as opened:
                shutil.copyfileobj(written, opened)
        return
    path = path.resolve()
    temporary = beside(path, path.suffix)
    temporary.touch(exist_ok=False)  # with the user's default permissions, which mkstemp would not give
    try:
        yield temporary
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
    """A log of one JSON value a line. An incomplete last line, left by a kill, is not read, and `append` cuts it off.

    Args:
        path: need not exist yet.
        fix: what a user should do about a file that is damaged.
        go_on: what to do when there is space on the disk again.
    """

    def __init__(self, path: Path, fix: str, go_on: str) -> None:
        self.path, self.fix, self.go_on = path, fix, go_on

    def read(self) -> list[Any]:
        """Return the value of every complete line; does not change the file, which another process may be writing.

        Raises:
            DraftsmithError: a complete line is not JSON; the message names it.
        """
        if not self.path.exists():
            return []
        values: list[Any] = []
        with self.path.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                try:
                    values.append(json.loads(line))
                except ValueError as error:
                    raise self.damaged(len(values) + 1) from error
        return values

    def damaged(self, line: int) -> DraftsmithError:
        """Return the error that names a line."""
        return DraftsmithError(f"line {line} of {self.path} is damaged; {self.fix}.")

    def append(self, value: Any, flush: bool = True) -> None:
        """Add a line, and wait until the disk has it unless `flush` is off; DraftsmithError if it cannot be written."""
        try:
            with self.path.open("ab+") as handle:
                _cut_half_line(handle)
                handle.write((json.dumps(value) + "\n").encode())
                if flush:
                    handle.flush()
                    os.fsync(handle.fileno())
        except OSError as error:
            raise self.unwritten(error) from error

    def rewrite(self, values: list[Any]) -> None:
        """Replace all lines by these values; DraftsmithError if they cannot be written."""
        try:
            replace_text(self.path, "".join(json.dumps(value) + "\n" for value in values))
        except OSError as error:
            raise self.unwritten(error) from error

    def unwritten(self, error: OSError) -> DraftsmithError:
        """Return the error that says why nothing could be written."""
        return DraftsmithError(f"cannot write {self.path} ({error.strerror}); free some space, then {self.go_on}.")


def _cut_half_line(handle: BinaryIO) -> None:
    handle.seek(max(0, handle.seek(0, os.SEEK_END) - 1))
    if handle.read() not in (b"", b"\n"):
        handle.seek(0)
        handle.truncate(handle.read().rfind(b"\n") + 1)
