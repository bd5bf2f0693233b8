"""Self-speculation: a copy of the target with weights in fewer bits drafts for it, over the target's own cache.

It reads half the bytes of a bf16 target (int8) or less than a third (int4), and makes nearly the same choices. It pays
where reading weights takes most of a step, and verification reads several tokens for little more than one. It uses the
text's keys and values that the target wrote, so it has no prompt to read and no cache of its own. "QuantSpec"
(arXiv:2502.10424) describes self-speculation with weights in 4 bits, and quantises the cache too.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftsmith.drafters.models.model_drafter import DraftModel, ModelDrafter
from draftsmith.drafters.models.quantised_self_config import INT4, INT8, Int4SelfConfig, QuantisedSelfConfig
from draftsmith.drafters.models.self_drafter import SelfDrafter
from draftsmith.native import why_missing
from draftsmith.native.layers import can_pack
from draftsmith.targets.copies import bytes_by_place
from draftsmith.types import DraftsmithError, Quantization

if TYPE_CHECKING:
    from draftsmith.targets import Target


class QuantisedSelf(SelfDrafter):
    """Drafts with a quantised copy of a bf16 target; it shares the target's cache and weights that are not packed."""

    def __init__(
        self, target: "Target", quantize: Quantization, guesses: int, name: str = "a copy", calibrate: int = 0
    ) -> None:
        super().__init__(target, target.quantised(quantize, name, calibrate), guesses)
        self._shared = frozenset(bytes_by_place(target.model))

    def parameter_count(self) -> int:
        """Count the weights of the copy."""
        return self.model.weights

    def memory_bytes(self) -> int:
        """Return the memory of the parts that are not the target's."""
        held = bytes_by_place(self.model.model)
        return sum(size for place, size in held.items() if place not in self._shared)


def make_quantised(
    name: str, quantize: Quantization, guesses: int, target: "Target", calibrate: int = 0
) -> ModelDrafter:
    """Copy the target, of any dtype; DraftsmithError if the native kernels cannot run the copy.

    The copy computes in bf16. So it can share the cache only of a bf16 target; for others it keeps its own.
    """
    if not can_pack(target.device, torch.bfloat16):
        reason = why_missing() or f"{target.name} is on {target.device}"
        raise DraftsmithError(f"{name} runs on the native kernels for CPUs, but {reason}; choose another drafter.")
    if target.dtype == torch.bfloat16:
        return QuantisedSelf(target, quantize, guesses, name, calibrate)
    return DraftModel(target.quantised(quantize, name, calibrate), target.vocab_size, guesses)


def make_int8_self(config: QuantisedSelfConfig, target: "Target", draft_tokens: Tensor | None) -> ModelDrafter:
    """Make the int8 copy."""
    return make_quantised(INT8.name, "int8", config.guesses, target)


def make_int4_self(config: Int4SelfConfig, target: "Target", draft_tokens: Tensor | None) -> ModelDrafter:
    """Make the int4 copy."""
    return make_quantised(INT4.name, "int4", config.guesses, target, config.calibrate)
