"""Sampled text with drafts against the exact joint distribution of the next few tokens, tested by chi-square.

On the real target the draws are limited to a top-k, so that the distribution can be enumerated. On a target of eight
tokens nothing is left out, and ten times as many draws find smaller shifts. Both draw by the engine's own step.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from draftsmith.drafters.base import Drafter
from draftsmith.engine.steps.step import Stepper
from draftsmith.evaluation.proof.changing_policy import NAME, ChangingPolicy, MakePolicy, draw_under_policy
from draftsmith.evaluation.proof.chi_square import detectable, fit, variation, variation_of_perfect
from draftsmith.evaluation.proof.draws import MakeStepper, draw
from draftsmith.evaluation.proof.exact_distribution import (
    ExactDistribution,
    apart_from,
    check_size,
    enumerate_distribution,
    read_by_decoding,
    read_plainly,
)
from draftsmith.evaluation.proof.shared_rows import SharedRows
from draftsmith.evaluation.proof.small_target import PROMPT
from draftsmith.evaluation.proof.workload import LEAST_DRAWS, SMALL_PLANS, check_draws
from draftsmith.evaluation.reporting.plan_names import plan_name
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.targets import Target
from draftsmith.types import SamplingParams

ALPHA = 1e-6
CANDIDATES = 12
CONTROL = 128
# The decoding forward and the model's own round differently; a larger total variation than this is not rounding.
MOST_APART = {torch.bfloat16: 0.1, torch.float16: 0.1, torch.float32: 1e-3, torch.float64: 1e-5}
REPETITION, FREQUENCY = 1.2, 1.5
SMALL_ROWS = 8192
POLICY_ROWS = 512
# Draws with penalties cost several times as much on the real target, so there are this many times fewer.
COSTLY = 8

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Cell:
    """The test of one plan against one distribution.

    Args:
        where: "this target" or "small alphabet".
        p_value: of the chi-square test; 0 when a draw was impossible under the distribution.
        tv: total variation between draws and distribution; `tv_noise` is what a perfect sampler shows on average,
            `tv_most` what it exceeds once in a thousand.
        smallest_shift: the total variation that the test finds nine times out of ten; no less than rounding excuses.
        rounding: total variation that the rounding of the target's forward may cause by itself.
        refused: whether the draws do not follow the distribution.
        lossless: whether the plan claims that draws follow the distribution; typical acceptance does not.
    """

    where: str
    plan: str
    drafter: str
    draws: int
    continuations: int
    statistic: float
    freedom: int
    p_value: float
    impossible: int
    tv: float
    tv_noise: float
    tv_most: float
    smallest_shift: float
    rounding: float
    accepted_per_step: float
    seconds: float
    refused: bool
    lossless: bool = True


@dataclass(frozen=True)
class SamplingProof:
    """All cells, and how far the distribution of the decoding forward is from that of the model's own forward (on the
    prompts used, and where shapes round differently also over caches); `apart` beyond `most_apart` is a defect by
    itself.
    """

    cells: list[Cell]
    apart: float
    most_apart: float
    shared: bool

    @property
    def defects(self) -> int:
        """Refused cells of lossless plans, and one more if the decoding forward has another distribution."""
        return sum(cell.refused and cell.lossless for cell in self.cells) + (self.apart > self.most_apart)

    def summary(self) -> dict[str, Any]:
        """Return the figures for JSON: those of the cell that fits worst, then all cells."""
        worst = min(self.cells, key=lambda cell: cell.p_value)
        names = ("p_value", "tv", "tv_noise", "smallest_shift")
        return {
            "draws": sum(cell.draws for cell in self.cells),
            **{name: getattr(worst, name) for name in names},
            "alpha": ALPHA,
            "defects": self.defects,
            "decoding_distribution_from_the_models_own": self.apart,
            "equal_rows_read_once": self.shared,
            "cells": [asdict(cell) for cell in self.cells],
        }


def with_penalties(params: SamplingParams) -> SamplingParams:
    """Return the parameters with penalties so strong that forgetting one on a path would be found."""
    return replace(params, repetition_penalty=REPETITION, frequency_penalty=FREQUENCY)


def cell_of_draws(
    where: str, plan: str, drafter: str, exact: ExactDistribution, texts: Sequence[Sequence[int]], seed: int,
    seconds: float,
    accepted: float, rounding: float = 0.0, lossless: bool = True,
) -> Cell:
    """Test draws against a distribution; a misfit that noise and rounding together can explain is not refused."""
    counts_C, impossible = exact.count(texts)
    found = fit(counts_C, impossible, exact.p_C)
    tv = variation(counts_C, impossible, exact.p_C)
    noise, most = variation_of_perfect(exact.p_C, len(texts), seed)
    # A shift within what rounding excuses goes unseen, however many draws there are.
    smallest = max(detectable(exact.p_C, len(texts), ALPHA, seed), most + rounding if rounding else 0.0)
    refused = found.p_value < ALPHA and (rounding == 0 or tv > most + rounding)
    return Cell(
        where, plan, drafter, len(texts), len(exact.p_C), found.statistic, found.freedom, found.p_value, impossible, tv,
        noise, most, smallest, rounding, accepted, seconds, refused,
        lossless,
    )


def prove_sampling_here(
    target: Target,
    drafter: Drafter,
    plan: Plan,
    prompts: Sequence[Sequence[int]],
    draws: int,
    *,
    length: int = 3,
    top_k: int = 6,
    rows: int = 1024,
    seed: int = 0,
    exact_shapes: bool,
    make_stepper: MakeStepper = Stepper,
    on_progress: OnProgress = lambda what, done, total: None,
) -> SamplingProof:
    """Draw from the real target under a top-k, with each kind of plan and with penalties, and test the draws.

    Args:
        plan: the user's plan; cut to the length.
        draws: draws of each plan; an eighth with penalties, which cost the most, but at least 1000.
        exact_shapes: whether logits are the same bits in every shape of the forward, so that rounding excuses nothing.
    """
    check_draws(draws)
    unpenalised = SamplingParams(temperature=1.0, top_k=top_k, max_tokens=length, ignore_eos=True)
    check_size(target, unpenalised, length)
    punished = with_penalties(unpenalised)
    reader = read_plainly(target) if target.dtype in (torch.float32, torch.float64) else read_by_decoding(target)
    prompt = middling(target, reader, prompts, unpenalised, length)
    repetitive = _repetitive(target, reader, prompts, punished, length)
    exact, apart = {}, 0.0
    for params, start in ((unpenalised, prompt), (punished, repetitive)):
        exact[id(params)] = enumerate_distribution(reader, target, start, params, length)
        apart = max(apart, apart_from(exact[id(params)], target, start, params, length, exact_shapes))

    depth = length - 1
    own = plan.shortened(depth)
    is_tree = not own.sampled and any(children > 1 for children in own.branching)
    tree = replace(own, acceptance="exact") if is_tree else Plan((2, *(1,) * (depth - 1)))
    guessed = own if own.is_chain and not own.sampled and own.acceptance == "exact" else Plan((1,) * depth)
    runs: list[tuple[str, Plan, SamplingParams, list[int], int]] = [
        (plan_name(tree), tree, unpenalised, prompt, draws),
        (f"{plan_name(tree)}, penalties", tree, punished, repetitive, max(LEAST_DRAWS, draws // COSTLY)),
        (plan_name(guessed), guessed, unpenalised, prompt, draws),
    ]
    if drafter.can_sample:
        chain, wide = Plan((1,) * depth, sampled=True), Plan((2, *(1,) * (depth - 1)), sampled=True)
        runs += [
            (plan_name(chain), chain, unpenalised, prompt, draws),
            (plan_name(wide), wide, unpenalised, prompt, draws),
        ]
    if own.acceptance != "exact":
        runs.append((plan_name(own), own, unpenalised, prompt, draws))
    shares = _sharing_is_exact(target, drafter, prompt, unpenalised, tree, seed, make_stepper)
    source = SharedRows(target) if shares else target
    cells, done, total = [], 0, sum(count for *_, count in runs)
    for number, (name, shape, params, start, count) in enumerate(runs):

        def advance(drawn: int, name: str = name) -> None:
            nonlocal done
            done += drawn
            on_progress(f"draws on this target: {name}", done, total)

        begun = time.perf_counter()
        found = draw(
            source, drafter, start, params, shape, count, batch=rows, seed=seed + number, make_stepper=make_stepper,
            on_progress=advance,
        )
        cells.append(
            cell_of_draws(
                "this target", name, "the drafter itself", exact[id(params)], found.texts, seed,
                time.perf_counter() - begun, found.accepted_per_step, 0.0 if exact_shapes else 2 * apart,
                shape.lossless,
            )
        )
    return SamplingProof(cells, apart, MOST_APART[target.dtype], shares)


def prove_sampling_small(
    target: Target,
    drafter: Drafter,
    drafter_name: str,
    draws: int,
    *,
    length: int = 3,
    seed: int = 0,
    plans: Sequence[Plan] = SMALL_PLANS,
    make_stepper: MakeStepper = Stepper,
    make_policy: MakePolicy = lambda requests: ChangingPolicy(),
    on_progress: OnProgress = lambda what, done, total: None,
) -> list[Cell]:
    """Draw from the small target without any top-k, with every kind of plan.

    Penalties get a tenth of the draws, and a policy that changes every row's plan at every step gets half of that.
    """
    whole = SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True)
    runs: list[tuple[str, Plan | None, SamplingParams, int]] = [(plan_name(plan), plan, whole, draws) for plan in plans]
    runs.append((f"{plan_name(plans[-1])}, penalties", plans[-1], with_penalties(whole), max(LEAST_DRAWS, draws // 10)))
    runs.append((NAME, None, whole, max(LEAST_DRAWS, draws // 20)))
    cells, done, total = [], 0, sum(count for *_, count in runs)
    for number, (name, plan, params, count) in enumerate(runs):

        def advance(drawn: int, name: str = name) -> None:
            nonlocal done
            done += drawn
            on_progress(f"draws on the small alphabet: {name}", done, total)

        exact = enumerate_distribution(read_plainly(target), target, PROMPT, params, length)
        begun = time.perf_counter()
        if plan is None:
            found = draw_under_policy(
                target, drafter, PROMPT, params, count, batch=min(POLICY_ROWS, count), seed=seed + number,
                make_policy=make_policy, on_progress=advance,
            )
        else:
            found = draw(
                target, drafter, PROMPT, params, plan, count, batch=min(SMALL_ROWS, count), seed=seed + number,
                make_stepper=make_stepper, on_progress=advance,
            )
        cells.append(
            cell_of_draws(
                "small alphabet", name, drafter_name, exact, found.texts, seed, time.perf_counter() - begun,
                found.accepted_per_step,
            )
        )
    return cells


def middling(
    target: Target, reader: Any, prompts: Sequence[Sequence[int]], params: SamplingParams, length: int
) -> list[int]:
    """Return the prompt with the median entropy of the next tokens, out of the first `CANDIDATES`."""
    ranked = sorted(
        (enumerate_distribution(reader, target, prompt, params, length).entropy(), list(prompt))
        for prompt in prompts[:CANDIDATES]
    )
    return ranked[len(ranked) // 2][1]


def _repetitive(
    target: Target, reader: Any, prompts: Sequence[Sequence[int]], params: SamplingParams, length: int
) -> list[int]:
    """Return the prompt after which forgetting penalties on the continuation would shift the distribution the most."""

    def shift(prompt: list[int]) -> float:
        remembered = enumerate_distribution(reader, target, prompt, params, length)
        return remembered.distance(enumerate_distribution(reader, target, prompt, params, length, remembers=False))

    windows = [list(prompt) for prompt in prompts[:CANDIDATES]]
    return max(windows + [window[-1:] * 4 for window in windows], key=shift)


def _sharing_is_exact(
    target: Target, drafter: Drafter, prompt: Sequence[int], params: SamplingParams, plan: Plan, seed: int,
    make_stepper: MakeStepper,
) -> bool:
    """Whether reading equal rows once gives the same texts as reading all of them, on a few draws."""
    both = [
        draw(
            source, drafter, prompt, params, shape, CONTROL, batch=CONTROL, seed=seed, make_stepper=make_stepper
        ).texts
        for shape in (NO_DRAFT, plan)
        for source in (target, SharedRows(target))
    ]
    return both[0] == both[1] and both[2] == both[3]
