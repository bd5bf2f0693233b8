"""Decodes a little with one plan after the other, to see what its steps take and which of its guesses stay."""

from collections.abc import Sequence
from dataclasses import dataclass

from draftsmith.engine import Engine
from draftsmith.engine.arm import Arm, Behind
from draftsmith.engine.evidence import no_evidence
from draftsmith.engine.known import ODDS
from draftsmith.engine.profile import Sampled
from draftsmith.evaluation.measuring.steps import step_seconds
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.types import SamplingParams

UNSEEN = 0.5
"""A guess stays this often as long as nobody has seen it, which weighs as much as one that was seen. Nothing that was
not seen counts as impossible: it could never be learnt otherwise, and texts differ."""
TASKS = 3
"""Of the embedded training texts, which take turns."""
SAMPLED_TEXTS, TEMPERATURE = 16, 0.8
"""At least so many texts show how guesses fare in sampled ones, which are drawn as those of a chat often are."""


@dataclass
class Brought:
    """What a plan brought so far.

    Args:
        stayed: in how many steps the first guess stayed, the second, and so on.
        steps, guessing: all of its steps, and those that made guesses.
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
        """How many guesses a step made that made some, on average."""
        return max(1.0, self.drafted / max(1, self.guessing))

    @property
    def usual(self) -> float:
        """How many guesses a step made, on average over all; see `UNSEEN`."""
        return self.drafted / self.steps if self.drafted else UNSEEN / (1 + self.steps)


class Sampler:
    """Decodes a little with one plan after the other; every call goes on to other prompts.

    Every plan begins at other prompts, by whole turns of their tasks, unless it is bounded by a confidence.

    Args:
        engine: with room for all plans.
        prompts: texts that begin again when all were used.
        new_tokens: so many are decoded, and those of the last step besides.
        looks_up: whether the engine's drafter makes guesses at some steps only, where it finds them in the text.
    """

    def __init__(self, engine: Engine, prompts: Sequence[list[int]], new_tokens: int, looks_up: bool = False) -> None:
        self.engine, self.prompts, self.new_tokens, self.looks_up = engine, prompts, new_tokens, looks_up
        self.brought: dict[Plan, Brought] = {}
        self.behind: dict[Plan, Brought] = {}
        """What was guessed where a lookup found nothing: `steps` are those in which another drafter was asked."""
        self._taken: dict[tuple[Plan, int], int] = {}

    def seconds(self, plan: Plan, rows: int) -> float:
        """Return what a step takes now while so many rows decode, and note which guesses stayed."""
        # What stays of all chains is told together, so they see more texts if each sees some of its own; plans that a
        # confidence bounds are told apart best on the same ones.
        first = 0 if plan == NO_DRAFT or plan.confidence is not None else len(self.brought) * TASKS * rows
        at = self._taken.get((plan, rows), first)
        self._taken[plan, rows] = at + rows
        some = [self.prompts[(at + row) % len(self.prompts)] for row in range(rows)]
        room = self.engine.max_length - max(map(len, some))
        params = SamplingParams(max_tokens=min(room, self.new_tokens + plan.depth), ignore_eos=True)
        requests = self.engine.admit_call(some, params, plan)
        took = step_seconds(self.engine, requests, self.new_tokens)
        brought = self.brought.setdefault(plan, Brought([0] * plan.depth))
        others = self.behind.setdefault(plan, Brought([0] * plan.depth))
        for one in requests:
            for accepted, drafted, behind in one.history.steps(0):
                brought.note(*((0, 0) if behind else (accepted, drafted)))
                if behind:
                    others.note(accepted, drafted)
        return took

    def sampled(self, arm: Arm) -> Sampled:
        """Return how the guesses of a measured plan fare in sampled texts."""
        seen, behind, rows = no_evidence(ODDS.index(1.0)), no_evidence(ODDS.index(1.0)), self.engine.max_batch
        for at in range(0, SAMPLED_TEXTS, rows):
            some = [self.prompts[(at + row) % len(self.prompts)] for row in range(rows)]
            most = min(self.engine.max_length - max(map(len, some)), self.new_tokens + arm.plan.depth)
            params = [
                SamplingParams(max_tokens=most, ignore_eos=True, temperature=TEMPERATURE, seed=at + row)
                for row in range(rows)
            ]
            requests = self.engine.admit_call(some, params, arm.plan)
            step_seconds(self.engine, requests, self.new_tokens)
            for one in requests:
                seen.of_steps(one.history, 0, arm, arm.kept(), 1.0)
                if arm.behind is not None:
                    behind.of_steps_behind(one.history, 0, arm, arm.kept_behind(), 1.0)
        each = (
            (seen.accepted, seen.expected), (seen.found, seen.tokens), (seen.length_of_finds, seen.finds),
            (behind.accepted, behind.expected),
        )
        return Sampled(*((got + UNSEEN) / (usual + UNSEEN) for got, usual in each))

    def arm(self, plan: Plan) -> Arm:
        """Return what is known of a plan but its costs."""
        brought = self._looked_up(plan)
        if not self.looks_up or not plan.depth:
            made = None if plan.confidence is None else brought.usual
            share = brought.guessing / brought.steps if brought.guessing else UNSEEN / (1 + brought.steps)
            return Arm(plan, self._survival(plan, share), (), made=made)
        others, behind = self._guessed_behind(plan), None
        if others.steps:
            behind = Behind(shares([(others.steps, *others.stayed)], plan.depth), others.usual, ())
        return Arm(plan, self._survival(plan), (), self._found(plan), (), brought.guesses, behind)

    def _found(self, plan: Plan) -> float:
        """Return the share of tokens that came from steps whose lookup found something.

        That is much the same for all plans, though not quite: who copies more is sooner where nothing is found.
        """
        brought = self.brought[plan]
        found = brought.guessing + sum(brought.stayed)
        missed = brought.steps - brought.guessing + sum(self.behind[plan].stayed)
        return found / (found + missed) if found else UNSEEN / (1 + missed)

    def _looked_up(self, plan: Plan) -> Brought:
        """Return what a plan brought, guesses behind a lookup left aside; all tell that bound the lookup alike."""
        return self.brought[plan] if not has_both(plan) else together([
            one for other, one in self.brought.items()
            if has_both(other) and (other.depth, other.factor) == (plan.depth, plan.factor)
        ])

    def _guessed_behind(self, plan: Plan) -> Brought:
        """Return what was guessed behind the lookup of a plan; all tell that bound that alike."""
        return self.behind[plan] if not has_both(plan) else together([
            one for other, one in self.behind.items()
            if has_both(other) and (other.depth, other.confidence) == (plan.depth, plan.confidence)
        ])

    def _survival(self, plan: Plan, share: float = 1.0) -> tuple[float, ...]:
        """Return the shares of steps that accepted at least 1, 2, … guesses, those behind a lookup left aside.

        How often a guess stays whose predecessor did is told by all chains that are as deep.

        Args:
            share: of the steps in which there was a guess, of those that are counted.
        """
        alike = [self._looked_up(plan)]
        if plan.is_chain and not has_both(plan):
            alike = [
                brought for one, brought in self.brought.items()
                if one.is_chain and one.sampled == plan.sampled and bounds(one) == bounds(plan)
            ]
        return shares([(one.guessing, *one.stayed) for one in alike], plan.depth, share)


def together(some: Sequence[Brought]) -> Brought:
    """Return what plans of one depth brought."""
    return Brought(
        [sum(stayed) for stayed in zip(*(one.stayed for one in some), strict=True)], sum(one.steps for one in some),
        sum(one.guessing for one in some), sum(one.drafted for one in some),
    )


def shares(counts: Sequence[Sequence[int]], depth: int, share: float = 1.0) -> tuple[float, ...]:
    """Return the shares of steps that accepted at least 1, 2, … guesses.

    Args:
        counts: of one plan or several, in how many steps there was a first guess to accept, then how often the first
            stayed, the second, ….
        share: of steps in which there was.
    """
    found = []
    for at in range(depth):
        deep = [one for one in counts if len(one) > at + 1]
        stayed, before = sum(one[at + 1] for one in deep), sum(one[at] for one in deep)
        share *= stayed / before if stayed else UNSEEN / (1 + before)
        found.append(share)
    return tuple(found)


def has_both(plan: Plan) -> bool:
    """Return whether the length of a match bounds its guesses, and a confidence those behind the lookup."""
    return None not in bounds(plan)


def bounds(plan: Plan) -> tuple[float | None, float | None]:
    """Return what bounds a plan's guesses beside its shape."""
    return plan.factor, plan.confidence
