"""Joint distribution of the next three tokens with drafting, at temperature 1 and top-k 6, against the exact
distribution, in fp32.

    python benchmarks/sampling_law.py

What `draftsmith prove` does for any pair, here with the controls: the same draws without drafts, and with a rule broken
on purpose, which the test has to find (the draft's argmax handed over as if it had been drawn from q). The exact
distribution comes from enumerating the tree of the k best tokens with transformers' own forward. Chi-square goodness of
fit at level 1e-6, cells expected fewer than 5 times pooled; total variation beside what a perfect sampler would show;
and the smallest shift that the test finds nine times out of ten.
"""

import time
from dataclasses import asdict, replace

from common import arguments, finish, main, make_prompts, open_drafter, print_table, say, start

from draftsmith import assets
from draftsmith.drafters.base import Drafter
from draftsmith.evaluation.proof.chi_square import POWER
from draftsmith.evaluation.proof.draws import draw
from draftsmith.evaluation.proof.exact_distribution import enumerate_distribution, read_plainly
from draftsmith.evaluation.proof.sampling import ALPHA, cell_of_draws
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.targets import Target
from draftsmith.types import Context, Draft, SamplingParams


class ArgmaxAsSample(Drafter):
    """A mistake: drafts the most probable token, but says that it was drawn from q. One level deep."""

    can_sample = True

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
    args = start(parser)
    target = Target.from_pretrained(args.target or assets.demo_target(), dtype=args.dtype, device=args.device)
    drafter = open_drafter(args.drafter, target)
    prompt = make_prompts(target, args.task, args.prompt_tokens, 1, args.seed)[0]
    params = SamplingParams(temperature=1.0, top_k=args.top_k, max_tokens=args.tokens, ignore_eos=True)
    exact = enumerate_distribution(read_plainly(target), target, prompt, params, args.tokens)
    say(f"{len(exact.p_C)} continuations, probabilities add up to {exact.p_C.sum():.12f}")

    modes: dict[str, tuple[Drafter, Plan]] = {
        "no draft": (drafter, NO_DRAFT),
        "deterministic tree 2,1": (drafter, Plan((2, 1))),
        "sampled chain 1,1": (drafter, Plan((1, 1), sampled=True)),
        "sampled chain 1,1, block": (drafter, Plan((1, 1), sampled=True, acceptance="block")),
        "sampled tree 2,1": (drafter, Plan((2, 1), sampled=True)),
        "broken on purpose: argmax as sample": (ArgmaxAsSample(drafter), Plan((1,), sampled=True)),
    }
    cells, rows = [], []
    for number, (name, (guesser, plan)) in enumerate(modes.items()):
        broken = isinstance(guesser, ArgmaxAsSample)
        count = min(args.draws, args.control_draws) if broken or plan is NO_DRAFT else args.draws
        begun = time.perf_counter()
        found = draw(target, guesser, prompt, params, plan, count, batch=args.batch, seed=args.seed + number)
        cell = cell_of_draws(
            "this target", name, "the drafter itself", exact, found.texts, args.seed, time.perf_counter() - begun,
            found.accepted_per_step,
        )
        cells.append({**asdict(cell), "as_expected": cell.refused == broken})
        rows.append(
            [name, str(count), f"{cell.statistic:.0f} / {cell.freedom}", f"{cell.p_value:.3g}", f"{cell.tv:.5f}",
             f"{cell.tv_noise:.5f} ({cell.tv_most:.5f})", f"{cell.smallest_shift:.5f}",
             f"{cell.accepted_per_step:.2f}", "refused" if cell.refused else "fits"]
        )
        say(f"{name}: p {cell.p_value:.3g}, {cell.seconds:.0f} s")
    print_table(
        f"Distribution of the next {args.tokens} tokens, {target.name}, {args.dtype}, {len(exact.p_C)} continuations; "
        f"refused below p = {ALPHA:g}; shifts found in {POWER:.0%} of cases",
        ["mode", "draws", "χ² / degrees", "p", "total variation", "of a perfect sampler (99.9 %)", "least shift found",
         "accepted a step", "test"],
        rows,
    )
    finish(args, {"continuations": len(exact.p_C), "cells": cells}, target=target.name, dtype=args.dtype)
    if not all(cell["as_expected"] for cell in cells):
        raise SystemExit(1)


if __name__ == "__main__":
    main(run)
