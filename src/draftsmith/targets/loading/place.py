"""Checks from its name alone whether a target is where the user says it is."""

from difflib import get_close_matches
from pathlib import Path

from draftsmith.targets.loading.hub import check_hub
from draftsmith.types import DraftsmithError

ALIKE, MUCH_ALIKE = 0.6, 0.8
"""How similar a folder's name has to be to the given path, or to a name that may be on the hub, to be suggested."""


def check_place(name: str) -> None:
    """Refuse a folder that does not exist or holds no model, and a mistyped name of a model's folder.

    A name alone, or owner/name, may mean a model on the hub. It counts as mistyped only if a model here has almost the
    same name, with the same digits: another number means another model.

    Raises:
        DraftsmithError: it cannot be loaded; the message names the folder that may be meant.
    """
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise DraftsmithError(f"{name} has no config.json; give the folder of a saved transformers model.")
        return
    if folder.exists():
        raise DraftsmithError(f"{name} is a file; give the folder of a saved transformers model.")
    on_hub = len(folder.parts) <= 2 and not folder.is_absolute() and not name.startswith((".", "~"))
    place = folder.expanduser()
    try:
        models = [path.name for path in place.parent.iterdir() if (path / "config.json").is_file()]
    except OSError:
        models = []
    if on_hub:
        models = [model for model in models if digits(model) == digits(place.name)]
    near = get_close_matches(place.name, models, n=1, cutoff=MUCH_ALIKE if on_hub else ALIKE)
    if near:
        raise DraftsmithError(f"the target {name} does not exist; did you mean {place.parent / near[0]}?")
    if not on_hub:
        raise DraftsmithError(f"folder {name} does not exist; check the path.")
    check_hub(name, "target")


def digits(name: str) -> list[str]:
    """Return the digits of a name, in order."""
    return [character for character in name if character.isdigit()]
