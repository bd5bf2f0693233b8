"""Whether a target is where it is said to be, told by its name alone."""

from difflib import get_close_matches
from pathlib import Path

from draftsmith.types import DraftsmithError

ALIKE = 0.8
"""So much like a name of the hub the name of a folder here has to be for the folder to be meant."""


def check_place(name: str) -> None:
    """Refuse a folder that is none, or that holds no model, and a name that is nearly that of a model's folder here.

    A name of another form than that of a path, owner/name or name alone, may stand for a model on the hub.

    Raises:
        DraftsmithError: it cannot be loaded; the sentence names the folder that may be meant.
    """
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise DraftsmithError(f"{name} has no config.json; give the folder of a saved transformers model.")
        return
    if folder.exists():
        raise DraftsmithError(f"{name} is a file; give the folder of a saved transformers model.")
    near = _near(folder)
    if near is not None:
        raise DraftsmithError(f"the target {name} does not exist; did you mean {near}?")
    if folder.is_absolute() or name.startswith((".", "~")) or len(folder.parts) > 2:
        raise DraftsmithError(f"folder {name} does not exist; check the path.")


def _near(folder: Path) -> Path | None:
    """Return the folder of a model beside this one, or where this one would be, whose name is like its name."""
    place = folder.expanduser()
    try:
        models = [path.name for path in place.parent.iterdir() if (path / "config.json").is_file()]
    except OSError:
        return None
    near = get_close_matches(place.name, models, n=1, cutoff=ALIKE)
    return place.parent / near[0] if near else None
