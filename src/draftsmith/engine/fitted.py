"""A policy that takes the plan which pays: by what drafts cost on this machine and how often they stay in this text.

What a step costs comes from a `Profile`. How often guesses stay differs from text to text, so it is learnt while a row
runs, from the steps that it has behind it and nothing else: what it answers does not depend on what is still to be
drawn.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from draftsmith.engine.policy import Choice, Load, Policy, RowHistory
from draftsmith.engine.profile import Arm, Profile

DECAY, COMMON_DECAY = 0.93, 0.995
"""What a step counts after the next one: for its own row, and for rows that begin later."""
PRIOR = 4.0
"""Guesses: so much evidence stands for what was measured, or for what other rows met, when a row begins."""
PATIENCE = 1.03
"""Another plan has to be so many times as fast before it is taken, and any that drafts than plain decoding."""
FIRST_WAIT, LONGEST_WAIT = 24, 384
"""Steps without a draft before one is tried again; they double as long as that does not lead to as many with one."""
ODDS = tuple(at / 20 for at in range(61))
"""How many times as often as measured a guess may stay; see `Arm.accepted`."""
USUAL = ODDS.index(1.0)
MOST_ROWS = 64


@dataclass(slots=True)
class _Row:
    """What was found of a row: guesses that stayed and that were expected to, both fading, and how far it was seen."""

    accepted: float
    expected: float
    seen: int


class Fitted(Policy):
    """The same plan for all rows, chosen before every step.

    Args:
        profile: what was measured.
        drafter: the name of the engine's drafter that it was measured with; None is the first.
        hope: it never drafts, and so the drafter costs nothing at all, where nothing would be gained even with these
            odds, see `Arm.accepted`.
        rows: nor where nothing would be gained with so many rows; None asks whether there is any number of rows.
    """

    def __init__(
        self, profile: Profile, drafter: str | None = None, hope: float = 1.0, rows: int | None = None
    ) -> None:
        self.profile = profile
        counts = range(1, MOST_ROWS + 1)
        gains = any(profile.best(count, hope) is not profile.arms[0] for count in (counts if rows is None else (rows,)))
        accepts = [[arm.accepted(odds) for odds in ODDS] for arm in profile.arms]
        useful = {0}
        for count in counts if gains else ():
            seconds = [profile.seconds(arm, count) for arm in profile.arms]
            for at in range(len(ODDS)):
                speeds = [(1 + own[at]) / took for own, took in zip(accepts, seconds, strict=True)]
                useful.add(speeds.index(max(speeds)))
        self._arms = [profile.arms[number] for number in sorted(useful)]
        self._accepts = [accepts[number] for number in sorted(useful)]
        self._choices = [Choice(arm.plan, drafter) for arm in self._arms]
        self.steps = [0] * len(self._arms)
        """How many steps took each of `choices`."""
        self._seconds: dict[int, list[float]] = {}
        self._rows: WeakKeyDictionary[RowHistory, _Row] = WeakKeyDictionary()
        self._accepted = self._expected = 0.0  # of all rows
        self._now, self._odds = 0, USUAL
        self._since, self._wait = 0, FIRST_WAIT  # steps since it began, or ceased, to draft

    @property
    def choices(self) -> tuple[Choice, ...]:
        return tuple(self._choices)

    @property
    def is_fixed(self) -> bool:
        return len(self._choices) == 1

    @property
    def typical(self) -> Arm:
        """The plan for one row of a text like those that were measured."""
        return self.profile.best(1)

    def choose(self, load: Load, rows: Sequence[RowHistory]) -> Sequence[Choice]:
        if len(self._choices) == 1 or not rows:
            return self._choices[:1] * len(rows)
        expected, shares = self._accepts[self._now][USUAL], 0.0
        for history in rows:
            row, steps = self._rows.get(history), len(history.accepted)
            if row is None:
                common = (self._accepted + PRIOR) / (self._expected + PRIOR)
                row = self._rows[history] = _Row(PRIOR * common, PRIOR, steps)
            elif expected and steps > row.seen:
                stayed = history.accepted[-1]
                row.accepted, row.expected = DECAY * row.accepted + stayed, DECAY * row.expected + expected
                self._accepted = COMMON_DECAY * self._accepted + stayed
                self._expected = COMMON_DECAY * self._expected + expected
            row.seen = steps
            shares += row.accepted / row.expected
        self._now = self._settle(len(rows), shares / len(rows))
        self.steps[self._now] += 1
        return [self._choices[self._now]] * len(rows)

    def _settle(self, rows: int, share: float) -> int:
        """Return which plan to take, given the mean of the rows' shares."""
        seconds = self._seconds.get(rows)
        if seconds is None:
            seconds = self._seconds[rows] = [self.profile.seconds(arm, rows) for arm in self._arms]
        if self._now:
            accepts = self._accepts[self._now]
            self._odds = min(bisect_left(accepts, share * accepts[USUAL]), len(ODDS) - 1)
        odds = self._odds
        speeds = [(1 + accepts[odds]) / took for accepts, took in zip(self._accepts, seconds, strict=True)]
        best = max(range(1, len(speeds)), key=speeds.__getitem__)
        if self._now and speeds[best] <= PATIENCE * speeds[self._now]:
            best = self._now
        pays = speeds[best] > PATIENCE * speeds[0]
        self._since = self._since + 1 if pays == bool(self._now) else 0
        if pays:
            if self._since >= FIRST_WAIT:
                self._wait = FIRST_WAIT
            return best
        # Now and then it is looked whether nothing still pays.
        if self._since < self._wait:
            return 0
        self._since, self._wait = 0, min(2 * self._wait, LONGEST_WAIT)
        return best
