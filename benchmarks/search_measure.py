"""By what to choose a learning rate: τ by decoding, or the loss, after a short training; and which is right later.

    python benchmarks/search_measure.py --out runs/search-measure

Families are trained with three rates on a share of a budget, and on all of it. After the short training each is judged
twice on texts of the tuning part: by τ on its prompts, and by the loss on what the target writes behind them. After the
long one τ is measured on prompts of the measured part, which shows what either choice would have brought. "Sure" is how
often a choice stays the same when the prompts are drawn again. What was done is kept in --out.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import arguments, finish, main, print_table, say, start

from draftsmith import assets
from draftsmith.evaluation.comparison.measurement_log import MeasurementLog
from draftsmith.evaluation.comparison.questions import Settings
from draftsmith.evaluation.prompts import Prompt
from draftsmith.targets import Target
from draftsmith.training.data.windows import Window, collate
from draftsmith.training.step import TrainingStep
from draftsmith.workflows.bridge import EngineBridge
from draftsmith.workflows.comparison_texts import comparison_texts
from draftsmith.workflows.entries import POSITIONS, Budget, Entry, read_entries, recipe_for
from draftsmith.workflows.methods import write_texts
from draftsmith.workflows.models import quiet
from draftsmith.workflows.partition import MEASURED, TUNING
from draftsmith.workflows.search import FACTOR, Choice, Judge, train_briefly

DRAWS = 2000


def run() -> None:
    """Measure and write."""
    parser = arguments(__doc__, "search-measure")
    parser.add_argument("--families", default="mlp,medusa,eagle")
    parser.add_argument("--positions", type=int, default=100_000)
    parser.add_argument("--shares", default="0.15", help="of the budget, for the short trainings")
    parser.add_argument("--out", type=Path, default=Path("runs/search-measure"))
    args = start(parser)
    target = Target.from_pretrained(args.target or assets.demo_target(), dtype=args.dtype, device=args.device)
    budget = Budget(args.out, args.positions)
    budget.parts.mkdir(parents=True, exist_ok=True)
    log = MeasurementLog(args.out / "measurements.jsonl")
    texts = comparison_texts(None, None)
    texts.write(budget.parts)
    settings = Settings()
    new_tokens = settings.new_tokens
    tuning, measured = (
        Judge.of(target, texts.prompts(part, target, new_tokens), settings) for part in (TUNING, MEASURED)
    )
    entries = read_entries(args.families.split(","))
    bridge = EngineBridge(target, [Prompt("code", "", "x = 1\n" * 40)], 1, 8, 8, {"temperature": 0.0})
    write_texts(entries[0], target, budget, bridge, quiet())
    prompts = [list(prompt) for prompt in tuning.prompts]
    written = [
        Window([*prompt, *more], [(len(prompt), len(prompt) + len(more))])
        for prompt, more in zip(prompts, bridge.generate(prompts, new_tokens, 0), strict=True)
    ]
    steps = budget.steps(lambda: 1.0)
    cells: list[dict[str, Any]] = []
    for entry in entries:
        long = {}
        for power in (-1, 0, 1):
            rate = entry.family.rate * float(FACTOR) ** power

            def trained(steps: int, entry: Entry = entry, rate: float = rate) -> TrainingStep:
                return train_briefly(recipe_for(entry, Choice(rate, entry.options), target, budget, steps, "x"), target)

            def later() -> Any:
                return measured.count(trained(steps).drafter.for_decoding(target))

            long[rate] = log.once(f"{entry.name}|{rate:g}|whole", later)
            say(f"{entry.name}, rate {rate:.2g}: τ {ratio(long[rate]):.3f} at the end")
        for share in map(float, args.shares.split(",")):
            short = {}
            for rate in long:

                def judged(share: float = share) -> Any:
                    step = trained(max(1, round(share * steps)))
                    return [tuning.count(step.drafter.for_decoding(target)), losses(step, written)]

                short[rate] = log.once(f"{entry.name}|{rate:g}|{share:g}", judged)
            cells += [choice(entry.name, share, name, short, long) for name in ("τ", "loss")]
    print_table(
        f"Rates chosen by short trainings, {target.name}, {args.positions:,} positions in all",
        ["family", "share", "judged by", "smallest to largest rate", "chosen", "sure", "τ later", "the best later"],
        [
            [
                cell["family"], f"{cell['share']:.0%}", cell["by"],
                " / ".join(f"{value:.3f}" for value in cell["scores"]), f"{cell['chosen']:.2g}",
                f"{cell['sure']:.0%}", f"{cell['tau_later']:.3f}", f"{max(cell['taus_later']):.3f}",
            ]
            for cell in cells
        ],
    )
    finish(args, {"cells": cells}, target=target.name, dtype=args.dtype)


def losses(step: TrainingStep, windows: Sequence[Window]) -> list[float]:
    """Return the loss on each text by itself."""
    depth = step.drafter.max_depth
    most = max(len(window.tokens) for window in windows) + depth
    return [step.measure([collate([window], most, depth - 1)], POSITIONS) for window in windows]


def ratio(counts: Sequence[Sequence[int]]) -> float:
    """Return τ of tokens and steps by prompt."""
    return float(np.sum(counts[0]) / np.sum(counts[1]))


def choice(family: str, share: float, by: str, short: dict[float, Any], long: dict[float, Any]) -> dict[str, Any]:
    """Return what one of the two measures chooses, how surely, and what it brings later."""
    rates = list(short)
    if by == "τ":
        tops_RP, bottoms_RP = (np.array([short[rate][0][at] for rate in rates], float) for at in (0, 1))
    else:  # the smaller, the better
        tops_RP = -np.array([short[rate][1] for rate in rates])
        bottoms_RP = np.ones_like(tops_RP)
    draws_DP = np.random.default_rng(0).integers(0, tops_RP.shape[1], (DRAWS, tops_RP.shape[1]))
    scores_R = tops_RP.sum(1) / bottoms_RP.sum(1)
    again_RD = tops_RP[:, draws_DP].sum(2) / bottoms_RP[:, draws_DP].sum(2)
    best = int(scores_R.argmax())
    taus = [ratio(long[rate]) for rate in rates]
    return {
        "family": family, "share": share, "by": by, "rates": rates, "scores": np.abs(scores_R).tolist(),
        "chosen": rates[best], "sure": float((again_RD.argmax(0) == best).mean()), "tau_later": taus[best],
        "taus_later": taus,
    }


if __name__ == "__main__":
    main(run)
