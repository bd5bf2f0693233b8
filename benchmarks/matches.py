"""How often guesses that were looked up stay, by how many of the newest tokens stood before: why plans have a `factor`.

    python benchmarks/matches.py

The target writes held-out texts plainly. At every place of them, prompt lookup says what it would guess there and how
long the match is; nothing is timed. A guess stays where it is right and all before it are.
"""

from collections import defaultdict
from typing import Any

from common import arguments, finish, main, print_table, start
from policy import prompts_of

from draftsmith import assets
from draftsmith.drafters.lookup.ngram import NgramIndex
from draftsmith.drafters.lookup.ngram_config import NgramConfig
from draftsmith.engine import Engine
from draftsmith.targets import Target
from draftsmith.types import SamplingParams

LENGTHS = {"none": (0, 0), "2": (2, 2), "3": (3, 3), "4–5": (4, 5), "6–7": (6, 7), "8–11": (8, 11), "12–15": (12, 15),
           "16–23": (16, 23), "24 and more": (24, 10**6)}
LONGEST, SHOWN = 24, (1, 2, 3, 4, 6, 8)


def run() -> None:
    """Look guesses up in every text, and hold them against what follows."""
    parser = arguments(__doc__, "matches")
    parser.add_argument("--tasks", nargs="+", default=["code", "prose"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--texts", type=int, default=128, help="a task")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    args = start(parser)
    target = Target.from_pretrained(args.target or assets.demo_target(), dtype=args.dtype, device=args.device)
    config = NgramConfig()
    engine = Engine(target, max_batch=args.batch, max_length=args.prompt_tokens + args.new_tokens + config.guesses)
    cells: list[dict[str, Any]] = []
    rows = []
    for temperature in args.temperatures:
        for task in args.tasks:
            prompts = prompts_of(target, task, args.prompt_tokens, args.texts, args.seed)
            most = args.new_tokens + config.guesses
            params = SamplingParams(max_tokens=most, ignore_eos=True, temperature=temperature, seed=args.seed)
            stayed: dict[str, list[int]] = defaultdict(list)
            for prompt, found in zip(prompts, engine.generate(prompts, params), strict=True):
                for length, right in looked_up(prompt, found.tokens, args.new_tokens, config):
                    stayed[next(name for name, (low, high) in LENGTHS.items() if low <= length <= high)].append(right)
            places = sum(map(len, stayed.values()))
            for name in LENGTHS:
                if not (some := stayed[name]):
                    continue
                shares = [sum(right >= guess for right in some) / len(some) for guess in range(1, config.guesses + 1)]
                cells.append({
                    "task": task, "temperature": temperature, "matched": name, "places": len(some),
                    "share": len(some) / places, "stayed": shares,
                })
                shown = [f"{shares[guess - 1]:.2f}" for guess in SHOWN] if name != "none" else ["–"] * len(SHOWN)
                rows.append([f"{temperature:g}", task, name, f"{len(some) / places:.2f}", *shown])
    print_table(
        f"Share of guesses that stay by tokens that matched, {target.name}, {args.texts} texts a task",
        ["temperature", "task", "tokens matched", "share of places", *(f"guess {guess}" for guess in SHOWN)], rows,
    )
    finish(args, {"cells": cells}, target=target.name, dtype=args.dtype)


def looked_up(prompt: list[int], text: list[int], places: int, config: NgramConfig) -> list[tuple[int, int]]:
    """Return, for every place of a text, how many tokens matched and how many guesses in a row are right."""
    index, found = NgramIndex(config.min_length, config.max_length), []
    index.extend(prompt)
    for at in range(places):
        where = index.places(config.match, 1)
        length = index.worth(where[0], LONGEST, 1.0) if where else 0
        guesses = index.copy(where[0], config.guesses) if where else []
        pairs = zip(guesses, text[at:], strict=False)
        right = next((number for number, (one, other) in enumerate(pairs) if one != other), len(guesses))
        found.append((length, right))
        index.extend([text[at]])
    return found


if __name__ == "__main__":
    main(run)
