"""Builds chains and trees from the steps of a stagewise drafter; they may end where it becomes unsure.

Shapes: B rows, F frontier nodes a row, R = B × F, W = F × branching nodes of a level, K paths, D depth, N node slots of
the plan, M = N + 1, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from draftsmith.drafters.base import StagewiseDrafter
from draftsmith.drafters.draws import Draws, all_drawn, arriving, shares_noise, temperature_of
from draftsmith.drafters.static_tree import static_tree
from draftsmith.plan import Plan
from draftsmith.types import ROOT, UNUSED, Context, Draft, DraftsmithError, empty_draft


def grow(drafter: StagewiseDrafter, context: Context, plan: Plan) -> Draft:
    """Draft in the shape of the plan; nodes come in the order of the paths' rank, each path from the root down.

    So nodes 0, 1, … are the best path, and accepting it moves nothing in the cache. The tensors have `plan.max_nodes`
    columns whatever the rows hold; chains with a `plan.confidence` may have fewer. With `paths`, ranking is that of the
    combined speculator (arXiv 2404.19124, section 3), with `beam` and `nodes` that of EAGLE-2 (arXiv 2406.16858,
    section 4); `choices` are a tree of fixed ranks. In sampled rows, the best children of a node are not its likeliest
    but those that the target's noise lets arrive first, see `arriving`. A sampled draft comes level by level instead,
    siblings in the order in which they were drawn.

    A guess is left out if its probability, times those of all guesses before it, is below `plan.confidence`. In a drawn
    chain, the likeliest token of its place counts instead: whether there is a guess must not reveal which token it is.
    A plan deeper than the drafter, or wider than its vocabulary, raises DraftsmithError.
    """
    if plan.depth > drafter.max_depth:
        raise DraftsmithError(
            f"the plan drafts {plan.depth} tokens ahead, but this drafter reaches {drafter.max_depth}; "
            "shorten it."
        )
    if plan.depth == 0:
        return empty_draft(context)
    if plan.sampled:
        return _sampled(drafter, context, plan)
    rank: Rank = drafter.top_k
    if drafter.can_sample and shares_noise(plan, context):
        if plan.is_chain:
            return _sampled(drafter, context, plan)
        mixed = not all_drawn(context)
        rank = partial(_arriving, drafter, context, temperature_of(context, plan), mixed)
    if plan.is_chain:
        return _chain(drafter, context, plan)
    return _static(drafter, rank, context, plan) if plan.choices else _ranked(drafter, rank, context, plan)


Rank = Callable[[int, Any, Tensor, int, bool], tuple[Tensor | None, Tensor, Any]]
"""Finds the best children of nodes, as `StagewiseDrafter.top_k` does."""


def _arriving(
    drafter: StagewiseDrafter, context: Context, temperature_B: Tensor, mixed: bool,
    depth: int, state: Any, tokens_R: Tensor, k: int, scores: bool,
) -> tuple[Tensor | None, Tensor, Any]:
    """Do as `StagewiseDrafter.top_k`, with the target's noise."""
    log_q_RV, state = drafter.step(depth, state, tokens_R)
    positions_B = context.lengths_B + depth
    found_Rk, tokens_Rk = arriving(log_q_RV.float(), temperature_B, context.seeds_B, positions_B, k, mixed)
    return found_Rk, tokens_Rk, state


def _chain(drafter: StagewiseDrafter, context: Context, plan: Plan) -> Draft:
    tokens_B, state = drafter.begin(context)
    sure = Sureness(plan)
    guesses: list[Tensor] = []
    for level in range(plan.depth):
        best_B1, tokens_B1, state = drafter.top_k(level, state, tokens_B, 1, scores=plan.confidence is not None)
        if best_B1 is not None and not sure.extends(best_B1.squeeze(1)):
            break
        tokens_B = tokens_B1.squeeze(1)
        guesses.append(tokens_B)
    return sure.bounded(as_chain(torch.stack(guesses, dim=1))) if guesses else empty_draft(context)


class Sureness:
    """Tracks how sure a drafter is of the chains (B, depth) that it makes guess by guess; unused without a bound."""

    def __init__(self, plan: Plan) -> None:
        self._least = math.log(plan.confidence or 1.0)
        self._scores_B: Tensor | None = None
        self._stay: list[Tensor] = []

    def extends(self, scores_B: Tensor) -> bool:
        """Take the log-probabilities of the next guesses; return whether any chain is likely enough to go on.

        On another device it would have to be waited for, and compiled code has one shape, so there the answer is always
        yes.
        """
        scores_B = scores_B.float().clamp(max=0)
        self._scores_B = scores_B if self._scores_B is None else self._scores_B + scores_B
        stay_B = self._scores_B >= self._least
        if stay_B.device.type == "cpu" and not torch.compiler.is_compiling() and not bool(stay_B.any()):
            return False
        self._stay.append(stay_B)
        return True

    def bounded(self, draft: Draft) -> Draft:
        """Return the chain without the guesses that are not likely enough."""
        if not self._stay:
            return draft
        left_BN = ~torch.stack(self._stay, dim=1)
        tokens_BN, parents_BN = draft.tokens_BN.masked_fill(left_BN, 0), draft.parents_BN.masked_fill(left_BN, UNUSED)
        return replace(draft, tokens_BN=tokens_BN, parents_BN=parents_BN)


def as_chain(tokens_BN: Tensor, q_BMV: Tensor | None = None) -> Draft:
    """Return these guesses as a chain, drawn from q or chosen."""
    batch, nodes = tokens_BN.shape
    parents_BN = torch.arange(ROOT, nodes - 1, device=tokens_BN.device).expand(batch, -1)
    return Draft(tokens_BN, parents_BN, depth=nodes, q_BMV=q_BMV, branching=(1,) * nodes)


@dataclass(frozen=True)
class _Level:
    """The nodes of one depth: token, summed log-probability and parent (an index into the level above), all (B, W)."""

    tokens_BW: Tensor
    scores_BW: Tensor
    parents_BW: Tensor


def _ranked(drafter: StagewiseDrafter, rank: Rank, context: Context, plan: Plan) -> Draft:
    levels, unexpanded = _levels(drafter, rank, context, plan)
    last_BW = levels[-1].scores_BW
    leaves_BK = last_BW.topk(min(plan.paths or last_BW.shape[1], last_BW.shape[1]), dim=1).indices
    paths = [_walk_up(levels, plan.depth - 1, leaves_BK)]
    if plan.paths is None:
        # The deepest first: this order decides nothing but the place of the nodes.
        paths += [_walk_up(levels, depth, leaves) for depth, leaves in reversed(unexpanded)]
    width = max(level.tokens_BW.shape[1] for level in levels)
    pad = torch.nn.functional.pad
    tokens_BDW = torch.stack([pad(level.tokens_BW, (0, width - level.tokens_BW.shape[1])) for level in levels], dim=1)
    paths_BKD = torch.cat(paths, dim=1) if len(paths) > 1 else paths[0]
    path_tokens_BKD = tokens_BDW.gather(2, paths_BKD.clamp(min=0).transpose(1, 2)).transpose(1, 2)
    if paths_BKD.shape[1] == 1 and plan.max_nodes <= plan.depth and plan.confidence is None:
        return as_chain(path_tokens_BKD[:, 0, : plan.max_nodes])
    slots = replace(plan, nodes=None).max_nodes
    tokens_BN, parents_BN, slots_BKD = _merge(paths_BKD, path_tokens_BKD, slots)
    if plan.max_nodes < slots or plan.confidence is not None:
        scores_BDW = torch.stack(
            [pad(level.scores_BW, (0, width - level.scores_BW.shape[1])) for level in levels], dim=1
        )
        path_scores_BKD = scores_BDW.gather(2, paths_BKD.clamp(min=0).transpose(1, 2)).transpose(1, 2)
        scores_BN = _place(path_scores_BKD, slots_BKD, slots, float("-inf"))
        least = -math.inf if plan.confidence is None else math.log(plan.confidence)
        tokens_BN, parents_BN = _prune(tokens_BN, parents_BN, scores_BN, plan.max_nodes, least)
    return Draft(tokens_BN, parents_BN, depth=min(plan.depth, plan.max_nodes), branching=plan.branching)


def _static(drafter: StagewiseDrafter, rank: Rank, context: Context, plan: Plan) -> Draft:
    """Take the guesses of the ranks that the plan names; nodes are in the order of its choices."""
    tokens_R, state = drafter.begin(context)
    batch, device = tokens_R.shape[0], tokens_R.device
    offsets_B1 = torch.arange(batch, device=device).unsqueeze(1)
    tree = static_tree(plan.choices, device)
    levels, frontier = [], 1
    for depth, level in enumerate(tree.levels):
        _, tokens_RC, state = rank(depth, state, tokens_R, level.width, False)
        tokens_BW = tokens_RC.reshape(batch, -1)[:, level.taken_W]
        levels.append(tokens_BW)
        if level.frontier == 0:
            break
        tokens_R = (tokens_BW if level.grown_F is None else tokens_BW[:, level.grown_F]).reshape(-1)
        if level.under_F is not None:
            rows_R = (offsets_B1 * frontier + level.under_F).reshape(-1)
            state = _map_state(state, partial(torch.index_select, dim=0, index=rows_R))
        frontier = level.frontier
    tokens_BN = torch.cat(levels, dim=1)[:, tree.order_N]
    return Draft(tokens_BN, tree.parents_N.expand(batch, -1), plan.depth, branching=plan.branching)


def _levels(
    drafter: StagewiseDrafter, rank: Rank, context: Context, plan: Plan
) -> tuple[list[_Level], list[tuple[int, Tensor]]]:
    """Expand depth by depth; return the levels, and for each depth the nodes (B, ·) that the beam left unexpanded."""
    tokens_R, state = drafter.begin(context)
    batch = tokens_R.shape[0]
    expanded_BF, scores_BF = tokens_R.new_zeros((batch, 1)), None
    levels: list[_Level] = []
    unexpanded: list[tuple[int, Tensor]] = []
    for depth, children in enumerate(plan.branching):
        best_RC, token_RC, state = rank(depth, state, tokens_R, children, True)
        assert best_RC is not None
        frontier = expanded_BF.shape[1]
        # Rounding must not make a child better than its parent: pruning relies on it.
        scores_BFC = best_RC.float().clamp(max=0).view(batch, frontier, children)
        if scores_BF is not None:
            scores_BFC = scores_BFC + scores_BF.unsqueeze(2)
        level = _Level(
            token_RC.reshape(batch, -1),
            scores_BFC.reshape(batch, -1),
            expanded_BF.unsqueeze(2).expand(-1, -1, children).reshape(batch, -1),
        )
        levels.append(level)
        if depth + 1 == plan.depth:
            break
        if plan.beam is not None and plan.beam < frontier * children:
            order_BW = level.scores_BW.sort(dim=1, descending=True, stable=True).indices
            expanded_BF = order_BW[:, : plan.beam]
            unexpanded.append((depth, order_BW[:, plan.beam :]))
            scores_BF = level.scores_BW.gather(1, expanded_BF)
            tokens_R = level.tokens_BW.gather(1, expanded_BF).reshape(-1)
            offsets_B1 = torch.arange(batch, device=tokens_R.device).unsqueeze(1) * frontier
            rows_R = (offsets_B1 + expanded_BF // children).reshape(-1)
            state = _map_state(state, partial(torch.index_select, dim=0, index=rows_R))
        else:
            expanded_BF = torch.arange(frontier * children, device=tokens_R.device).expand(batch, -1)
            scores_BF, tokens_R = level.scores_BW, level.tokens_BW.reshape(-1)
            if children > 1:
                state = _map_state(state, partial(torch.repeat_interleave, repeats=children, dim=0))
    return levels, unexpanded


def _map_state(state: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply the function to every tensor of a state made of tensors, tuples, lists and dictionaries.

    Other objects stay as they are; they hold what all nodes of a row share.
    """
    if isinstance(state, Tensor):
        return function(state)
    if isinstance(state, (tuple, list)):
        return type(state)(_map_state(part, function) for part in state)
    if isinstance(state, dict):
        return {key: _map_state(part, function) for key, part in state.items()}
    return state


def _walk_up(levels: list[_Level], depth: int, nodes_BK: Tensor) -> Tensor:
    """Return paths_BKD from depth 0 to these nodes of this depth, as indices into the levels; deeper entries are -1."""
    path = [nodes_BK]
    for level in levels[depth:0:-1]:
        path.append(level.parents_BW.gather(1, path[-1]))
    missing = len(levels) - 1 - depth
    return torch.nn.functional.pad(torch.stack(path[::-1], dim=2), (0, missing), value=-1)


def _merge(paths_BKD: Tensor, tokens_BKD: Tensor, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """Store the common prefixes of the paths once: tokens (B, slots), parents (B, slots), slot of each entry (B, K, D).

    Nodes are numbered in the order in which the paths, each read from the root down, first reach them.
    """
    batch, paths, depth = paths_BKD.shape
    # The first path through the same node; the path itself if no earlier one goes through it.
    first_BKD = (paths_BKD.unsqueeze(2) == paths_BKD.unsqueeze(1)).to(torch.uint8).argmax(2)
    own_K1 = torch.arange(paths, device=paths_BKD.device).unsqueeze(1)
    new_BKD = (first_BKD == own_K1) & (paths_BKD >= 0)
    numbers_BKD = (new_BKD.reshape(batch, -1).cumsum(1) - 1).view(batch, paths, depth)
    slots_BKD = numbers_BKD.gather(1, first_BKD).masked_fill(paths_BKD < 0, slots)
    parents_BKD = torch.nn.functional.pad(slots_BKD[:, :, :-1], (1, 0), value=ROOT)
    return _place(tokens_BKD, slots_BKD, slots, 0), _place(parents_BKD, slots_BKD, slots, UNUSED), slots_BKD


def _place(values_BKD: Tensor, slots_BKD: Tensor, slots: int, empty: float) -> Tensor:
    """Scatter the values into (B, slots); entries of the same slot agree, and slot number `slots` is discarded."""
    batch = values_BKD.shape[0]
    target_BN = values_BKD.new_full((batch, slots + 1), empty)
    return target_BN.scatter(1, slots_BKD.reshape(batch, -1), values_BKD.reshape(batch, -1))[:, :slots]


def _prune(
    tokens_BN: Tensor, parents_BN: Tensor, scores_BN: Tensor, nodes: int, least: float
) -> tuple[Tensor, Tensor]:
    """Keep the `nodes` best of the nodes that are good enough, in their order.

    A parent comes before its child and is never worse, so it stays.
    """
    best_BN = scores_BN.sort(dim=1, descending=True, stable=True).indices[:, :nodes]
    kept_BN = torch.zeros_like(tokens_BN).scatter(1, best_BN, 1)
    if least > -math.inf:
        kept_BN = kept_BN * (scores_BN >= least)
    numbers_BN = kept_BN.cumsum(1) - 1
    # ROOT and UNUSED stay as they are; a node's number shifts by the nodes dropped before it.
    moved_BN = torch.where(parents_BN >= 0, numbers_BN.gather(1, parents_BN.clamp(min=0)), parents_BN)
    slots_BN = numbers_BN.masked_fill(kept_BN == 0, nodes)
    return _place(tokens_BN, slots_BN, nodes, 0), _place(moved_BN, slots_BN, nodes, UNUSED)


def _sampled(drafter: StagewiseDrafter, context: Context, plan: Plan) -> Draft:
    """Draw children without replacement: each from q without its elder siblings, renormalised.

    Verification gets exactly the q that guesses were drawn from; a rounded copy would be another distribution. A plan
    that is not sampled uses the target's noise, and its guesses have no q.
    """
    tokens_R, state = drafter.begin(context)
    draws = Draws(context, plan)
    sure, tokens, parents, frontier, start = Sureness(plan), [], [], 1, 0
    for depth, children in enumerate(plan.branching):
        log_q_RV, state = drafter.step(depth, state, tokens_R)
        if plan.confidence is not None and not sure.extends(log_q_RV.max(dim=-1).values):
            break
        tokens_BW = draws.draw(log_q_RV.float(), depth, children, start)
        tokens.append(tokens_BW)
        # The frontier is the level above, whose nodes end just before this level's.
        above = torch.arange(start - frontier, start, device=tokens_R.device)
        parents.append(above.repeat_interleave(children) if depth else above.new_full((children,), ROOT))
        start, frontier, tokens_R = start + frontier * children, frontier * children, tokens_BW.reshape(-1)
        if depth + 1 < plan.depth and children > 1:
            state = _map_state(state, partial(torch.repeat_interleave, repeats=children, dim=0))
    batch = context.tokens_BT.shape[0]
    if not tokens:
        return empty_draft(context)
    q_BMV = draws.q_BMV if plan.sampled else None
    return sure.bounded(Draft(
        torch.cat(tokens, dim=1), torch.cat(parents).expand(batch, -1), len(tokens), q_BMV,
        plan.branching[: len(tokens)],
    ))
