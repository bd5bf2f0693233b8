"""Self-speculation: a copy of the target with int8 weights drafts for it.

Half the bytes to read of a bf16 target, and nearly its choices. Worth it where reading weights is what a step costs,
and verification reads several tokens for little more than one.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftsmith.drafters.models.int8_self_config import Int8SelfConfig
from draftsmith.drafters.models.model_drafter import DraftModel
from draftsmith.native import why_missing
from draftsmith.native.layers import can_pack
from draftsmith.types import DraftsmithError

if TYPE_CHECKING:
    from draftsmith.targets import Target


def make_int8_self(config: Int8SelfConfig, target: "Target", draft_tokens: Tensor | None) -> DraftModel:
    """Copy the target, of any dtype, into int8; DraftsmithError where the native kernels cannot run it."""
    if not can_pack(target.device, torch.bfloat16):
        reason = why_missing() or f"{target.name} is on {target.device}"
        raise DraftsmithError(f"int8-self runs on the native kernels for CPUs, but {reason}; choose another drafter.")
    copied = target.copied(torch.bfloat16, native=True, quantize="int8")
    return DraftModel(copied, target.vocab_size, config.guesses)
