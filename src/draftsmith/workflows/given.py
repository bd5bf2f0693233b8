"""What a command was given by name, checked before anything is imported that takes long: a mistake is told at once."""

from collections.abc import Iterable
from pathlib import Path

from draftsmith.drafters.registry import meant
from draftsmith.drafters.trainable import storage
from draftsmith.dtypes import check_device, check_dtype
from draftsmith.targets.loading.place import check_place
from draftsmith.training.data.record_files import files_of, missing_file
from draftsmith.workflows.sources import gather_prompts


def check_models(
    target: str | Path | None = None, drafters: Iterable[str | Path | None] = (), dtypes: Iterable[str] = (),
    device: str = "auto",
) -> None:
    """Refuse names of a target, of drafters, dtypes or a device that stand for nothing; None is left to its default.

    What is on the hub is found out when it is loaded.

    Raises:
        DraftsmithError: the first of them, with what may be meant.
    """
    for dtype in dtypes:
        check_dtype(dtype)
    check_device(device)
    if target is not None:
        check_place(str(target))
    for drafter in drafters:
        if drafter is not None:
            meant(drafter)


def check_folder(drafter: Path | None) -> None:
    """Refuse the folder of a drafter that does not exist, with the nearest that does, whatever it may hold."""
    if drafter is not None:
        storage.require_folder(drafter)


def check_prompts(path: Path | None, task: str | None = None) -> None:
    """Refuse a file of prompts that cannot be read, and a task that it does not have, or the embedded prompts."""
    if path is not None or task is not None:
        gather_prompts(path, task)


def check_texts(path: Path | None) -> None:
    """Refuse a file or folder of training texts that does not exist, with the nearest that does."""
    if path is None:
        return
    place = path.expanduser()
    if not place.exists():
        raise missing_file(place)
    files_of(place)
