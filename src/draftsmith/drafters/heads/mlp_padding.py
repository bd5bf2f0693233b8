"""Makes an MLP speculator read the wider states of a padded target, see `draftsmith.evaluation.padding`."""

import json
import math
from pathlib import Path

from draftsmith.drafters.heads.mlp_config import MODEL_TYPE
from draftsmith.drafters.trainable import storage
from draftsmith.types import DraftsmithError


def pad_speculator(source: Path, folder: Path, times: int) -> None:
    """Write the MLP speculator in `source` for a target whose states are `times` as wide.

    Its guesses stay the same. (With `scale_input` up to rounding: its epsilon cannot be set.)

    Raises:
        DraftsmithError: the source is no MLP speculator with tables of its own, or the folder is not empty.
    """
    config = storage.read_json(source / "config.json")
    if config.get("model_type") != MODEL_TYPE or config.get("tie_to_target"):
        raise DraftsmithError(f"{source} is no MLP speculator with tables of its own; give the folder of one to pad.")
    storage.refuse_full(folder)
    width = config["emb_dim"]
    tensors = storage.read_tensors(source)
    first = "speculator.proj.0.weight"
    scale = math.isqrt(times) if config.get("scale_input") else 1
    tensors[first] = (tensors[first] / scale).repeat(1, times)
    ours = json.loads(json.dumps(config.get("draftsmith", {})))
    if "target" in ours:
        ours["target"] |= {"hidden_size": times * width, "name": "padded"}
        ours["target"].pop("weights_hash", None)  # the hash of the original target
    padded = {**config, "emb_dim": times * width, "inner_dim": config.get("inner_dim") or width, "draftsmith": ours}

    def fill(aside: Path) -> None:
        storage.write_json(aside / "config.json", padded)
        storage.write_tensors(aside / "model.safetensors", tensors)

    storage.write_folder(folder, fill)
