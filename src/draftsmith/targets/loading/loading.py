"""Reads models from disk or the hub, and reports plainly what is wrong with them."""

import logging
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from draftsmith.targets.loading.faults import config_fault, model_fault
from draftsmith.targets.loading.place import check_place
from draftsmith.targets.loading.support import refuse_quantised, refuse_unsupported
from draftsmith.targets.loading.tokens import check_generation_config
from draftsmith.types import DraftsmithError

log = logging.getLogger(__name__)


def load_model(name: str, dtype: torch.dtype, device: torch.device, trust_remote_code: bool) -> PreTrainedModel:
    """Load a causal LM by hub name or folder; weights from safetensors only.

    Raises:
        DraftsmithError: when it is missing, damaged or of an unsupported kind.
    """
    check_place(name)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # each model's config checks itself and raises its own kinds of exceptions
        raise config_fault(error, name) from error
    refuse_unsupported(config, name)
    refuse_quantised(config, name)
    check_generation_config(name)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, with both sizes in the message
        )
        model, info = loaded
        model.to(device)
    except Exception as error:  # the loaders raise many kinds of exceptions for damaged files
        raise model_fault(error, config, name, trust_remote_code) from error
    _compare_tensors(info, name)
    return cast(PreTrainedModel, model)


def _compare_tensors(info: Mapping[str, Collection[Any]], name: str) -> None:
    """Refuse tensors that are missing in the files or have another shape there; report those that the model lacks."""
    misfits = sorted(info["mismatched_keys"])
    if misfits:
        tensor, stored, wanted = misfits[0]
        raise DraftsmithError(
            f"config.json and weights of {name!r} do not belong together: {tensor} is {_shape(stored)} in the files, "
            f"and {_shape(wanted)} by config.json ({len(misfits)} tensors differ); fetch both again from one place."
        )
    lost = sorted(map(str, info["missing_keys"]))
    if lost:
        raise DraftsmithError(
            f"the weights of {name!r} lack {len(lost)} tensors, {lost[0]} first; fetch the files again, config.json "
            "too."
        )
    unused = sorted(map(str, info["unexpected_keys"]))
    if unused:
        log.warning(
            "the weights of %r have %d tensors that its config.json has no place for, %s first; they are left out.",
            name, len(unused), unused[0],
        )


def _shape(sizes: Collection[int]) -> str:
    return " x ".join(map(str, sizes))


def precision_on_disk(name: str, dtype: torch.dtype, trust_remote_code: bool) -> str:
    """Return the short name ("fp32") of the dtype in a loaded model's files if `dtype` cannot hold it, else ""."""
    stored = _stored_dtype(Path(name)) if Path(name).is_dir() else None
    if stored is None:
        stored = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code).dtype
    if stored not in _STORED.values() or torch.promote_types(stored, dtype) == dtype:
        return ""
    return short_name(stored)


def short_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as options write it."""
    return {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]


_STORED = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _stored_dtype(folder: Path) -> torch.dtype | None:
    """Return the dtype of the largest tensor in the first file of a folder; None if that holds no floats."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                parts = [file.get_slice(key) for key in file.keys()]  # noqa: SIM118
                largest = max(parts, key=lambda part: math.prod(part.get_shape()), default=None)
                return _STORED.get(largest.get_dtype()) if largest is not None else None
        except (OSError, SafetensorError):
            return None
    return None


def resolve_device(device: str) -> torch.device:
    """Read auto, cpu or cuda."""
    try:
        where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    except RuntimeError as error:
        raise DraftsmithError(f"device {device!r} is unknown; use auto, cpu or cuda.") from error
    if where.type == "cuda" and not torch.cuda.is_available():
        raise DraftsmithError(f"device {device!r} is not here: PyTorch sees no CUDA device; use cpu or auto.")
    return where
