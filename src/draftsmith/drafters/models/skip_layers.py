"""The target without some attentions and feed-forwards drafts for it: "Draft & Verify" (arXiv:2309.08168), section 3.

The parts to leave out are set by hand or found by `draftsmith tune-layers`, see `layer_search`. The folder that it
writes holds no weights, because all weights are the target's.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from draftsmith.drafters.models.place import check_place
from draftsmith.drafters.models.self_drafter import SelfDrafter
from draftsmith.drafters.models.skip_layers_config import MODEL_TYPE, SkipLayersConfig
from draftsmith.drafters.trainable import storage
from draftsmith.drafters.trainable.model import check_target
from draftsmith.targets import Skipped
from draftsmith.types import DraftsmithError

if TYPE_CHECKING:
    from draftsmith.targets import Target

class SkipLayers(SelfDrafter):
    """Drafts with what is left of the target."""

    def __init__(self, target: "Target", skipped: Skipped, guesses: int) -> None:
        """Leave these parts out; DraftsmithError if the target has no such parts."""
        super().__init__(target, target.without(skipped), guesses)


def make_skip_layers(config: SkipLayersConfig, target: "Target", draft_tokens: Tensor | None) -> SkipLayers:
    """Make the drafter that the config describes."""
    skipped = Skipped(frozenset(config.skip_attention), frozenset(config.skip_mlp))
    return SkipLayers(target, skipped, config.guesses)


def save_skip_layers(
    folder: Path, skipped: Skipped, guesses: int, target: "Target", found: Mapping[str, Any] | None = None
) -> None:
    """Write the folder of a drafter completely or not at all.

    Args:
        found: how the parts were found and measured, stored under the key `draftsmith`.

    Raises:
        DraftsmithError: something else is in that place, or the folder cannot be written.
    """
    check_place(folder)
    config = {
        "model_type": MODEL_TYPE, "skip_attention": sorted(skipped.attention), "skip_mlp": sorted(skipped.mlp),
        "guesses": guesses,
        "draftsmith": {"target": asdict(target.facts()), "layers": target.layers, **(found or {})},
    }
    storage.write_folder(folder, lambda aside: storage.write_json(aside / "config.json", config))


def load_skip_layers(folder: Path, target: "Target") -> SkipLayers:
    """Load a folder that `save_skip_layers` wrote; DraftsmithError for a damaged one, or for another target."""
    storage.verify_folder(folder)
    origin = storage.standing(folder) / "config.json"
    values = storage.read_json(origin)
    record = values.get("draftsmith", {})
    check_target(folder, record.get("target", {}), target.facts())
    layers = record.get("layers", target.layers)
    if layers != target.layers:
        raise DraftsmithError(
            f"{folder} drafts for a target of {layers} layers, but {target.name!r} has {target.layers}; load that "
            "target, or run tune-layers for this one."
        )
    options = {name: values[name] for name in SkipLayersConfig.options() if name in values}
    return make_skip_layers(SkipLayersConfig.read(options, f"{origin}: "), target, None)
