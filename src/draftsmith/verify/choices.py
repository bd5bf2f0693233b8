"""Acceptance by native operators, for greedy rows under any rules and for sampled rows with deterministic drafts.

Shapes: B rows, N drafted, M = N + 1 verified nodes (root first), V vocabulary.

The definition is PyTorch's: `shape_logits`, `probabilities`, `accept_greedy` and `accept_deterministic`. The operator
takes the very token that they take. Where it would have to trust the last bits of a sum that it adds up in another
order, it leaves the row to them.
"""

from dataclasses import replace

import torch
from torch import Tensor

from draftsmith.native import LIBRARY
from draftsmith.types import Draft
from draftsmith.verify.accept import Acceptance, accept_deterministic
from draftsmith.verify.distribution import History, SamplingBatch, probabilities, shape_logits

UNDECIDED = -1


def can_accept_natively(logits_BMV: Tensor, history: History | None) -> bool:
    """Whether `accept_natively` takes such logits and such a history."""
    return (
        LIBRARY and logits_BMV.device.type == "cpu" and logits_BMV.dtype in (torch.bfloat16, torch.float32)
        and logits_BMV.stride(2) == 1 and (history is None or history.seen_RV is not None)
    )


def accept_natively(
    logits_BMV: Tensor, batch: SamplingBatch, history: History | None, draft: Draft, visible_BMM: Tensor,
    seeds_B: Tensor, positions_B: Tensor,
) -> Acceptance:
    """Do as `accept_defined`: the same tokens, by one native operator and without tensors of their size.

    `can_accept_natively` has to hold.
    """
    bias = batch.bias
    path_BD, counts_B, next_B = torch.ops.draftsmith.accept_choices(
        logits_BMV, draft.tokens_BN, draft.parents_BN, visible_BMM, draft.depth, batch.rules_BX, batch.top_k_B,
        seeds_B, positions_B, [] if bias is None else [bias.rows_K, bias.tokens_K, bias.values_K],
        [] if history is None else history.tensors,
    )
    for row, token in enumerate(next_B.tolist()):
        if token == UNDECIDED:
            one = slice(row, row + 1)
            own = replace(draft, tokens_BN=draft.tokens_BN[one], parents_BN=draft.parents_BN[one], q_BMV=None)
            past = None if history is None else history.at(history.slots_B[one])
            alone = accept_defined(
                logits_BMV[one], batch.row(row), past, own, visible_BMM[one], seeds_B[one], positions_B[one]
            )
            path_BD[row], counts_B[row], next_B[row] = alone.path_BD[0], alone.counts_B[0], alone.next_B[0]
    return Acceptance(path_BD, counts_B, next_B)


def accept_defined(
    logits_BMV: Tensor, batch: SamplingBatch, history: History | None, draft: Draft, visible_BMM: Tensor,
    seeds_B: Tensor, positions_B: Tensor,
) -> Acceptance:
    """Accept the path of what the target chooses: a greedy row its best token, another one the token it draws.

    Args:
        logits_BMV: the target's own, at every node.
        batch, history: the rules of the rows, and what these have read and written.
        draft: whatever its guesses were drawn from, they count as given.
        visible_BMM: which nodes are on the path of which.
        seeds_B: seeds of the rows (int64).
        positions_B: absolute position of the token after the root.
    """
    shaped_BMV = shape_logits(logits_BMV, batch, history, draft.tokens_BN, visible_BMM)
    return accept_deterministic(probabilities(shaped_BMV, batch), draft, seeds_B, positions_B)
