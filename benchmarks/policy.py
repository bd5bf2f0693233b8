"""The policy against what it chooses from, and against rules of others: tokens a second by load, prompt and task.

    python benchmarks/policy.py --concurrency 1 4 16 --prompts 64 --tasks mixed

Every cell is a number of texts that are written at a time, a length of their prompts and a task. In a cell these take
turns in random order, all on one engine:

- no speculation: requests that never draft;
- the policy that `serve` and `generate` take, fitted to this machine, over their drafter `lookup-first`: prompt lookup,
  and the speculator where that finds nothing;
- fixed plans: chains of the speculator and of prompt lookup, and `lookup-first` by its own plan and by the same one
  without the speculator, each the same for every row at every step;
- a table of depths by the number of rows, as vLLM's `num_speculative_tokens_per_batch_size` has it (`--table`);
- a budget of guesses a step that the rows share in equal parts (`--budgets`; the best of them is told).

Prompts are read first, all of them in one step, and beginnings that were read before are not read again; cells whose
prompts have more tokens together than `--most-prompt-tokens` are left out. Timed is the time in which all texts are
written: from when the last of them has begun to when the first has all its tokens, which are counted. Ratios are paired
by round, with 95 % intervals. A policy learns while it serves: `--before` lets it write from prompts of the same set
first, as a server that is not new has done. The best fixed plan is the best of this very cell, found afterwards: no
rule can know it beforehand, and by chance alone the best of several looks better than it is. So the policy is also held
against the plan that is best in all other rounds, round by round, as somebody would choose it who knows this load.
"""

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common import arguments, as_json, finish, main, open_drafter, print_table, say, span, start
from rich.console import Console

from draftsmith import assets
from draftsmith.drafters.lookup.lookup_first import LookupFirst
from draftsmith.drafters.registry import load_drafter
from draftsmith.engine import Choice, Engine, Fixed, Load, Policy, RowHistory
from draftsmith.engine.requests.request import Request
from draftsmith.evaluation.measuring.interleaving import interleaved
from draftsmith.evaluation.measuring.intervals import ratio_interval
from draftsmith.evaluation.prompts import Prompt, cut, embedded_prompts, tokenizer_of
from draftsmith.evaluation.reporting.result_files import write_json
from draftsmith.plan import NEVER_SURE, NO_DRAFT, Plan
from draftsmith.targets import Target
from draftsmith.targets.token_ids import text_ids
from draftsmith.types import DraftsmithError, SamplingParams
from draftsmith.workflows.fitting import fitted_engines

SPECULATOR, LOOKUP, BOTH = "speculator", "ngram", "lookup-first"
NONE, POLICY, TABLE = "no speculation", "policy", "table by batch size"
TOLD = (0.98, 0.95)
"""A cell whose speed is a smaller share of the best fixed plan's is named."""


class ByRows(Policy):
    """A depth for every number of rows: (least, most, depth) ranges; no draft outside of them."""

    def __init__(self, table: Sequence[tuple[int, int, int]]) -> None:
        self._table = tuple(table)
        depths = dict.fromkeys((0, *(depth for *_, depth in table)))
        self._of = {depth: Choice(Plan((1,) * depth), SPECULATOR) for depth in depths}

    @property
    def choices(self) -> tuple[Choice, ...]:
        return tuple(self._of.values())

    def choose(self, load: Load, rows: Sequence[RowHistory]) -> Sequence[Choice]:
        depth = next((deep for least, most, deep in self._table if least <= load.decoding <= most), 0)
        return [self._of[depth]] * len(rows)


class Budget(Policy):
    """So many guesses a step, in equal chains for all rows, none longer than `deepest`."""

    def __init__(self, guesses: int, deepest: int) -> None:
        self._guesses, self._deepest = guesses, deepest
        self._of = [Choice(Plan((1,) * depth), SPECULATOR) for depth in range(deepest + 1)]

    @property
    def choices(self) -> tuple[Choice, ...]:
        return tuple(self._of)

    def choose(self, load: Load, rows: Sequence[RowHistory]) -> Sequence[Choice]:
        return [self._of[min(self._deepest, self._guesses // max(1, load.decoding))]] * len(rows)


class Switched(Policy):
    """Answers as one of several policies does, whichever is current, so that all of them share an engine."""

    def __init__(self, policies: Mapping[str, Policy]) -> None:
        self.policies = dict(policies)
        self.current = next(iter(policies))
        self._choices = tuple(dict.fromkeys(choice for one in policies.values() for choice in one.choices))

    @property
    def choices(self) -> tuple[Choice, ...]:
        return self._choices

    @property
    def holds(self) -> int:
        return self.policies[self.current].holds

    def timed(self, seconds: float) -> None:
        self.policies[self.current].timed(seconds)

    def choose(self, load: Load, rows: Sequence[RowHistory]) -> Sequence[Choice]:
        return self.policies[self.current].choose(load, rows)


@dataclass(frozen=True)
class Run:
    """One setting on one set of prompts.

    Args:
        seconds, tokens: while all texts were written.
        drafted, accepted, steps: guesses that were verified and that stayed, and steps of a text.
        texts: what was written until then.
    """

    seconds: float
    tokens: int
    drafted: int
    accepted: int
    steps: int
    texts: list[list[int]]

    @property
    def seconds_a_token(self) -> float:
        """What is compared."""
        return self.seconds / self.tokens


def write(
    engine: Engine, prompts: Sequence[list[int]], new_tokens: int, plan: Plan | None, temperature: float = 0.0,
    seed: int = 1,
) -> Run:
    """Write so many tokens after every prompt until the first text has all of them; time it while all are written.

    Raises:
        DraftsmithError: a text failed, or was over before the last had begun.
    """
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True, temperature=temperature, seed=seed)
    # Each comes by itself, as from clients of a server.
    requests = [request for prompt in prompts for request in engine.admit_call([prompt], params, plan)]
    core = engine.core
    for request in requests:
        core.add(request)
    try:
        while any(not request.tokens for request in requests):
            core.step()
            _check(requests)
        if any(request.finish_reason is not None for request in requests):
            raise DraftsmithError("a text was over before the last had begun; ask for more --new-tokens.")
        before, steps = sum(len(request.tokens) for request in requests), sum(len(one.accepted) for one in requests)
        stayed, drafted = sum(sum(one.accepted) for one in requests), sum(one.drafted for one in requests)
        begun = time.perf_counter()
        while all(request.finish_reason is None for request in requests):
            core.step()
        seconds = time.perf_counter() - begun
        _check(requests)
        return Run(
            seconds, sum(len(request.tokens) for request in requests) - before,
            sum(one.drafted for one in requests) - drafted, sum(sum(one.accepted) for one in requests) - stayed,
            sum(len(one.accepted) for one in requests) - steps, [list(request.tokens) for request in requests],
        )
    finally:
        for request in requests:
            core.abort(request.id)


def _check(requests: Sequence[Request]) -> None:
    error = next((one.error for one in requests if one.error is not None), None)
    if error is not None:
        raise DraftsmithError(error)


def prompts_of(target: Target, task: str, tokens: int, count: int, seed: int) -> list[list[int]]:
    """Return held-out prompts; "mixed" takes code and prose in turns. A text that is too short goes on with others."""
    if task == "mixed":
        both = [prompts_of(target, one, tokens, -(-count // 2), seed) for one in ("code", "prose")]
        return [prompt for pair in zip(*both, strict=True) for prompt in pair][:count]
    texts = embedded_prompts(task)
    random.Random(seed).shuffle(texts)
    lengths, long = [len(text_ids(tokenizer_of(target), one.text)) for one in texts], []
    for at, one in enumerate(texts):
        parts, length = [one], lengths[at]
        for other in range(at + 1, at + len(texts)):
            if length < tokens:
                parts.append(texts[other % len(texts)])
                length += lengths[other % len(texts)]
        long.append(one if len(parts) == 1 else Prompt(task, "", "\n\n".join(part.text for part in parts)))
    return cut(target, long, tokens, count)


def read_table(words: Sequence[str]) -> list[tuple[int, int, int]]:
    """Read "1-2:5": from one row to two, chains of five."""
    found = []
    for word in words:
        rows, _, depth = word.partition(":")
        least, _, most = rows.partition("-")
        try:
            found.append((int(least), int(most or least), int(depth)))
        except ValueError:
            raise DraftsmithError(f"the entry {word!r} of --table cannot be read; write it like 1-2:5.") from None
    return found


def cell_of(
    engine: Engine, switched: Switched, plain: set[str], prompts: Sequence[list[int]], rows: int, args: Any,
    rng: random.Random,
) -> dict[str, list[Run]]:
    """Run every setting in every round; a round has prompts of its own."""
    ways = [NONE, *switched.policies]
    found: dict[str, list[Run]] = {name: [] for name in ways}
    for number, name, timed in interleaved(ways, args.rounds, rng, warmups=args.warmups):
        at = (number % args.rounds) * rows
        if name != NONE:
            switched.current = name
        own = NO_DRAFT if name == NONE or name in plain else None
        one = write(engine, prompts[at : at + rows], args.new_tokens, own)
        if timed:
            found[name].append(one)
    return found


def told_of(found: Mapping[str, list[Run]], fixed: Sequence[str], budgets: Sequence[str], seed: int) -> dict[str, Any]:
    """Return the figures of a cell."""
    seconds = {name: [run.seconds_a_token for run in runs] for name, runs in found.items()}
    usual = {name: statistics.fmean(values) for name, values in seconds.items()}
    best, budget = min((NONE, *fixed), key=usual.__getitem__), min(budgets, key=usual.__getitem__)
    chosen_s = []  # of the plan that is best in all other rounds
    for at in range(len(seconds[NONE])):
        others = {name: sum(seconds[name]) - seconds[name][at] for name in (NONE, *fixed)}
        chosen_s.append(seconds[min(others, key=others.__getitem__)][at])
    same = all(
        ours[: len(theirs)] == theirs[: len(ours)]
        for runs in found.values() for run, other in zip(runs, found[NONE], strict=True)
        for ours, theirs in zip(run.texts, other.texts, strict=True)
    )
    return {
        "best_fixed": best, "best_budget": budget, "identical": same,
        "tokens_a_second": {name: 1 / value for name, value in usual.items()},
        "tokens_a_step": {
            name: 1 + sum(run.accepted for run in runs) / max(1, sum(run.steps for run in runs))
            for name, runs in found.items()
        },
        "over_none": {
            name: as_json(ratio_interval(seconds[NONE], values, seed=seed)) for name, values in seconds.items()
        },
        "policy_over": {
            name: as_json(ratio_interval(seconds[name], seconds[POLICY], seed=seed))
            for name in {best, budget, TABLE, NONE}
        },
        "policy_over_chosen": as_json(ratio_interval(chosen_s, seconds[POLICY], seed=seed)),
        "spans": {
            "none": span(ratio_interval(seconds[NONE], seconds[POLICY], seed=seed)),
            "best": span(ratio_interval(seconds[best], seconds[POLICY], seed=seed)),
            "chosen": span(ratio_interval(chosen_s, seconds[POLICY], seed=seed)),
            "table": span(ratio_interval(seconds[NONE], seconds[TABLE], seed=seed)),
            "budget": span(ratio_interval(seconds[NONE], seconds[budget], seed=seed)),
        },
    }


def run() -> None:
    """Measure every cell, and name those where the policy loses."""
    parser = arguments(__doc__, "policy")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 512, 1900], help="tokens of a prompt")
    parser.add_argument(
        "--most-prompt-tokens", type=int, default=32_768, help="of all prompts of a cell, which are read in one step"
    )
    parser.add_argument("--tasks", nargs="+", default=["code", "prose", "mixed"])
    parser.add_argument("--chains", type=int, nargs="+", default=[1, 2, 3, 5], help="depths of the fixed plans")
    parser.add_argument("--table", nargs="+", default=["1-2:5", "3-4:3", "5-8:2", "9-16:1"], help="rows:depth")
    parser.add_argument("--budgets", type=int, nargs="+", default=[4, 8, 16], help="guesses a step, of all rows")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmups", type=int, default=1)
    parser.add_argument("--before", type=int, default=0, help="rounds of the policy alone, before all others")
    args = start(parser)
    target = Target.from_pretrained(args.target or assets.demo_target(), dtype=args.dtype, device=args.device)
    speculator, lookup = open_drafter(args.drafter, target), load_drafter(LOOKUP, target)
    both, deepest = LookupFirst(lookup, speculator), speculator.max_depth
    drafters = {SPECULATOR: speculator, LOOKUP: lookup, BOTH: both}
    names = {BOTH: f"{BOTH}:lookup={LOOKUP},then={args.drafter or assets.demo_drafter()}"}
    fixed: dict[str, Policy] = {
        f"{name}, chain of {depth}": Fixed(Plan((1,) * depth), name)
        for name in (SPECULATOR, LOOKUP) for depth in args.chains if name != SPECULATOR or depth <= deepest
    }
    fixed[f"{BOTH}, its own plan"] = Fixed(both.default_plan(), BOTH)
    fixed[f"{BOTH}, lookup alone"] = Fixed(replace(both.default_plan(), confidence=NEVER_SURE), BOTH)
    budgets: dict[str, Policy] = {f"budget of {guesses}": Budget(guesses, deepest) for guesses in args.budgets}
    rng, cells, rows, below = random.Random(args.seed), [], [], []
    for count in args.concurrency:
        for tokens in args.prompts:
            if count * tokens > args.most_prompt_tokens:
                say(f"{count} at a time, {tokens} prompt tokens: left out, see --most-prompt-tokens")
                continue
            length = tokens + args.new_tokens
            # Prompts that are read in pieces would let the first texts be over before the last begins.
            sizes = {"max_batch": count, "max_length": length, "piece_tokens": count * tokens}
            bare = Engine(target, {BOTH: both}, **sizes)
            fitted = fitted_engines(bare, (count,), names, Console(stderr=True))[count].core.policy
            policies = {POLICY: fitted, TABLE: ByRows(read_table(args.table)), **fixed, **budgets}
            switched = Switched(policies)
            # What never drafts need not be known to any drafter, and so costs no more than no speculation.
            plain = {name for name, one in policies.items() if not any(choice.plan.depth for choice in one.choices)}
            engine = Engine(target, drafters, policy=switched, **sizes)
            for task in args.tasks:
                begun = time.perf_counter()
                prompts = prompts_of(target, task, tokens, count * args.rounds, args.seed)
                switched.current = POLICY
                others = prompts_of(target, task, tokens, count * args.before, args.seed + 1)
                for at in range(0, len(others), count):
                    write(engine, others[at : at + count], args.new_tokens, None)
                found = cell_of(engine, switched, plain, prompts, count, args, rng)
                told = told_of(found, list(fixed), list(budgets), args.seed)
                name = f"{count} at a time, {tokens} prompt tokens, {task}"
                spans, share = told.pop("spans"), told["policy_over"][told["best_fixed"]]["value"]
                cells.append({"concurrency": count, "prompt_tokens": tokens, "task": task, **told})
                rows.append([
                    str(count), str(tokens), task, f"{told['tokens_a_second'][NONE]:.0f}", spans["none"],
                    told["best_fixed"], spans["best"], spans["chosen"], spans["table"],
                    f"{told['best_budget']}: {spans['budget']}",
                    "yes" if told["identical"] else "no",
                ])
                below += [(name, share)] if share < TOLD[0] else []
                write_json(args.json, {"cells": cells})  # what is cut short keeps what it has
                say(f"{name}: policy {spans['none']} of none, {spans['best']} of {told['best_fixed']}, "
                    f"{spans['chosen']} of those chosen by other rounds, {time.perf_counter() - begun:.0f} s")
    print_table(
        f"The policy, {target.name}, {args.dtype}, {args.new_tokens} new tokens, {args.rounds} rounds",
        ["at a time", "prompt", "task", "none, tokens/s", "policy/none", "best fixed plan", "policy/best fixed",
         "policy/chosen", "table/none", "best budget/none", "texts equal"],
        rows,
    )
    for name, share in sorted(below, key=lambda item: item[1]):
        print(f"below {TOLD[1] if share < TOLD[1] else TOLD[0]} of the best fixed plan: {name} ({share:.3f})")
    finish(args, {"cells": cells, "below": [list(item) for item in below]}, target=target.name, dtype=args.dtype)


if __name__ == "__main__":
    main(run)
