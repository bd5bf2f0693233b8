"""Writes folders that are either complete or absent: written aside, flushed, sealed with SHA-256 sums, then renamed.

safetensors has no checksum, so a flipped bit would load as a slightly wrong weight; the manifest detects it. Pickles
are never read.
"""

import errno
import glob
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from draftsmith.files import beside, locked
from draftsmith.types import DraftsmithError

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST = "manifest.json"
TENSOR_NAMES = "tensor_names"
ASIDE = ".tmp"
"""Suffix of folders that are not in place yet, or no longer."""
LONGEST_HEADER = 100_000_000
"""The most bytes of a safetensors header, by the format's definition."""


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with open(path, "wb") as handle:
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())


def write_json(path: Path, value: Any) -> None:
    """Write JSON as `write_bytes` does; keys keep their order, and NaN is refused because JSON has none."""
    write_bytes(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def write_tensors(path: Path, tensors: "Mapping[str, Tensor]", metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file as `write_bytes` does."""
    from safetensors.torch import save

    whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    write_bytes(path, save(whole, dict(metadata or {"format": "pt"})))


def sync_folder(folder: Path) -> None:
    """Make renames and new names inside a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write files into a temporary folder, seal it with a manifest, and put it in place of `folder`.

    A link stays, and the folder that it points at is replaced. If another process is writing it, wait for that process.

    Raises DraftsmithError if the disk is full or the place cannot be written; the old folder then stays in place.
    """
    place = _pointed_at(folder)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with locked(_lock(place)):
            _tidy(place)
            aside = beside(place, ASIDE)
            aside.mkdir()
            try:
                fill(aside)
                sums = {path.name: sha256(path) for path in sorted(aside.iterdir()) if path.is_file()}
                write_json(aside / MANIFEST, sums)
                sync_folder(aside)
            except BaseException:
                shutil.rmtree(aside, ignore_errors=True)
                raise
            _replace(aside, place)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DraftsmithError(f"no space is left on the disk for {folder}; free some and run again.") from error
        raise DraftsmithError(
            f"cannot write {folder} ({error.strerror or error}); choose a folder that can be written."
        ) from error


def remove_folder(folder: Path) -> None:
    """Remove a folder or a link to one; OSError if it cannot first be renamed, so that a kill leaves no half there."""
    aside = beside(folder, ASIDE)
    os.rename(folder, aside)
    _delete(aside)


def clear_leftovers(folder: Path) -> None:
    """Finish or undo what killed writers of a folder left half done, unless a process is writing it."""
    place = _pointed_at(folder)
    with locked(_lock(place), wait=False) as held:
        if held:
            _tidy(place)


def refuse_full(folder: Path) -> None:
    """Raise DraftsmithError if something is there already, so that no files are replaced."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DraftsmithError(f"{folder} is there already; choose a folder that is not, or remove it.")


def refuse_foreign(folder: Path) -> None:
    """Raise DraftsmithError if a folder holds something that its manifest does not list, and that would be lost."""
    listed = read_json(folder / MANIFEST)
    for path in sorted(folder.iterdir()):
        if path.name not in listed and path.name != MANIFEST:
            raise DraftsmithError(f"{path} is not part of the drafter there, which would be replaced; move it away.")


def _pointed_at(folder: Path) -> Path:
    """Return the folder itself where the name is a link: what is beside that one is on the same file system."""
    return Path(os.path.realpath(folder))


def _delete(path: Path) -> None:
    """Delete a folder, as far as possible; of a link only the link, as what it points at may be of use to others."""
    if path.is_symlink():
        with suppress(OSError):
            path.unlink()
        return
    for folder, _, _ in os.walk(path):  # nothing could be removed from a folder that is only to be read
        with suppress(OSError):
            os.chmod(folder, 0o700)
    shutil.rmtree(path, ignore_errors=True)


def _set_aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _lock(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


def _tidy(folder: Path) -> None:
    """Clean up after killed writers; the caller must hold the lock."""
    _recover(folder)
    # The exact length of the random part excludes the files of folders whose name continues after a dot.
    names = f".{glob.escape(folder.name)}.{'[0-9a-f]' * 8}{ASIDE}"
    for leftover in (_set_aside(folder), *folder.parent.glob(names)):
        _delete(leftover)


def _replace(new: Path, folder: Path) -> None:
    """Rename `new` to `folder`; a folder already there is kept until the new one has its name, or gets its own back."""
    try:
        if folder.exists():
            os.rename(folder, _set_aside(folder))
        os.rename(new, folder)
    except OSError as error:
        # A complete folder is never deleted before the next save.
        raise DraftsmithError(
            f"cannot put {new} in place of {folder} ({error.strerror}); rename it yourself, or save again."
        ) from error
    finally:
        _recover(folder)
    sync_folder(folder.parent)
    _delete(_set_aside(folder))


def _recover(folder: Path) -> None:
    old = _set_aside(folder)
    if old.exists() and not folder.exists():
        os.rename(old, folder)


def standing(folder: Path) -> Path:
    """Return a readable path of a folder, also while it is replaced, or if that was killed between its two renames."""
    old = _set_aside(_pointed_at(folder))
    return old if old.is_dir() and not folder.exists() else folder


def verify_folder(folder: Path) -> None:
    """Compare every file with the manifest, if there is one; DraftsmithError names the first that differs."""
    folder = standing(folder)
    manifest = folder / MANIFEST
    if not manifest.exists():
        return
    for name, digest in read_json(manifest).items():
        path = folder / name
        if not path.exists():
            raise DraftsmithError(f"{path} is missing although {MANIFEST} lists it; restore it from a good copy.")
        if sha256(path) != digest:
            raise DraftsmithError(f"{path} is damaged (its SHA-256 is not in {MANIFEST}); restore it from a good copy.")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; DraftsmithError when the file is missing or broken."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DraftsmithError(f"{path} is missing, so the folder is no whole checkpoint; save it again.") from error
    except (OSError, ValueError) as error:
        raise DraftsmithError(f"{path} cannot be read as JSON ({error}); restore it from a good copy.") from error
    if not isinstance(value, dict):
        raise DraftsmithError(f"{path} holds no JSON object; restore it from a good copy.")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json; the names of the tensors in model.safetensors are added under `TENSOR_NAMES`.

    Some published files can only be told apart by these names. If the weights are missing or damaged, there are no
    names; reading the weights will report that.
    """
    folder = standing(folder)
    exported = folder / "drafter"
    if not (folder / "config.json").exists() and (exported / "config.json").exists():
        raise DraftsmithError(f"{folder} is the folder of a run; its drafter is in {exported}, so give that.")
    return read_json(folder / "config.json") | {TENSOR_NAMES: tensor_names(folder / "model.safetensors")}


def tensor_names(path: Path) -> list[str]:
    """Return the tensor names in a safetensors file, from its header alone; none if the file is damaged.

    safetensors' own reader would import PyTorch, which takes longer than everything that the names are needed for.
    """
    try:
        with open(path, "rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            header = json.loads(handle.read(length)) if length <= LONGEST_HEADER else {}
    except (OSError, ValueError, struct.error):
        return []
    return [name for name in header if name != "__metadata__"] if isinstance(header, dict) else []


def read_tensor_file(path: Path) -> "dict[str, Tensor]":
    """Read one safetensors file; DraftsmithError when it is missing, cut short or broken."""
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except FileNotFoundError as error:
        raise DraftsmithError(f"{path} is missing, so the folder is no whole checkpoint; save it again.") from error
    except (OSError, SafetensorError) as error:
        raise DraftsmithError(f"{path} is cut short or broken ({error}); restore it from a good copy.") from error


def read_tensors(folder: Path, name: str = "model.safetensors") -> "dict[str, Tensor]":
    """Read the file `name`, or the shards that `name`.index.json lists; pickles are refused."""
    folder = standing(folder)
    whole, index = folder / name, folder / f"{name}.index.json"
    if whole.exists():
        return read_tensor_file(whole)
    if index.exists():
        shards = sorted(set(read_json(index).get("weight_map", {}).values()))
        merged: dict[str, Tensor] = {}
        for shard in shards:
            if Path(shard).name != shard:
                raise DraftsmithError(f"{index} points outside its folder ({shard!r}); use shards beside it.")
            merged.update(read_tensor_file(folder / shard))
        return merged
    pickles = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in sorted(folder.glob(pattern))]
    if pickles:
        raise DraftsmithError(
            f"{folder / pickles[0]} is a pickle, which can run code when read; convert it to {name}."
        )
    raise DraftsmithError(f"{whole} is missing, so {folder} is no whole checkpoint; save it again.")


def require_folder(folder: Path) -> None:
    """Raise DraftsmithError, with the nearest name that exists, unless `folder` is one."""
    if standing(folder).is_dir():
        return
    if folder.exists():
        raise DraftsmithError(f"{folder} is a file, where a folder has to be; give the folder that it is in.")
    siblings = [path.name for path in folder.parent.iterdir()] if folder.parent.is_dir() else []
    near = get_close_matches(folder.name, siblings, n=1)
    hint = f"did you mean {folder.parent / near[0]}?" if near else "check the path."
    raise DraftsmithError(f"folder {folder} does not exist; {hint}")
