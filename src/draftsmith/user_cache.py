"""Folders of the user's cache, where what was worked out once is kept, and the one that is kept within bounds."""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from draftsmith.types import DraftsmithError

CACHE = "DRAFTSMITH_CACHE"
"""The variable that names a folder for what is worked out once; without it, the user's cache folder has one."""
MOST = "DRAFTSMITH_PACKED_GB"
"""The variable that says how much of packed weights is kept at most, in 10⁹ bytes; 0 keeps nothing."""
MOST_GB = 8.0
ABANDONED_S = 3600.0
"""Files that are being written are younger than this."""


def cache_folder(kind: str) -> Path:
    """Return the folder for one kind of things that are worked out once and kept; it need not exist yet."""
    if chosen := os.environ.get(CACHE):
        return Path(chosen) / kind
    # Without a home expanduser leaves "~" as it is, and a folder that cannot be made is taken; Path.home() would raise.
    home = os.path.expanduser("~")
    shared = os.environ.get("XDG_CACHE_HOME") or (os.devnull if home == "~" else Path(home, ".cache"))
    return Path(shared, "draftsmith", kind)


@dataclass(frozen=True)
class Kept:
    """What is in the folder of packed weights: how many files, of how many bytes together, and how many are allowed."""

    folder: str
    files: int
    bytes: int
    most_bytes: int


def packed_folder() -> Path:
    """Return where packed weights are kept."""
    return cache_folder("packed")


def packed_kept() -> Kept:
    """Look how much is kept."""
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
    """Remove the files that were used longest ago until no more than so many bytes are left; OSError if one stays.

    What a killed process was writing goes too.

    Args:
        newest: stays in any case.
    """
    for path in folder.glob(".*.safetensors"):
        with suppress(FileNotFoundError):  # the process that wrote it has put it in place meanwhile
            if time.time() - path.stat().st_mtime > ABANDONED_S:
                path.unlink()
    files = _by_age(folder)
    held = sum(size for _, size, _ in files)
    for _, size, path in files:
        if held > most and path != newest:
            path.unlink(missing_ok=True)
            held -= size


def _by_age(folder: Path) -> list[tuple[float, int, Path]]:
    """Return when each file was used last, its size and where it is, the oldest first; none without a folder."""
    found = []
    for path in folder.glob("[!.]*.safetensors"):
        try:
            about = path.stat()
        except OSError:  # another process removed it, or it may not be looked at
            continue
        found.append((about.st_mtime, about.st_size, path))
    return sorted(found)
