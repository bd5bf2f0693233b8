"""Keeps packed weights on disk from one start to the next, because rounding weights takes longer than reading them.

A file holds the packed layers of one model. Its name is a hash of everything that they depend on: every weight, the
names and kinds of the layers, what they were rounded by, and the layout. So a file is never out of date. Files that are
no longer used are deleted when there is too much. If a file or the folder is unusable, the only cost is packing again.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftsmith.files import replacing
from draftsmith.native.packing import Packable
from draftsmith.system import bytes_in_words
from draftsmith.user_cache import most_packed, packed_folder, prune

LAYOUT = 2
"""Version of the packed weights. Increase it when the packing operators give other bits for the same weights."""
LEAST = 1 << 18
"""Bytes; smaller models are packed as quickly as a file is found."""
ALIGNED = 64
"""Alignment, in bytes, of packed weights in a file: a line of them."""
DTYPES = {torch.uint8: "U8", torch.int8: "I8", torch.int32: "I32", torch.float32: "F32"}
"""The names that safetensors has for the formats of quantised weights."""
FORMAT = "draftsmith packed weights"

progress = logging.getLogger("draftsmith.progress")


class KeptWeights:
    """Finds and keeps the packed weights of one model, and logs their file.

    Args:
        folder: the folder of the files; by default one in the user's cache.
        most: the most bytes to keep in all files together; by default the user's setting.
        rounding: names what the packed weights depend on besides the layers' weights; empty if nothing.
    """

    def __init__(self, folder: Path | None = None, most: int | None = None, rounding: str = "") -> None:
        self.folder = packed_folder() if folder is None else folder
        self.most = most_packed() if most is None else most
        self.rounding = rounding
        self._path: Path | None = None

    def find(self, work: Mapping[str, Packable]) -> Mapping[str, Sequence[Tensor]]:
        """Return the packed parts of all these layers if a file has them, else nothing."""
        forms = {name: one.pack(one.sizes()) for name, one in work.items()}
        size = sum(part.nbytes for parts in forms.values() for part in parts)
        if not LEAST <= size <= self.most:
            return {}
        self._path = self.folder / f"{key_of(work, self.rounding)}.safetensors"
        try:
            found = read(self._path, forms)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return {}
        except (OSError, SafetensorError, ValueError) as error:
            progress.warning(
                "the packed weights kept in %s cannot be used (%s); they are packed and written anew.",
                self._path, _in_a_line(error),
            )
            return {}
        with suppress(OSError):  # the folder may belong to another user
            os.utime(self._path)
        progress.info("packed weights: from %s (%s)", self._path, bytes_in_words(size))
        return found

    def keep(self, parts: Mapping[str, Sequence[Tensor]]) -> None:
        """Write the packed weights, and remove the files that were unused longest if there are too many bytes."""
        if self._path is None:
            return
        size = sum(part.nbytes for some in parts.values() for part in some)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.folder).free
            if free < 2 * size:
                raise OSError(0, f"{bytes_in_words(free)} are free on the disk, and as much as is kept is to stay free")
            write(self._path, parts)
            prune(self.folder, self.most, self._path)
        except OSError as error:
            progress.warning(
                "the packed weights (%s) are not kept in %s (%s); they will be packed again the next time.",
                bytes_in_words(size), self.folder, error.strerror or error,
            )
            return
        progress.info("packed weights: kept in %s for the next time (%s)", self._path, bytes_in_words(size))


def key_of(work: Mapping[str, Packable], rounding: str = "") -> str:
    """Return a hash of all that the packed weights of these layers depend on."""
    sources = {name: one.sources() for name, one in work.items()}
    digests = iter(_parallel(digest, (part for parts in sources.values() for part in parts)))
    what = {
        name: [one.quantize, one.is_transposed, *([str(p.dtype), list(p.shape), next(digests)] for p in sources[name])]
        for name, one in work.items()
    }
    named = [FORMAT, LAYOUT, what, *([rounding] if rounding else [])]
    return sha256(json.dumps(named).encode()).hexdigest()[:32]


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes."""
    return sha256(bytes_of(tensor)).hexdigest()


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes as they lie in memory; copied only if they are not contiguous."""
    return tensor.contiguous().view(torch.uint8).numpy().data.cast("B")


def read(path: Path, forms: Mapping[str, Sequence[Tensor]]) -> dict[str, Sequence[Tensor]]:
    """Read the parts of layers, which have to have these forms. Every byte is read once, to compare the hash.

    The parts stay mapped from the file, so processes share them, and the system may drop them and read them again.

    Raises:
        OSError, SafetensorError, ValueError: the file is missing, of another format or of other layers, or damaged.
    """
    with safe_open(path, framework="pt") as file:
        told = file.metadata() or {}
        if told.get("format") != FORMAT or told.get("layout") != str(LAYOUT):
            raise ValueError("it is none of packed weights")
        named = {place_of(name, at): form for name, parts in forms.items() for at, form in enumerate(parts)}
        if named.keys() != set(file.keys()):
            raise ValueError("it is of other layers")
        mapped = {place: file.get_tensor(place) for place in named}
    for place, form in named.items():
        if mapped[place].dtype != form.dtype or mapped[place].shape != form.shape:
            raise ValueError("it is of layers of other sizes")
    if _digest_of(mapped) != told.get("sha256"):
        raise ValueError("it is damaged")
    return {name: [mapped[place_of(name, at)] for at in range(len(parts))] for name, parts in forms.items()}


def write(path: Path, parts: Mapping[str, Sequence[Tensor]]) -> None:
    """Write the parts of layers, piece by piece, so that memory never holds them twice; OSError if that fails."""
    tensors = {place_of(name, at): part for name, some in parts.items() for at, part in enumerate(some)}
    about = {"format": FORMAT, "layout": str(LAYOUT), "sha256": _digest_of(tensors)}
    header: dict[str, Any] = {"__metadata__": about}
    end = 0
    for place, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[place] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNED)
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(bytes_of(tensor))


def place_of(name: str, at: int) -> str:
    """Return the name of a layer's part in a file."""
    return f"{name}.{at}"


def _digest_of(tensors: Mapping[str, Tensor]) -> str:
    places = sorted(tensors)
    parts = _parallel(digest, (tensors[place] for place in places))
    return sha256("".join(parts).encode()).hexdigest()


def _parallel(work: Callable[[Tensor], str], tensors: Iterable[Tensor]) -> list[str]:
    """Apply `work` to every tensor, on as many threads as PyTorch computes with."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return list(pool.map(work, tensors))


def _in_a_line(error: Exception) -> str:
    said = error.strerror if isinstance(error, OSError) else str(error)
    return (said or type(error).__name__).strip().splitlines()[0]
