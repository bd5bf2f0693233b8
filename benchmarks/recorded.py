"""What the fitted policy would choose on recorded texts, with a clock that is computed: the same at every run.

    python benchmarks/recorded.py --geometry 134m --drafters int4-self --recording /tmp/recorded.json
    PYTHONPATH=OTHER/src python benchmarks/recorded.py --recording /tmp/recorded.json     # another version's policy

Recorded are, once, what a fit measures of target and drafter on this machine; what wider steps cost the target; and of
every text, plan and position in the text how many guesses the plan makes there, how deep they are and how many stay.
From that follows what any choices would have brought, without decoding again. A step takes as long as the target takes
for so many tokens, with what the engine does around it for so many rows, with or without drafts; and for every depth
of its drafts as long as the drafter takes for the rows that are that deep, whatever their plans. Every step takes at
random a little more or less (`recorded_clock.NOISE`).

Two kinds of load are decoded: calls (`batch` texts begin together, and the call is over when the last one is; ratios
are geometric means over calls) and crowds (whenever a text ends, another one begins; tokens a second). Each is
decoded plainly, by the policy, and by every measured plan at every step. A new policy begins for every cell and seed.
The plan that is best in a cell is found afterwards, and differs from cell to cell.

With `--misfit` each policy knows other costs of drafts than those of the clock, as after a fit on a machine that was
busy meanwhile: what a draft adds to a step is multiplied by a random factor for all plans and one for each.

A computed clock shows what a rule is worth where chance would hide it, and lets one look at each choice. It does not
show what questions to the policy and changes of plan take, nor how a real machine strays from what was measured;
`defaults.py` and `policy.py` do.
"""

import json
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from common import GEOMETRIES, arguments, finish, main, model_folder, say, show_table, start
from recorded_clock import NOTHING, Machine, Outcome
from rich.progress import track

from draftsmith import assets
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.registry import load_drafter
from draftsmith.dtypes import resolve_dtype
from draftsmith.engine import Choice, Engine, Load, RowHistory
from draftsmith.engine.arm import Arm
from draftsmith.engine.fitted import Fitted
from draftsmith.engine.known import Known
from draftsmith.engine.profile import Profile, WidthCost
from draftsmith.evaluation.comparison.questions import Settings, gather
from draftsmith.evaluation.measuring.profiling import measure_profile, up_to
from draftsmith.evaluation.measuring.steps import raise_failures
from draftsmith.evaluation.measuring.width_costs import measure_width_cost
from draftsmith.evaluation.prompts import embedded_prompts
from draftsmith.files import replace_text
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.targets import Target
from draftsmith.types import DraftsmithError, SamplingParams
from draftsmith.workflows.fitting import READY_HOPE

TOGETHER = 16
"""Positions that are recorded at a time."""


@dataclass(frozen=True)
class Text:
    """A text: what each plan brings behind every one of its tokens, by the plan's place in the profile."""

    prompt_tokens: int
    outcomes: Mapping[int, Sequence[Outcome]]


@dataclass(frozen=True)
class Recording:
    """Texts by task, what a fit measured, and what the target takes by the number of tokens."""

    profile: Profile
    width: WidthCost
    texts: Mapping[str, Sequence[Text]]

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        return {
            "profile": self.profile.to_json(), "width": asdict(self.width),
            "texts": {
                task: [
                    {"prompt_tokens": text.prompt_tokens, "outcomes": {
                        plan: [list(asdict(one).values()) for one in some] for plan, some in text.outcomes.items()
                    }}
                    for text in texts
                ]
                for task, texts in self.texts.items()
            },
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Recording":
        """Undo `to_json`."""
        width = WidthCost(tuple(value["width"]["widths"]), tuple(value["width"]["seconds"]))
        texts = {
            task: [
                Text(text["prompt_tokens"], {
                    int(plan): [Outcome(*one) for one in some] for plan, some in text["outcomes"].items()
                })
                for text in texts
            ]
            for task, texts in value["texts"].items()
        }
        return cls(Profile.from_json(value["profile"]), width, texts)


def record(target: Target, drafter: Drafter, texts: Mapping[str, list[list[int]]], args: Any) -> Recording:
    """Measure and decode all that is needed."""
    say("measuring what drafts cost …")
    profile, _ = measure_profile(target, drafter, up_to(max(args.batches)))
    width = profile.width_cost or measure_width_cost(target, next(iter(texts.values()))[0])
    if width is None:
        raise DraftsmithError("the target's context is too short to measure what wide steps cost; take another target.")
    plans = {at: arm.plan for at, arm in enumerate(profile.arms) if arm.plan != NO_DRAFT}
    room = max(plan.depth for plan in plans.values()) + 2
    length = max(len(prompt) for some in texts.values() for prompt in some) + args.new_tokens + room
    largest = max(plans.values(), key=lambda plan: plan.max_nodes)
    engine = Engine(target, drafter, plan=largest, max_batch=TOGETHER, max_length=length)
    found: dict[str, list[Text]] = {}
    for task, prompts in texts.items():
        for prompt in track(prompts, f"recording {task}", disable=None):
            [done] = engine.generate([prompt], SamplingParams(max_tokens=args.new_tokens, ignore_eos=True), NO_DRAFT)
            outcomes: dict[int, list[Outcome]] = {at: [NOTHING] for at in plans}
            for at, plan in plans.items():
                for first in range(0, args.new_tokens, TOGETHER):
                    some = range(first, min(args.new_tokens, first + TOGETHER))
                    outcomes[at] += one_step(engine, [prompt + done.tokens[:place] for place in some], plan, room)
            found.setdefault(task, []).append(Text(len(prompt), outcomes))
    return Recording(profile, width, found)


def one_step(engine: Engine, prompts: list[list[int]], plan: Plan, room: int) -> list[Outcome]:
    """Return the outcome of the first draft behind each prompt and the token after it."""
    params = SamplingParams(max_tokens=room + 1, ignore_eos=True)
    requests = engine.admit_call(prompts, params, plan, shows_drafts=True)
    depths: dict[int, int] = {}
    for request in requests:
        engine.core.add(request)
    while not all(request.history.accepted for request in requests):
        for progress in engine.core.step():
            if progress.made is not None:
                tree = progress.made.tree
                depths.setdefault(progress.request.id, 0 if tree is None else depth_of(tree.parents))
        raise_failures(requests)
    found = []
    for request in requests:
        engine.core.abort(request.id)
        stayed, drafted, behind = next(request.history.steps(0))
        found.append(Outcome(stayed, drafted, depths[request.id], behind))
    return found


def depth_of(parents: Sequence[int]) -> int:
    """Return how deep the deepest node of a tree is."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)


class Play:
    """Decodes texts in imagination.

    Args:
        plan: the same at every step; None asks the policy.
    """

    def __init__(self, recording: Recording, machine: Machine, policy: Fitted, plan: Plan | None) -> None:
        self._of = {arm.plan: at for at, arm in enumerate(recording.profile.arms)}
        self._machine, self._policy, self._plan = machine, policy, plan
        self.rows: list[tuple[Text, RowHistory]] = []
        self._asked: list[RowHistory] = []
        self._plans: list[Plan] = []
        self._held = 0
        self.seconds, self.tokens, self.steps, self.drafted = 0.0, 0, 0, 0

    def add(self, text: Text, new_tokens: int, call: object | None) -> None:
        """Let a text begin, the first token of which came with its prompt."""
        self.rows.append((text, RowHistory(False, text.prompt_tokens, written=1, most=new_tokens, call=call)))

    def step(self, waiting: int, most: int) -> None:
        """Take a step; texts that are complete leave."""
        histories = [history for _, history in self.rows]
        plans = self._choose(Load(len(histories), 0, waiting, most), histories)
        outcomes = [
            text.outcomes[self._of[plan]][min(history.written, len(text.outcomes[self._of[plan]]) - 1)]
            if plan.depth else NOTHING
            for (text, history), plan in zip(self.rows, plans, strict=True)
        ]
        took = self._machine.seconds(outcomes)
        if self._plan is None:
            self._policy.timed(took)
        for history, plan, one in zip(histories, plans, outcomes, strict=True):
            gained = min(one.stayed + 1, int(history.left))
            history.written += gained
            history.note(one.stayed, one.drafted, plan, one.behind)
            self.tokens += gained
            self.steps += 1
            self.drafted += plan.depth > 0
        self.seconds += took
        self.rows = [row for row in self.rows if row[1].written < row[1].most]

    def _choose(self, load: Load, histories: list[RowHistory]) -> list[Plan]:
        if self._plan is not None:
            return [self._plan] * len(histories)
        if self._held and self._asked == histories:
            self._held -= 1
            return self._plans
        chosen: Sequence[Choice] = self._policy.choose(load, histories)
        self._asked, self._plans, self._held = histories, [one.plan for one in chosen], self._policy.holds
        return self._plans


def call_of(texts: Sequence[Text], new: int, play: Play) -> Play:
    """Decode one call."""
    call = object()
    for text in texts:
        play.add(text, new, call)
    while play.rows:
        play.step(0, len(texts))
    return play


def crowd_of(texts: Sequence[Text], count: int, new: int, play: Play) -> Play:
    """Decode texts, `count` at a time, until too few are left."""
    left = list(texts)
    while left or len(play.rows) == count:
        while left and len(play.rows) < count:
            play.add(left.pop(), new, None)
        if len(play.rows) < count:
            break
        play.step(len(left), count)
    return play


def replay(recording: Recording, args: Any) -> list[dict[str, Any]]:
    """Return all cells."""
    every = [text for some in zip(*recording.texts.values(), strict=False) for text in some]
    tasks = {**recording.texts, "mixed": every} if len(recording.texts) > 1 else recording.texts
    plans = [arm.plan for arm in recording.profile.arms]
    cells = []
    for kind, batch, (task, texts) in (
        (kind, batch, task) for kind in args.loads for batch in args.batches for task in tasks.items()
    ):
        speeds: dict[Plan | None, list[float]] = {plan: [] for plan in (None, *plans)}
        drafted = steps = 0
        for seed in range(args.seeds):
            profile = misfitted(recording.profile, args.misfit, random.Random(seed))
            policy = Fitted(Known(profile, hope=READY_HOPE), learns_times=True)

            def playing(plan: Plan | None, policy: Fitted = policy, seed: int = seed) -> Play:
                return Play(recording, Machine(recording.profile, recording.width, random.Random(seed)), policy, plan)

            # A policy that is not new has met other texts before.
            for turn in range(2):
                order = random.Random(f"{seed} {turn}").choices(texts, k=args.rounds * batch)
                for plan in speeds if turn else (None,):
                    found = decoded(kind, order, batch, args.new_tokens, lambda plan=plan: playing(plan))
                    if turn:
                        speeds[plan] += [play.tokens / play.seconds for play in found]
                        drafted += sum(play.drafted for play in found) if plan is None else 0
                        steps += sum(play.steps for play in found) if plan is None else 0
        means = {plan: math.exp(statistics.mean(map(math.log, some))) for plan, some in speeds.items()}
        best = max(plans, key=means.__getitem__)
        cells.append({
            "load": kind, "task": task, "batch": batch, "policy_over_plain": means[None] / means[NO_DRAFT],
            "best_over_plain": means[best] / means[NO_DRAFT], "policy_over_best": means[None] / means[best],
            "best": asdict(best), "drafted": drafted / steps,
        })
    return cells


def misfitted(profile: Profile, deviation: float, rng: random.Random) -> Profile:
    """Return a profile whose drafts cost more or less than they do.

    Args:
        deviation: the standard deviation of the logarithm of the factor that all plans have, and of each plan's own.
    """
    plain, shared, arms = profile.arms[0].seconds, rng.gauss(0, deviation), list[Arm]()
    for arm in profile.arms:
        factor = math.exp(shared + rng.gauss(0, deviation)) if arm.plan.depth else 1.0
        arms.append(replace(
            arm,
            seconds=tuple(one + factor * (took - one) for took, one in zip(arm.seconds, plain, strict=True)),
            full=tuple(one + factor * (took - one) for took, one in zip(arm.full, plain, strict=bool(arm.full))),
        ))
    return replace(profile, arms=tuple(arms))


def decoded(kind: str, texts: Sequence[Text], batch: int, new: int, playing: Callable[[], Play]) -> list[Play]:
    """Decode texts as calls, each by itself, or as one crowd."""
    if kind == "crowds":
        return [crowd_of(texts, batch, new, playing())]
    return [call_of(texts[at : at + batch], new, playing()) for at in range(0, len(texts), batch)]


def report(cells: Sequence[dict[str, Any]]) -> None:
    """Print a table for each kind of load."""
    for kind in dict.fromkeys(cell["load"] for cell in cells):
        own = [cell for cell in cells if cell["load"] == kind]
        rows = [
            [
                f"{cell['task']} {cell['batch']}", f"{cell['policy_over_plain']:.2f}", f"{cell['best_over_plain']:.2f}",
                f"{cell['policy_over_best']:.2f}", f"{100 * cell['drafted']:.0f} %",
            ]
            for cell in own
        ]
        for name in ("policy_over_plain", "policy_over_best"):
            values = [cell[name] for cell in own]
            mean = math.exp(statistics.mean(map(math.log, values)))
            say(f"{kind}, {name.replace('_', ' ')}: mean {mean:.3f}, least {min(values):.3f}")
        show_table(f"{kind}: times plain decoding", ["", "policy", "best plan", "policy / best", "drafted"], rows)


def run() -> None:
    """Record if there is no recording, and replay."""
    parser = arguments(__doc__, "recorded")
    parser.add_argument("--geometry", default="demo", choices=["demo", *GEOMETRIES])
    parser.add_argument("--drafters", default="int4-self", help="the word or folder of one drafter")
    parser.add_argument("--recording", type=Path, required=True, help="written if there is none, otherwise read")
    parser.add_argument("--tasks", nargs="+", default=["code", "prose"])
    parser.add_argument("--texts", type=int, default=32, help="a task")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--loads", nargs="+", default=["calls", "crowds"], choices=["calls", "crowds"])
    parser.add_argument("--rounds", type=int, default=16, help="calls, or texts for each place in a crowd")
    parser.add_argument("--seeds", type=int, default=4, help="new policies, each with other texts")
    parser.add_argument("--misfit", type=float, default=0.0, help="how wrong a fit is about what drafts cost")
    args = start(parser)
    if not args.recording.exists():
        with model_folder(args.geometry, args.target, resolve_dtype(args.dtype, args.device)) as folder:
            target = Target.from_pretrained(folder, dtype=args.dtype, device=args.device)
            settings = Settings(tuple(args.tasks), args.texts, 1, 64, args.new_tokens)
            # Random weights come without a tokenizer; the embedded one's tokens are tokens of theirs too.
            reader = target if target.tokenizer is not None else Target.from_pretrained(assets.demo_target())
            asked = gather(reader, embedded_prompts(), embedded_prompts(split="train"), settings)
            texts = {task: [list(one) for one in some.measured[: args.texts]] for task, some in asked.items()}
            made = record(target, load_drafter(args.drafters, target), texts, args)
            named = {"target": target.name, "drafter": args.drafters}
            replace_text(args.recording, json.dumps({**named, **made.to_json()}))
    kept = json.loads(args.recording.read_text())
    cells = replay(Recording.from_json(kept), args)
    report(cells)
    finish(args, {"cells": cells}, target=kept["target"], drafter=kept["drafter"])


if __name__ == "__main__":
    main(run)
