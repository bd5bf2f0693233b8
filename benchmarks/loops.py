"""How many of a target's continuations end in a loop, by task, greedily and sampled.

    python benchmarks/loops.py
    python benchmarks/loops.py --target FOLDER --prompts runs/demo-data/held-out.jsonl --json loops.json

Prompts are the beginnings of held-out texts, 48 tokens each: the embedded ones, and others with --prompts (JSONL with
`task` and `text`); `edit` is a piece of code with its beginning again. A text ends after 100 new tokens or at the
target's end token. It ends in a loop if its last tokens are the same ones at least three times in a row, 24 tokens or
more (`draftsmith.evaluation.measuring.loops`). Beside that: the share of runs of four tokens that stood in the same
text before, and the share of texts that ended by themselves. The JSON has a few texts of every task to read. Intervals
are 95 %, Wilson's for shares of texts and the bootstrap's for means.
"""

from pathlib import Path
from statistics import NormalDist

from common import arguments, as_json, finish, main, print_table, start

from draftsmith import assets
from draftsmith.engine import Engine
from draftsmith.evaluation.comparison.questions import Settings, gather, tasks_of
from draftsmith.evaluation.measuring.intervals import Interval, mean_interval
from draftsmith.evaluation.measuring.loops import loop_period, repeated_share
from draftsmith.evaluation.prompts import embedded_prompts, load_prompts
from draftsmith.targets import Target
from draftsmith.types import Completion, SamplingParams, require_finished


def share(hits: int, total: int, level: float = 0.95) -> Interval:
    """Return a share of counted things with Wilson's interval."""
    z = NormalDist().inv_cdf((1 + level) / 2)
    centre = (hits + z * z / 2) / (total + z * z)
    half = z / (total + z * z) * (hits * (total - hits) / total + z * z / 4) ** 0.5
    return Interval(hits / total, max(0.0, centre - half), min(1.0, centre + half))


def judge(completions: list[Completion], examples: int) -> dict:
    """Return what is said of the continuations of one task at one temperature."""
    periods = [loop_period(each.tokens) for each in completions]
    ended = sum(each.finish_reason == "stop" for each in completions)
    return {
        "texts": len(completions),
        "looping": as_json(share(sum(period is not None for period in periods), len(periods))),
        "repeated": as_json(mean_interval([repeated_share(each.tokens) for each in completions])),
        "ended": as_json(share(ended, len(completions))),
        "examples": [
            {"text": each.text, "tokens": len(each.tokens), "loop": period}
            for each, period in list(zip(completions, periods, strict=True))[:examples]
        ],
    }


def percent(value: dict) -> str:
    """Write a share with its interval in percent."""
    low, high = value["ci95"]
    return f"{100 * value['value']:.0f} % ({100 * low:.0f}–{100 * high:.0f})"


def run() -> None:
    """Decode, count and write."""
    parser = arguments(__doc__, "loops")
    parser.add_argument("--prompts", type=Path, help="more prompts, JSONL with `task` and `text`")
    parser.add_argument("--count", type=int, default=40, help="prompts a task")
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=100)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--examples", type=int, default=4, help="texts of each task and temperature for the JSON")
    args = start(parser)
    target = Target.from_pretrained(args.target or str(assets.demo_target()), dtype=args.dtype, device=args.device)
    embedded = embedded_prompts()
    sets = {"": embedded} | ({f"{args.prompts.stem}: ": load_prompts(args.prompts)} if args.prompts else {})
    engine = Engine(target, max_batch=args.batch, max_length=8 * args.prompt_tokens + args.new_tokens)
    cells = []
    for label, prompts in sets.items():
        settings = Settings(
            tuple(tasks_of(prompts)), args.count, args.count, args.prompt_tokens, args.new_tokens, seed=args.seed
        )
        for task, questions in gather(target, prompts, prompts, settings).items():
            for temperature in args.temperatures:
                params = [
                    SamplingParams(temperature=temperature, max_tokens=args.new_tokens, seed=args.seed + index)
                    for index in range(len(questions.measured))
                ]
                completions = require_finished(engine.generate(questions.measured, params))
                cells.append(
                    {"task": f"{label}{task}", "temperature": temperature, **judge(completions, args.examples)}
                )
    print_table(
        f"{target.name}: continuations of {args.prompt_tokens} tokens by up to {args.new_tokens}",
        ["task", "temperature", "texts", "end in a loop", "repeated runs of four", "ended by themselves"],
        [
            [cell["task"], f"{cell['temperature']:g}", str(cell["texts"]),
             *(percent(cell[name]) for name in ("looping", "repeated", "ended"))]
            for cell in cells
        ],
    )
    finish(args, {"cells": cells}, target=target.name, dtype=args.dtype)


if __name__ == "__main__":
    main(run)
