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
LONGER = 64
"""Tokens by which the rows beside a prefix may be longer than it, in the shapes that have such rows."""
# Parents of the nodes after the root: two guesses under it, each with a child; the second may continue the prefix.
BESIDE = (ROOT, ROOT, 0, 1)


@dataclass(frozen=True)
class Movement:
    """The largest move of any logit over some prefixes, the rounding step there, and the limit of rounding's effect.

    `leading` is the largest move of a logit that is nearly the best in some shape.
    """

    largest: float
    step: float
    limit: float
    prefixes: int
    leading: float = 0.0

    @property
    def bit_identical(self) -> bool:
        """Whether no logit moved in its last bit."""
        return self.largest == 0.0

    @property
    def plausible(self) -> bool:
        """Whether rounding can have done it."""
        return self.largest <= self.limit


def logits_by_shape(target: Target, prefix: Sequence[int]) -> dict[str, Tensor]:
    """Return the logits (V, fp32 or better) after a prefix of at least 3 tokens, from seven shapes of the forward.

    The shapes are: a prompt read in one piece, plain decoding at batch 1 and at batch 8, a root with a draft under it,
    and the prefix's last token as the second guess of a draft; and plain decoding and a root beside longer rows.
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
    longer = min(LONGER, target.max_length - len(prefix) - len(BESIDE))
    if longer > 0:
        found["one token, beside longer rows"] = _read(target, prefix[:-1], prefix[-1:], None, BATCH, longer)[-1]
        nodes = [prefix[-1], *filler]
        found["root of a draft, beside longer rows"] = _read(target, prefix[:-1], nodes, BESIDE, BATCH, longer)[0]
    return {name: logits_V if logits_V.dtype == torch.float64 else logits_V.float() for name, logits_V in found.items()}


@torch.no_grad()
def _read(
    target: Target, cached: Sequence[int], nodes: Sequence[int], parents: Sequence[int] | None, batch: int,
    longer: int = 0,
) -> Tensor:
    """Cache some tokens, read the nodes after them (a chain if `parents` is None), and return the last row (M, V).

    Args:
        longer: by how many tokens more the rows before the last one are ahead of it, at most; the first one is.
    """
    device = target.device
    cache = target.new_cache(batch, len(cached) + longer + len(nodes))
    held = [len(cached) + longer - longer * row // max(1, batch - 1) for row in range(batch)]
    if cached:
        # Longer rows go on with the tokens that they began with.
        rows = [[cached[at % len(cached)] for at in range(length)] + [0] * (held[0] - length) for length in held]
        counts_B = torch.tensor(held, device=device) if longer else None
        zeros_B = torch.zeros(batch, dtype=torch.long, device=device)
        target.read_chain(cache, torch.tensor(rows, device=device), zeros_B, (), longest=0, counts_B=counts_B)
    tokens_BM = torch.tensor([list(nodes)], device=device).expand(batch, -1).contiguous()
    cached_B = torch.tensor(held, device=device)
    if parents is None:
        logits_BMV, _ = target.read_chain(cache, tokens_BM, cached_B, (), longest=held[0])
        return logits_BMV[-1]
    parents_BN = torch.tensor([list(parents)], dtype=torch.long, device=device).expand(batch, -1)
    visible_BMM, depths_BM = tree_tables(parents_BN, len(parents))
    columns_S = target.backend.columns(lambda: cache.capacity)
    tree = Nodes(tokens_BM, cached_B, None, depths_BM, visible_BMM, columns_S=columns_S)
    logits_BMV, _ = target.forward(cache, tree, ())
    return logits_BMV[-1]


def measure_movement(target: Target, prefixes: Sequence[Sequence[int]]) -> Movement:
    """Measure how far any logit moves between the shapes, over several prefixes."""
    worst, leading = Movement(0.0, 0.0, 0.0, 0), 0.0
    for prefix in prefixes:
        stacked_SV = torch.stack(list(logits_by_shape(target, prefix).values()))
        moved = float((stacked_SV.amax(0) - stacked_SV.amin(0)).max())
        leading = max(leading, _leading_move(stacked_SV))
        step = rounding_step(float(stacked_SV.abs().max()), target.dtype)
        limit = min(MOST_STEPS * step, MOST_SPREAD * float(stacked_SV[0].std()))
        if worst.prefixes == 0 or moved / limit > worst.largest / worst.limit:
            worst = Movement(moved, step, limit, 1)
    return Movement(worst.largest, worst.step, worst.limit, len(prefixes), leading)


def tie_or_fault_by_movement(
    target: Target, wide: Target, prefix: Sequence[int], item: Divergence, elsewhere: float = 0.0
) -> tuple[Explained, float]:
    """Say whether a divergence is a tie of the rounding, as measured on this prefix; also return how far logits moved.

    Both tokens must be nearly the best in some shape of the target: within one rounding step of the best one, or within
    twice the largest move, between shapes, of a logit that is as near to the best; and within 0.125 nats and 1024
    steps. In `wide`, from which all shapes are as far apart as from each other, it may be twice that. Where native code
    gives every shape the same bits on this prefix, nothing is a tie.

    Args:
        elsewhere: how far such logits move between shapes on other prefixes.
    """
    if item.expected is None or item.got is None:
        return Explained(item, False, None, None, None), 0.0
    pair = [item.expected, item.got]
    wide_V = last_logits(wide, prefix)
    shapes = list(logits_by_shape(target, prefix).values()) if len(prefix) >= 3 else [last_logits(target, prefix)]
    gaps = [float(logits_V[pair[0]] - logits_V[pair[1]]) for logits_V in shapes]
    stacked_SV = torch.stack(shapes)
    here = _leading_move(stacked_SV, pair)
    moved = max(elsewhere, here)
    step = rounding_step(float(wide_V.max()), target.dtype)
    gap_wide = abs(float(wide_V[pair[0]] - wide_V[pair[1]]))
    gap = min(abs(one) for one in gaps)
    never_moves = here == 0 and target.backend.reads_apart
    allowed = 0.0 if never_moves else min(max(step, 2 * moved), LARGEST_TIE, MOST_STEPS * step)
    behind = min(_behind(scores_V, pair) for scores_V in shapes)
    tie = allowed > 0 and behind <= allowed and _behind(wide_V, pair) <= min(2 * allowed, LARGEST_TIE)
    return Explained(item, tie, gap, gap_wide, step), moved


def _leading_move(stacked_SV: Tensor, tokens: Sequence[int] = ()) -> float:
    """Return the largest move of a logit within `LARGEST_TIE` of the best in some shape, or of one of some tokens."""
    leads_V = (stacked_SV.amax(1, keepdim=True) - stacked_SV <= LARGEST_TIE).any(0)
    leads_V[list(tokens)] = True
    return float((stacked_SV.amax(0) - stacked_SV.amin(0))[leads_V].max())


def _behind(logits_V: Tensor, tokens: Sequence[int]) -> float:
    """Return by how much the lowest of some tokens' logits is below the best of all."""
    return float(logits_V.max() - logits_V[list(tokens)].min())
