"""From a folder or a hub name to a drafter, by the `model_type` in its config.json.

Other packages add families through the entry-point group `draftsmith.drafters`: name = model_type, value = a `Loader`.
"""

from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.drafters import storage
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.mlp import MLPSpeculator
from draftsmith.drafters.mlp_config import MODEL_TYPE
from draftsmith.target.packing import can_prepack, prepack_linears
from draftsmith.types import DraftsmithError

if TYPE_CHECKING:
    from draftsmith.target import Target

Loader = Callable[[Path, "Target"], Drafter]

ENTRY_POINTS = "draftsmith.drafters"
HUB_FILES = ["config.json", "manifest.json", "*.safetensors", "*.safetensors.index.json"]


def load_mlp(folder: Path, target: "Target") -> Drafter:
    """Load an MLP speculator in the target's dtype, on its device, ready to decode but not to be trained."""
    speculator = MLPSpeculator.from_pretrained(folder, target, dtype=target.dtype).eval().requires_grad_(False)
    if target.native:
        speculator.go_native(int8=True)
    elif can_prepack(target.device, target.dtype):
        prepack_linears(speculator, lambda: target.packed)
    return speculator


BUILT_IN: dict[str, Loader] = {MODEL_TYPE: load_mlp}


def loader_for(family: object, origin: Path) -> Loader:
    """Return the loader of a family, our own first; DraftsmithError lists the families that exist."""
    if isinstance(family, str) and family in BUILT_IN:
        return BUILT_IN[family]
    others = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if isinstance(family, str) and family in others:
        loader: Loader = others[family].load()
        return loader
    known = ", ".join(sorted({*BUILT_IN, *others}))
    raise DraftsmithError(f"{origin} is of the drafter family {family!r}, which is unknown; known are {known}.")


def fetch(name: str) -> Path:
    """Download a drafter's config and safetensors from the model hub; DraftsmithError when that fails."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DraftsmithError(
            f"drafter {name!r} is neither a local folder nor could it be fetched from the model hub ({reason}); "
            "check the name or the network."
        ) from error


def is_local(name: str | Path) -> bool:
    """Tell a path from a hub name: a path exists, is absolute, starts with a dot, or has not the form owner/name."""
    path = Path(name)
    return isinstance(name, Path) or path.exists() or str(name)[:1] in "/.~" or len(path.parts) != 2


def load_drafter(name_or_path: str | Path, target: "Target") -> Drafter:
    """Load the drafter at a local folder or hub name, checked against the target.

    Raises:
        DraftsmithError: nothing there, damaged, of an unknown family, or made for another target.
    """
    if is_local(name_or_path):
        folder = Path(name_or_path).expanduser()
        storage.require_folder(folder)
    else:
        folder = fetch(str(name_or_path))
    config = storage.read_json(folder / "config.json")
    return loader_for(config.get("model_type"), folder)(folder, target)
