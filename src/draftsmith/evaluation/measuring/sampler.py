"""Decodes a little with one plan after the other, to measure the time of its steps and which of its guesses stay."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from draftsmith.engine import Engine
from draftsmith.engine.arm import Arm, Behind
from draftsmith.engine.evidence import lessons_behind, lessons_of, no_evidence
from draftsmith.engine.profile import Sampled
from draftsmith.evaluation.measuring.steps import step_seconds
from draftsmith.plan import NO_COPY, Plan
from draftsmith.types import SamplingParams

UNSEEN = 0.5
"""A guess that was never seen to stay counts as having stayed this often, in one try more than there were. So nothing
that was not seen counts as impossible: it could never be learnt otherwise, and texts differ."""
TASKS = 3
"""Tasks of the embedded training texts, which take turns."""
SAMPLED_TEXTS, TEMPERATURE = 16, 0.8
"""At least this many texts, at a temperature that is common in chats, show how guesses fare in sampled texts."""
TURN_S, PLAIN_TURN_S, FEWEST_STEPS = 0.3, 0.1, 6
"""A call for a single row, with drafts or without, takes so many steps as would take about so long without drafts, but
at least `FEWEST_STEPS`. Drafts get more, because they also have to show which guesses stay. Several rows get fewer, by
the square root of their number."""


@dataclass
class Brought:
    """Counts of a plan's steps and guesses so far.

    Args:
        stayed: in how many steps the first guess stayed, the second, and so on.
        steps, guessing: the number of all its steps, and of those that made guesses.
        drafted: guesses that were verified.
    """

    stayed: list[int]
    steps: int = 0
    guessing: int = 0
    drafted: int = 0

    def note(self, accepted: int, drafted: int) -> None:
        """Add a step."""
        self.steps += 1
        self.drafted += drafted
        self.guessing += drafted > 0
        for depth in range(accepted):
            self.stayed[depth] += 1

    @property
    def guesses(self) -> float:
        """The mean number of guesses of a step that made any."""
        return max(1.0, self.drafted / max(1, self.guessing))

    @property
    def usual(self) -> float:
        """The mean number of guesses of all steps; see `UNSEEN`."""
        return self.drafted / self.steps if self.drafted else UNSEEN / (1 + self.steps)


class Sampler:
    """Decodes a little with one plan after the other; every call goes on to the next prompts.

    Chains without a confidence begin at different prompts, moved by whole turns of the tasks.

    Args:
        engine: an engine with room for all plans.
        prompts: texts that are used again once all have been used.
        new_tokens: how many are decoded at most; the last step may bring more.
        steps: the most steps of a call.
        turn_s: about how many seconds a call with drafts may take, see `TURN_S`; infinite takes all steps.
        looks_up: whether the engine's drafter makes guesses only at steps where it finds them in the text.
        draws: whether the engine's drafter follows the target's noise in sampled texts, see `Drafter.can_sample`.
    """

    def __init__(
        self, engine: Engine, prompts: Sequence[list[int]], new_tokens: int, steps: float = math.inf,
        looks_up: bool = False, draws: bool = False, turn_s: float = math.inf,
    ) -> None:
        self.engine, self.prompts, self.new_tokens, self.steps = engine, prompts, new_tokens, steps
        self.looks_up, self.draws, self.turn_s = looks_up, draws, turn_s
        self.plain_s = 0.0
        """About how long a plain step of one row takes; 0 while that is not known."""
        self.brought: dict[Plan, Brought] = {}
        self.behind: dict[Plan, Brought] = {}
        """Guesses where a lookup found nothing: `steps` are those in which another drafter guessed instead."""
        self._taken: dict[tuple[Plan, int], int] = {}

    def seconds(self, plan: Plan, rows: int) -> float:
        """Return the seconds of a step with `rows` rows, and note which guesses stayed."""
        # The acceptance of all chains is pooled, so they see more texts if each has its own; other plans are compared
        # best where most of their texts are the same, and see more if each number of rows begins elsewhere.
        pooled = plan.is_chain and plan.confidence is None
        first = TASKS * (len(self.brought) * rows if pooled else rows - 1)
        at = self._taken.get((plan, rows), first)
        self._taken[plan, rows] = at + rows
        some = [self.prompts[(at + row) % len(self.prompts)] for row in range(rows)]
        room = self.engine.max_length - max(map(len, some))
        params = SamplingParams(max_tokens=min(room, self.new_tokens + plan.depth), ignore_eos=True)
        requests = self.engine.admit_call(some, params, plan)
        took = step_seconds(self.engine, requests, self.new_tokens, most=self._most_steps(plan, rows))
        brought = self.brought.setdefault(plan, Brought([0] * plan.depth))
        others = self.behind.setdefault(plan, Brought([0] * plan.depth))
        for one in requests:
            for accepted, drafted, behind in one.history.steps(0):
                brought.note(*((0, 0) if behind else (accepted, drafted)))
                if behind:
                    others.note(accepted, drafted)
        return took

    def _most_steps(self, plan: Plan, rows: int) -> float:
        """Return the most steps of a call, see `TURN_S`."""
        if not self.plain_s or self.turn_s == math.inf:
            return self.steps
        turn_s = self.turn_s if plan.depth else min(self.turn_s, PLAIN_TURN_S)
        return min(self.steps, max(FEWEST_STEPS, round(turn_s / (self.plain_s * math.sqrt(rows)))))

    def sampled(self, arm: Arm) -> Sampled:
        """Return how the guesses of a measured plan fare in sampled texts, relative to greedy ones."""
        seen, behind, rows = no_evidence(), no_evidence(), self.engine.max_batch
        for at in range(0, SAMPLED_TEXTS, rows):
            some = [self.prompts[(at + row) % len(self.prompts)] for row in range(rows)]
            most = min(self.engine.max_length - max(map(len, some)), self.new_tokens + arm.plan.depth)
            params = [
                SamplingParams(max_tokens=most, ignore_eos=True, temperature=TEMPERATURE, seed=at + row)
                for row in range(rows)
            ]
            requests = self.engine.admit_call(some, params, arm.plan)
            step_seconds(self.engine, requests, self.new_tokens, most=self._most_steps(arm.plan, rows))
            for one in requests:
                steps = list(one.history.steps(0))
                seen.learn(lessons_of(one.history, steps, arm, arm.kept()), 1.0)
                if arm.behind is not None:
                    behind.learn(lessons_behind(one.history, steps, arm, arm.kept_behind()), 1.0)
        each = seen.stayed, seen.found, seen.made, behind.stayed
        return Sampled(*((one.came + UNSEEN) / (one.expected + UNSEEN) for one in each))

    def arm(self, plan: Plan) -> Arm:
        """Return everything that is known about a plan except its costs."""
        brought, suits = self._looked_up(plan), plan.is_chain or not plan.depth or self.draws
        if not self.looks_up or not plan.depth or plan.factor == NO_COPY:
            made = None if plan.confidence is None else brought.usual
            share = brought.guessing / brought.steps if brought.guessing else UNSEEN / (1 + brought.steps)
            return Arm(plan, self._survival(plan, share), (), made=made, suits_draws=suits)
        others, behind = self._guessed_behind(plan), None
        if others.steps:
            behind = Behind(shares([(others.steps, *others.stayed)], plan.depth), others.usual, ())
        # What is looked up is the same in all texts.
        suits = suits or behind is None
        return Arm(plan, self._survival(plan), (), self._found(plan), (), brought.guesses, behind, suits)

    def _found(self, plan: Plan) -> float:
        """Return the share of tokens that came from steps whose lookup found something.

        It is nearly the same for all plans, but a plan that copies more gets sooner to where nothing is found.
        """
        brought = self.brought[plan]
        found = brought.guessing + sum(brought.stayed)
        missed = brought.steps - brought.guessing + sum(self.behind[plan].stayed)
        return found / (found + missed) if found else UNSEEN / (1 + missed)

    def _looked_up(self, plan: Plan) -> Brought:
        """Return a plan's counts without guesses behind a lookup; plans with the same bound on lookups are pooled."""
        return self.brought[plan] if not has_both(plan) else together([
            one for other, one in self.brought.items()
            if has_both(other) and (other.depth, other.max_nodes) == (plan.depth, plan.max_nodes)
            and other.factor == plan.factor
        ])

    def _guessed_behind(self, plan: Plan) -> Brought:
        """Return the counts of guesses behind a plan's lookup; plans with the same bound on those are pooled."""
        return self.behind[plan] if not has_both(plan) else together([
            one for other, one in self.behind.items()
            if has_both(other) and replace(other, factor=plan.factor) == plan
        ])

    def _survival(self, plan: Plan, share: float = 1.0) -> tuple[float, ...]:
        """Return the shares of steps that accepted at least 1, 2, … guesses, without those behind a lookup.

        How often a guess stays after its predecessor did is pooled over all chains that reach its depth.

        Args:
            share: the share of the counted steps that had a guess.
        """
        alike = [self._looked_up(plan)]
        if plan.is_chain and not has_both(plan):
            alike = [
                brought for one, brought in self.brought.items()
                if one.is_chain and one.sampled == plan.sampled and bounds(one) == bounds(plan)
            ]
        return shares([(one.guessing, *one.stayed) for one in alike], plan.depth, share)


def together(some: Sequence[Brought]) -> Brought:
    """Return the summed counts of plans of one depth."""
    return Brought(
        [sum(stayed) for stayed in zip(*(one.stayed for one in some), strict=True)], sum(one.steps for one in some),
        sum(one.guessing for one in some), sum(one.drafted for one in some),
    )


def shares(counts: Sequence[Sequence[int]], depth: int, share: float = 1.0) -> tuple[float, ...]:
    """Return the shares of steps that accepted at least 1, 2, … guesses.

    Args:
        counts: for each plan, in how many steps there was a first guess, then how often the first stayed, the second,
            and so on.
        share: the share of steps with a first guess.
    """
    found = []
    for at in range(depth):
        deep = [one for one in counts if len(one) > at + 1]
        stayed, before = sum(one[at + 1] for one in deep), sum(one[at] for one in deep)
        share *= stayed / before if stayed else UNSEEN / (1 + before)
        found.append(share)
    return tuple(found)


def has_both(plan: Plan) -> bool:
    """Return whether the length of a match bounds the plan's lookups, and a confidence the guesses behind them."""
    return None not in bounds(plan) and plan.factor != NO_COPY


def bounds(plan: Plan) -> tuple[float | None, float | None]:
    """Return what bounds a plan's guesses besides its shape: its factor and its confidence."""
    return plan.factor, plan.confidence
