"""Is this pair of target and drafter lossless here: on this machine, in this precision, with these kernels and plans?

Greedy text is compared token for token, sampled text by its joint distribution; docs/prove.md says how strong that
evidence is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from draftsmith.drafters.base import Drafter
from draftsmith.engine import Engine
from draftsmith.engine.steps.step import Stepper
from draftsmith.evaluation.prompts import distinct
from draftsmith.evaluation.proof.draws import MakeStepper
from draftsmith.evaluation.proof.greedy import GreedyProof, MakeEngine, OnProgress, prove_greedy
from draftsmith.evaluation.proof.sampling import (
    ALPHA,
    SamplingProof,
    prove_sampling_here,
    prove_sampling_small,
)
from draftsmith.evaluation.proof.workload import Workload
from draftsmith.plan import Plan
from draftsmith.targets import Target
from draftsmith.types import DraftsmithError

Verdict = Literal["lossless", "lossless up to ties", "lossy by choice", "defect"]


@dataclass(frozen=True)
class SmallPair:
    """The small target, a drafter for it, and a description of that drafter."""

    target: Target
    drafter: Drafter
    drafter_name: str


@dataclass(frozen=True)
class Proof:
    """Both parts and the verdict."""

    greedy: GreedyProof
    sampling: SamplingProof

    @property
    def verdict(self) -> Verdict:
        """Return "defect" for anything that rounding or chance does not explain."""
        if self.greedy.defects or self.sampling.defects:
            return "defect"
        if not all(cell.lossless for cell in self.sampling.cells):
            return "lossy by choice"
        return "lossless up to ties" if self.greedy.ties else "lossless"

    def sentence(self) -> str:
        """Say the verdict with its evidence."""
        greedy, cells = self.greedy, self.sampling.cells
        if self.verdict == "defect":
            found = [divergent.sentence() for divergent in greedy.divergent_texts if not divergent.tie][:1]
            found += [f"the plain text of prompt {index} is not the model's own" for index in greedy.foreign[:1]]
            if not greedy.movement.plausible:
                moved = f"{greedy.movement.largest:.3g}"
                found.append(f"logits move by {moved} between shapes of the forward, which no rounding does")
            if self.sampling.apart > self.sampling.most_apart:
                found.append(f"decoding has a distribution {self.sampling.apart:.3g} away from the model's own")
            found += [
                f"{cell.plan} on {cell.where} does not follow the target's distribution (p = {cell.p_value:.2g}, total "
                f"variation {cell.tv:.4f}, a perfect sampler shows {cell.tv_noise:.4f})"
                for cell in cells if cell.refused and cell.lossless
            ]
            return f"DEFECT: {'; '.join(found)}."
        if self.verdict == "lossy by choice":
            cell = next(cell for cell in cells if not cell.lossless)
            return (
                f"Lossy by choice: typical acceptance ({cell.plan}) moves the distribution of sampled text by "
                f"{cell.tv:.4f} in total variation (a perfect sampler shows {cell.tv_noise:.4f}); everything else is "
                "lossless."
            )
        least = {where: max(c.smallest_shift for c in cells if c.where == where) for where in {c.where for c in cells}}
        ties = f", {greedy.ties} diverging at a tie of the rounding" if greedy.ties else ""
        return (
            f"{self.verdict.capitalize()}: {greedy.compared - len(greedy.divergent_texts)} of {greedy.compared} greedy "
            f"texts are the same token for token{ties}, and {sum(cell.draws for cell in cells):,} draws follow the "
            f"exact distribution in all {len(cells)} cells; a shift of total variation "
            + " or ".join(f"{shift:.4f} ({where})" for where, shift in sorted(least.items()))
            + f" would have been found nine times out of ten at a false alarm of {ALPHA:g} a cell."
        )

    def summary(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return {
            "verdict": self.verdict,
            "sentence": self.sentence(),
            "greedy": self.greedy.summary(),
            "sampling": self.sampling.summary(),
        }


def prove(
    target: Target,
    drafter: Drafter,
    plan: Plan,
    prompts: Sequence[Sequence[int]],
    small: SmallPair,
    work: Workload,
    *,
    sampling_prompts: Sequence[Sequence[int]] | None = None,
    make_engine: MakeEngine = Engine,
    make_stepper: MakeStepper = Stepper,
    on_progress: OnProgress = lambda what, done, total: None,
) -> Proof:
    """Prove or disprove that drafts leave the text unchanged.

    Args:
        prompts: token ids, of different lengths for the ragged batch; each counts once.
        sampling_prompts: short prompts to draw from; None takes the first 8 tokens of `prompts`.
        make_engine: builds the engine of the greedy part.
        make_stepper: builds the stepper of the sampling part. Both exist so that faults can be planted.
        on_progress: called with what is being done, how much of it is done, and how much there is in all.
    """
    if plan.depth == 0:
        raise DraftsmithError("the plan drafts nothing, so there is nothing to prove; give a drafter and a plan.")
    prompts = distinct(prompts)  # a repeated prompt proves nothing more
    greedy = prove_greedy(target, drafter, plan, prompts, work.new_tokens, work.batch, make_engine, on_progress)
    starts = sampling_prompts if sampling_prompts is not None else [list(prompt[:8]) for prompt in prompts]
    here = prove_sampling_here(
        target, drafter, plan, starts, work.draws, length=work.joint_tokens, top_k=work.top_k, rows=work.rows,
        seed=work.seed, exact_shapes=greedy.movement.bit_identical, make_stepper=make_stepper, on_progress=on_progress,
    )
    cells = prove_sampling_small(
        small.target, small.drafter, small.drafter_name, work.small_draws, length=work.joint_tokens, seed=work.seed,
        plans=work.small_plans, make_stepper=make_stepper, on_progress=on_progress,
    )
    return Proof(greedy, SamplingProof([*here.cells, *cells], here.apart, here.most_apart, here.shared))
