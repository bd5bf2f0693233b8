"""From a folder, a hub name or a word such as `ngram:max_length=4` to a drafter.

A folder's family is recognised by its config.json. Other packages add families through the entry-point group
`draftsmith.drafters`, whose values are `Family` objects.

The facts about families are read here without PyTorch, so that a mistyped name or option is reported quickly. The code
with which a family computes is imported when a drafter is made or loaded. Families of other packages, which may import
PyTorch, are imported only if none of ours is meant.
"""

import json
import logging
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith import assets
from draftsmith.drafters.attention.eagle_config import EAGLE, EAGLE3
from draftsmith.drafters.config import Config
from draftsmith.drafters.family import Family, read_spec
from draftsmith.drafters.heads.firp_config import FAMILY as FIRP
from draftsmith.drafters.heads.hydra_config import FAMILY as HYDRA
from draftsmith.drafters.heads.medusa_config import FAMILY as MEDUSA
from draftsmith.drafters.heads.mlp_config import FAMILY as MLP
from draftsmith.drafters.heads.recurrent_config import FAMILY as RECURRENT
from draftsmith.drafters.lookup.lookahead_config import FAMILY as LOOKAHEAD
from draftsmith.drafters.lookup.lookup_first_config import FAMILY as LOOKUP_FIRST
from draftsmith.drafters.lookup.ngram_config import FAMILY as NGRAM
from draftsmith.drafters.lookup.suffix_config import FAMILY as SUFFIX
from draftsmith.drafters.models.cascade_config import FAMILY as CASCADE
from draftsmith.drafters.models.draft_model_config import FAMILY as DRAFT_MODEL
from draftsmith.drafters.models.early_exit_config import FAMILY as EARLY_EXIT
from draftsmith.drafters.models.quantised_self_config import INT4 as INT4_SELF
from draftsmith.drafters.models.quantised_self_config import INT8 as INT8_SELF
from draftsmith.drafters.models.skip_layers_config import FAMILY as SKIP_LAYERS
from draftsmith.drafters.models.small_lm_config import FAMILY as SMALL_LM
from draftsmith.drafters.trainable import storage
from draftsmith.drafters.tree_choices import Choices
from draftsmith.targets.loading.hub import check_hub
from draftsmith.types import DraftsmithError

if TYPE_CHECKING:
    import torch

    from draftsmith.drafters.base import Drafter
    from draftsmith.drafters.trainable.model import TrainableModel
    from draftsmith.targets import Target

log = logging.getLogger(__name__)

NEEDS_NO_TRAINING = NGRAM.name
"""The drafter for an unchanged target if none was chosen."""

ENTRY_POINTS = "draftsmith.drafters"
HUB_FILES = [
    "config.json", "manifest.json", "*.safetensors", "*.safetensors.index.json",
    # The end tokens and the tokenizer of a draft model.
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "*.model",
]


BUILT_IN: tuple[Family, ...] = (
    MLP, MEDUSA, HYDRA, EAGLE, EAGLE3, RECURRENT, FIRP, SMALL_LM, NGRAM, SUFFIX, LOOKAHEAD, LOOKUP_FIRST, EARLY_EXIT,
    SKIP_LAYERS, INT8_SELF, INT4_SELF, CASCADE,
)


def embedded() -> str:
    """Return the drafter for the embedded target if none was chosen: its speculator, behind a lookup."""
    return f"{LOOKUP_FIRST.name}:then={json.dumps(str(assets.demo_drafter()), ensure_ascii=False)}"


DEFAULT_FAMILY = MLP.name
"""The family of a recipe that names none."""


@cache
def families() -> dict[str, Family]:
    """Return all families by name, our own first; other packages cannot replace our families."""
    known = {family.name: family for family in BUILT_IN}
    for point in entry_points(group=ENTRY_POINTS):
        family = point.load()
        if not isinstance(family, Family):
            raise DraftsmithError(
                f"the entry point {point.name!r} ({point.value}) is a {type(family).__name__}, not a drafter Family; "
                "fix or remove that package."
            )
        known.setdefault(family.name, family)
    # The family of draft models comes last, because checkpoints of other families may look like language models.
    known[DRAFT_MODEL.name] = DRAFT_MODEL
    return known


def find(name: str) -> Family | None:
    """Return the family of a name, None if there is none; families of other packages are searched after ours."""
    own = next((family for family in (*BUILT_IN, DRAFT_MODEL) if family.name == name), None)
    return own or families().get(name)


def family_named(name: str) -> Family:
    """Return a family; DraftsmithError lists those that exist."""
    family = find(name)
    if family is None:
        raise DraftsmithError(f"there is no drafter family {name!r}; {near_family(name)}.")
    return family


def recognised(config: Mapping[str, Any]) -> Family | None:
    """Return the family that recognises a config.json's object, ours first; None if none does."""
    own = next((family for family in BUILT_IN if family.recognises(config)), None)
    return own or next((family for family in families().values() if family.recognises(config)), None)


def near_family(name: str) -> str:
    """Return a sentence with the family that a wrong name may mean, and all families that exist."""
    known = sorted(families())
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    listed = f"known are {', '.join(known)} (`draftsmith families` says more)"
    return f"did you mean {near[0]}? {listed[0].upper()}{listed[1:]}" if near else listed


def published_trees() -> dict[str, Choices]:
    """Return the static trees that were published with families, by the family's name."""
    return {family.name: family.tree for family in families().values() if family.tree}


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


def meant(name: str | Path) -> tuple[Family, Config | None] | None:
    """Return a drafter's family and, for a word, its options; None if only a download could tell.

    Nothing is imported or loaded for this, except the packages of other families if the name is none of ours.

    Raises:
        DraftsmithError: the drafter does not exist, is damaged, or is of an unknown family.
    """
    if isinstance(name, str) and not Path(name).exists():
        word, values = read_spec(name) if ":" in name else (name, {})
        family = find(word)
        if family is not None:
            options = family.config.read(values, f"{word}:")
            family.check_ready()
            return family, options
        if not set(str(name)) & set("/.~\\"):
            raise DraftsmithError(
                f"{word!r} is neither a folder nor a drafter family; {near_family(word)}. Families with training are "
                "given as the folder of a trained drafter."
            )
    if not is_local(name):
        check_hub(str(name), "drafter")
        return None
    folder = Path(name).expanduser()
    storage.require_folder(folder)
    return in_folder(folder, storage.read_config(folder)), None


def in_folder(folder: Path, config: Mapping[str, Any]) -> Family:
    """Return the family of a loadable drafter; DraftsmithError if no family has this config.json."""
    family = recognised(config)
    if family is None or family.load is None:
        known = ", ".join(sorted(family.name for family in families().values() if family.load is not None))
        raise DraftsmithError(
            f"{folder} is of the drafter family {config.get('model_type')!r}, which is unknown; known are {known}."
        )
    return family


def load_drafter(name: str | Path, target: "Target") -> "Drafter":
    """Load the drafter at a local folder or hub name, checked against the target, or make one from a word.

    A word is the name of a family that needs no training, with its options: `ngram`, `ngram:max_length=4`.

    Raises:
        DraftsmithError: the drafter does not exist, is damaged, of an unknown family, or made for another target.
    """
    from draftsmith.drafters.trainable.model import other_tokens, other_weights

    found = meant(name)
    family, options = found if found is not None else (None, None)
    if family is not None and options is not None:
        return family.ready(options, target)
    folder = Path(name).expanduser() if family is not None else fetch(str(name))
    config = storage.read_config(folder)
    family = family or in_folder(folder, config)
    assert family.load is not None
    drafter = family.load(folder, target)
    made_for = config.get("draftsmith", {}).get("target", {})
    for warning in (other_weights(folder, made_for, target.facts()), other_tokens(folder, made_for, target)):
        if warning is not None:
            log.warning(warning)
    return drafter


def reopen(folder: Path, target: "Target", dtype: "torch.dtype") -> "TrainableModel":
    """Load the drafter in a folder, to continue its training.

    Raises:
        DraftsmithError: there is none, it is damaged, or its family cannot reopen drafters.
    """
    storage.require_folder(folder)
    family = family_of(folder)
    if family is None or family.reopen is None:
        trained = ", ".join(sorted(family.name for family in families().values() if family.reopen is not None))
        raise DraftsmithError(f"{folder} holds no drafter that can be trained on; give one of {trained}.")
    return family.reopen(folder, target, dtype)


def family_of(name: str | Path) -> Family | None:
    """Return the family of a word or of a folder's config.json; None if only a download could tell."""
    if isinstance(name, str) and not Path(name).exists():
        family = find(name.partition(":")[0])
        if family is not None:
            return family
    folder = storage.standing(Path(name).expanduser())
    return recognised(storage.read_config(folder)) if (folder / "config.json").is_file() else None
