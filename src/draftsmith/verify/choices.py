"""Acceptance by native operators, for greedy rows and sampled ones under any rules, with drafts of any kind.

Shapes: B rows, N drafted, M = N + 1 verified nodes (root first), V vocabulary.

The PyTorch functions define the result: `shape_logits`, `probabilities`, `accept_greedy`, `accept_deterministic`,
`accept_sampled` and `accept_block`. The operators choose exactly the same tokens. Where that would depend on the last
bits of a sum, which they add up in another order, they leave the row to the PyTorch functions.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.native import LIBRARY
from draftsmith.types import Draft
from draftsmith.verify.accept import Acceptance, accept_deterministic, accept_sampled
from draftsmith.verify.block import accept_block
from draftsmith.verify.distribution import History, SamplingBatch, probabilities, shape_logits

UNDECIDED = -1


def can_accept_natively(logits_BMV: Tensor, history: History | None) -> bool:
    """Whether the native functions of this module can take these logits and this history."""
    return (
        LIBRARY and logits_BMV.device.type == "cpu" and logits_BMV.dtype in (torch.bfloat16, torch.float32)
        and logits_BMV.stride(2) == 1 and (history is None or history.seen_RV is not None)
    )


def accept_natively(
    logits_BMV: Tensor, batch: SamplingBatch, history: History | None, draft: Draft, visible_BMM: Tensor,
    seeds_B: Tensor, positions_B: Tensor,
) -> Acceptance:
    """Do as `accept_defined`: the same tokens, by one native operator and without tensors as large as the logits.

    `can_accept_natively` has to hold.
    """
    given = draft if draft.q_BMV is None else replace(draft, q_BMV=None)
    found = Acceptance(*torch.ops.draftsmith.accept_choices(
        *_arguments(logits_BMV, batch, history, given, visible_BMM, seeds_B, positions_B)
    ))
    return _completed(accept_defined, found, logits_BMV, batch, history, given, visible_BMM, seeds_B, positions_B)


def accept_drawn_natively(
    logits_BMV: Tensor, batch: SamplingBatch, history: History | None, draft: Draft, visible_BMM: Tensor,
    seeds_B: Tensor, positions_B: Tensor,
) -> Acceptance:
    """Do as `accept_drawn_as_defined`: the same tokens, by one native operator.

    It computes only as much of p and q as a row needs. `can_accept_natively` has to hold.
    """
    assert draft.q_BMV is not None, "guesses that were not drawn are accepted by accept_natively"
    found = Acceptance(*torch.ops.draftsmith.accept_drawn(
        *_arguments(logits_BMV, batch, history, draft, visible_BMM, seeds_B, positions_B), draft.q_BMV,
        draft.branching or (),
    ))
    return _completed(
        accept_drawn_as_defined, found, logits_BMV, batch, history, draft, visible_BMM, seeds_B, positions_B
    )


def accept_block_natively(
    logits_BMV: Tensor, batch: SamplingBatch, history: History | None, draft: Draft, visible_BMM: Tensor,
    seeds_B: Tensor, positions_B: Tensor,
) -> Acceptance:
    """Do as `accept_block_as_defined`: the same tokens, by one native operator. `can_accept_natively` has to hold."""
    assert draft.q_BMV is not None, "guesses that were not drawn are accepted by accept_natively"
    found = Acceptance(*torch.ops.draftsmith.accept_block(
        *_arguments(logits_BMV, batch, history, draft, visible_BMM, seeds_B, positions_B), draft.q_BMV,
    ))
    return _completed(
        accept_block_as_defined, found, logits_BMV, batch, history, draft, visible_BMM, seeds_B, positions_B
    )


def _arguments(
    logits_BMV: Tensor, batch: SamplingBatch, history: History | None, draft: Draft, visible_BMM: Tensor,
    seeds_B: Tensor, positions_B: Tensor,
) -> tuple[Any, ...]:
    bias = batch.bias
    return (
        logits_BMV, draft.tokens_BN, draft.parents_BN, visible_BMM, draft.depth, batch.rules_BX, batch.top_k_B,
        seeds_B, positions_B, [] if bias is None else [bias.rows_K, bias.tokens_K, bias.values_K],
        [] if history is None else history.tensors,
    )


def _completed(
    define: Callable[..., Acceptance], found: Acceptance, logits_BMV: Tensor, batch: SamplingBatch,
    history: History | None, draft: Draft, visible_BMM: Tensor, seeds_B: Tensor, positions_B: Tensor,
) -> Acceptance:
    """Let the PyTorch definition decide the rows that the operator has left undecided, each by itself."""
    for row, token in enumerate(found.next_B.tolist()):
        if token == UNDECIDED:
            one = slice(row, row + 1)
            q_BMV = None if draft.q_BMV is None else draft.q_BMV[one]
            own = replace(draft, tokens_BN=draft.tokens_BN[one], parents_BN=draft.parents_BN[one], q_BMV=q_BMV)
            past = None if history is None else history.at(history.slots_B[one])
            alone = define(logits_BMV[one], batch.row(row), past, own, visible_BMM[one], seeds_B[one], positions_B[one])
            levels = alone.path_BD.shape[1]
            found.path_BD[row, :levels] = alone.path_BD[0]
            found.counts_B[row], found.next_B[row] = alone.counts_B[0], alone.next_B[0]
    return found


def accept_defined(
    logits_BMV: Tensor, batch: SamplingBatch, history: History | None, draft: Draft, visible_BMM: Tensor,
    seeds_B: Tensor, positions_B: Tensor,
) -> Acceptance:
    """Accept the path of the target's choices: the best token for a greedy row, a drawn token for a sampled one.

    Args:
        logits_BMV: the target's own, at every node.
        batch, history: the rules of the rows, and the tokens that these have read and written.
        draft: the guesses; they count as deterministic, even if they were drawn.
        visible_BMM: for every node, which nodes are on its path.
        seeds_B: seeds of the rows (int64).
        positions_B: absolute position of the token after the root.
    """
    shaped_BMV = shape_logits(logits_BMV, batch, history, draft.tokens_BN, visible_BMM)
    return accept_deterministic(probabilities(shaped_BMV, batch), draft, seeds_B, positions_B)


def accept_drawn_as_defined(
    logits_BMV: Tensor, batch: SamplingBatch, history: History | None, draft: Draft, visible_BMM: Tensor,
    seeds_B: Tensor, positions_B: Tensor,
) -> Acceptance:
    """Accept guesses of a draft with q by rejection sampling; arguments as in `accept_defined`."""
    shaped_BMV = shape_logits(logits_BMV, batch, history, draft.tokens_BN, visible_BMM)
    return accept_sampled(probabilities(shaped_BMV, batch), draft, seeds_B, positions_B)


def accept_block_as_defined(
    logits_BMV: Tensor, batch: SamplingBatch, history: History | None, draft: Draft, visible_BMM: Tensor,
    seeds_B: Tensor, positions_B: Tensor,
) -> Acceptance:
    """Accept guesses of a chain with q by block verification; arguments as in `accept_defined`."""
    shaped_BMV = shape_logits(logits_BMV, batch, history, draft.tokens_BN, visible_BMM)
    return accept_block(probabilities(shaped_BMV, batch), draft, seeds_B, positions_B)
