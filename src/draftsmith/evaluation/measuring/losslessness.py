"""Is the text the same, token for token? And where it is not, was it a tie of the rounding or a fault?

Greedy speculation has to give the target's own text. In bf16 two logits can be equal to within the rounding, and the
choice between them then depends on how many tokens share a forward. A divergence counts as such a tie only if the two
tokens are the best two, in either order, both in the target's own precision and in fp32 on the same prefix, and if
their gap is at most one rounding step there, and at most 0.125 nats. Shapes: T tokens, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.targets import Target
from draftsmith.types import Completion

LARGEST_TIE = 0.125


@dataclass(frozen=True)
class Divergence:
    """The first differing token of one pair; None stands for a text that ended there."""

    index: int
    position: int
    expected: int | None
    got: int | None


@dataclass(frozen=True)
class Explained:
    """A divergence scored again: gaps between the two tokens' logits in the target's precision and in fp32."""

    divergence: Divergence
    tie: bool
    gap: float | None
    gap_fp32: float | None
    rounding_step: float | None


@dataclass(frozen=True)
class TextComparison:
    """How many of the texts are the same, and the first divergence of each that is not."""

    total: int
    divergences: list[Divergence]
    explained: list[Explained] | None = None

    @property
    def identical(self) -> int:
        """Texts that are the same to the last token."""
        return self.total - len(self.divergences)

    @property
    def ties(self) -> int:
        """Divergences shown to be ties."""
        return sum(item.tie for item in self.explained or ())

    @property
    def lossless(self) -> bool:
        """Whether nothing but ties differs."""
        return len(self.divergences) == self.ties

    def sentence(self) -> str:
        """Say it in a few words, "yes" first only if every text is identical."""
        if not self.divergences:
            return f"yes ({self.total} of {self.total} texts, token for token)"
        if self.explained is None:
            return f"no ({self.identical} of {self.total} texts; the others were not examined)"
        faults = len(self.divergences) - self.ties
        what = f"{self.ties} part at a tie of the rounding" + (f", {faults} without one" if faults else "")
        return f"{'no' if faults else 'up to ties'} ({self.identical} of {self.total} texts; {what})"

    def summary(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return {
            "total": self.total,
            "identical": self.identical,
            "ties": self.ties if self.explained is not None else None,
            "divergences": [asdict(item) for item in (self.explained or self.divergences)],
        }


def first_divergence(index: int, expected: Sequence[int], got: Sequence[int]) -> Divergence | None:
    """Return where two token lists part, or None if they are equal."""
    for position in range(max(len(expected), len(got))):
        left = expected[position] if position < len(expected) else None
        right = got[position] if position < len(got) else None
        if left != right:
            return Divergence(index, position, left, right)
    return None


def compare_texts(
    expected: Sequence[Completion], got: Sequence[Completion], target: Target | None = None
) -> TextComparison:
    """Compare texts pairwise; with a target, every divergence is scored again to tell ties from faults."""
    if len(expected) != len(got):
        raise ValueError(f"{len(expected)} texts cannot be compared with {len(got)}")
    pairs = enumerate(zip(expected, got, strict=True))
    found = [first_divergence(i, left.tokens, right.tokens) for i, (left, right) in pairs]
    divergences = [item for item in found if item is not None]
    explained = explain(target, expected, divergences) if target is not None and divergences else None
    return TextComparison(len(expected), divergences, explained)


def explain(target: Target, expected: Sequence[Completion], divergences: Sequence[Divergence]) -> list[Explained]:
    """Score each divergence in the target's precision and in an fp32 copy of the target (needs memory for both)."""
    wide = target if target.dtype in (torch.float32, torch.float64) else target.widened()
    results = []
    for item in divergences:
        completion = expected[item.index]
        prefix = completion.prompt_tokens + completion.tokens[: item.position]
        results.append(tie_or_fault(item, last_logits(target, prefix), last_logits(wide, prefix), target.dtype))
    return results


def tie_or_fault(item: Divergence, logits_V: Tensor, wide_V: Tensor, dtype: torch.dtype) -> Explained:
    """Apply the rule of the module's docstring to the logits at the point of divergence."""
    if item.expected is None or item.got is None:
        return Explained(item, False, None, None, None)
    pair = {item.expected, item.got}
    lead = all(set(scores_V.topk(2).indices.tolist()) == pair for scores_V in (logits_V, wide_V))
    gap = abs(float(logits_V[item.expected] - logits_V[item.got]))
    gap_wide = abs(float(wide_V[item.expected] - wide_V[item.got]))
    step = rounding_step(float(wide_V.max()), dtype)
    tie = lead and max(gap, gap_wide) <= min(step, LARGEST_TIE)
    return Explained(item, tie, gap, gap_wide, step)


def is_targets_own(target: Target, completion: Completion) -> bool:
    """Check a greedy text against one plain forward over all of it, without cache, tree or drafter.

    Every token has to be the most probable one at its place, to within the noise of the precision. This guards against
    the fault that a comparison of two texts cannot see: that both are wrong in the same way.
    """
    tokens = completion.prompt_tokens + completion.tokens
    tokens_1T = torch.tensor([tokens[:-1]], device=target.device)
    _, logits_1TV = target.encode(tokens_1T, logits=True, by_model=True)
    assert logits_1TV is not None
    logits_TV = logits_1TV[0, len(completion.prompt_tokens) - 1 :].double()
    best_T = logits_TV.max(dim=1).values
    taken_T = logits_TV.gather(1, torch.tensor(completion.tokens, device=target.device).unsqueeze(1)).squeeze(1)
    slack = max(4 * rounding_step(float(best_T.abs().max()), target.dtype), 1e-3)
    return bool(((best_T - taken_T) <= slack).all())


def rounding_step(value: float, dtype: torch.dtype) -> float:
    """Return the distance between neighbouring numbers of a dtype around a value."""
    exponent = math.floor(math.log2(abs(value))) if value else 0
    return float(torch.finfo(dtype).eps) * 2.0**exponent


def last_logits(target: Target, tokens: Sequence[int]) -> Tensor:
    """Return the logits (V) after a prefix, in fp32 or better."""
    tokens_1T = torch.tensor([list(tokens)], device=target.device)
    _, logits_1TV = target.encode(tokens_1T, logits=True, by_model=True)
    assert logits_1TV is not None
    last_V = logits_1TV[0, -1]
    return last_V.double() if last_V.dtype == torch.float64 else last_V.float()
