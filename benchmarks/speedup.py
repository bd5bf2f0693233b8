"""Greedy decoding with drafts at batch 1 against the own baseline in every level and against transformers' `generate`.

    python benchmarks/speedup.py

Levels, plans and transformers run interleaved in one process on the same prompts. The plan of each task and level is
chosen on a tuning subset and reported on other prompts. Speed-ups are ratios of wall-clock of whole calls, prefill
included, paired by prompt, with 95 % intervals over prompts. "Realised" is the speed-up over the own baseline of the
same level, divided by τ: the share of the saved forwards that arrived as time. Shapes: D depth.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from common import (
    NATIVE,
    PLAIN,
    TRANSFORMERS,
    Setting,
    arguments,
    as_json,
    bootstrap,
    compile_level,
    finish,
    interleave,
    main,
    make_prompts,
    open_drafter,
    plans_within,
    pooled_tau,
    print_table,
    same_texts,
    say,
    span,
    split_levels,
    start,
    statistics_of,
    tokens_of,
    walls,
    with_engine,
    with_peer,
)

from draftsmith import assets
from draftsmith.engine import Engine
from draftsmith.evaluation.bench import TimedCall
from draftsmith.evaluation.measuring.intervals import ratio_interval
from draftsmith.evaluation.measuring.peers import transformers_peer
from draftsmith.targets import Target

PLANS = ("1", "1,1", "1,1,1", "1,1,1,1", "1,1,1,1,1", "2,1", "3,1/3", "2,1,1")


def key(level: str, plan: str) -> str:
    """Name a setting."""
    return f"{level} {plan}"


def choose(runs: Mapping[str, Sequence[TimedCall]], levels: Sequence[str], plans: Sequence[str]) -> dict[str, str]:
    """Return the plan that took the least time in each level."""
    return {level: min(plans, key=lambda plan: walls(runs[key(level, plan)]).sum()) for level in levels}


def figures(
    mine: Sequence[TimedCall], baseline: Sequence[TimedCall], fastest: Sequence[TimedCall], theirs: Sequence[TimedCall],
    seed: int
) -> dict[str, Any]:
    """Return what one setting brought on the reported prompts."""
    seconds, base = walls(mine), walls(baseline)
    new_tokens = tokens_of(mine)
    statistics = statistics_of(mine)
    steps = np.array([s.steps for s in statistics])
    tau = pooled_tau(np.array([s.accepted for s in statistics]), steps)
    decode = [s.decode_s for s in statistics]
    base_decode = [s.decode_s for s in statistics_of(baseline)]
    depth = max(len(s.accepted_by_depth) for s in statistics)
    reached = np.array([s.accepted_by_depth + [0] * (depth - len(s.accepted_by_depth)) for s in statistics])
    each = new_tokens / len(mine)
    return {
        "tokens_per_second": as_json(bootstrap(len(mine), lambda t: each / float(seconds[t].mean()), seed)),
        "ms_per_token": as_json(bootstrap(len(mine), lambda t: 1000 * float(seconds[t].mean()) / each, seed)),
        "tau": as_json(bootstrap(len(mine), tau, seed)),
        "accepted_by_depth": (reached.sum(axis=0) / steps.sum()).tolist(),
        "speedup_over_same_level": as_json(ratio_interval(base, seconds, seed=seed)),
        "speedup_of_decoding_over_same_level": as_json(ratio_interval(base_decode, decode, seed=seed)),
        "speedup_over_fastest_baseline": as_json(ratio_interval(walls(fastest), seconds, seed=seed)),
        "speedup_over_transformers": as_json(ratio_interval(walls(theirs), seconds, seed=seed)),
        "realised": as_json(
            bootstrap(len(mine), lambda t: float(base[t].mean() / seconds[t].mean()) / tau(t), seed)
        ),
        "generated_tokens": new_tokens,
        "generated_tokens_baseline": tokens_of(baseline),
        "wall_s": seconds.tolist(),
    }


def written(cell: Mapping[str, Any], name: str, digits: int = 2) -> str:
    """Show one figure of a cell with its interval."""
    low, high = cell[name]["ci95"]
    return f"{cell[name]['value']:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def run() -> None:
    """Tune, measure and write."""
    parser = arguments(__doc__, "speedup")
    parser.add_argument("--tasks", default="code,prose,dialogue")
    parser.add_argument("--levels", default="native,off")
    parser.add_argument("--plans", nargs="+", default=list(PLANS))
    parser.add_argument("--tuning", type=int, default=8, help="prompts a task to choose the plan on")
    parser.add_argument("--prompts", type=int, default=32, help="prompts a task to report on")
    parser.add_argument("--warmups", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=100)
    parser.add_argument("--all-plans", action="store_true", help="report on every plan, not only on the chosen ones")
    args = start(parser)
    name = args.target or str(assets.demo_target())
    levels, engines, drafter = split_levels(args.levels), {}, None
    for level in levels:
        # A target of its own: native layers are those of a whole target.
        target = Target.from_pretrained(name, dtype=args.dtype, device=args.device, native=level == NATIVE)
        drafter = open_drafter(args.drafter, target)
        length = args.prompt_tokens + args.new_tokens
        engines[level] = Engine(
            target, drafter, max_batch=1, max_length=length, share_prefixes=False, compile=compile_level(level)
        )
    plans = plans_within([PLAIN, *args.plans], drafter)
    drafting = [text for text in plans if text != PLAIN]
    peer = transformers_peer(name, target)
    wide = Target.from_pretrained(name, dtype="fp32", device=args.device)
    compiling = {}
    for level in levels:
        compiling[level] = sum(engines[level].prepare(1, plan) for plan in plans.values())
        say(f"level {level}: {len(plans)} plans ready after {compiling[level]:.1f} s")

    settings: dict[str, Setting] = {TRANSFORMERS: with_peer(peer, args.new_tokens)}
    for level in levels:
        settings |= {key(level, text): with_engine(engines[level], p, args.new_tokens) for text, p in plans.items()}
    tasks, rows = {}, []
    for task in args.tasks.split(","):
        prompts = make_prompts(target, task, args.prompt_tokens, args.tuning + args.prompts, args.seed)
        tuning, reported = prompts[: args.tuning], prompts[args.tuning :]
        tried = interleave(settings, tuning, args.warmups, args.seed, f"{task}, tuning,")
        chosen = choose(tried, levels, drafting)
        best_level = min(levels, key=lambda level: walls(tried[key(level, chosen[level])]).sum())
        kept = {
            setting: decode
            for setting, decode in settings.items()
            if args.all_plans
            or setting == TRANSFORMERS
            or any(setting in (key(level, PLAIN), key(level, chosen[level])) for level in levels)
        }
        runs = interleave(kept, reported, args.warmups, args.seed + 1, task)
        fastest = min(levels, key=lambda level: walls(runs[key(level, PLAIN)]).sum())
        cells = []
        for level in levels:
            for text in plans:
                mine = runs.get(key(level, text))
                if mine is None:
                    continue
                baseline = runs[key(level, PLAIN)]
                cell = {
                    "level": level,
                    "plan": text,
                    "chosen_in_level": text == chosen[level],
                    **figures(mine, baseline, runs[key(fastest, PLAIN)], runs[TRANSFORMERS], args.seed),
                    "texts_against_baseline": same_texts(mine, baseline, engines[level].target, wide),
                }
                cells.append(cell)
                same = cell["texts_against_baseline"]
                rows.append(
                    [task, level, text + (" *" if (level, text) == (best_level, chosen[best_level]) else ""),
                     *(written(cell, figure) for figure in (
                         "tokens_per_second", "tau", "speedup_over_same_level", "speedup_over_fastest_baseline",
                         "speedup_over_transformers", "realised")),
                     f"{same['identical']} + {same['ties']} of {len(mine)}"]
                )
        theirs = walls(runs[TRANSFORMERS])
        speed = bootstrap(len(theirs), lambda t, s=theirs: args.new_tokens / float(s[t].mean()), args.seed)
        rows.append([task, TRANSFORMERS, "", span(speed), *[""] * 6])
        tasks[task] = {
            "tuning_prompts": len(tuning),
            "prompts": len(reported),
            "best": {"level": best_level, "plan": chosen[best_level]},
            "chosen": chosen,
            "fastest_baseline": fastest,
            "tuning_wall_s": {setting: walls(measured).tolist() for setting, measured in tried.items()},
            "transformers": {
                "tokens_per_second": as_json(speed),
                "generated_tokens": tokens_of(runs[TRANSFORMERS]),
                "wall_s": theirs.tolist(),
            },
            "cells": cells,
        }
        print(f"{task}: best on {len(tuning)} tuning prompts: plan {chosen[best_level]}, level {best_level}")
    print_table(
        f"Greedy, batch 1, {target.name}, {args.dtype}, prompt {args.prompt_tokens}, {args.new_tokens} new tokens, "
        f"{args.prompts} prompts a task (95 % intervals; * best on the tuning prompts)",
        ["task", "level", "plan", "tokens/s", "τ", "× same level", "× fastest own baseline", "× transformers",
         "realised", "same text + ties"],
        rows,
    )
    finish(args, {"compile_seconds": compiling, "tasks": tasks}, target=target.name, dtype=args.dtype)


if __name__ == "__main__":
    main(run)
