"""Does a trained drafter decode as well as its training forward promises? Guess by guess, on the target's own text.

The training forward reads a whole text at once, with the states that predicted its tokens; decoding feeds the drafter
step by step. Both must make the same guesses. A mask, a position or a feature that is off by one in one of them costs
acceptance silently, which no other test sees. Shapes: B = 1 text, T tokens, F feature width, D depths, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.trainable.model import TrainableModel
from draftsmith.engine import Engine
from draftsmith.evaluation.measuring.losslessness import first_divergence, last_logits
from draftsmith.plan import Plan
from draftsmith.targets import Target
from draftsmith.types import Completion, SamplingParams, require_finished

# Two scores closer than this many rounding steps of the larger may change places between shapes of a forward.
TIE_STEPS = 8.0
SURE = 0.95


@dataclass(frozen=True)
class Prediction:
    """What the training forward predicts for one text, at every place where a root can be.

    Args:
        accepted_T: guesses that a greedy chain draft under token t gets right, up to the end of the text.
        near_TD: whether the guess of depth d there, if all before it are right, is within rounding of another.
    """

    accepted_T: Tensor
    near_TD: Tensor


@dataclass(frozen=True)
class Gap:
    """A root where decoding accepted more or fewer guesses than the training forward predicts; `depth` from 1."""

    text: int
    root: int
    depth: int
    predicted: int
    measured: int
    tie: bool


@dataclass(frozen=True)
class Parity:
    """The comparison over some texts.

    Args:
        roots: steps compared.
        predicted, measured: share of the steps that accepted at least d guesses, for d = 1 … D.
        gaps: steps that differ.
    """

    roots: int
    predicted: list[float]
    measured: list[float]
    gaps: list[Gap]

    @property
    def faults(self) -> list[Gap]:
        """Steps that differ without a tie of the rounding."""
        return [gap for gap in self.gaps if not gap.tie]

    @property
    def holds(self) -> bool:
        """Whether nothing but ties differs."""
        return not self.faults

    @property
    def gap_points(self) -> float:
        """By how many points of acceptance predicted and measured differ, at the depth where they differ most."""
        both = zip(self.predicted, self.measured, strict=True)
        return max((100 * abs(predicted - measured) for predicted, measured in both), default=0.0)

    @property
    def ruled_out_points(self) -> float:
        """The most points of acceptance that a fault can cost, at 95 % confidence, if no step showed one."""
        return 100 * (1 - (1 - SURE) ** (1 / max(1, self.roots)))

    def summary(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return {
            "steps": self.roots,
            "predicted_by_depth": self.predicted,
            "measured_by_depth": self.measured,
            "gap_points": self.gap_points,
            "ties": len(self.gaps) - len(self.faults),
            "faults": len(self.faults),
            "ruled_out_points": self.ruled_out_points if self.holds else None,
        }


def own_texts(
    target: Target, drafter: Drafter, depth: int, prompts: Sequence[Sequence[int]], new_tokens: int, batch: int = 1
) -> list[Completion]:
    """Decode greedily with chains of `depth` guesses."""
    longest = max(len(prompt) for prompt in prompts) + new_tokens
    engine = Engine(target, drafter, plan=Plan((1,) * depth), max_batch=batch, max_length=longest)
    return require_finished(engine.generate(prompts, SamplingParams(max_tokens=new_tokens, ignore_eos=True)))


@torch.no_grad()
def predict(target: Target, trained_model: TrainableModel, text: Completion, shift: int = 0) -> Prediction:
    """Run the training forward over a whole text.

    Args:
        shift: feed token t the state that predicted token t - shift (0 is right), to see what a misalignment does; a
            model that reads no states makes at token t the guesses that belong to token t - shift.
    """
    tokens_1T = torch.tensor([text.prompt_tokens + text.tokens], device=target.device)
    # The state after token t predicts token t + 1: entry t belongs to the token one further on.
    states_1TF, _ = target.encode(tokens_1T[:, :-1], trained_model.taps)
    if trained_model.taps:
        logits = trained_model(tokens_1T[:, 1:], states_1TF.roll(shift, dims=1))
    else:
        # No state predicted the first token, but a model that reads no states uses that token as well.
        logits = [scores_1TV[:, 1:].roll(shift, dims=1) for scores_1TV in trained_model(tokens_1T, states_1TF)]
    length = tokens_1T.shape[1]
    depth = min(trained_model.max_depth, len(logits))
    right_TD = torch.zeros((length, depth), dtype=torch.bool, device=target.device)
    near_TD = torch.zeros_like(right_TD)
    for d in range(depth):
        # Entry t of this depth has its root at token t + 1 of the text and guesses token t + d + 2.
        scores_TV = logits[d][0, : length - d - 2]
        if not len(scores_TV):
            continue
        truth_T = tokens_1T[0, d + 2 :]
        right_TD[1 : 1 + len(truth_T), d] = scores_TV.argmax(-1) == truth_T
        best_T2 = scores_TV.double().topk(2, dim=-1).values
        slack_T = TIE_STEPS * torch.finfo(_coarser(scores_TV.dtype, target.dtype)).eps * best_T2.abs().amax(-1)
        near_TD[1 : 1 + len(truth_T), d] = best_T2[:, 0] - best_T2[:, 1] <= slack_T
    return Prediction(right_TD.long().cumprod(1).sum(1).cpu(), near_TD.cpu())


def _coarser(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    return one if torch.finfo(one).eps >= torch.finfo(other).eps else other


def measure_parity(
    target: Target, trained_model: TrainableModel, texts: Sequence[Completion], shift: int = 0
) -> Parity:
    """Compare the accepted lengths of decoded texts with those that `trained_model.forward` predicts at the same roots.

    The roots are those that decoding went through: a difference at one does not change what comes after.
    """
    depth = trained_model.max_depth
    predicted_D, measured_D, steps = [0] * depth, [0] * depth, 0
    gaps: list[Gap] = []
    for number, text in enumerate(texts):
        prediction = predict(target, trained_model, text, shift)
        total = len(text.prompt_tokens) + len(text.tokens)
        root = len(text.prompt_tokens)
        for measured in text.accepted_lengths:
            # The last token of a text counts as the target's own.
            room = total - root - 2
            expected = min(int(prediction.accepted_T[root]), room, depth)
            steps += 1
            for d in range(depth):
                predicted_D[d] += expected > d
                measured_D[d] += measured > d
            if expected != measured:
                at = min(expected, measured)
                tie = at < prediction.near_TD.shape[1] and bool(prediction.near_TD[root, at])
                gaps.append(Gap(number, root, at + 1, expected, measured, tie))
            root += measured + 1
    share = max(1, steps)
    return Parity(steps, [count / share for count in predicted_D], [count / share for count in measured_D], gaps)


def parts_at_a_tie(
    target: Target, trained_model: TrainableModel, one: Completion, other: Completion, step: int
) -> bool:
    """Whether two decodings of a prompt, the first to accept different numbers at this step, do so only by rounding.

    Then the texts part before the first guess that only one of them accepts, or at it, where two tokens are a tie of
    the target's; or the drafts part there, at two tokens that are a tie of the drafter's.
    """
    root = sum(accepted + 1 for accepted in one.accepted_lengths[:step])
    at = min(one.accepted_lengths[step], other.accepted_lengths[step])
    item = first_divergence(0, one.tokens, other.tokens)
    if item is not None and item.position <= root + at + 1:
        scores_V = last_logits(target, one.prompt_tokens + one.tokens[: item.position])
        best_2 = scores_V.topk(2)
        slack = TIE_STEPS * torch.finfo(target.dtype).eps * float(best_2.values.abs().max())
        gap = float(best_2.values[0] - best_2.values[1])
        return {item.expected, item.got} == set(best_2.indices.tolist()) and gap <= slack
    near_TD = predict(target, trained_model, one).near_TD
    return at < near_TD.shape[1] and bool(near_TD[len(one.prompt_tokens) + root, at])


def likely_cause(target: Target, trained_model: TrainableModel, texts: Sequence[Completion], found: Parity) -> str:
    """Say what would explain a gap: the misalignment that fits what was measured, or else what to suspect."""
    faults = len(found.faults)
    for shift, where in ((1, "before"), (-1, "after")):
        if len(measure_parity(target, trained_model, texts, shift).faults) * 4 < faults:
            if not trained_model.taps:
                return f"reading off by one: decoding guesses what should be guessed at the token {where}"
            return f"features off by one: decoding hands the drafter the state that predicted the token {where}"
    depth = min(gap.depth for gap in found.faults)
    if depth > 1:
        return (
            f"depth 1 agrees and depth {depth} is the first that does not, so look at what one stage hands to the "
            "next: its state, or the token chosen from it"
        )
    return "the first guess differs already: look at the features, the root's token, positions and masks"
