"""What the files of a run's data are, so that a run that is resumed reads what it began with.

Modification times are not looked at: a copy of the same bytes is the same data.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftsmith.training.data.record_files import missing_file
from draftsmith.training.data.sources import Source
from draftsmith.training.recipe import Recipe
from draftsmith.types import DraftsmithError

READ_BYTES = 2**29
"""If the files have no more bytes together, all are hashed. Otherwise they share about so many equally, and what small
files leave of their shares goes to the larger ones; of a file larger than its share, blocks all over it are hashed."""
BLOCK = 2**16
WRITTEN = (
    "checkpoints", "drafter", "dry-run", "generated.jsonl", "held-out.jsonl", "metrics.jsonl", "recipe.yaml",
    "run.json", "samples.jsonl", "sources.json",
)
"""What a run writes into its folder that is text, or a folder with text."""
TARGET_FOLDER = "target"
"""Where joint training writes the changed target."""


def identify(recipe: Recipe) -> dict[str, str]:
    """Return the size and a hash of the bytes of every file of text that a run reads, by its path.

    Data sets on the hub are left out, and so is what the run itself writes into its folder (`WRITTEN`, and in joint
    training `target`), be it below a folder of the data or named as `stage2.texts`. Other files in that folder count.

    Raises:
        DraftsmithError: a file that does not exist or cannot be read.
    """
    folder, data = Path(recipe.output.folder).expanduser().resolve(), recipe.data
    written = [folder / name for name in (*WRITTEN, *(() if recipe.joint is None else (TARGET_FOLDER,)))]
    sources = [Source(section, data.held_out_every, data.piece_characters) for section in data.sources]
    files = [file for source in sources for file in source.files]
    if recipe.stage2.texts is not None:
        files.append(Path(recipe.stage2.texts).expanduser())
    sizes = {file: _size(file) for file in files if not any(map(file.resolve().is_relative_to, written))}
    shares = _shares(sizes)
    return {str(file): f"{size}-{_hash(file, size, shares[file])}" for file, size in sizes.items()}


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


def _shares(sizes: Mapping[Path, int]) -> dict[Path, int]:
    """Return how many bytes of each file to hash, the smallest file first; sizes alone decide, and paths among equals.

    A share is what is left of READ_BYTES by the number of files that are left, so a small file leaves more to others.
    """
    shares, left = {}, READ_BYTES
    for number, (size, file) in enumerate(sorted((size, file) for file, size in sizes.items())):
        shares[file] = left // (len(sizes) - number)
        left -= min(size, shares[file])
    return shares


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise _unreadable(file, error) from error


def _hash(file: Path, size: int, share: int) -> str:
    """Return a hash of the whole file, or of its first and last block and as many between them as make up the share."""
    digest, blocks = hashlib.blake2b(digest_size=16), max(2, share // BLOCK)
    whole = size <= max(share, blocks * BLOCK)
    try:
        with file.open("rb") as opened:
            for number in range(-(-size // BLOCK) if whole else blocks):
                opened.seek(number * BLOCK if whole else number * (size - BLOCK) // (blocks - 1))
                digest.update(opened.read(BLOCK))
    except OSError as error:
        raise _unreadable(file, error) from error
    return digest.hexdigest()


def _unreadable(file: Path, error: OSError) -> DraftsmithError:
    if isinstance(error, FileNotFoundError):
        return missing_file(file)
    return DraftsmithError(f"{file} cannot be read ({error.strerror}); check its permissions.")
