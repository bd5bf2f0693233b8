"""Checks where a drafter that leaves out layers may be written."""

from pathlib import Path

from draftsmith.drafters.models.skip_layers_config import FAMILY
from draftsmith.drafters.trainable import storage
from draftsmith.types import DraftsmithError


def check_place(folder: Path) -> None:
    """Refuse to overwrite anything but an older drafter of this family; raises DraftsmithError."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / "config.json").is_file() or not FAMILY.recognises(storage.read_json(folder / "config.json")):
        raise DraftsmithError(f"{folder} exists and holds something else; choose a new folder.")
