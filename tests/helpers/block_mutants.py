"""Block verification with one mistake each. The distribution test must fail on every one of them.

Shapes: B rows, N guesses, M = N + 1 nodes, V alphabet.
"""

from functools import partial

import torch
from torch import Tensor

from draftsmith.drafters.base import StagewiseDrafter
from draftsmith.drafters.grow import grow
from draftsmith.plan import Plan
from draftsmith.types import Context, Draft
from draftsmith.verify import Acceptance, Stream, accept_block, categorical, race, uniform
from tests.helpers.mutants import Mutant

BLOCK = Plan((1, 1, 1), sampled=True, acceptance="block")


def block_rule(
    p_BMV: Tensor,
    draft: Draft,
    seeds_B: Tensor,
    positions_B: Tensor,
    accept_stream: Stream = Stream.BLOCK_ACCEPT,
    residual_stream: Stream = Stream.RESIDUAL,
    accept_by_depth: bool = True,
    most_ratio: float = 1.0,
    clamps: bool = True,
    joint_residual: bool = True,
    joint_test: bool = True,
    plain_test: bool = False,
    stops_at_failure: bool = False,
    late: int = 0,
    shift: int = 0,
) -> Acceptance:
    """Algorithm 2 of arXiv 2403.10444, row by row of the paper; the defaults are right, each argument is a mistake."""
    assert draft.q_BMV is not None
    rows, depth = torch.arange(len(positions_B)), draft.depth
    # Nothing was drawn behind the last guess.
    q_BMV = torch.nn.functional.pad(draft.q_BMV[:, :depth].double(), (0, 0, 0, 1))
    ratio_B = torch.ones(len(rows), dtype=torch.float64)
    counts_B, open_B = torch.zeros_like(positions_B), torch.ones_like(positions_B, dtype=torch.bool)
    residuals = [p_BMV[:, 0] - q_BMV[:, 0]]
    for i in range(1, depth + 1):
        token_B = draft.tokens_BN[:, i - 1]
        ratio_B = ratio_B * p_BMV[rows, i - 1, token_B] / q_BMV[rows, i - 1, token_B]
        ratio_B = ratio_B.clamp(max=most_ratio)
        node = max(0, i - late)
        scale_B1 = ratio_B.unsqueeze(1)
        rest_BV = scale_B1 * p_BMV[:, node] - q_BMV[:, node]
        residuals.append(rest_BV if joint_residual else p_BMV[:, i] - q_BMV[:, i])
        tested_BV = rest_BV if joint_test else p_BMV[:, i] - q_BMV[:, i]
        rest_B = torch.relu(tested_BV).sum(1)
        chance_B = ratio_B if i == depth or plain_test else rest_B / (rest_B + 1 - ratio_B)
        u_B = uniform(seeds_B, positions_B + i - 1, accept_stream, i - 1 if accept_by_depth else 0)
        passes_B = (u_B < chance_B) & open_B
        counts_B = torch.where(passes_B, i, counts_B)
        open_B = passes_B if stops_at_failure else open_B
    residual_BV = torch.stack(residuals, 1)[rows, counts_B]
    residual_BV = torch.relu(residual_BV) if clamps else residual_BV
    end_B = positions_B + counts_B
    index_B = counts_B if residual_stream is Stream.BLOCK_DRAFT else 0
    recovered_B = categorical(residual_BV, uniform(seeds_B, end_B, residual_stream, index_B))
    bonus_B = race(p_BMV[:, depth], seeds_B, end_B, Stream.TARGET)
    path_BD = torch.arange(1, depth + 1).expand(len(rows), -1)
    next_B = torch.where(counts_B == depth, bonus_B, recovered_B)
    return Acceptance(path_BD, (counts_B + shift).clamp(0, depth), next_B)


def drawn_by_position(drafter: StagewiseDrafter, context: Context, plan: Plan) -> Draft:
    """Draw a chain whose noise knows the position alone, so that two steps draw the same position with one number."""
    shape = grow(drafter, context, plan)
    assert shape.q_BMV is not None
    tokens_B, state = drafter.begin(context)
    tokens, q = [], []
    for depth in range(plan.depth):
        log_q_BV, state = drafter.step(depth, state, tokens_B)
        q.append(log_q_BV.softmax(-1).double())
        tokens_B = categorical(q[-1], uniform(context.seeds_B, context.lengths_B + depth, Stream.BLOCK_DRAFT, 0))
        tokens.append(tokens_B)
    q.append(torch.zeros_like(q[0]))
    return Draft(torch.stack(tokens, 1), shape.parents_BN, plan.depth, torch.stack(q, 1), plan.branching)


def _mutant(**mistake: object) -> Mutant:
    return Mutant(BLOCK, partial(block_rule, **mistake))  # type: ignore[arg-type]


BLOCK_MUTANTS = {
    "block: tests share the draft's noise": _mutant(accept_stream=Stream.BLOCK_DRAFT),
    "block: tests of two steps share their noise": _mutant(accept_by_depth=False),
    "block: guesses of two steps share their noise": Mutant(BLOCK, accept_block, drawn_by_position),
    "block: residual shares the draft's noise": _mutant(residual_stream=Stream.BLOCK_DRAFT),
    "block: residual shares the tests' noise": _mutant(residual_stream=Stream.BLOCK_ACCEPT),
    "block: residual not clamped": _mutant(clamps=False),
    "block: residual of the last guess alone": _mutant(joint_residual=False),
    "block: ratios without their minimum": _mutant(most_ratio=float("inf")),
    "block: tests without the ratio": _mutant(joint_test=False),
    "block: every prefix tested as if it were the whole": _mutant(plain_test=True),
    "block: stops at the first prefix that fails": _mutant(stops_at_failure=True),
    "block: one node late": _mutant(late=1),
    "block: one token too many": _mutant(shift=1),
    "block: one token too few": _mutant(shift=-1),
}
