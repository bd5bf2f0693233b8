"""What drafts cost and bring in a text of which, and of whose like, nothing is known yet: one text at a time.

    python benchmarks/first_texts.py

Every prompt is written on by three settings in random order, on one engine: without drafts, by a policy that has seen
no text (what `generate` has in a process of its own), and by one that has written all texts before (what a server
has). Timed is from the first token to the last; ratios to no speculation are paired by prompt, with 95 % intervals.
"""

import random

from common import arguments, as_json, finish, main, print_table, say, span, start
from policy import NONE, Run, Switched, prompts_of, write
from rich.console import Console

from draftsmith import assets
from draftsmith.drafters.registry import embedded, load_drafter
from draftsmith.engine import Engine
from draftsmith.engine.fitted import Fitted
from draftsmith.evaluation.measuring.intervals import ratio_interval
from draftsmith.plan import NO_DRAFT
from draftsmith.targets import Target
from draftsmith.types import DraftsmithError
from draftsmith.workflows.fitting import fitted_engines
from draftsmith.workflows.models import name_of

FIRST, LATER = "nothing seen", "all texts before seen"
WARMUPS = 3


def run() -> None:
    """Measure every task at every temperature."""
    parser = arguments(__doc__, "first_texts")
    parser.add_argument("--tasks", nargs="+", default=["code", "prose", "dialogue"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--prompts", type=int, default=24)
    args = start(parser)
    target = Target.from_pretrained(args.target or assets.demo_target(), dtype=args.dtype, device=args.device)
    word = str(args.drafter) if args.drafter else embedded()
    sizes = {"max_batch": 1, "max_length": args.prompt_tokens + max(args.new_tokens)}
    bare = Engine(target, load_drafter(word, target), **sizes)
    found = fitted_engines(bare, (1,), word, Console(stderr=True))
    if not found or found[1].core.policy.is_fixed:
        raise DraftsmithError(f"nothing is drafted by {word} here, so there is nothing to measure.")
    fitted = found[1].core.policy
    assert isinstance(fitted, Fitted)

    def fresh() -> Fitted:
        return Fitted(*fitted.known, learns_times=True)

    rng, cells, rows = random.Random(args.seed), [], []
    for temperature in args.temperatures:
        for tokens in args.new_tokens:
            for task in args.tasks:
                switched = Switched({FIRST: fresh(), LATER: fresh()})
                engine = Engine(target, bare.core.drafters, policy=switched, **sizes)
                prompts = prompts_of(target, task, args.prompt_tokens, args.prompts, args.seed)
                runs: dict[str, list[Run]] = {name: [] for name in (NONE, FIRST, LATER)}
                for at in range(-WARMUPS, len(prompts)):
                    switched.policies[FIRST] = fresh()
                    for name in rng.sample(list(runs), len(runs)):
                        switched.current = FIRST if name == NONE else name
                        own = NO_DRAFT if name == NONE else None
                        one = write(engine, [prompts[at]], tokens, own, temperature, seed=args.seed + at + WARMUPS)
                        if at >= 0:
                            runs[name].append(one)
                same = all(
                    one.texts == other.texts for name in (FIRST, LATER)
                    for one, other in zip(runs[name], runs[NONE], strict=True)
                )
                seconds = {name: [one.seconds_a_token for one in some] for name, some in runs.items()}
                cell = {"temperature": temperature, "new_tokens": tokens, "task": task, "identical": same, "ways": {}}
                for name in (FIRST, LATER):
                    over = ratio_interval(seconds[NONE], seconds[name], seed=args.seed)
                    steps = sum(one.steps for one in runs[name])
                    drafted = sum(one.drafted for one in runs[name])
                    stayed = sum(one.accepted for one in runs[name])
                    lowest = min(a / b for a, b in zip(seconds[NONE], seconds[name], strict=True))
                    cell["ways"][name] = {
                        "over_none": as_json(over), "lowest": lowest, "drafted": drafted / steps,
                        "accepted": stayed / steps,
                    }
                    rows.append([
                        f"{temperature:g}", str(tokens), task, name, span(over), f"{lowest:.2f}",
                        f"{drafted / steps:.2f}", f"{stayed / steps:.2f}", "yes" if same else "no",
                    ])
                cells.append(cell)
                say(" | ".join(rows[-2]) + "  ||  " + " | ".join(rows[-1][3:]))
    print_table(
        f"One text at a time, {target.name}, {args.dtype}, {args.prompts} prompts a line",
        [
            "temperature", "new tokens", "task", "policy", "over none", "lowest", "guesses a step", "stayed",
            "same texts",
        ],
        rows,
    )
    finish(args, {"cells": cells}, target=target.name, drafter=name_of(word), dtype=args.dtype)


if __name__ == "__main__":
    main(run)
