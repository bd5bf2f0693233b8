"""Broken rules, one mistake each. The distribution test must fail on every one of them.

Shapes: B rows, N drafted nodes, M = N + 1 verified nodes (root first), D depth, K children, V alphabet.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from draftsmith.drafters.base import StagewiseDrafter
from draftsmith.drafters.grow import grow
from draftsmith.plan import Plan
from draftsmith.types import Context, Draft
from draftsmith.verify import Acceptance, Stream, accept_sampled, categorical, race, uniform
from tests.helpers.toy import Accept, Grow

CHAIN = Plan((1, 1), sampled=True)
TREE = Plan((2, 2), sampled=True)


@dataclass(frozen=True)
class Mutant:
    """A rule with one mistake, and the plan under which it shows."""

    plan: Plan
    accept: Accept = accept_sampled
    grow: Grow = grow


def clamped(p_BV: Tensor, q_BV: Tensor) -> Tensor:
    """The right residual."""
    return torch.relu(p_BV - q_BV)


def chain_rule(
    p_BMV: Tensor,
    draft: Draft,
    seeds_B: Tensor,
    positions_B: Tensor,
    accept_stream: Stream = Stream.ACCEPT,
    residual_stream: Stream = Stream.RESIDUAL,
    residual: Callable[[Tensor, Tensor], Tensor] = clamped,
) -> Acceptance:
    """Rejection sampling of a chain, written as in the papers; the defaults are right, each argument is a mistake.

    The noise that drew the guess of depth d has index d.
    """
    assert draft.q_BMV is not None
    rows = torch.arange(len(positions_B))
    counts_B = torch.zeros_like(positions_B)
    next_B = torch.zeros_like(positions_B)
    done_B = torch.zeros_like(positions_B, dtype=torch.bool)
    for d in range(draft.depth):
        p_BV, q_BV, token_B = p_BMV[:, d], draft.q_BMV[:, d], draft.tokens_BN[:, d]
        here_B = positions_B + d
        index = d if accept_stream is Stream.DRAFT else 0
        u_B = uniform(seeds_B, here_B, accept_stream, index)
        refused_B = ~done_B & (u_B * q_BV[rows, token_B] >= p_BV[rows, token_B])
        rest_BV = residual(p_BV, q_BV)
        index = d if residual_stream is Stream.DRAFT else 0
        recovered_B = categorical(rest_BV, uniform(seeds_B, here_B, residual_stream, index))
        next_B = torch.where(refused_B, recovered_B, next_B)
        done_B = done_B | refused_B
        counts_B = counts_B + ~done_B
    bonus_B = race(p_BMV[:, draft.depth], seeds_B, positions_B + draft.depth, Stream.TARGET)
    path_BD = torch.arange(1, draft.depth + 1).expand(len(rows), -1)
    return Acceptance(path_BD, counts_B, torch.where(done_B, next_B, bonus_B))


def drawn_in_bf16(drafter: StagewiseDrafter, context: Context, plan: Plan) -> Draft:
    """Draw a chain from probabilities, sums and noise in bf16, but hand over the fp32 distribution."""
    tokens_B, state = drafter.begin(context)
    tokens, q = [], []
    for depth in range(plan.depth):
        log_q_BV, state = drafter.step(depth, state, tokens_B)
        u_B1 = uniform(context.seeds_B, context.lengths_B + depth, Stream.DRAFT, depth).bfloat16().unsqueeze(1)
        cumulative_BV = log_q_BV.bfloat16().softmax(-1).cumsum(-1)
        tokens_B = (cumulative_BV <= u_B1).sum(-1).clamp(max=log_q_BV.shape[-1] - 1)
        tokens.append(tokens_B)
        q.append(log_q_BV.softmax(-1).double())
    q.append(torch.zeros_like(q[0]))
    parents_N = torch.arange(-1, plan.depth - 1)
    return Draft(
        torch.stack(tokens, 1), parents_N.expand(len(tokens_B), -1), plan.depth, torch.stack(q, 1), plan.branching
    )


def best_as_sample(drafter: StagewiseDrafter, context: Context, plan: Plan) -> Draft:
    """Take the best children of every node, but claim that they were drawn from q."""
    tokens_R, state = drafter.begin(context)
    batch = len(tokens_R)
    shape = grow(drafter, context, plan)
    tokens, q, frontier = [], [], 1
    for depth, children in enumerate(plan.branching):
        log_q_RV, state = drafter.step(depth, state, tokens_R)
        q.append(log_q_RV.softmax(-1).double().view(batch, frontier, -1))
        tokens_R = log_q_RV.topk(children, dim=-1).indices.reshape(-1)
        tokens.append(tokens_R.view(batch, -1))
        state = state.repeat_interleave(children, dim=0)
        frontier *= children
    q.append(torch.zeros_like(q[0]).expand(-1, frontier, -1))
    return replace(shape, tokens_BN=torch.cat(tokens, 1), q_BMV=torch.cat(q, 1))


def one_node_late(p_BMV: Tensor, draft: Draft, seeds_B: Tensor, positions_B: Tensor) -> Acceptance:
    """Verify every node but the root by its predecessor's distribution."""
    return accept_sampled(torch.cat([p_BMV[:, :1], p_BMV[:, :-1]], dim=1), draft, seeds_B, positions_B)


def one_token_too_many(p_BMV: Tensor, draft: Draft, seeds_B: Tensor, positions_B: Tensor) -> Acceptance:
    """Count the first rejected guess of a chain as accepted."""
    right = accept_sampled(p_BMV, draft, seeds_B, positions_B)
    path_BD = torch.arange(1, draft.depth + 1).expand(len(seeds_B), -1)
    return Acceptance(path_BD, (right.counts_B + 1).clamp(max=draft.depth), right.next_B)


def one_noise_for_all_depths(p_BMV: Tensor, draft: Draft, seeds_B: Tensor, positions_B: Tensor) -> Acceptance:
    """Draw the tokens behind a chain of given guesses by the noise of the first of them."""
    drawn_BM = race(p_BMV, seeds_B.unsqueeze(1), positions_B.unsqueeze(1), Stream.TARGET)
    stays_BD = (drawn_BM[:, : draft.depth] == draft.tokens_BN).cumprod(1)
    counts_B = stays_BD.sum(1)
    path_BD = torch.arange(1, draft.depth + 1).expand(len(seeds_B), -1)
    return Acceptance(path_BD, counts_B, drawn_BM.gather(1, counts_B.unsqueeze(1)).squeeze(1))


def with_replacement(p_BMV: Tensor, draft: Draft, seeds_B: Tensor, positions_B: Tensor) -> Acceptance:
    """Verify siblings drawn without replacement as if each had been drawn from the whole q."""
    assert draft.q_BMV is not None
    first = accept_sampled(p_BMV, only_first_children(draft), seeds_B, positions_B)
    refused_B = first.counts_B == 0
    q_BV = draft.q_BMV[:, 0]
    p_BV = torch.relu(p_BMV[:, 0] - q_BV)
    p_BV = p_BV / p_BV.sum(1, keepdim=True)
    second_B = draft.tokens_BN[:, 1:2]
    u_B = uniform(seeds_B, positions_B, Stream.ACCEPT, 1)
    taken_B = refused_B & (u_B * q_BV.gather(1, second_B)[:, 0] < p_BV.gather(1, second_B)[:, 0])
    rest_BV = torch.where(taken_B.unsqueeze(1), p_BMV[:, 2], torch.relu(p_BV - q_BV))
    last_B = categorical(rest_BV, uniform(seeds_B, positions_B + taken_B, Stream.RESIDUAL, 0))
    path_BD = torch.where(taken_B.unsqueeze(1), 2, first.path_BD)
    return Acceptance(path_BD, first.counts_B + taken_B, torch.where(refused_B, last_B, first.next_B))


def only_first_children(draft: Draft) -> Draft:
    """Cut a tree of one level down to each node's first child, with the columns as they are."""
    parents_BN = draft.parents_BN.clone()
    parents_BN[:, 1:] = -2
    return replace(draft, parents_BN=parents_BN)


MUTANTS = {
    "acceptance shares the draft's noise": Mutant(CHAIN, partial(chain_rule, accept_stream=Stream.DRAFT)),
    "residual shares the draft's noise": Mutant(CHAIN, partial(chain_rule, residual_stream=Stream.DRAFT)),
    "residual shares the acceptance's noise": Mutant(CHAIN, partial(chain_rule, residual_stream=Stream.ACCEPT)),
    "residual not clamped": Mutant(CHAIN, partial(chain_rule, residual=lambda p, q: p - q)),
    "residual forgotten": Mutant(CHAIN, partial(chain_rule, residual=lambda p, q: p)),
    "drawn in bf16, scored in fp32": Mutant(CHAIN, grow=drawn_in_bf16),
    "argmax scored as if sampled": Mutant(CHAIN, grow=best_as_sample),
    "top-k candidates scored as if sampled": Mutant(TREE, grow=best_as_sample),
    "one node late": Mutant(CHAIN, one_node_late),
    "one token too many": Mutant(CHAIN, one_token_too_many),
    "siblings verified as if drawn with replacement": Mutant(Plan((2,), sampled=True), with_replacement),
}
