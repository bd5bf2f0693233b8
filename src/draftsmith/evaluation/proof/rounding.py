"""How far the logits after one prefix move when the same forward computes them in other shapes.

A greedy token may differ between plain and drafted decoding only where two logits are closer than that movement.
Shapes: B rows, M nodes (root first), T tokens of the prefix, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.evaluation.measuring.losslessness import LARGEST_TIE, Divergence, Explained, last_logits, rounding_step
from draftsmith.targets import Nodes, Target
from draftsmith.types import ROOT, DraftsmithError
from draftsmith.verify import tree_tables

BATCH = 8
# Accumulated rounding reaches neither of these: a number of rounding steps, and a share of the spread of the logits.
MOST_STEPS, MOST_SPREAD = 1024, 0.5
# Parents of the nodes after the root: two guesses under it, each with a child; the second may continue the prefix.
BESIDE = (ROOT, ROOT, 0, 1)


@dataclass(frozen=True)
class Movement:
    """The largest move of any logit over some prefixes, the rounding step there, and the limit of rounding's effect."""

    largest: float
    step: float
    limit: float
    prefixes: int

    @property
    def bit_identical(self) -> bool:
        """Whether no logit moved in its last bit."""
        return self.largest == 0.0

    @property
    def plausible(self) -> bool:
        """Whether rounding can have done it."""
        return self.largest <= self.limit


def logits_by_shape(target: Target, prefix: Sequence[int]) -> dict[str, Tensor]:
    """Return the logits (V, fp32 or better) after a prefix of at least 3 tokens, from five shapes of the forward.

    The shapes are: a prompt read in one piece, plain decoding at batch 1 and at batch 8, a root with a draft under it,
    and the prefix's last token as the second guess of a draft.
    """
    if len(prefix) < 3:
        raise DraftsmithError(f"a prefix of {len(prefix)} tokens cannot be read in every shape; give 3 or more.")
    filler = list(prefix[:2]) * 2
    guess = [filler[0], prefix[-1], filler[1], filler[0]]
    found = {
        "prompt": _read(target, prefix[:0], prefix, None, 1)[-1],
        "one token": _read(target, prefix[:-1], prefix[-1:], None, 1)[-1],
        "one token, batch 8": _read(target, prefix[:-1], prefix[-1:], None, BATCH)[-1],
        "root of a draft": _read(target, prefix[:-1], [prefix[-1], *filler], BESIDE, BATCH)[0],
        "second guess of a draft": _read(target, prefix[:-2], [prefix[-2], *guess], BESIDE, 1)[2],
    }
    return {name: logits_V if logits_V.dtype == torch.float64 else logits_V.float() for name, logits_V in found.items()}


@torch.no_grad()
def _read(
    target: Target, cached: Sequence[int], nodes: Sequence[int], parents: Sequence[int] | None, batch: int
) -> Tensor:
    """Cache some tokens, read the nodes after them (a chain if `parents` is None), and return the last row (M, V)."""
    device = target.device
    cache = target.new_cache(batch, len(cached) + len(nodes))
    logits_BMV = torch.empty(0)
    for tokens, above, held in ((cached, None, 0), (nodes, parents, len(cached))):
        if not tokens:
            continue
        tokens_BM = torch.tensor([list(tokens)], device=device).expand(batch, -1).contiguous()
        cached_B = torch.full((batch,), held, device=device)
        if above is None:
            logits_BMV, _ = target.read_chain(cache, tokens_BM, cached_B, (), longest=held)
            continue
        parents_BN = torch.tensor([list(above)], dtype=torch.long, device=device).expand(batch, -1)
        visible_BMM, depths_BM = tree_tables(parents_BN, len(above))
        columns_S = target.backend.columns(lambda: cache.capacity)
        tree = Nodes(tokens_BM, cached_B, None, depths_BM, visible_BMM, columns_S=columns_S)
        logits_BMV, _ = target.forward(cache, tree, ())
    return logits_BMV[-1]


def measure_movement(target: Target, prefixes: Sequence[Sequence[int]]) -> Movement:
    """Measure how far any logit moves between the shapes, over several prefixes."""
    worst = Movement(0.0, 0.0, 0.0, 0)
    for prefix in prefixes:
        stacked_SV = torch.stack(list(logits_by_shape(target, prefix).values()))
        moved = float((stacked_SV.amax(0) - stacked_SV.amin(0)).max())
        step = rounding_step(float(stacked_SV.abs().max()), target.dtype)
        limit = min(MOST_STEPS * step, MOST_SPREAD * float(stacked_SV[0].std()))
        if worst.prefixes == 0 or moved / limit > worst.largest / worst.limit:
            worst = Movement(moved, step, limit, 1)
    return Movement(worst.largest, worst.step, worst.limit, len(prefixes))


def tie_or_fault_by_movement(
    target: Target, wide: Target, prefix: Sequence[int], item: Divergence
) -> tuple[Explained, float]:
    """Say whether a divergence is a tie of the rounding, as measured on this prefix; also return how far its gap moved.

    Both tokens must be the best two, in the target's precision and in that of `wide`. Their gap must be within one
    rounding step, or within twice the move of that gap between shapes, and at most 0.125 nats. Where native code gives
    every shape the same bits, nothing is a tie.
    """
    if item.expected is None or item.got is None:
        return Explained(item, False, None, None, None), 0.0
    pair = [item.expected, item.got]
    wide_V = last_logits(wide, prefix)
    shapes = list(logits_by_shape(target, prefix).values()) if len(prefix) >= 3 else [last_logits(target, prefix)]
    gaps = [float(logits_V[pair[0]] - logits_V[pair[1]]) for logits_V in shapes]
    moved = max(gaps) - min(gaps)
    step = rounding_step(float(wide_V.max()), target.dtype)
    leads = all(set(scores_V.topk(2).indices.tolist()) == set(pair) for scores_V in (shapes[0], wide_V))
    gap_wide = abs(float(wide_V[pair[0]] - wide_V[pair[1]]))
    gap = min(abs(one) for one in gaps)
    never_moves = moved == 0 and target.backend.reads_apart
    allowed = 0.0 if never_moves else min(max(step, 2 * moved), LARGEST_TIE, MOST_STEPS * step)
    tie = leads and allowed > 0 and max(gap, gap_wide) <= allowed
    return Explained(item, tie, gap, gap_wide, step), moved
