"""Joint law of the next three tokens with drafting, at temperature 1 and top-k 6, against the exact law.

    python benchmarks/sampling_law.py

The exact law comes from enumerating the tree of the k best tokens with `Target.encode`, in fp32, without cache, drafts
or any code of the acceptance rules. The engine then draws with deterministic trees, sampled chains and sampled trees
(siblings without replacement), and once with a rule broken on purpose, which the test has to find: the draft's argmax
handed over as if it had been drawn from q. Chi-square goodness of fit at level 1e-6, cells expected fewer than 5 times
pooled; total variation beside what a perfect sampler would show; and the smallest shift that the test finds nine times
out of ten. Shapes: B rows, M nodes, N drafted nodes, V vocabulary.
"""

import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from common import arguments, finish, main, make_prompts, open_drafter, print_table, say, start
from numpy.typing import NDArray

from draftsmith import assets
from draftsmith.drafters.base import Drafter
from draftsmith.engine import Engine
from draftsmith.engine.engine import SEED_STRIDE
from draftsmith.target import Target
from draftsmith.types import NO_DRAFT, Context, Draft, DraftsmithError, Plan, SamplingParams, Statistics

LEAST_EXPECTED = 5.0
POWER = 0.9
ENCODED = 72

Law = dict[tuple[int, ...], float]


class ArgmaxAsSample(Drafter):
    """A mistake: drafts the most probable token, but says that it was drawn from q. One level deep."""

    def __init__(self, right: Drafter) -> None:
        self.right, self.taps = right, right.taps

    def propose(self, context: Context, plan: Plan) -> Draft:
        """Swap the drawn token for the argmax of its own q."""
        draft = self.right.propose(context, plan)
        assert draft.q_BMV is not None
        return replace(draft, tokens_BN=draft.q_BMV[:, :1].argmax(dim=-1))

    def default_plan(self) -> Plan:
        """One guess."""
        return Plan((1,), sampled=True)


@dataclass(frozen=True)
class Fit:
    """How well counts fit a law."""

    statistic: float
    freedom: int
    p_value: float
    outside: int


def exact_law(target: Target, prompt: list[int], top_k: int, length: int) -> Law:
    """Return the probability of every continuation of this length, at temperature 1."""
    law: Law = {(): 1.0}
    for _ in range(length):
        prefixes, longer = list(law), {}
        for start_at in range(0, len(prefixes), ENCODED):
            chunk = prefixes[start_at : start_at + ENCODED]
            tokens_BT = torch.tensor([prompt + list(prefix) for prefix in chunk], device=target.device)
            _, logits_BTV = target.encode(tokens_BT, logits=True)
            assert logits_BTV is not None
            scores_BV = logits_BTV[:, -1].double()
            scores_BV = scores_BV.masked_fill(scores_BV < scores_BV.topk(top_k).values[:, -1:], -torch.inf)
            p_BV = scores_BV.softmax(-1)
            for prefix, p_V in zip(chunk, p_BV, strict=True):
                for token in p_V.nonzero().flatten().tolist():
                    longer[(*prefix, token)] = law[prefix] * float(p_V[token])
        law = longer
    return law


def draw(
    engine: Engine, prompt: list[int], plan: Plan, count: int, length: int, top_k: int, seed: int
) -> tuple[Counter[tuple[int, ...]], Statistics]:
    """Draw continuations, a full batch a call, each row with noise of its own."""
    found: Counter[tuple[int, ...]] = Counter()
    statistics = Statistics()
    done = 0
    while done < count:
        rows = min(engine.max_batch, count - done)
        params = SamplingParams(
            temperature=1.0,
            top_k=top_k,
            max_tokens=length,
            ignore_eos=True,
            n=rows,
            seed=(seed * 1_000_003 + done * SEED_STRIDE) % 2**63,  # goes on where the call before left off
        )
        for completion in engine.generate([prompt], params, plan):
            found[tuple(completion.tokens)] += 1
            statistics += completion.statistics
        done += rows
    return found, statistics


def tail(statistic: float, freedom: int) -> float:
    """Probability that a chi-square variable with so many degrees of freedom exceeds the statistic."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def critical(freedom: int, alpha: float) -> float:
    """Return the statistic that is exceeded with probability alpha."""
    low, high = 0.0, 10.0 * freedom + 1000.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle, freedom) > alpha else (low, middle)
    return high


def pool(p_C: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Return the cell of every outcome; rare ones share one, which takes the next larger until it is big enough."""
    order_C = np.argsort(p_C)
    sums_C = np.cumsum(p_C[order_C]) * count
    rare = int((p_C * count < LEAST_EXPECTED).sum())
    if rare:
        rare = max(rare, int(np.searchsorted(sums_C, LEAST_EXPECTED)) + 1)
    cells_C = np.empty(len(p_C), dtype=np.int64)
    cells_C[order_C] = np.maximum(np.arange(len(p_C)) - max(rare - 1, 0), 0)
    return cells_C


def pooled(values: NDArray[Any], cells_C: NDArray[np.int64]) -> NDArray[np.float64]:
    """Add up values (…, C) by cell."""
    summed = np.zeros((*values.shape[:-1], int(cells_C.max()) + 1))
    np.add.at(summed, (..., cells_C), values)
    return summed


def fit(counts_C: NDArray[np.int64], outside: int, p_C: NDArray[np.float64]) -> Fit:
    """Test counts against a law; a continuation that the law excludes ends the matter."""
    total = int(counts_C.sum()) + outside
    cells_C = pool(p_C, total)
    expected = total * pooled(p_C, cells_C)
    statistic = float(((pooled(counts_C, cells_C) - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    if freedom < 1:
        raise DraftsmithError(f"{total} draws are too few for {len(p_C)} continuations; ask for more with --draws.")
    return Fit(statistic, freedom, 0.0 if outside else tail(statistic, freedom), outside)


def variation_of_perfect(p_C: NDArray[np.float64], count: int, seed: int, trials: int = 400) -> dict[str, float]:
    """Simulate a perfect sampler: mean and 99.9 % quantile of its total variation from the law."""
    drawn = np.random.default_rng(seed).multinomial(count, p_C / p_C.sum(), size=trials) / count
    variation = np.abs(drawn - p_C).sum(axis=1) / 2
    return {"mean": float(variation.mean()), "quantile_999": float(np.quantile(variation, 0.999))}


def detectable(p_C: NDArray[np.float64], count: int, alpha: float, seed: int, trials: int = 200) -> float:
    """Return the smallest total variation that the test finds nine times out of ten.

    The shift raises a random half of the outcomes and lowers the others, each in proportion to its probability.
    """
    rng = np.random.default_rng(seed)
    cells_C = pool(p_C, count)
    expected = count * pooled(p_C, cells_C)
    limit = critical(len(expected) - 1, alpha)
    sign_C = np.where(rng.permutation(len(p_C)) % 2 == 0, 1.0, -1.0)
    low, high = 0.0, 0.4
    for _ in range(14):
        size = (low + high) / 2
        shifted_C = p_C * (1 + 2 * size * sign_C)
        drawn = rng.multinomial(count, shifted_C / shifted_C.sum(), size=trials)
        statistics = ((pooled(drawn, cells_C) - expected) ** 2 / expected).sum(axis=1)
        low, high = (low, size) if (statistics > limit).mean() >= POWER else (size, high)
    shifted_C = p_C * (1 + 2 * high * sign_C)
    return float(np.abs(shifted_C / shifted_C.sum() - p_C).sum() / 2)


def run() -> None:
    """Enumerate, draw, test and write."""
    parser = arguments(__doc__, "sampling_law", dtype="fp32")
    parser.add_argument("--draws", type=int, default=100_000)
    parser.add_argument("--control-draws", type=int, default=20_000, help="without drafts, and with the broken rule")
    parser.add_argument("--tokens", type=int, default=3)
    parser.add_argument("--top-k", type=int, default=6)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=2)
    parser.add_argument("--task", default="prose")
    parser.add_argument("--alpha", type=float, default=1e-6)
    args = start(parser)
    target = Target.from_pretrained(args.target or assets.demo_target(), dtype=args.dtype, device=args.device)
    drafter = open_drafter(args.drafter, target)
    prompt = make_prompts(target, args.task, args.prompt_tokens, 1, args.seed)[0]
    law = exact_law(target, prompt, args.top_k, args.tokens)
    p_C = np.array(list(law.values()))
    say(f"{len(law)} continuations, probabilities add up to {p_C.sum():.12f}")

    modes: dict[str, tuple[Drafter, Plan]] = {
        "no draft": (drafter, NO_DRAFT),
        "deterministic tree 2,1": (drafter, Plan((2, 1))),
        "sampled chain 1,1": (drafter, Plan((1, 1), sampled=True)),
        "sampled tree 2,1": (drafter, Plan((2, 1), sampled=True)),
        "broken on purpose: argmax as sample": (ArgmaxAsSample(drafter), Plan((1,), sampled=True)),
    }
    cells, rows = [], []
    for number, (name, (guesser, plan)) in enumerate(modes.items()):
        broken = isinstance(guesser, ArgmaxAsSample)
        draws = min(args.draws, args.control_draws) if broken or plan is NO_DRAFT else args.draws
        noise = variation_of_perfect(p_C, draws, args.seed)
        shift = detectable(p_C, draws, args.alpha, args.seed)
        engine = Engine(target, guesser, max_batch=args.batch, max_length=len(prompt) + args.tokens)
        begun = time.perf_counter()
        found, statistics = draw(engine, prompt, plan, draws, args.tokens, args.top_k, args.seed + number)
        seconds = time.perf_counter() - begun
        counts_C = np.array([found[continuation] for continuation in law])
        outside = draws - int(counts_C.sum())
        result = fit(counts_C, outside, p_C)
        variation = float((np.abs(counts_C / draws - p_C).sum() + outside / draws) / 2)
        refused = result.p_value < args.alpha
        cells.append(
            {
                "mode": name,
                "draws": int(counts_C.sum()) + outside,
                "chi_square": result.statistic,
                "degrees_of_freedom": result.freedom,
                "p_value": result.p_value,
                "impossible_continuations": outside,
                "total_variation": variation,
                "total_variation_of_a_perfect_sampler": noise,
                "smallest_shift_found": {"total_variation": shift, "power": POWER},
                "accepted_per_step": statistics.accepted / max(1, statistics.steps),
                "steps": statistics.steps,
                "seconds": seconds,
                "as_expected": refused == broken,
            }
        )
        rows.append(
            [name, str(draws), f"{result.statistic:.0f} / {result.freedom}", f"{result.p_value:.3g}",
             f"{variation:.5f}", f"{noise['mean']:.5f} ({noise['quantile_999']:.5f})", f"{shift:.5f}",
             f"{statistics.accepted / max(1, statistics.steps):.2f}", "refused" if refused else "fits"]
        )
        say(f"{name}: p {result.p_value:.3g}, {seconds:.0f} s")
    print_table(
        f"Law of the next {args.tokens} tokens, {target.name}, {args.dtype}, {len(law)} continuations; refused below "
        f"p = {args.alpha:g}; shifts found in {POWER:.0%} of cases",
        ["mode", "draws", "χ² / degrees", "p", "total variation", "of a perfect sampler (99.9 %)", "least shift found",
         "accepted a step", "test"],
        rows,
    )
    finish(
        args,
        {"continuations": len(law), "cells": cells},
        target=target.name,
        dtype=args.dtype,
    )
    if not all(cell["as_expected"] for cell in cells):
        raise SystemExit(1)


if __name__ == "__main__":
    main(run)
