"""Checks the names that a command was given before anything slow is imported, so that mistakes are reported at once."""

from collections.abc import Iterable
from pathlib import Path

from draftsmith.drafters.registry import BUILT_IN, find, meant
from draftsmith.drafters.trainable import storage
from draftsmith.dtypes import check_device, check_dtype
from draftsmith.targets.loading.place import check_place
from draftsmith.types import DraftsmithError
from draftsmith.workflows.comparison_texts import read_data
from draftsmith.workflows.sources import gather_prompts


def check_models(
    target: str | Path | None = None, drafters: Iterable[str | Path | None] = (), dtypes: Iterable[str] = (),
    device: str = "auto",
) -> None:
    """Refuse unknown targets, drafters, dtypes and devices; None stands for the default.

    Names on the hub are checked only when they are loaded.

    Raises:
        DraftsmithError: the first unknown name, with the name that may be meant.
    """
    for dtype in dtypes:
        check_dtype(dtype)
    check_device(device)
    if target is not None:
        check_place(str(target))
        refuse_drafter(Path(target).expanduser())
    for drafter in drafters:
        if drafter is not None:
            meant(drafter)


def refuse_drafter(folder: Path) -> None:
    """Raise DraftsmithError for a target that is the folder of a drafter, unless that is a language model itself."""
    if not folder.is_dir():
        return
    try:
        config = storage.read_config(folder)
    except DraftsmithError:
        return  # loading it will say what is wrong
    # Families of other packages are left out: most targets are no drafter, and those packages may take long to import.
    family = next((one for one in BUILT_IN if one.recognises(config)), None)
    if family is not None and family.trainable and not family.is_model:
        raise DraftsmithError(
            f"the target {folder} is a drafter of the family {family.name}; give it as --drafter, and the model that "
            "it was trained for as --target."
        )


def require_trained(drafter: Path, work: str) -> None:
    """Refuse a path that is not the folder of a drafter, without checking what the folder holds.

    Args:
        work: what would be done with it, such as "check".

    Raises:
        DraftsmithError: there is no such folder, with the nearest that exists; or it is the name of a family.
    """
    word = str(drafter).partition(":")[0]
    family = None if drafter.exists() else find(word)
    if family is not None:
        why = "is a family of drafters" if family.trainable else f"is not trained, so there is nothing to {work}"
        raise DraftsmithError(f"{word!r} {why}; give the folder of a trained drafter.")
    storage.require_folder(drafter)


def check_prompts(path: Path | None, task: str | None = None) -> None:
    """Refuse a prompt file that cannot be read, and a task that this file, or the embedded prompts, do not have."""
    if path is not None or task is not None:
        gather_prompts(path, task)


def check_texts(path: Path | None) -> None:
    """Refuse a file or folder of training texts that does not exist, with the nearest that does, or cannot be read."""
    if path is not None:
        read_data(path)
