"""Commits what was accepted: moves keys and values into place, and makes the context of the next step.

Shapes: B rows, N drafted nodes, M = N + 1 verified nodes (root first), D depth of the draft, T context tokens,
F feature width, V vocabulary.
"""

import torch
from torch import Tensor

from draftsmith.engine.steps.layout import Layout
from draftsmith.targets import KVCache, keep_path
from draftsmith.types import UNUSED, Context, Draft
from draftsmith.verify import Acceptance, accept_greedy

# In a step's table, in place of a row's number of guesses: the logits that chose its first token are NaN or infinite.
NOT_FINITE = -1


def commit_greedy(
    cache: KVCache, logits_BMV: Tensor, features_BMF: Tensor, layout: Layout, context: Context
) -> tuple[Context, Tensor, Tensor]:
    """Accept the path of argmaxes and commit it; see `commit`."""
    acceptance = accept_greedy(logits_BMV.argmax(dim=-1), layout.draft)
    return commit(cache, acceptance, logits_BMV, features_BMF, layout, context)


def commit_greedily_natively(
    cache: KVCache, logits_BMV: Tensor, features_BMF: Tensor, layout: Layout, context: Context
) -> tuple[Context, Tensor, Tensor]:
    """Do as `commit_greedy`, in one native operator where logits and states are bf16."""
    if logits_BMV.dtype != torch.bfloat16 or features_BMF.dtype != torch.bfloat16:
        return commit_greedy(cache, logits_BMV, features_BMF, layout, context)
    draft = layout.draft
    tokens_BT, features_BTF, counts_B, lengths_B, table_BX, path_BD = torch.ops.draftsmith.commit_greedy(
        [] if draft.is_chain else cache.tensors, logits_BMV, features_BMF, layout.tokens_BM, draft.parents_BN,
        context.lengths_B, draft.depth, context.slots_B, layout.nodes_B, cache.tables_RJ,
    )
    return context.after(tokens_BT, features_BTF, counts_B, lengths_B), table_BX, path_BD


def keep_states(cache: KVCache, context: Context, states_BTF: Tensor) -> None:
    """Keep states beside the keys and values of the tokens just read, for requests that begin with the same text later.

    Args:
        context: that the step began with; places behind what it accepted hold nothing until they are read.
        states_BTF: of the last token before the step and of those that it accepted.
    """
    tokens_T = torch.arange(states_BTF.shape[1], device=states_BTF.device)
    cache.store_states(context.slots_B, (context.lengths_B - 1).unsqueeze(1) + tokens_T, states_BTF)


def keep_states_natively(cache: KVCache, context: Context, states_BTF: Tensor) -> None:
    """Do as `keep_states`, in one native operator where the states are bf16."""
    assert cache.states_NEF is not None, "the cache was made without room for states"
    if states_BTF.dtype != torch.bfloat16 or cache.states_NEF.dtype != torch.bfloat16:
        keep_states(cache, context, states_BTF)
        return
    torch.ops.draftsmith.keep_states(
        cache.states_NEF, states_BTF, context.lengths_B, context.slots_B, cache.tables_RJ
    )


def commit_natively(
    cache: KVCache, acceptance: Acceptance, logits_BMV: Tensor, features_BMF: Tensor, layout: Layout, context: Context
) -> tuple[Context, Tensor, Tensor]:
    """Do as `commit`, in one native operator where logits and states are bf16."""
    if logits_BMV.dtype != torch.bfloat16 or features_BMF.dtype != torch.bfloat16:
        return commit(cache, acceptance, logits_BMV, features_BMF, layout, context)
    draft = layout.draft
    tokens_BT, features_BTF, counts_B, lengths_B, table_BX, path_BD = torch.ops.draftsmith.commit_path(
        [] if draft.is_chain else cache.tensors, logits_BMV, features_BMF, layout.tokens_BM, draft.parents_BN,
        context.lengths_B, acceptance.path_BD, acceptance.counts_B, acceptance.next_B, context.slots_B, layout.nodes_B,
        cache.tables_RJ,
    )
    return context.after(tokens_BT, features_BTF, counts_B, lengths_B), table_BX, path_BD


def commit(
    cache: KVCache, acceptance: Acceptance, logits_BMV: Tensor, features_BMF: Tensor, layout: Layout, context: Context
) -> tuple[Context, Tensor, Tensor]:
    """Keep the accepted path in the cache and make the next context.

    Returns:
        the context of the next step (T = depth + 1), the table of `StepResult`, and path_BD.
    """
    path_BD, accepted_B, next_B = acceptance.path_BD, acceptance.counts_B, acceptance.next_B
    draft = layout.draft
    # The nodes of a chain already lie where they have to be.
    if draft.depth and not draft.is_chain:
        keep_path(cache, context.lengths_B - 1, path_BD, context.slots_B, layout.nodes_B)
    tokens_BT = torch.cat([layout.tokens_BM.gather(1, path_BD), next_B.unsqueeze(1)], dim=1)
    tokens_BT = tokens_BT.scatter(1, accepted_B.unsqueeze(1), next_B.unsqueeze(1))
    states_BT = torch.cat([torch.zeros_like(accepted_B).unsqueeze(1), path_BD], dim=1)
    features_BTF = features_BMF.gather(1, states_BT.unsqueeze(2).expand(-1, -1, features_BMF.shape[2]))
    # A row's path is cut before a token that was not chosen by finite logits. The guess before it, which the target
    # could not read, becomes the root of the next step.
    finite_B = count_finite(logits_BMV, states_BT, accepted_B)
    counts_B = torch.where(finite_B > 0, finite_B, accepted_B + 1)
    drafted_B = guesses_or_flag(draft, finite_B)
    table_BX = torch.cat([counts_B.unsqueeze(1), drafted_B.unsqueeze(1), tokens_BT], dim=1)
    following = context.after(tokens_BT, features_BTF, counts_B, context.lengths_B + counts_B)
    return following, table_BX, path_BD


def count_finite(logits_BMV: Tensor, states_BT: Tensor, accepted_B: Tensor) -> Tensor:
    """Count each row's leading tokens that were chosen by finite logits, up to the first one that was not (B).

    Args:
        states_BT: the root and the accepted path, as nodes; entries from `accepted_B` + 1 on are not looked at.
    """
    # Minimum and maximum are NaN if any logit is, and finding them makes no other tensor as wide as the vocabulary.
    least_BM, most_BM = logits_BMV.aminmax(dim=-1)
    finite_BT = (least_BM.isfinite() & most_BM.isfinite()).gather(1, states_BT)
    used_BT = torch.arange(states_BT.shape[1], device=states_BT.device) <= accepted_B.unsqueeze(1)
    return (finite_BT & used_BT).cumprod(dim=1).sum(dim=1)


def guesses_or_flag(draft: Draft, finite_B: Tensor) -> Tensor:
    """Count the guesses of every row, or give `NOT_FINITE` if finite logits chose none of its tokens."""
    return torch.where(finite_B > 0, (draft.parents_BN != UNUSED).sum(dim=1), NOT_FINITE)
