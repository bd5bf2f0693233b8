"""Error messages for files that do not load: whether the config, the weights or a missing permission is to blame."""

from collections.abc import Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM

from draftsmith.targets.loading.tokens import first_line, needs_own_code, own_code
from draftsmith.types import DraftsmithError

LOOK_AT_THE_CONFIG = "correct it, or fetch the file again"


def config_fault(error: Exception, name: str) -> DraftsmithError:
    """Return the error for a config that could not be read."""
    if needs_own_code(error):
        return own_code(name)
    if isinstance(error, StrictDataclassError):  # its first line names the broken rule, its second line the reason
        said = str(error).strip().splitlines()[-1].strip()
        reason = said.partition(": ")[2].partition(". Errors:")[0].rstrip(".")
        return DraftsmithError(f"the config.json of {name!r} has a wrong value ({reason}); {LOOK_AT_THE_CONFIG}.")
    return DraftsmithError(
        f"the target {name!r} could not be read ({first_line(error)}); give the folder of a saved model or the name "
        "of one on the hub."
    )


def model_fault(error: Exception, config: Any, name: str, trust_remote_code: bool) -> DraftsmithError:
    """Return the error for a model that could not be loaded although its config was read."""
    if needs_own_code(error):
        return own_code(name)
    fault = _building_fault(config, trust_remote_code)
    if fault is None:
        return DraftsmithError(
            f"the weights of {name!r} could not be loaded ({first_line(error)}); fetch the files again, as safetensors."
        )
    field = _field_of(fault.args[0], config.to_dict()) if isinstance(fault, KeyError) else None
    if field is not None:
        return DraftsmithError(
            f"in the config.json of {name!r}, {field} is {fault.args[0]!r}, which transformers does not know; "
            f"{LOOK_AT_THE_CONFIG}."
        )
    return DraftsmithError(
        f"the model that the config.json of {name!r} describes cannot be built ({first_line(fault)}); "
        f"{LOOK_AT_THE_CONFIG}, or give a causal language model that transformers knows."
    )


def _building_fault(config: Any, trust_remote_code: bool) -> Exception | None:
    """Return the exception that building the model raises even without weights; None if it raises none."""
    try:
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # each model's code raises its own kinds
        return error
    return None


def _field_of(value: object, fields: Mapping[str, Any]) -> str | None:
    """Return the name of the field that has this value, such as "rope_parameters.rope_type"."""
    for name, held in fields.items():
        if held == value:
            return name
        inner = _field_of(value, held) if isinstance(held, Mapping) else None
        if inner is not None:
            return f"{name}.{inner}"
    return None
