"""Whether a target is where it is said to be, told by its name alone."""

from difflib import get_close_matches
from pathlib import Path

from draftsmith.targets.loading.hub import check_hub
from draftsmith.types import DraftsmithError

ALIKE, MUCH_ALIKE = 0.6, 0.8
"""So much like a path the folder of a model has to be to be meant by it; and like what may be a name on the hub."""


def check_place(name: str) -> None:
    """Refuse a folder that is none, or that holds no model, and a slip in the name of a model's folder.

    A name alone, or owner/name, may stand for a model on the hub. It is taken for a slip only where a model here is
    called much the same, with the same digits: another number is another model.

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
