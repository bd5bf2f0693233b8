"""Self-speculation: a copy of the target with weights in fewer bits drafts for it, over the target's own cache.

It reads half the bytes of a bf16 target (int8) or less than a third (int4), and makes nearly the same choices. It pays
where reading weights takes most of a step, and verification reads several tokens for little more than one. It uses the
text's keys and values that the target wrote, so it has no prompt to read and no cache of its own. "QuantSpec"
(arXiv:2502.10424) describes self-speculation with weights in 4 bits, and quantises the cache too.

A chain of a plan with a confidence ends where the target may have chosen another token, see `agreement`. The guess at
which that becomes likely is the last one: it has cost a pass, and may well stay. Where the target may well choose the
next best token instead, that is guessed too, beside the chain.

Shapes: B rows, D depth of the plan, V vocabulary.
"""

import logging
import time
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftsmith.drafters.draws import best_two, shares_noise
from draftsmith.drafters.models.agreement import NO_TOKEN, WORTH_IT, chance_of, kept_spread, spread_of
from draftsmith.drafters.models.model_drafter import DraftModel, ModelDrafter
from draftsmith.drafters.models.quantised_self_config import INT4, INT8, Int4SelfConfig, QuantisedSelfConfig
from draftsmith.drafters.models.self_drafter import SelfDrafter, with_others
from draftsmith.native import why_missing
from draftsmith.native.decoder import Bound
from draftsmith.native.layers import can_pack
from draftsmith.plan import Plan
from draftsmith.targets.copies import bytes_by_place
from draftsmith.types import Context, Draft, DraftsmithError, Quantization

if TYPE_CHECKING:
    from draftsmith.targets import Target

progress = logging.getLogger("draftsmith.progress")


class QuantisedSelf(SelfDrafter):
    """Drafts with a quantised copy of a bf16 target; it shares the target's cache and weights that are not packed."""

    confidences = (0.5, 0.7)
    sure_behind = 0.5

    def __init__(
        self, target: "Target", quantize: Quantization, guesses: int, name: str = "a copy", calibrate: int = 0
    ) -> None:
        super().__init__(target, target.quantised(quantize, name, calibrate), guesses)
        self._shared = frozenset(bytes_by_place(target.model))
        self._target, self._name = target, name
        self._rounding = f"{quantize}, by {calibrate} tokens"

    def parameter_count(self) -> int:
        """Count the weights of the copy."""
        return self.model.weights

    def memory_bytes(self) -> int:
        """Return the memory of the parts that are not the target's."""
        held = bytes_by_place(self.model.model)
        return sum(size for place, size in held.items() if place not in self._shared)

    @cached_property
    def spread(self) -> float:
        """How far the scores of the copy and the target are from each other, see `agreement`; kept once measured."""
        return kept_spread(self._target, self._rounding, self._measured_spread)

    def _measured_spread(self) -> float:
        begun = time.perf_counter()
        spread = spread_of(self.model, self._target)
        progress.info(
            "%s: its scores were compared with the target's in %.1f s, so that chains end where it may be wrong.",
            self._name, time.perf_counter() - begun,
        )
        return spread

    def propose(self, context: Context, plan: Plan) -> Draft:
        """Draft a chain that may end early, or what the plan says."""
        if plan.confidence is None or not plan.is_chain or plan.depth > self.max_depth:
            return super().propose(context, plan)
        bound = Bound(plan.confidence, self.spread)
        draft = self.by_operator(context, plan, bound)
        return self._while_likely(context, plan, bound) if draft is None else draft

    def _while_likely(self, context: Context, plan: Plan, bound: Bound) -> Draft:
        """Draft chains level by level, for as long as the target is likely to choose all of their tokens."""
        tokens_B, state = self.begin(context)
        drawn_B = context.temperature_B if shares_noise(plan, context) else torch.zeros_like(context.temperature_B)
        chance_B = torch.ones(len(tokens_B), dtype=torch.float64, device=tokens_B.device)
        guesses, others = list[list[int]](), list[list[int]]()
        while len(guesses) < plan.depth and bool((chance_B >= bound.least).any()):
            depth, goes_on_B = len(guesses), chance_B >= bound.least
            logits_BV, state = self._read(depth, state, tokens_B)
            two_B2, lead_B = best_two(logits_BV.float(), drawn_B, context.seeds_B, context.lengths_B + depth)
            tokens_B, before_B = two_B2[:, 0], chance_B
            chance_B = before_B * chance_of(lead_B, bound.spread)
            guesses.append(tokens_B.where(goes_on_B, NO_TOKEN).tolist())
            beside_B = two_B2[:, 1].where(goes_on_B & (before_B - chance_B >= WORTH_IT), NO_TOKEN)
            others.append(beside_B.tolist())
        return with_others(list(zip(*guesses, strict=True)), list(zip(*others, strict=True)), context, plan)


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
