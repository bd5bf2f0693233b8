"""Measures what drafts cost and gain: plans with more and more guesses decode a little, until larger ones clearly lose.

Costs and acceptance are measured in decoding itself, on texts that are not used for evaluation. Every run of a plan is
timed together with a run of plain decoding.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice, product

from draftsmith.drafters.base import Drafter, StagewiseDrafter
from draftsmith.engine import Engine
from draftsmith.engine.arm import Arm
from draftsmith.engine.pace import COLD_STEPS
from draftsmith.engine.profile import Profile, candidates
from draftsmith.engine.reasons import shape_in_words
from draftsmith.evaluation.measuring.copying import always_finding
from draftsmith.evaluation.measuring.length_costs import measure_length_cost
from draftsmith.evaluation.measuring.sampler import TASKS, TURN_S, UNSEEN, Sampler, bounds
from draftsmith.evaluation.measuring.width_costs import measure_width_cost
from draftsmith.evaluation.prompts import Prompt, cut, embedded_prompts
from draftsmith.plan import NEVER_SURE, NO_COPY, NO_DRAFT, Plan
from draftsmith.processor import Watch
from draftsmith.targets import Target
from draftsmith.types import DraftsmithError

ROWS = (1, 2, 4, 8, 16)
PROMPT_TOKENS, NEW_TOKENS = 48, 96
STEPS = 3 * COLD_STEPS
"""A plan is timed for so many steps a turn, or until a text has `NEW_TOKENS` new tokens."""
FULL_TOKENS = 2 * COLD_STEPS + 2
"""New tokens of runs in which all rows guess at every step; fewer are enough, because such steps are all alike."""
FEWEST_TEXTS = 24
"""The fewest texts, even for few rows, because acceptance differs from text to text."""
SLOW_STEP_S, NEARLY = 0.01, 0.95
"""Where a plain step takes longer than `SLOW_STEP_S`, fewer plans are timed with several rows: of those that make about
as many guesses, the ones that are at least `NEARLY` as fast with one row as the fastest. (Not only the fastest of all:
with several rows fewer guesses pay, above all where a step of more tokens than some number costs clearly more.)"""
COPYING_TURN_S = 0.1
"""As `TURN_S`, for steps in which all rows guess."""
HOPELESS, MISSES = 0.85, 2
"""Larger drafts are not tried once `MISSES` in a row had less than the share `HOPELESS` of the best speed so far."""
FEWEST_TURNS, FEWEST_OF_SEVERAL, MOST_TURNS, ENOUGH_S = TASKS, 2, 6, 0.2
"""A plan is timed at least `FEWEST_TURNS` times with one row, or `FEWEST_OF_SEVERAL` times with several rows, which see
several tasks at once; then until `ENOUGH_S` seconds have passed, at most `MOST_TURNS` times in all."""
ALONE = 3
"""With only one number of rows, a plan is timed this many times as long and up to this many times as often, because
these runs alone show which guesses stay."""
NOISY = 1.4
"""If the median plain step takes more than this many times the fastest, other programs disturbed the measurement."""
MOST_NODES = 64
LONG_TOKENS, LONG_ROUNDS, LONG_TOKENS_OF_SLOW, LONG_ROUNDS_OF_SLOW = 1024, 3, 512, 1
"""Tokens and rounds of the text that shows what longer texts cost; both are fewer where a plain step takes longer than
`SLOW_STEP_S`."""

Taken = dict[Plan, dict[int, list[float]]]
"""All measurements, by plan and by number of rows: for plain decoding the seconds of a step, for any other plan how
many seconds longer than the plain step timed with it its step took. Where other programs slow the memory meanwhile,
that is taken to cost both as many seconds: drafted steps are not slower by as many times as plain ones."""


class Contest:
    """Times plans, smaller ones first, for as long as larger ones may pay.

    Args:
        rows: numbers of rows to time steps with, rising.
        on_progress: gets what is being measured.
        copying: for a lookup, the sampler of a stand-in that makes all guesses at every step.
    """

    def __init__(
        self, sampler: Sampler, rows: Sequence[int], on_progress: Callable[[str], None], copying: Sampler | None = None
    ) -> None:
        self.sampler, self.rows, self.on_progress, self.copying = sampler, tuple(rows), on_progress, copying
        self.taken: Taken = {}
        # By (guesses, rows): how many seconds longer than a plain step one takes in which all rows make that many.
        self._full: dict[tuple[int, int], float] = {}

    def time(self, plan: Plan, rows: int) -> None:
        """Time a plan and plain decoding in turn, until there are enough measurements of both."""
        guesses = shape_in_words(plan) if bounds(plan) != (None, None) else f"{plan.max_nodes} guesses"
        self.on_progress(f"{_in_rows(rows)}, {guesses}")
        begun, longer = time.monotonic(), ALONE if len(self.rows) == 1 else 1
        fewest = FEWEST_TURNS if rows == 1 else FEWEST_OF_SEVERAL
        for turn in range(MOST_TURNS * longer):
            plain = self.sampler.seconds(NO_DRAFT, rows)
            self._note(NO_DRAFT, rows, plain)
            if plan != NO_DRAFT:
                self._note(plan, rows, self.sampler.seconds(plan, rows) - plain)
            if turn + 1 >= fewest and time.monotonic() - begun > ENOUGH_S * longer:
                return

    def speed(self, plan: Plan) -> float:
        """Return tokens a second of one row."""
        return (1 + self.sampler.arm(plan).accepted()) / self.seconds(plan, self.rows[0])

    def _note(self, plan: Plan, rows: int, took: float) -> None:
        self.taken.setdefault(plan, {}).setdefault(rows, []).append(took)

    def seconds(self, plan: Plan, rows: int) -> float:
        """Return the seconds of a step; a chain takes no more than a longer, equally or unbounded one."""
        plain = statistics.median(self.taken[NO_DRAFT][rows])
        if plan == NO_DRAFT:
            return plain
        alike = [plan]
        if plan.is_chain:
            longer = [one for one in self.taken if one.is_chain and one.depth >= plan.depth and rows in self.taken[one]]
            alike += [one for one in longer if bounds(one) in (bounds(plan), bounds(_whole(plan)))]
        return plain + max(0.0, min(statistics.median(self.taken[one][rows]) for one in alike))

    def _usual_behind(self, plan: Plan) -> float:
        """Return how many guesses behind the lookup a step made, on average over all steps."""
        return self.sampler.behind[plan].drafted / self.sampler.brought[plan].steps

    def time_full(self, copying: Sampler, guesses: int, rows: int) -> None:
        """Time steps in which all rows make `guesses` guesses, unless that was done before."""
        if (guesses, rows) in self._full:
            return
        self.on_progress(f"{_in_rows(rows)}, {guesses} guesses in each")
        plan, extra_s = Plan((1,) * guesses), []
        copying.seconds(plan, rows)  # warms up
        for _ in range(FEWEST_TURNS):
            plain = copying.seconds(NO_DRAFT, rows)
            extra_s.append(copying.seconds(plan, rows) - plain)
        self._full[guesses, rows] = statistics.median(extra_s)

    def full_seconds(self, guesses: int, rows: int) -> float:
        """Return the seconds of a step in which all rows make `guesses` guesses; more guesses never take less."""
        extra_s = [took for (more, count), took in self._full.items() if more >= guesses and count == rows]
        return self.seconds(NO_DRAFT, rows) + max(0.0, min(extra_s))

    def run(self, plans: Sequence[Plan]) -> Profile:
        """Time the plans and return the profile."""
        self.time(NO_DRAFT, self.rows[0])
        misses, best = 0, 0.0
        for plan in plans:
            # With a bound other than the length fewer guesses fail, so such a plan may pay where others clearly lose.
            if misses == MISSES and bounds(plan) == (None, None):
                continue
            self.time(plan, self.rows[0])
            best = max(best, self.speed(plan), self.speed(NO_DRAFT))
            if misses < MISSES:
                misses = misses + 1 if self.speed(plan) < HOPELESS * best else 0
        plain = self.speed(NO_DRAFT)
        # A bounded plan may pay with many rows even where it does not with one; the longest are kept to find out.
        bounded = [plan for plan in self.taken if bounds(plan) != (None, None)]
        always = {NO_DRAFT, *(plan for plan in bounded if plan.depth == max(one.depth for one in bounded))}
        kept = [plan for plan in self.taken if plan in always or self.speed(plan) >= HOPELESS * plain]
        if len(self.rows) > 1 and self.seconds(NO_DRAFT, self.rows[0]) > SLOW_STEP_S:
            always = {plan for plan in always if plan.confidence is None}
            kept = [plan for plan in kept if plan in always or self._is_near_best(plan, kept)]
        for rows in self.rows[1:]:
            for plan in kept:
                self.time(plan, rows)
        for plan, rows in product(kept[1:], self.rows):
            whole = _whole(plan)
            if plan.confidence not in (None, NEVER_SURE) and rows not in self.taken.get(whole, {}):
                self.time(whole, rows)
            if self.copying is not None and plan.factor != NO_COPY:
                self.time_full(self.copying, plan.max_nodes, rows)
        return Profile(self.rows, tuple(self._with_costs(plan) for plan in kept))

    def _is_near_best(self, plan: Plan, others: Sequence[Plan]) -> bool:
        """Return whether a plan is nearly as fast as the fastest one that makes about as many guesses, with one row."""
        alike = [other for other in others if self._size(other) == self._size(plan)]
        return self.speed(plan) >= NEARLY * max(map(self.speed, alike))

    def _size(self, plan: Plan) -> int:
        """Return the same number for plans that verify 1 guess a step, 2 or 3, 4 to 7, 8 to 15, and so on."""
        arm = self.sampler.arm(plan)
        return round(arm.usual + arm.usual_behind).bit_length()

    def _with_costs(self, plan: Plan) -> Arm:
        """Return a plan with its costs; a lookup, or a plan bounded by a confidence, does not guess at every step."""
        arm = self.sampler.arm(plan)
        seconds, full = tuple(self.seconds(plan, rows) for rows in self.rows), tuple[float, ...]()
        if arm.varies:
            whole = _whole(plan)
            # Some drafters make fewer guesses than they may even without a bound. The cost of a guess comes from all
            # guesses of the whole chain, since both plans, timed on different texts, may make nearly as many.
            more = (plan.max_nodes - arm.usual) / self.sampler.brought[whole].usual
            full = tuple(
                took + more * max(0.0, self.seconds(whole, rows) - self.seconds(NO_DRAFT, rows))
                for took, rows in zip(seconds, self.rows, strict=True)
            )
        elif arm.found is not None:
            full = tuple(self.full_seconds(plan.max_nodes, rows) for rows in self.rows)
        arm = replace(arm, seconds=seconds, full=full)
        if arm.behind is None:
            return arm
        return replace(arm, behind=replace(arm.behind, each=tuple(
            self._each_behind(arm, took, copied, rows)
            for took, copied, rows in zip(seconds, full, self.rows, strict=True)
        )))

    def _each_behind(self, arm: Arm, took: float, copied: float, rows: int) -> float:
        """Return the seconds of one more guess behind a lookup, so where it found nothing, in every row.

        A guess that is looked up and a guess behind the lookup have different costs. Both follow from steps of three
        plans: this one, one that only copies, and the whole chain, which has no bound. Where the whole chain was not
        timed or makes no more guesses behind the lookup, the first two alone give the cost behind it.

        Args:
            took, copied: seconds of a step of this plan, and of the one that only copies.
        """
        whole, room = Plan((1,) * arm.plan.depth), max(1.0, arm.plan.max_nodes - arm.usual)
        if rows in self.taken.get(whole, {}):
            share = (self.sampler.brought[whole].usual - arm.usual) / room
            more = self._usual_behind(whole) - arm.usual_behind + share * arm.usual_behind
            if more > UNSEEN:
                return max(0.0, self.seconds(whole, rows) - took - share * (copied - took)) / more
        return max(0.0, copied - took) / room

    @property
    def is_steady(self) -> bool:
        """Whether a plain step took about the same time whenever it was timed."""
        return all(statistics.median(some) < NOISY * min(some) for some in self.taken[NO_DRAFT].values())


def _whole(plan: Plan) -> Plan:
    """Return a chain of the same depth and drafters in which no guess is left out."""
    return Plan((1,) * plan.depth, factor=NO_COPY if plan.factor == NO_COPY else None)


def _in_rows(rows: int) -> str:
    return f"{rows} row{'s' if rows > 1 else ''}"


def up_to(rows: int) -> tuple[int, ...]:
    """Return the numbers of rows to time for an engine of `rows` rows; costs beyond them are extrapolated."""
    return tuple(count for count, before in zip(ROWS, (0, *ROWS), strict=False) if before < rows)


def measure_profile(
    target: Target, drafter: Drafter, rows: Sequence[int], on_progress: Callable[[str], None] = lambda _: None
) -> tuple[Profile, bool]:
    """Decode with plans of more and more nodes; return the profile, and whether the machine was quiet meanwhile.

    Args:
        rows: numbers of rows to time steps with, rising.
        on_progress: gets what is being measured.
    """
    default, most = drafter.default_plan(), rows[-1]
    longest = drafter.max_depth if isinstance(drafter, StagewiseDrafter) else default.depth
    behind = drafter.parts[-1] if drafter.parts else None
    grower: Drafter | None = drafter
    if behind is not None:
        # With a memory of its own, which is kept for one kind of draft, it makes chains alone.
        grower = behind if drafter.confidences and not behind.reads_prompt else None
    plans = candidates(
        default, isinstance(grower, StagewiseDrafter), MOST_NODES, longest, drafter.factors, drafter.confidences,
        drafter.longest, 0 if behind is None else behind.max_depth or behind.default_plan().depth,
    )
    largest = max([NO_DRAFT, *plans], key=lambda plan: plan.max_nodes)
    deepest = max((plan.depth for plan in plans), default=0)
    length = min(PROMPT_TOKENS + NEW_TOKENS, max(2, target.max_length - deepest))
    new_tokens = max(1, length * NEW_TOKENS // (PROMPT_TOKENS + NEW_TOKENS))
    prompts = texts_for(target, length - new_tokens, max(FEWEST_TEXTS, 3 * most))
    longest_prompt = max(map(len, prompts))
    # All prompts of a call are read in one step, so that all texts begin in the same one.
    reach, piece = min(target.max_length, longest_prompt + new_tokens + deepest), most * longest_prompt

    def sampler_of(one: Drafter, tokens: int, turn_s: float) -> Sampler:
        engine = Engine(target, one, plan=largest, max_batch=most, max_length=reach, piece_tokens=piece)
        return Sampler(engine, prompts, tokens, STEPS, bool(one.factors), one.can_sample, turn_s)

    sampler = sampler_of(drafter, new_tokens, TURN_S)
    finding = always_finding(drafter, default) if drafter.factors else None
    copying = None if finding is None else sampler_of(finding, min(FULL_TOKENS, new_tokens), COPYING_TURN_S)
    for plan in (largest, NO_DRAFT):
        sampler.seconds(plan, 1)  # warms up
    sampler.plain_s = sampler.seconds(NO_DRAFT, 1)
    if copying is not None:
        copying.plain_s = sampler.plain_s
    contest, watch = Contest(sampler, rows, on_progress, copying), Watch()
    found = contest.run(plans)
    if len(found.arms) > 1:
        on_progress("sampled and long texts")
        best = max(found.arms[1:], key=lambda arm: found.speed(arm, rows[0]))
        # A plan in which both drafters of a pair guess, if there is one.
        drawn = [arm for arm in found.arms[1:] if arm.suits_draws] or [best]
        telling = [arm for arm in drawn if arm.behind is not None] or drawn
        found = replace(found, sampled=sampler.sampled(max(telling, key=lambda arm: found.speed(arm, rows[0]))))
        bounded = finding is not None or best.varies
        plan = Plan((1,) * max(1, round(best.guesses))) if bounded else best.plan
        slow = found.arms[0].seconds[0] > SLOW_STEP_S
        long, rounds = (LONG_TOKENS_OF_SLOW, LONG_ROUNDS_OF_SLOW) if slow else (LONG_TOKENS, LONG_ROUNDS)
        # If long texts cannot be read, requests for them fail later; short texts can still be drafted for.
        with suppress(DraftsmithError):
            # Of several drafters the last decides what a guess costs after a long text: it may have to read that text.
            last = drafter.parts[-1] if drafter.parts else drafter
            guesser = finding if finding is not None and last.factors else last
            if guesser.max_depth is not None:
                plan = plan.shortened(guesser.max_depth)
            cost = measure_length_cost(target, guesser, plan, prompts, longest_prompt, long, rounds)
            found = replace(found, length_cost=cost)
        if most > 1 and found.arms[0].seconds[-1] > SLOW_STEP_S:  # where steps are short, all rows draft alike
            on_progress("wide steps")
            with suppress(DraftsmithError):
                found = replace(found, width_cost=measure_width_cost(target, prompts[0]))
    return found, contest.is_steady and not watch.is_disturbed


def texts_for(target: Target, tokens: int, count: int) -> list[list[int]]:
    """Return beginnings of the embedded training texts; for a target without a tokenizer, random tokens."""
    if target.tokenizer is not None:
        return cut(target, mixed(), tokens, count, exact=False)
    rng = random.Random(0)
    return [[rng.randrange(target.vocab_size) for _ in range(tokens)] for _ in range(count)]


def mixed() -> list[Prompt]:
    """Return the embedded training texts, in an order in which the tasks take turns."""
    texts = embedded_prompts(split="train")
    tasks = [[text for text in texts if text.task == task] for task in sorted({text.task for text in texts})]
    return list(islice(taking_turns(tasks), len(texts)))


def taking_turns(lists: Sequence[Sequence[Prompt]]) -> Iterator[Prompt]:
    """Yield the first of each list, then the second of each, and so on."""
    for at in range(max(map(len, lists))):
        for one in lists:
            if at < len(one):
                yield one[at]
