"""Folders in the user's cache for results that are computed once; the size of one of them is limited."""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from draftsmith.types import DraftsmithError

CACHE = "DRAFTSMITH_CACHE"
"""The environment variable that names the cache folder; without it, a folder in the user's own cache is used."""
MOST = "DRAFTSMITH_PACKED_GB"
"""The environment variable that limits the packed weights that are kept, in 10⁹ bytes; 0 keeps nothing."""
MOST_GB = 8.0
ABANDONED_S = 3600.0
"""Temporary files older than this, in seconds, were left by a process that was killed."""


def cache_folder(kind: str) -> Path:
    """Return the cache folder for one kind of results; it need not exist yet."""
    if chosen := os.environ.get(CACHE):
        return Path(chosen) / kind
    # Without a home, expanduser leaves "~" as it is (Path.home() would raise). Then a path is used that cannot be made.
    home = os.path.expanduser("~")
    shared = os.environ.get("XDG_CACHE_HOME") or (os.devnull if home == "~" else Path(home, ".cache"))
    return Path(shared, "draftsmith", kind)


@dataclass(frozen=True)
class Kept:
    """What is in the folder of packed weights: number of files, their bytes together, and the bytes allowed."""

    folder: str
    files: int
    bytes: int
    most_bytes: int


def packed_folder() -> Path:
    """Return where packed weights are kept."""
    return cache_folder("packed")


def packed_kept() -> Kept:
    """Return how much is kept."""
    sizes = [size for _, size, _ in _by_age(packed_folder())]
    return Kept(str(packed_folder()), len(sizes), sum(sizes), most_packed())


def most_packed() -> int:
    """Return how many bytes of packed weights are kept at most; DraftsmithError where that cannot be read."""
    text = os.environ.get(MOST, "").strip()
    try:
        wanted = float(text) if text else MOST_GB
    except ValueError:
        wanted = -1.0
    if not 0 <= wanted < 1e9:
        raise DraftsmithError(f"{MOST} is {text!r}; give a number of GB, such as 8, or 0 to keep no packed weights.")
    return int(wanted * 1e9)


def prune(folder: Path, most: int, newest: Path) -> None:
    """Remove the files that were used longest ago until at most `most` bytes are left; OSError if removing one fails.

    Temporary files of killed processes are removed too.

    Args:
        newest: a file that is kept in any case.
    """
    for path in folder.glob(".*.safetensors"):
        with suppress(FileNotFoundError):  # the process that wrote it has moved it into place meanwhile
            if time.time() - path.stat().st_mtime > ABANDONED_S:
                path.unlink()
    files = _by_age(folder)
    held = sum(size for _, size, _ in files)
    for _, size, path in files:
        if held > most and path != newest:
            path.unlink(missing_ok=True)
            held -= size


def _by_age(folder: Path) -> list[tuple[float, int, Path]]:
    """Return for each file its time of last use, its size and its path, oldest first; nothing without a folder."""
    found = []
    for path in folder.glob("[!.]*.safetensors"):
        try:
            about = path.stat()
        except OSError:  # another process removed it, or reading its metadata is not permitted
            continue
        found.append((about.st_mtime, about.st_size, path))
    return sorted(found)
