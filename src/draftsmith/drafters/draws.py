"""Guesses that are drawn at random, and the distributions they are drawn from.

Shapes: B rows, F nodes of a level a row, R = B × F, C children of a node, W = F × C, N drafted nodes, V vocabulary.
"""

import math

import torch
from torch import Tensor

from draftsmith.drafters.base import best, check_width
from draftsmith.native import LIBRARY
from draftsmith.plan import Plan
from draftsmith.types import Context
from draftsmith.verify.noise import Stream, arrivals, categorical, race, uniform

# For a greedy row any q is exact; the sharper q is, the oftener it guesses the argmax. In trees that are drawn,
# siblings differ, so the tokens next to it need a share as well.
_GREEDY_TEMPERATURE = 0.1
# The same for chains. It also marks a greedy row beside rows that guess with the target's noise; kNoNoise in
# native/csrc/drawing.h.
_NO_NOISE_TEMPERATURE = 1e-4
COMPARED = 8
"""Among so many first arrivals it is told how likely each is: others hardly count, and finding them would take long.
kCompared in native/csrc/drawing.h."""
_NEVER = -1e4  # the logarithm for tokens that have no share; kNever there


def shares_noise(plan: Plan, context: Context) -> bool:
    """Whether a plan's guesses are drawn with the very noise by which the target will draw its tokens.

    Drawn so, a guess equals the target's token as often as the drafter's distribution is near the target's; filters
    such as top-p, which the drafter does not know, cost some of that. The guesses still count as given: verification
    checks whether the target draws the same tokens, so the text is that of its seed. They may be compared with those
    tokens but not tested against q, so `typical` plans do not use the noise. In a tree, a node's children are the
    tokens that would be drawn first, second, …, see `arriving`. A compiled drafter does not check whether rows are
    sampled, and takes its likeliest tokens.
    """
    if not plan.depth or plan.sampled or plan.acceptance == "typical" or torch.compiler.is_compiling():
        return False
    return any_drawn(context)


def any_drawn(context: Context) -> bool:
    """Return whether any row's tokens are drawn."""
    if context.drawn is not None:
        return context.drawn != "none"
    return any(context.temperature_B.tolist())  # on a CPU ten times as fast as comparing and reducing in PyTorch


def all_drawn(context: Context) -> bool:
    """Return whether the tokens of all rows are drawn."""
    return bool((context.temperature_B > 0).all()) if context.drawn is None else context.drawn == "all"


def shared_noise(plan: Plan, context: Context) -> list[Tensor]:
    """Return the inputs by which native drafters share the target's noise, see `shares_noise`; none if they do not."""
    if not shares_noise(plan, context):
        return []
    return [temperature_of(context, plan), context.seeds_B.contiguous(), context.lengths_B.contiguous()]


def temperature_of(context: Context, plan: Plan) -> Tensor:
    """Return the temperature by which scores are divided before guesses are drawn (B, fp32)."""
    greedy = _GREEDY_TEMPERATURE if plan.sampled and not plan.is_chain else _NO_NOISE_TEMPERATURE
    return torch.where(context.temperature_B > 0, context.temperature_B, greedy).float()


def stream_of(plan: Plan) -> Stream:
    """Return the stream of random numbers by which guesses are drawn.

    A later step draws anew for the same position. Block verification looks at all guesses of a step before it rejects
    some, so its stream must differ from those of other plans, and its index, the slot of a guess, from later guesses'
    own. A plan that is not sampled shares the target's noise, see `shares_noise`.
    """
    if not plan.sampled:
        return Stream.TARGET
    return Stream.BLOCK_DRAFT if plan.acceptance == "block" else Stream.DRAFT


def draw_like_target(scores_RV: Tensor, temperature_R: Tensor, seeds_R: Tensor, positions_R: Tensor) -> Tensor:
    """Draw a token (R) for each of some places, with the noise by which the target will draw there.

    Args:
        scores_RV: fp32.
        temperature_R: 0 takes the likeliest token.
        positions_R: number of tokens before each place.
    """
    is_drawn_R = temperature_R > 0
    heat_R = torch.where(is_drawn_R, temperature_R, _NO_NOISE_TEMPERATURE).float()
    if LIBRARY and scores_RV.device.type == "cpu" and not torch.compiler.is_compiling():
        memory_R1V = torch.empty_like(scores_RV).unsqueeze(1)
        tokens_R1: Tensor = torch.ops.draftsmith.draw(
            scores_RV, heat_R, seeds_R, positions_R, Stream.TARGET, 1, 0, memory_R1V, 0
        )
        return tokens_R1.flatten()
    q_RV = (scores_RV / heat_R.unsqueeze(1)).softmax(-1).to(torch.float64)
    return torch.where(is_drawn_R, race(q_RV, seeds_R, positions_R, Stream.TARGET), q_RV.argmax(-1))


def arriving(
    log_q_RV: Tensor, temperature_B: Tensor, seeds_B: Tensor, positions_B: Tensor, children: int, mixed: bool = True
) -> tuple[Tensor, Tensor]:
    """Return tokens (R, children) in the order in which the target's noise lets them arrive, and how likely each is.

    A token arrives at its time in `arrivals`, divided by its share; the first to arrive is drawn. Somebody else with
    nearly the same shares is taken to draw a token with a probability that goes with 1 / its time here: greedily, it
    goes with the token's share, and the noise, which is known, counts as a part of the score. (Other powers of the time
    were tried at temperatures of 0.7 and 1; trees made by them keep no more.) What is told (R, children), fp32, are
    logarithms of these probabilities, of which those of the first `COMPARED` arrivals sum to 1. Rows without noise have
    their likeliest tokens, with their probabilities.

    Args:
        log_q_RV: fp32, of the nodes of every row, row by row.
        temperature_B: as of `temperature_of`.
        positions_B: number of tokens before the places of these nodes.
        mixed: whether there may be rows without noise.

    Raises:
        DraftsmithError: there are fewer tokens than children.
    """
    check_width(children, log_q_RV.shape[1])
    if LIBRARY and log_q_RV.device.type == "cpu":
        found: tuple[Tensor, Tensor] = torch.ops.draftsmith.arrive(
            log_q_RV, temperature_B, seeds_B, positions_B, children
        )
    else:
        found = arriving_written_out(log_q_RV, temperature_B, seeds_B, positions_B, children)
    if not mixed:
        return found
    likeliest = best(log_q_RV, children)
    is_drawn_B = temperature_B > _NO_NOISE_TEMPERATURE
    is_drawn_R1 = is_drawn_B.repeat_interleave(len(log_q_RV) // len(seeds_B)).unsqueeze(1)
    return torch.where(is_drawn_R1, found[0], likeliest[0]), torch.where(is_drawn_R1, found[1], likeliest[1])


def arriving_written_out(
    log_q_RV: Tensor, temperature_B: Tensor, seeds_B: Tensor, positions_B: Tensor, children: int
) -> tuple[Tensor, Tensor]:
    """Do as `arriving` where all rows have noise, by PyTorch's operations."""
    scores_BFV = log_q_RV.view(len(seeds_B), -1, log_q_RV.shape[1]) / temperature_B[:, None, None]
    times_BV = arrivals(torch.arange(log_q_RV.shape[1], device=log_q_RV.device), seeds_B, positions_B, Stream.TARGET)
    compared = min(max(children, COMPARED), log_q_RV.shape[1])
    first = (scores_BFV - times_BV.log().to(scores_BFV.dtype).unsqueeze(1)).flatten(0, 1).topk(compared, dim=-1)
    logarithms_RC = first.values.log_softmax(-1)[:, :children].clamp(min=_NEVER)
    return logarithms_RC.float(), first.indices[:, :children]


def best_two(
    scores_RV: Tensor, temperature_R: Tensor, seeds_R: Tensor, positions_R: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what `draw_like_target` does and the token next to it (R, 2), and by how much the first leads (R).

    Greedily that is the lead of the best score over the second. With noise, it is what the score of the other token
    would have to gain on that of the one drawn, so that it were drawn instead. Native operators take a share that is
    next to nothing for none, so at temperatures of a few hundredths they may find a larger lead.
    """
    scores_RV = scores_RV.double()
    best_R = scores_RV.max(dim=-1)  # of equals, the first
    next_R = scores_RV.scatter(1, best_R.indices.unsqueeze(1), -torch.inf).max(dim=-1)
    tokens_R2, leads_R = torch.stack([best_R.indices, next_R.indices], dim=1), best_R.values - next_R.values
    is_drawn_R = temperature_R > 0
    if not bool(is_drawn_R.any()):
        return tokens_R2, leads_R
    heat_R = torch.where(is_drawn_R, temperature_R, _NO_NOISE_TEMPERATURE).double()
    q_RV = (scores_RV / heat_R.unsqueeze(1)).softmax(-1)
    times_RV = arrivals(torch.arange(q_RV.shape[1], device=q_RV.device), seeds_R, positions_R, Stream.TARGET)
    first_R2 = (times_RV / q_RV).topk(2, dim=-1, largest=False)
    drawn_leads_R = heat_R * first_R2.values.log().diff(dim=-1).squeeze(-1)
    return torch.where(is_drawn_R.unsqueeze(1), first_R2.indices, tokens_R2), torch.where(
        is_drawn_R, drawn_leads_R, leads_R
    )


class Draws:
    """Draws the guesses of a plan level by level, and keeps the distributions they were drawn from.

    It uses a native operator if there is one, in fp32. The operator's exponentials differ from PyTorch's in the last
    bits, so its q does too, and a draw at the edge of a token's share may fall on the next token.
    """

    def __init__(self, context: Context, plan: Plan) -> None:
        self._context, self._stream = context, stream_of(plan)
        self._temperature_B = temperature_of(context, plan)
        self._inner = 1 + plan.max_nodes - math.prod(plan.branching)
        self._levels: list[Tensor] = []
        self._native_BMV: Tensor | None = None

    @property
    def q_BMV(self) -> Tensor:
        """The distributions of a sampled plan's guesses; nodes of the last level have no children, and no row here."""
        return torch.cat(self._levels, dim=1) if self._native_BMV is None else self._native_BMV

    def draw(self, scores_RV: Tensor, depth: int, children: int, start: int) -> Tensor:
        """Draw the children of a level's nodes (B, F × children); their slots begin at `start`."""
        context, batch = self._context, len(self._context.seeds_B)
        positions_B = context.lengths_B + depth
        if self._stream == Stream.TARGET:
            # A chain; nobody needs the distributions of its guesses.
            return draw_like_target(scores_RV, context.temperature_B, context.seeds_B, positions_B).unsqueeze(1)
        if LIBRARY and scores_RV.device.type == "cpu" and not torch.compiler.is_compiling():
            if self._native_BMV is None:
                self._native_BMV = scores_RV.new_empty((batch, self._inner, scores_RV.shape[1]))
            frontier = len(scores_RV) // batch
            # A node's row is its slot plus one, and the level begins as many slots further up as it has nodes.
            line = start - frontier + 1
            tokens_RC: Tensor = torch.ops.draftsmith.draw(
                scores_RV, self._temperature_B, context.seeds_B, positions_B, self._stream, children, start,
                self._native_BMV, line,
            )
            return tokens_RC.view(batch, -1)
        q_BFV = (scores_RV.view(batch, -1, scores_RV.shape[1]) / self._temperature_B[:, None, None]).softmax(-1)
        q_BFV = q_BFV.to(torch.float64)
        q_BFV = q_BFV / q_BFV.sum(-1, keepdim=True)
        self._levels.append(q_BFV)
        frontier = q_BFV.shape[1]
        slots_W = torch.arange(start, start + frontier * children, device=scores_RV.device)
        u_BFC = uniform(context.seeds_B.unsqueeze(1), positions_B.unsqueeze(1), self._stream, slots_W).view(
            batch, frontier, children
        )
        drawn: list[Tensor] = []
        for child in range(children):
            if child:
                q_BFV = q_BFV.scatter(2, drawn[-1].unsqueeze(2), 0.0)
            drawn.append(categorical(q_BFV, u_BFC[:, :, child]))
        return torch.stack(drawn, dim=2).reshape(batch, -1)
