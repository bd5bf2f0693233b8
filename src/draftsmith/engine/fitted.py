"""A policy that takes the plan that pays, by what drafts cost on this machine and how often guesses stay in this text.

What a step costs comes from a `Profile`. How often guesses stay differs from text to text, so it is learnt while a row
runs, from the row's past steps and nothing else: no answer depends on what is still to be drawn.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from draftsmith.engine.arm import Arm
from draftsmith.engine.budget import Budget, Plans, Wish
from draftsmith.engine.closing import Closing, ends_apart, is_closing
from draftsmith.engine.evidence import (
    NOBODY,
    TRIAL,
    Evidence,
    RowEvidence,
)
from draftsmith.engine.expected import Expected, at_most, beats, values_of
from draftsmith.engine.explaining import Explaining
from draftsmith.engine.known import Known
from draftsmith.engine.learnt import Learnt
from draftsmith.engine.pace import Pace
from draftsmith.engine.policy import Choice, Load, Policy, RowHistory
from draftsmith.engine.reasons import NEVER, TIMING, Reason
from draftsmith.engine.reminders import Reminders
from draftsmith.engine.settling import PATIENCE, Settling
from draftsmith.engine.step_costs import StepCosts
from draftsmith.engine.together import Together
from draftsmith.engine.trials import HELD, SHORT, Offer, Trials
from draftsmith.plan import NO_DRAFT
from draftsmith.types import DraftsmithError

SWITCH = 1.08
"""How many times as fast as the draft taken so far another one has to be for several rows that take one plan: such a
change is made for the sake of their mean. Where all of them have just begun, it is `PATIENCE`."""
CROWD_PATIENCE = 1.08
"""The same as `PATIENCE` where several rows that take one plan begin to draft, or go on when others have joined them.
Guesses bring some rows more than others: they no longer end together, and the last ones decode in steps that are hardly
cheaper. (For the rows of one call, that loss is computed, see `closing`.)"""
GROUP_S, GROUP_SHARE = 0.0005, 0.03
"""Rows that draft differently form groups, and each group costs a step so much time, whatever the target. Where that is
more than this share of a step, all rows take the same plan."""
HELD_EACH, ROOM_EACH = 1, 8
"""Steps with a draft for which it need not be asked again where each row takes its own plan, if every row has so many
tokens to write. Weighing every plan of every row takes up to a millisecond, which at each step would be a thirtieth of
the time. But texts change within a few steps: answers that stood for three further ones made decoding slower with one
text or two at a time."""
HELD_EARLY, HELD_DRAFTING, EARLY = 7, 15, 24
"""Steps with a draft for which it need not be asked again, where all rows take the same plan: while the first of them
has fewer than `EARLY` steps behind it, in which most is learnt about a text, and later."""


class Fitted(Policy):
    """Chooses a plan for every row, step by step, so that all rows together get the most tokens a second.

    Time has a price: the tokens a second that all rows together can have. Each row takes the plan that brings most
    after paying for its time, so that in a crowd only rows whose guesses stay draft. With a small target, whose steps
    are short, all rows take the same plan. What does not pay in a text is tried again after growing pauses, and so is
    another drafter where there are several.

    Args:
        drafters: what was measured of one drafter or of several.
        learns_times: whether it learns from the steps' seconds what they cost now: a machine is slower at some times
            than at others, and not equally for all plans. Otherwise it relies on the measured costs for ever.
    """

    def __init__(self, *drafters: Known, learns_times: bool = False) -> None:
        if not drafters:
            raise DraftsmithError("a fitted policy without drafters has nothing to choose; give at least one.")
        self.known = drafters
        first = drafters[0].profile
        self._guessers = [guesser for known in drafters for guesser in known.guessers]
        owned = [(number, one.known, arm) for number, one in enumerate(self._guessers) for arm in one.arms]
        self._whose = [NOBODY, *(number for number, _, _ in owned)]
        self._arms = [first.arms[0], *(arm for _, _, arm in owned)]
        self._expected = Expected(self._arms, self._whose)
        self._choices = [Choice(NO_DRAFT, drafters[0].name), *(Choice(arm.plan, known.name) for _, known, arm in owned)]
        self._steps = [0] * len(self._arms)
        self._costs = StepCosts(self._arms, [first, *(known.profile for _, known, _ in owned)])
        self._tokens = 0.0  # the length of a row's text, on average over the rows that were looked at last
        self._together = Together(self._expected, self._costs, learns_times)
        self._pace = Pace(self._whose, learns_times)
        self._reminders = Reminders(self._pace, self._whose)
        self._learnt = Learnt(self._guessers, self._whose, self._expected)
        self._trials = Trials(self._whose, self._learnt.told, len(self._guessers), self._expected.most)
        self._closing = Closing(self._expected, self._costs, self._pace, self._learnt)
        self._is_closing = False  # at the last question
        self._settling = Settling(self._whose, self._learnt.told, self._trials)
        # Where all rows take the same plan: what is known about them together; and, of the last question, how many rows
        # decoded, which ones, and how many steps they had behind them.
        self._crowd = RowEvidence([Evidence() for _ in self._guessers], 0)
        self._asked: tuple[int, Sequence[RowHistory], int] | None = None
        # Where each row takes its own plan: the rows of the last question, how many steps the first of them had behind
        # it when they were counted last, and the plans that they take until they are asked about again.
        self._standing: tuple[Sequence[RowHistory], int, Sequence[int]] | None = None
        self._holds = 0  # for how many further steps that answer stands
        self._taken = 0  # which plan all rows took last, reminders included
        self._unasked = 0  # steps taken without a question since the last one
        self._reasons: list[Reason] = []
        self._left = math.inf  # the most tokens that any row could still write at the last question
        self._explaining = Explaining(self._arms, self._whose, self._learnt.told, self._costs, self._expected)

    @property
    def choices(self) -> tuple[Choice, ...]:
        return tuple(self._choices)

    @property
    def is_fixed(self) -> bool:
        return len(self._choices) == 1

    @property
    def steps(self) -> Sequence[int]:
        """How many steps, counted row by row, took each of `choices`."""
        self._count_unasked()
        return self._steps

    @property
    def typical(self) -> Arm:
        """The fastest plan for a single row whose text is like those that were measured."""
        speeds = [
            (1 + arm.accepted()) / took for arm, took in zip(self._arms, self._costs.of(1).seconds, strict=True)
        ]
        return self._arms[speeds.index(max(speeds))]

    def choose(self, load: Load, rows: Sequence[RowHistory]) -> Sequence[Choice]:
        self._count_unasked()
        if self._asked is not None and self._asked[1] != rows:
            for history in self._asked[1]:  # otherwise the last steps of rows that have ended would teach nothing
                self._learnt.of(history)
        if self._standing is not None and self._standing[0] != rows:
            for history in self._standing[0]:
                if history not in rows:
                    self._learn_last(history)
        if len(self._choices) == 1 or not rows:
            self._reasons, self._asked, self._standing = [NEVER] * len(rows), None, None
            self._pace.pause()
            self._together.pause()
            return self._choices[:1] * len(rows)
        count = max(load.decoding, len(rows))
        if GROUP_SHARE * count * self._costs.of(count).plain < GROUP_S or is_closing(load, rows):
            self._standing = None
            self._together.pause()
            return [self._choices[self._of_all(load, rows, count)]] * len(rows)
        self._asked, self._unasked = None, 0
        plans = self._of_one(load, rows) if count == 1 else self._of_each(load, rows, count)
        self._standing = list(rows), len(rows[0].accepted), plans
        return [self._choices[arm] for arm in plans]

    @property
    def holds(self) -> int:
        crowd = self._crowd
        if self._asked is None:
            return 0 if self._standing is None else self._holds
        if crowd.arm != self._taken:
            return self._reminders.left
        left, told = HELD, self._learnt.told[crowd.arm]
        if crowd.arm:
            drafting = crowd.evidence[self._whose[crowd.arm]]
            if drafting.trial:  # to be asked before its end, in case that no guess has stayed, costs more than it saves
                return drafting.trial - 1
            left = min(HELD_EARLY if self._asked[2] < EARLY else HELD_DRAFTING, self._reminders.due_in)
        if self._left <= SHORT:  # nothing is tried any more
            return max(0, left)
        others = (own for number, own in enumerate(crowd.evidence) if number not in told)
        return max(0, min([left, *(own.wait - own.since - 1 for own in others)]))

    def timed(self, seconds: float) -> None:
        self._pace.timed(seconds)
        self._together.pace.timed(seconds)

    def reasons(self, load: Load, rows: Sequence[RowHistory]) -> Sequence[Reason]:
        return self._reasons

    def _of_one(self, load: Load, rows: Sequence[RowHistory]) -> list[int]:
        """Return a plan for the only row."""
        row, expected = self._learnt.of(rows[0]), self._expected
        self._together.pause()
        self._tokens = length_of(rows)
        self._learn_times(load, rows)
        costs = self._costs.of(1, self._tokens).slowed(self._pace.slower(1))
        tokens, times = expected.of(row.stand)
        brings = at_most(tokens, rows[0].left)
        spent = costs.grown(times)
        price = max(tokens / took for tokens, took in zip(brings, spent, strict=True))
        values, most = values_of(brings, price, spent), costs.grown(expected.most_times)
        row.catch_up()
        row.arm = self._settling.settle(row, Offer(values, price, spent, most, rows[0].left), passed=max(1, row.passed))
        self._steps[row.arm] += 1
        reason = self._explaining.reason(row, values, price, spent, 1, self._tokens, PATIENCE)
        self._reasons, self._taken, self._holds = [reason], row.arm, self._held_for(rows, [row])
        return [row.arm]

    def _of_each(self, load: Load, rows: Sequence[RowHistory], count: int) -> list[int]:
        """Return a plan for each of several rows, by what it brings and costs there beside what the others draft."""
        together, known = self._together, self._learnt.of_all(rows)
        self._tokens = length_of(rows)
        self._pace.pause()
        together.learn()
        weighing = together.weigh([row.stand for row in known], count, self._tokens)
        budget, most = weighing.budget, weighing.most
        wishes = [
            Wish(weighing.plans[row.stand].within(history.left), row.arm, self._settling.will_go_on(row))
            for row, history in zip(known, rows, strict=True)
        ]
        shares, fewest = budget.shared_out(wishes), budget.with_held_only(wishes)
        if not shares.beats(fewest, PATIENCE):
            shares = fewest
        price, owed, self._reasons = shares.price, {False: 0.0, True: 0.0}, list[Reason]()
        for at, (row, history, wish) in enumerate(zip(known, rows, wishes, strict=True)):
            row.catch_up()
            brings = wish.plans.brings
            spent, hoped = shares.spent(at, wish.plans), shares.spent(at, most)
            joined = least(spent, wish.plans.alike)
            values, tried = values_of(brings, price, spent), values_of(brings, price, joined)
            offer = Offer(values, price, spent, least(hoped, most.alike), history.left, tried=tried)
            row.arm = self._settling.settle(row, offer, passed=max(1, row.passed))
            shares.take(at, row.arm)
            if row.tried != NOBODY:  # paid for as if others would join; those that begin after it find room
                owed[row.sampled] += TRIAL * price * (spent[row.arm] - joined[row.arm])
            self._reasons.append(self._reason_of(row, wish.plans, price, budget))
        for sampled, tokens in owed.items():
            self._trials.purse.charge(sampled, tokens / count, count)
        taken, added_s = [row.arm for row in known], shares.added_s
        if any(taken) and self._reminder_is_due(load, rows, known, price * budget.step_s(0.0) / count):
            for row in known:
                row.interrupt()
            taken, added_s, self._reasons = [0] * len(known), 0.0, [TIMING] * len(known)
            self._holds = 0
        else:
            self._holds = self._held_for(rows, known)
        for arm in taken:
            self._steps[arm] += 1
        together.begin(load, rows, taken, weighing, added_s)
        self._taken = taken[0]
        return taken

    def _learn_last(self, history: RowHistory) -> None:
        """Learn from the last steps of a row that has ended, about which nobody asked any more."""
        row = self._learnt.of(history)
        if row.passed:
            tokens = row.passed + sum(history.accepted[-row.passed:])
            self._trials.purse.earn(row.sampled, tokens)

    def _held_for(self, rows: Sequence[RowHistory], known: Sequence[RowEvidence]) -> int:
        """Return for how many further steps the answer stands that each of these rows has just got."""
        if not any(row.arm for row in known):
            waits = (
                own.wait - own.since - 1
                for row, history in zip(known, rows, strict=True) if history.left > SHORT for own in row.evidence
            )
            return max(0, min([HELD, *waits]))
        trials = (row.evidence[self._whose[row.arm]].until_judged for row in known if row.arm)
        if min(history.left for history in rows) < ROOM_EACH:
            return 0
        return max(0, min([HELD_EACH, *(left - 1 for left in trials if left)]))

    def _reminder_is_due(
        self, load: Load, rows: Sequence[RowHistory], known: Sequence[RowEvidence], gain: float
    ) -> bool:
        """Return whether the next step is one without guesses, only to see what it costs."""
        on_trial = any(map(self._settling.is_on_trial, known))
        return self._together.can_time(load, rows) and self._together.pace.reminds(len(rows), gain, on_trial)

    def _reason_of(self, row: RowEvidence, plans: Plans, price: float, budget: Budget) -> Reason:
        """Return why a row among others takes the plan that was just settled."""
        values = values_of(plans.brings, price, plans.alike)
        reason = self._explaining.reason(
            row, values, price, plans.alike, budget.rows, self._tokens, PATIENCE
        )
        if row.arm:
            return reason
        first_s = budget.beside(plans)  # if no other row drafted
        first = values_of(plans.brings, price, first_s)
        pays = beats(first, price, first_s, max(range(1, len(first)), key=first.__getitem__), 0, PATIENCE)
        return replace(reason, kind="no_room") if pays else reason

    def _of_all(self, load: Load, rows: Sequence[RowHistory], count: int) -> int:
        """Return one plan for all rows, by what it brings them on average."""
        crowd, passed = self._crowd, 1 + self._unasked
        self._learn_times(load, rows)
        self._unasked = 0
        same = self._asked is not None and self._asked[:2] == (count, rows)
        if same and not crowd.arm and all(own.since + 1 < own.wait for own in crowd.evidence):
            # Nothing was drafted, so nothing was learnt. This case is frequent, and must cost next to nothing.
            self._tokens += passed
            self._trials.purse.earn(crowd.sampled, passed, rows=len(rows))
            for own in crowd.evidence:
                own.since += 1
            self._steps[0] += len(rows)
            self._asked = (count, rows, len(rows[0].accepted))
            return 0
        new = [not self._learnt.knows(history) for history in rows]
        joined = any(new)
        fresh = all(new)
        known = self._learnt.of_all(rows)
        if fresh or self._asked is None:  # these rows drafted nothing, or each of them by a plan of its own
            crowd.start_anew(known[0].arm if len({row.arm for row in known}) == 1 else 0)
        self._tokens = length_of(rows)
        costs = self._costs.of(count, self._tokens)
        stands = [row.stand for row in known]
        brings, times = self._expected.average(stands)
        slower = self._pace.slower(count)
        spent = [took * longer for took, longer in zip(costs.grown(times), slower, strict=True)]
        left, ends, briefly, lost = [row.left for row in rows], 0, list[float](), list[float]()
        closing = self._is_closing = is_closing(load, rows)
        if closing:
            ends = ends_apart(left)
            averaged = brings
            brings, briefly = self._closing.brings(known, left, averaged, times, spent, self._tokens)
            lost = [mean / own if own else 1.0 for mean, own in zip(averaged, brings, strict=True)]
        price = max(tokens / took for tokens, took in zip(brings, spent, strict=True))
        values = values_of(brings, price, spent)
        crowd.sampled = all(row.sampled for row in known)
        for number, own in enumerate(crowd.evidence):
            others = [row.evidence[number] for row in known]
            own.hit = any(one.hit for one in others)
            own.guessed = any(one.guessed for one in others)
            own.growth = round(sum([one.growth for one in others]) / len(others))
            own.length = round(sum([one.length for one in others]) / len(others))
            own.odds = round(sum([one.odds for one in others]) / len(others))
        begins = len(rows) > 1 and (joined or crowd.trying or not crowd.arm)
        patience = CROWD_PATIENCE if begins and not closing else PATIENCE
        self._left = max(left)

        hoped = [
            took * longer for took, longer in zip(costs.grown(self._expected.most_times), slower, strict=True)
        ]
        tried = values_of(briefly, price, spent) if closing else ()
        offer = Offer(values, price, spent, hoped, self._left, len(rows), ends, tried, closing)
        switch = PATIENCE if len(rows) == 1 or fresh else SWITCH
        crowd.arm = self._settling.settle(crowd, offer, patience, switch, passed)
        self._taken = self._reminders.plan(crowd.arm, self._settling.is_on_trial(crowd), count, values, price, spent)
        reason: Reason = TIMING
        if self._taken == crowd.arm:
            reason = self._explaining.reason(crowd, values, price, spent, count, self._tokens, patience, lost)
        self._reasons = [reason] * len(rows)
        for row in known:
            row.arm = self._taken
            if crowd.tried != NOBODY:
                row.evidence[crowd.tried].doubt()
        self._steps[self._taken] += len(rows)
        self._asked = (count, list(rows), len(rows[0].accepted))
        return self._taken

    def _count_unasked(self) -> None:
        """Count the steps that were taken without a question since the last one, by the plans of the last answer."""
        if self._standing is not None:
            standing, counted, taken = self._standing
            unasked = max(0, len(standing[0].accepted) - counted - 1)
            for arm in taken:
                self._steps[arm] += unasked
            self._together.pace.passed(unasked)
            self._standing = standing, counted + unasked, taken
        if self._asked is None:
            return
        count, rows, before = self._asked
        unasked = len(rows[0].accepted) - before - 1
        if unasked > 0:
            for own in self._crowd.evidence:
                own.since += unasked
            self._steps[self._taken] += unasked * len(rows)
            self._reminders.passed(unasked, self._taken > 0)
            self._unasked += unasked
            self._asked = (count, rows, before + unasked)

    def _learn_times(self, load: Load, rows: Sequence[RowHistory]) -> None:
        """Take in how long the steps since the last question took; the next ones are those of these rows."""
        if self._crowd.trying and self._asked is not None and self._pace.took:
            self._charge_trial(self._asked[1], self._pace.took)
        heard = self._pace.heard(self._taken)
        if heard is not None:
            before, took = heard
            count = len(before)
            seconds = self._costs.of_made(self._costs.of(count, self._tokens), self._taken, before, len(took))
            self._pace.learn(count, self._taken, took, seconds)
        self._pace.begin(load, rows)

    def _charge_trial(self, rows: Sequence[RowHistory], took: Sequence[float]) -> None:
        """Let the last steps of rows, which were on trial, be paid for by the seconds that they really took.

        A greedy row by itself is not charged, because it may begin to repeat itself and then gain much. Steps soon
        behind a prompt would have taken long without drafts too; and beside other drafts it is not known what those
        would have brought.
        """
        count, steps, sampled = len(rows), len(took), self._crowd.sampled
        if (count == 1 and not sampled) or self._crowd.settled or not self._pace.is_warm:
            return
        plain_s = count * self._costs.of(count, self._tokens).plain * self._pace.slower(count)[0]
        each = [sum(row.accepted[-steps:]) for row in rows]
        stayed = min(each) if self._is_closing else sum(each) / count
        self._trials.charge(sampled, steps, sum(took) / plain_s - steps - stayed, count)


def least(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """Return the smaller of every two numbers.

    What a trial costs is told like this: where a step has no more room for one row, there may be some for all of them.
    """
    return [min(pair) for pair in zip(one, other, strict=True)]


def length_of(rows: Sequence[RowHistory]) -> float:
    """Return how many tokens the rows' texts have, on average, prompts included."""
    return sum(row.prompt_tokens + row.written for row in rows) / len(rows)
