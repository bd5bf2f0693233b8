"""What the files of a run's data are, so that a run that is resumed reads what it began with.

Modification times are not looked at: a copy of the same bytes is the same data.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftsmith.training.data.sources import Source
from draftsmith.training.recipe import Recipe
from draftsmith.types import DraftsmithError

READ_BYTES = 2**29
"""If the files have no more bytes together, all are hashed. Otherwise each file has an equal share of about so many; of
a larger one, blocks all over it are hashed."""
BLOCK = 2**16


def identify(recipe: Recipe) -> dict[str, str]:
    """Return the size and a hash of the bytes of every file of text that a run reads, by its path.

    Data sets on the hub are left out, and so are the files that the run itself writes.

    Raises:
        DraftsmithError: a file that does not exist or cannot be read.
    """
    own = Path(recipe.output.folder).expanduser().resolve()
    data = recipe.data
    sources = [Source(section, data.held_out_every, data.piece_characters) for section in data.sources]
    files = [file for source in sources for file in source.files if not file.resolve().is_relative_to(own)]
    if recipe.stage2.texts is not None:
        files.append(Path(recipe.stage2.texts))
    sizes = {file: _size(file) for file in files}
    share = READ_BYTES if sum(sizes.values()) <= READ_BYTES else READ_BYTES // len(sizes)
    return {str(file): f"{size}-{_hash(file, size, share)}" for file, size in sizes.items()}


def first_change(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return a file that is not what it was, and what happened to it, in words; None if all are the same.

    How much of a file is hashed depends on the number and the sizes of all, so these are compared first.
    """
    for file in before:
        if file not in now:
            return f"{file} is no longer among the data"
    for file in now:
        if file not in before:
            return f"{file} was added to the data"
    other = [file for file in now if now[file] != before[file]]
    resized = [file for file in other if now[file].partition("-")[0] != before[file].partition("-")[0]]
    return next((f"{file} has changed" for file in [*resized, *other]), None)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise _unreadable(file, error) from error


def _hash(file: Path, size: int, share: int) -> str:
    """Return a hash of the whole file, or of its first and last block and as many between them as make up the share."""
    digest, blocks = hashlib.blake2b(digest_size=16), max(2, share // BLOCK)
    whole = size <= blocks * BLOCK
    try:
        with file.open("rb") as opened:
            for number in range(-(-size // BLOCK) if whole else blocks):
                opened.seek(number * BLOCK if whole else number * (size - BLOCK) // (blocks - 1))
                digest.update(opened.read(BLOCK))
    except OSError as error:
        raise _unreadable(file, error) from error
    return digest.hexdigest()


def _unreadable(file: Path, error: OSError) -> DraftsmithError:
    return DraftsmithError(f"{file} cannot be read ({error.strerror}); check its permissions.")
