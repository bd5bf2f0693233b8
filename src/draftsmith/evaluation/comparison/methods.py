"""Draft families against each other: the same target, prompts and rounds for all.

Two things are measured for every method, task and temperature. First, how well it guesses: τ on the same prompts with
one chain and one tree for all, and at temperature 1 with a sampled chain as well; cost is left out. Second, what that
gains on this machine: the time of one prompt at a time with the method's own fastest shape of draft; every round also
runs plain decoding and all other methods, in random order. Shapes are chosen on prompts of other sources than those
measured on.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from draftsmith.drafters.base import Drafter, StagewiseDrafter
from draftsmith.drafters.tree_choices import Choices, pruned
from draftsmith.engine import Engine
from draftsmith.evaluation.comparison.measurement_log import MeasurementLog
from draftsmith.evaluation.comparison.questions import Questions, Settings
from draftsmith.evaluation.measuring.interleaving import interleaved
from draftsmith.evaluation.measuring.intervals import mean_interval, ratio_interval
from draftsmith.evaluation.measuring.measure import measure
from draftsmith.evaluation.reporting.plan_names import plan_name
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.targets import Target
from draftsmith.types import SamplingParams

PLAIN = "plain"
CHAIN = 4
TREE_NODES, TREE_WIDTH = 14, 4
MODES = {"greedy": 0.0, "T=1": 1.0}
# Rows decoded together where τ is measured. τ does not depend on it; more rows would only need more memory per engine.
ROWS = 16


def static_tree(published: Choices) -> Choices:
    """Return a published tree, cut to as many nodes as all trees of a comparison have."""
    return pruned(published, TREE_NODES)


@dataclass(frozen=True)
class Method:
    """One drafter, with its name in the tables.

    With `published`, it drafts that tree at every step, cut to as many nodes as the trees of all others have. Methods
    without it keep the nodes they are surest of.
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
        """The drafts that all are compared with, by name; above temperature 0 also a sampled chain, if possible."""
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


def measure_methods(
    target: Target,
    methods: Sequence[Method],
    prompts: dict[str, Questions],
    settings: Settings,
    measurement_log: MeasurementLog,
    on_progress: Callable[[str], None] = lambda label: None,
) -> list[dict[str, Any]]:
    """Measure everything that the measurement log lacks and return a cell for each method, task and mode."""
    every = [prompt for several in prompts.values() for prompt in [*several.calibration, *several.measured]]
    longest = max(map(len, every)) + settings.new_tokens
    rows = min(max(settings.prompts, settings.sampled_prompts), ROWS)
    engines = {
        method.name: Engine(target, method.drafter, max_batch=rows, max_length=longest, share_prefixes=False)
        for method in methods
    }
    cells = []
    for task, several in prompts.items():
        for mode, temperature in MODES.items():
            count = settings.prompts if temperature == 0 else settings.sampled_prompts
            measured = several.measured[:count]
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
                    f"shape|{key}", partial(fastest_shape, engine, method, several.calibration, params)
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

    The seconds of every round are kept, because any two methods are compared round by round.
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
