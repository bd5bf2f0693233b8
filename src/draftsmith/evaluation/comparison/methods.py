"""Draft families against each other: the same target, prompts and rounds for all.

Two things are measured of every method, task and temperature. How well it guesses: τ on the same prompts with one
chain and one tree for all, and at temperature 1 with a sampled chain as well; cost is left out. What that is worth
here: the time of one prompt at a time with the shape of draft that this method is fastest with, every round together
with plain decoding and all others in random order. A shape is chosen on prompts that are not measured on.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from draftsmith.drafters.base import Drafter, StagewiseDrafter
from draftsmith.drafters.static_tree import Choices, pruned
from draftsmith.engine import Engine
from draftsmith.evaluation.comparison.measurement_log import MeasurementLog
from draftsmith.evaluation.measuring.interleaving import interleaved
from draftsmith.evaluation.measuring.intervals import mean_interval, ratio_interval
from draftsmith.evaluation.measuring.measure import measure
from draftsmith.evaluation.prompts import Prompt, cut, tokenizer_of
from draftsmith.evaluation.reporting.plan_names import plan_name
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.targets import Target
from draftsmith.targets.token_ids import body_ids, opening_ids
from draftsmith.types import DraftsmithError, SamplingParams

PLAIN = "plain"
CHAIN = 4
TREE_NODES, TREE_WIDTH = 14, 4
EDIT = "edit"
# A file that is repeated is so many times as long as a prompt; its beginning, half a prompt, is given again.
REPEATED = 3
TASKS = ("code", "prose", "dialogue", EDIT)
MODES = {"greedy": 0.0, "T=1": 1.0}
# Rows at a time where τ is measured, which does not depend on it; more would only take more memory for each engine.
ROWS = 16


@dataclass(frozen=True)
class Settings:
    """How much to measure of every task: τ on so many prompts, exactly `new_tokens` each, and timed rounds.

    At temperature 1 the first `sampled_prompts` do: τ varies less from prompt to prompt there, and takes more steps.
    """

    tasks: tuple[str, ...] = TASKS
    prompts: int = 40
    sampled_prompts: int = 16
    prompt_tokens: int = 64
    new_tokens: int = 64
    rounds: int = 12
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("prompts", "sampled_prompts", "prompt_tokens", "rounds"):
            if getattr(self, name) < 1:
                raise DraftsmithError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.new_tokens < 2:
            raise DraftsmithError(f"new_tokens is {self.new_tokens}; it must be at least 2.")


def static_tree(published: Choices) -> Choices:
    """Return a published tree with as many nodes as all trees of a comparison have."""
    return pruned(published, TREE_NODES)


@dataclass(frozen=True)
class Method:
    """One drafter under the name that the tables have for it.

    `published` makes its tree the same at every step: that one, cut to as many nodes as all others have. They keep the
    nodes they are surest of.
    """

    name: str
    drafter: Drafter
    published: Choices = ()

    @property
    def reach(self) -> int:
        """The longest draft it makes."""
        if isinstance(self.drafter, StagewiseDrafter):
            return self.drafter.max_depth
        return self.drafter.default_plan().depth

    def chain(self) -> Plan:
        """The chain that all are compared with."""
        return Plan((1,) * min(CHAIN, self.reach))

    def tree(self) -> Plan:
        """The tree of at most `TREE_NODES` nodes that all are compared with."""
        if self.published:
            return Plan(choices=static_tree(self.published)).shortened(self.reach)
        depth = min(CHAIN + 1, self.reach) if isinstance(self.drafter, StagewiseDrafter) else self.reach
        return Plan((TREE_WIDTH,) * depth, beam=TREE_WIDTH, nodes=TREE_NODES)

    def compared(self, temperature: float) -> dict[str, Plan]:
        """The drafts that all are compared with, by name; drafters that can sample also do so at a temperature."""
        plans = {"chain": self.chain(), "tree": self.tree()}
        if temperature > 0 and self.drafter.can_sample:
            plans["sampled_chain"] = replace(self.chain(), sampled=True)
        return plans

    def shapes(self, temperature: float) -> list[Plan]:
        """The drafts to choose the fastest from."""
        reach = self.reach
        chains = [Plan((1,) * depth) for depth in sorted({1, 2, 3, 4, 6, 8, min(8, reach)}) if depth <= reach]
        plans = list(dict.fromkeys([*chains, self.drafter.default_plan()]))
        if temperature > 0 and self.drafter.can_sample:
            plans += [Plan((1,) * depth, sampled=True) for depth in (1, 2, 4) if depth <= reach]
        return plans


def gather(target: Target, prompts: Sequence[Prompt], settings: Settings) -> dict[str, list[list[int]]]:
    """Return, for every task, the prompts of calibration (2), then those measured on; short texts are taken whole.

    The task `edit` is made from code: a file, and then its beginning again, as an editor's model is asked to write it.

    Raises:
        DraftsmithError: a task without prompts, or a prompt that the target has no room for.
    """
    count = max(settings.prompts, settings.sampled_prompts) + 2
    chosen = {}
    for task in settings.tasks:
        if task == EDIT:
            whole = REPEATED * settings.prompt_tokens
            files = cut(target, [prompt for prompt in prompts if prompt.task == "code"], whole, count, exact=False)
            tokenizer = tokenizer_of(target)
            again, begun = body_ids(tokenizer, "\n\n# The same file, edited:\n"), len(opening_ids(tokenizer))
            chosen[task] = [file + again + file[begun : len(file) // (2 * REPEATED)] for file in files]
            continue
        mine = [prompt for prompt in prompts if prompt.task == task]
        if not mine:
            raise DraftsmithError(f"there are no prompts of task {task!r}; give some with --prompts, or leave it out.")
        chosen[task] = cut(target, mine, settings.prompt_tokens, count, exact=False)
    room = target.max_length - settings.new_tokens
    for task, several in chosen.items():
        for number, tokens in enumerate(several, 1):
            if len(tokens) > room:
                raise DraftsmithError(
                    f"prompt {number} of task {task!r} has {len(tokens)} tokens, but {target.name!r} has room for "
                    f"{room} before {settings.new_tokens} new ones; give shorter prompts, or ask for fewer new tokens."
                )
    return chosen


def measure_methods(
    target: Target,
    methods: Sequence[Method],
    prompts: dict[str, list[list[int]]],
    settings: Settings,
    measurement_log: MeasurementLog,
    on_progress: Callable[[str], None] = lambda label: None,
) -> list[dict[str, Any]]:
    """Measure everything that the measurement log lacks and return a cell for each method, task and mode."""
    longest = max(len(prompt) for several in prompts.values() for prompt in several) + settings.new_tokens
    rows = min(max(settings.prompts, settings.sampled_prompts), ROWS)
    engines = {
        method.name: Engine(target, method.drafter, max_batch=rows, max_length=longest, share_prefixes=False)
        for method in methods
    }
    cells = []
    for task, several in prompts.items():
        calibration = several[:2]
        for mode, temperature in MODES.items():
            count = settings.prompts if temperature == 0 else settings.sampled_prompts
            measured = several[2:][:count]
            params = SamplingParams(
                max_tokens=settings.new_tokens, temperature=temperature, ignore_eos=True, seed=settings.seed
            )
            where = f"{task}, {mode}"
            guessed, shapes = {}, {}
            for method in methods:
                on_progress(f"{method.name}: {where}")
                engine, key = engines[method.name], f"{method.name}|{task}|{mode}"
                guessed[method.name] = measurement_log.once(
                    f"guess|{key}", partial(guess_quality, engine, method, measured, params)
                )
                found = measurement_log.once(
                    f"shape|{key}", partial(fastest_shape, engine, method, calibration, params)
                )
                shapes[method.name] = read_plan(found)
            rounds = []
            for number in range(settings.rounds):
                on_progress(f"round {number + 1}: {where}")
                prompt = measured[number % len(measured)]
                rounds.append(
                    measurement_log.once(
                        f"round|{task}|{mode}|{number}|{','.join(engines)}",
                        partial(time_round, engines, shapes, prompt, params, settings.seed + number),
                    )
                )
            for method in methods:
                name = method.name
                cells.append(
                    {
                        "method": name, "task": task, "mode": mode, "temperature": temperature,
                        "plan": plan_name(shapes[name]), "sampled": shapes[name].sampled,
                    }
                    | guessed[name]
                    | timing(rounds, name)
                )
    return cells


def guess_quality(
    engine: Engine, method: Method, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> dict[str, Any]:
    """Measure τ with the drafts that all are compared with, with an interval over prompts."""
    found: dict[str, Any] = {}
    for shape, plan in method.compared(params.temperature).items():
        result = measure(engine, prompts, params, plan)
        steps = [completion.statistics.steps for completion in result.completions]
        tokens = [completion.statistics.steps + completion.statistics.accepted for completion in result.completions]
        tau = ratio_interval(tokens, steps)
        found[shape] = {
            "tokens_per_step": tau.value,
            "tokens_per_step_ci": tau.ends,
            "tokens_by_prompt": tokens,
            "steps_by_prompt": steps,
            "accepted_by_depth": result.accepted_by_depth(),
            "drafted_per_step": result.statistics.drafted / max(1, result.statistics.steps),
        }
    return found


def fastest_shape(
    engine: Engine, method: Method, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> dict[str, Any]:
    """Decode a few prompts with every shape, one at a time, and return the fastest as plain JSON."""
    plans = method.shapes(params.temperature)
    measure(engine, prompts[:1], params, plans[0])
    seconds = [0.0] * len(plans)
    for prompt in prompts:
        for index, plan in enumerate(plans):
            seconds[index] += measure(engine, [prompt], params, plan).wall_s
    return asdict(plans[seconds.index(min(seconds))])


def read_plan(values: dict[str, Any]) -> Plan:
    """Read a plan back from plain JSON."""
    choices = tuple(tuple(path) for path in values.get("choices", ()))
    return Plan(**(values | {"branching": tuple(values["branching"]), "choices": choices}))


def time_round(
    engines: dict[str, Engine], shapes: dict[str, Plan], prompt: Sequence[int], params: SamplingParams, seed: int
) -> dict[str, Any]:
    """Decode one prompt plainly and with every method, in random order, each after a short warm-up of its own."""
    ways = [PLAIN, *engines]
    plain_engine = next(iter(engines.values()))
    warm = replace(params, max_tokens=min(8, params.max_tokens))
    found: dict[str, Any] = {}
    texts: dict[str, list[int]] = {}
    for _, way, _ in interleaved(ways, 1, random.Random(seed)):
        engine, plan = (plain_engine, NO_DRAFT) if way == PLAIN else (engines[way], shapes[way])
        measure(engine, [prompt], warm, plan)
        result = measure(engine, [prompt], params, plan)
        statistics = result.statistics
        texts[way] = result.completions[0].tokens
        found[way] = {
            "decode_s": result.wall_s - statistics.prefill_s, "new_tokens": result.new_tokens,
            "steps": statistics.steps, "accepted": statistics.accepted, "drafter_s": statistics.drafter_s,
            "target_s": statistics.target_s,
        }
    for way in ways:
        found[way]["identical"] = texts[way] == texts[PLAIN]
    return found


def timing(rounds: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """Sum up the rounds of one method: ms a token, speed-up over plain, share of drafting, what a step costs.

    The seconds of every round stay, because any two methods are compared round by round.
    """
    mine, plain = [r[name] for r in rounds], [r[PLAIN] for r in rounds]
    speedup = ratio_interval([r["decode_s"] for r in plain], [r["decode_s"] for r in mine])
    latency = mean_interval([1e3 * r["decode_s"] / (r["new_tokens"] - 1) for r in mine])
    steps, plain_steps = sum(r["steps"] for r in mine), sum(r["steps"] for r in plain)
    decode_s = sum(r["decode_s"] for r in mine)
    return {
        "ms_per_token": latency.value,
        "ms_per_token_ci": latency.ends,
        "speedup": speedup.value,
        "speedup_ci": speedup.ends,
        "tokens_per_step_timed": 1 + sum(r["accepted"] for r in mine) / max(1, steps),
        "share_drafting": sum(r["drafter_s"] for r in mine) / decode_s,
        "step_cost": (decode_s / max(1, steps)) / (sum(r["decode_s"] for r in plain) / max(1, plain_steps)),
        "identical": sum(r["identical"] for r in mine),
        "rounds": len(rounds),
        "seconds_by_round": [r["decode_s"] for r in mine],
    }
