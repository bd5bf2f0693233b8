"""Block verification: a sampled chain verified as a whole. Shapes: B rows, N guesses, M = N + 1 nodes, V vocabulary.

Verified guess by guess, a chain loses everything after the first rejected guess. Verified as a block, a guess that was
too likely under q can be made up for by later guesses that were too unlikely, so that more tokens stay, and the text
is still distributed as p.
"""

import torch
from torch import Tensor

from draftsmith.types import ROOT, Draft
from draftsmith.verify.accept import Acceptance, token_behind
from draftsmith.verify.noise import Stream, uniform


def accept_block(
    p_BMV: Tensor, draft: Draft, seeds_B: Tensor, positions_B: Tensor, alphabet_BU: Tensor | None = None
) -> Acceptance:
    """Accept the longest prefix of a sampled chain that passes a test of its own, so that the text is distributed as p.

    Let r_0 = 1 and r_i = min(1, r_(i-1) p(x_i) / q(x_i)), and let s_i be the sum over x of max(r_i p(x) - q(x), 0)
    after guess i. Prefix i passes with probability s_i / (s_i + 1 - r_i), the whole chain with r_N. Every prefix is
    tested, even if a shorter one failed; the longest that passes stays. After a prefix i < N the next token is drawn
    from max(r_i p - q, 0) normalised, after the whole chain from p. On average at least as many guesses stay as under
    any other exact rule that sees only the chain, `accept_sampled` included.
    Sun et al., "Block verification accelerates speculative decoding" (arXiv 2403.10444, algorithm 2).

    Every guess of the chain influences how many stay, even guesses that do not stay themselves. So a random number
    that drew a guess must not be used again for the same position in a later step, whatever that step's plan. That is
    why guesses have a stream of their own, `Stream.BLOCK_DRAFT`, with the guess's depth as index (see `grow`), and the
    tests here likewise use `Stream.BLOCK_ACCEPT`. The token that ends a step is drawn once a position.

    >>> q = torch.tensor([[[2.0, 1.0], [2.0, 1.0], [0.0, 0.0]]]).double() / 3     # a is likelier than b
    >>> p = torch.tensor([[[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]]]).double() / 3     # b is likelier than a
    >>> draft = Draft(torch.tensor([[0, 1]]), torch.tensor([[-1, 0]]), 2, q)      # a, b: r is 1/2, then 1
    >>> accept_block(p, draft, torch.tensor([1]), torch.tensor([7])).counts_B     # a alone fails, a b passes surely
    tensor([2])

    Args:
        p_BMV: the target's distribution at every node, float64, each summing to 1; it is one-hot for a greedy row, of
            which the prefix of argmaxes is accepted.
        draft: a chain with q. A row's chain ends before the first node that is not the child of the node before it,
            such as an `UNUSED` one, and before a guess with q = 0, which cannot have been drawn.
        seeds_B: seeds of the rows (int64).
        positions_B: absolute position of the token after the root.
        alphabet_BU: as in `accept_deterministic`.
    """
    if draft.q_BMV is None:
        raise ValueError("a draft without q was not sampled; use accept_deterministic")
    nodes = draft.tokens_BN.shape[1]
    device = p_BMV.device
    index_BN1 = draft.tokens_BN.unsqueeze(2)
    p_BN = p_BMV[:, :nodes].gather(2, index_BN1).squeeze(2)
    q_BNV = draft.q_BMV[:, :nodes].to(torch.float64)
    q_BNV = q_BNV / q_BNV.sum(2, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    q_BN = q_BNV.gather(2, index_BN1).squeeze(2)
    chain_N = torch.arange(ROOT, nodes - 1, device=device)
    in_chain_BN = ((draft.parents_BN == chain_N) & (q_BN > 0)).cumprod(1).bool()
    ratio_BN = torch.where(in_chain_BN, p_BN / torch.where(in_chain_BN, q_BN, 1.0), 0.0)
    joint = [torch.ones_like(p_BMV[:, 0, 0])]
    for ratio_B in ratio_BN.unbind(1):
        joint.append((joint[-1] * ratio_B).clamp(max=1.0))
    joint_BM = torch.stack(joint, dim=1)

    # There is no q after the last guess, where nothing was drawn.
    rest_BMV = torch.relu(joint_BM.unsqueeze(2) * p_BMV - torch.nn.functional.pad(q_BNV, (0, 0, 0, 1)))
    rest_BM = rest_BMV.sum(2)
    # 0 / 0 means r = 1 and p = q: the prefix passes, as it does where p and q are nearly equal.
    share_BM = torch.where(rest_BM > 0, rest_BM / (rest_BM + 1 - joint_BM), (joint_BM == 1).to(torch.float64))
    lengths_B = in_chain_BN.sum(1)
    steps_M = torch.arange(nodes + 1, device=device)
    whole_BM = steps_M == lengths_B.unsqueeze(1)
    passes_BM = torch.where(whole_BM, joint_BM, share_BM)
    u_BM = uniform(
        seeds_B.unsqueeze(1), positions_B.unsqueeze(1) + steps_M - 1, Stream.BLOCK_ACCEPT, (steps_M - 1).clamp(min=0)
    )
    stays_BM = (u_BM < passes_BM) & (steps_M <= lengths_B.unsqueeze(1))
    counts_B = torch.where(stays_BM, steps_M, 0).amax(1)

    last_B11 = counts_B[:, None, None].expand(-1, 1, p_BMV.shape[2])
    p_BV, rest_BV = p_BMV.gather(1, last_B11).squeeze(1), rest_BMV.gather(1, last_B11).squeeze(1)
    cut_B = counts_B < lengths_B
    # After a prefix that was cut, an empty residual comes from rounding alone; then p itself is used.
    cut_B1 = (cut_B & (rest_BV.sum(1) > 0)).unsqueeze(1)
    path_BD = torch.arange(1, draft.depth + 1, device=device).clamp(max=nodes).expand(len(counts_B), -1)
    next_B = token_behind(torch.where(cut_B1, rest_BV, p_BV), cut_B, seeds_B, positions_B + counts_B, alphabet_BU)
    return Acceptance(path_BD, counts_B, next_B)
