"""Which guesses stay. Shapes: B rows, N drafted nodes, M = N + 1 verified nodes (root first), D depth, V vocabulary.

Pure functions of the target's choices or probabilities at every node. All are exact: `accept_greedy` gives the target's
own text, the other two give text distributed as the target's own.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.types import UNUSED, Draft
from draftsmith.verify.noise import Stream, categorical, race, uniform
from draftsmith.verify.tree import ancestor_table


@dataclass(frozen=True)
class Acceptance:
    """What a step commits: the accepted guesses, then one token of the target's own.

    Args:
        path_BD: accepted nodes from the root down, as indices into 0 … M - 1 (node n is n + 1); entries from
            `counts_B[b]` on repeat a valid index.
        counts_B: accepted guesses, 0 … D.
        next_B: the target's token after the last accepted node.
    """

    path_BD: Tensor
    counts_B: Tensor
    next_B: Tensor


def accept_greedy(choice_BM: Tensor, draft: Draft) -> Acceptance:
    """Accept the longest path on which every guess is the target's choice at its parent (`choice_BM`, token ids).

    >>> from draftsmith.types import Draft
    >>> draft = Draft(torch.tensor([[5, 7, 6]]), torch.tensor([[-1, 0, -1]]), depth=2)   # root → {5 → {7}, 6}
    >>> accept_greedy(torch.tensor([[5, 7, 9, 8]]), draft)
    Acceptance(path_BD=tensor([[1, 2]]), counts_B=tensor([2]), next_B=tensor([9]))
    """
    return _follow(choice_BM, draft, ancestor_table(draft.parents_BN, draft.depth))


def accept_deterministic(
    p_BMV: Tensor, draft: Draft, seeds_B: Tensor, positions_B: Tensor, alphabet_BU: Tensor | None = None
) -> Acceptance:
    """Let the target draw its token at every node from p (float64), then accept the path that guessed the draws.

    The noise of a draw depends only on the seed and the absolute position of the token; `positions_B` is the position
    of the token after the root. So the text equals plain decoding with the same seed, token for token, whatever the
    draft. SpecInfer's naive sampling (arXiv 2305.09781, section 4.3); an empty draft makes it plain decoding.
    `alphabet_BU` holds the ids of p's tokens if p covers only a part of the vocabulary, see `narrow`.
    """
    ancestors_BMA = ancestor_table(draft.parents_BN, draft.depth)
    positions_BM = positions_B.unsqueeze(1) + (ancestors_BMA != 0).sum(2)
    alphabet = None if alphabet_BU is None else alphabet_BU.unsqueeze(1)
    return _follow(race(p_BMV, seeds_B.unsqueeze(1), positions_BM, Stream.TARGET, alphabet), draft, ancestors_BMA)


def _follow(choice_BM: Tensor, draft: Draft, ancestors_BMA: Tensor) -> Acceptance:
    parents_BN = draft.parents_BN
    right_BN = (draft.tokens_BN == choice_BM.gather(1, (parents_BN + 1).clamp(min=0))) & (parents_BN != UNUSED)
    path_BD, counts_B, last_B = longest_path(right_BN, ancestors_BMA)
    return Acceptance(path_BD, counts_B, choice_BM.gather(1, last_B.unsqueeze(1)).squeeze(1))


def longest_path(stays_BN: Tensor, ancestors_BMA: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the longest path whose nodes all stay (the first if several are): path_BD, counts_B, its last node (B)."""
    batch, nodes, levels = ancestors_BMA.shape
    stays_BM = torch.nn.functional.pad(stays_BN, (1, 0), value=True)
    all_stay_BM = stays_BM.gather(1, ancestors_BMA.reshape(batch, -1)).view(batch, nodes, levels).all(2)
    length_BM = (ancestors_BMA != 0).sum(2).masked_fill(~all_stay_BM, -1)
    counts_B, last_B = length_BM.max(1)
    upward_BA = ancestors_BMA.gather(1, last_B[:, None, None].expand(-1, 1, levels)).squeeze(1)
    steps_D = torch.arange(1, levels, device=stays_BN.device)
    path_BD = upward_BA.gather(1, (counts_B.unsqueeze(1) - steps_D).clamp(min=0))
    return path_BD, counts_B, last_B


def accept_sampled(
    p_BMV: Tensor, draft: Draft, seeds_B: Tensor, positions_B: Tensor, alphabet_BU: Tensor | None = None
) -> Acceptance:
    """Accept guesses that were drawn from q, so that the text is distributed as p.

    A node's children are tried in index order. Child x stays with probability min(1, p(x) / q(x)); otherwise p becomes
    max(p - q, 0) normalised, and x is removed from q, since siblings were drawn without replacement. When all are
    rejected, the token is drawn from what is left of p. With one child this is the rule of Leviathan et al. (arXiv
    2211.17192, section 2.3) and Chen et al. (arXiv 2302.01318, "Modified rejection sampling"); with several, it is
    recursive rejection sampling without replacement (Jeon et al., arXiv 2402.14160; Yang et al., arXiv 2401.06706).

    Args:
        p_BMV: the target's distribution at every node, float64, each summing to 1; it is one-hot for a greedy row, so
            that only its argmax can be accepted or drawn.
        draft: a draft with q.
        seeds_B: seeds of the rows (int64).
        positions_B: absolute position of the token after the root.
        alphabet_BU: as in `accept_deterministic`.
    """
    (batch, nodes), depth = draft.tokens_BN.shape, draft.depth
    # A draft without guesses needs no q.
    q_BMV = _require_q(draft) if nodes else p_BMV
    branching = draft.branching if draft.branching is not None else (nodes,) * depth
    current_B = torch.zeros_like(positions_B)
    counts_B = torch.zeros_like(positions_B)
    p_BV, rejected_B, path = p_BMV[:, 0], torch.zeros_like(positions_B, dtype=torch.bool), []
    up_BN = draft.parents_BN + 1
    slots_N = torch.arange(nodes, device=up_BN.device)
    for level, most in enumerate(branching[:depth]):
        # Rows that stopped higher up have no children here.
        going_B = counts_B == level
        child_BN = (up_BN == current_B.unsqueeze(1)) & going_B.unsqueeze(1)
        children_BK = torch.where(child_BN, slots_N, nodes).topk(min(most, nodes), dim=1, largest=False).values
        q_BV = _node(q_BMV, current_B.clamp(max=q_BMV.shape[1] - 1)).to(torch.float64)
        q_BV = _normalised(q_BV, q_BV)
        u_BK = uniform(
            seeds_B.unsqueeze(1), positions_B.unsqueeze(1) + level, Stream.ACCEPT,
            torch.arange(children_BK.shape[1], device=up_BN.device),
        )
        open_B, chosen_B = going_B, current_B
        for rank in range(children_BK.shape[1]):
            child_B = children_BK[:, rank]
            token_B1 = draft.tokens_BN.gather(1, child_B.clamp(max=nodes - 1).unsqueeze(1))
            q_x_B = q_BV.gather(1, token_B1).squeeze(1)
            # A guess with q(x) = 0 was not drawn from q (which had fewer tokens than children), and is skipped.
            tried_B = open_B & (child_B < nodes) & (q_x_B > 0)
            taken_B = tried_B & (u_BK[:, rank] * q_x_B < p_BV.gather(1, token_B1).squeeze(1))
            refused_B = tried_B & ~taken_B
            chosen_B = torch.where(taken_B, child_B + 1, chosen_B)
            open_B = open_B & ~taken_B
            rejected_B = rejected_B | refused_B
            p_BV = torch.where(refused_B.unsqueeze(1), _normalised(torch.relu(p_BV - q_BV), p_BV), p_BV)
            if rank + 1 < children_BK.shape[1]:
                fewer_BV = q_BV.scatter(1, token_B1, 0.0)
                q_BV = torch.where(refused_B.unsqueeze(1), _normalised(fewer_BV, fewer_BV), q_BV)
        moved_B = chosen_B != current_B
        current_B = chosen_B
        counts_B = counts_B + moved_B
        rejected_B = rejected_B & ~moved_B
        p_BV = torch.where(moved_B.unsqueeze(1), _node(p_BMV, current_B), p_BV)
        path.append(current_B)
    path_BD = torch.stack(path, dim=1) if path else positions_B.new_zeros((batch, 0))
    return Acceptance(path_BD, counts_B, token_behind(p_BV, rejected_B, seeds_B, positions_B + counts_B, alphabet_BU))


def token_behind(
    p_BV: Tensor, is_residual_B: Tensor, seeds_B: Tensor, positions_B: Tensor, alphabet_BU: Tensor | None
) -> Tensor:
    """Draw the token after the accepted path: from what rejected guesses left of p, or from p as in plain decoding."""
    residual_B = categorical(p_BV, uniform(seeds_B, positions_B, Stream.RESIDUAL, 0))
    return torch.where(is_residual_B, residual_B, race(p_BV, seeds_B, positions_B, Stream.TARGET, alphabet_BU))


def _require_q(draft: Draft) -> Tensor:
    if draft.q_BMV is None:
        raise ValueError("a draft without q was not sampled; use accept_deterministic")
    return draft.q_BMV


def _node(values_BMV: Tensor, node_B: Tensor) -> Tensor:
    return values_BMV.gather(1, node_B[:, None, None].expand(-1, 1, values_BMV.shape[2])).squeeze(1)


def _normalised(weights_BV: Tensor, otherwise_BV: Tensor) -> Tensor:
    """Divide by the sum; where that is 0, which only rounding can cause, return the other."""
    total_B1 = weights_BV.sum(1, keepdim=True)
    return torch.where(total_B1 > 0, weights_BV / total_B1, otherwise_BV)
