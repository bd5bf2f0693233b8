"""Self-speculation: a copy of the target with int8 weights drafts for it.

Half the bytes to read of a bf16 target, and nearly its choices. Worth it where reading weights is what a step costs,
and verification reads several tokens for little more than one.
"""

from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field
from torch import Tensor

from draftsmith.drafters.config import Config
from draftsmith.drafters.family import Family
from draftsmith.drafters.models.model_drafter import MAX_DEPTH, DraftModel
from draftsmith.native import why_missing
from draftsmith.native.layers import can_pack
from draftsmith.types import DraftsmithError

if TYPE_CHECKING:
    from draftsmith.targets import Target


class Int8SelfConfig(Config):
    """The options of the int8 copy."""

    guesses: Annotated[int, Field(ge=1, le=MAX_DEPTH)] = Field(
        default=4, description="tokens that are drafted, as a chain"
    )


def make_int8_self(config: Int8SelfConfig, target: "Target", draft_tokens: Tensor | None) -> DraftModel:
    """Copy the target, of any dtype, into int8; DraftsmithError where the native kernels cannot run it."""
    if not can_pack(target.device, torch.bfloat16):
        reason = why_missing() or f"{target.name} is on {target.device}"
        raise DraftsmithError(f"int8-self runs on the native kernels for CPUs, but {reason}; choose another drafter.")
    copied = target.copied(torch.bfloat16, native=True, quantize="int8")
    return DraftModel(copied, target.vocab_size, config.guesses)


FAMILY = Family(
    "int8-self", "an int8 copy of the target, by the native kernels for CPUs", Int8SelfConfig, make_int8_self
)
