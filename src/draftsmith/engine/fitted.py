"""A policy that takes the plan which pays: by what drafts cost on this machine and how often they stay in this text.

What a step costs comes from a `Profile`. How often guesses stay differs from text to text, so it is learnt while a row
runs, from the steps that it has behind it and nothing else: what it answers does not depend on what is still to be
drawn.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from draftsmith.engine.evidence import FIRST_WAIT, LONGEST_WAIT, PRIOR, TRIAL, Evidence, RowEvidence
from draftsmith.engine.pace import Pace
from draftsmith.engine.policy import Choice, Load, Policy, RowHistory
from draftsmith.engine.profile import Arm, Profile
from draftsmith.engine.reasons import NEVER, Label, Reason, Weighed
from draftsmith.plan import NO_DRAFT
from draftsmith.types import DraftsmithError

DECAY, COMMON_DECAY = 0.93, 0.999
"""What a step counts after the next one: for its own row, and for rows that begin later."""
PATIENCE = 1.03
"""Another plan has to be so many times as fast before it is taken, and any that drafts than plain decoding."""
LOST = 0.005
"""The share of all tokens that trials may cost in the long run, as far as the longest pause allows."""
ODDS = tuple(at / 20 for at in range(61))
"""How many times as often as measured a guess may stay; see `Arm.accepted`."""
USUAL = ODDS.index(1.0)
GROUP_S, GROUP_SHARE = 0.0005, 0.03
"""Rows that draft differently are groups, each of which costs a step some time whatever the target. Where that is more
than this share of a step, all rows do the same."""
HELD = 7
"""Steps without a draft for which it need not be asked again, where all rows do the same."""
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of rows for which plans are compared beforehand."""
NEARLY = 0.95
"""A plan is kept that is somewhere so near to the best: which of them is, is only learnt while they are used."""
NOBODY = -1


@dataclass(frozen=True)
class Known:
    """One of the engine's drafters, with what was measured of it.

    Args:
        name: by which the engine has it; None is its first.
        hope: it never drafts, and so costs nothing at all, where nothing would be gained even with these odds, see
            `Arm.accepted`.
        rows: nor where nothing would be gained with so many rows; None asks whether there is any number of rows.
    """

    profile: Profile
    name: str | None = None
    hope: float = 1.0
    rows: int | None = None

    def useful(self) -> list[Arm]:
        """Return its plans that are the best, or nearly, for some number of rows and some odds."""
        profile, asked = self.profile, COUNTS if self.rows is None else (self.rows,)
        if all(profile.best(count, self.hope) is profile.arms[0] for count in asked):
            return []
        kept = set[int]()
        for odds in ODDS:
            for count in COUNTS:
                speeds = [profile.speed(arm, count, odds) for arm in profile.arms]
                enough = max(speeds[0], NEARLY * max(speeds))
                kept.update(at for at, speed in enumerate(speeds) if at and speed >= enough)
        return [profile.arms[at] for at in sorted(kept)]


class Fitted(Policy):
    """A plan for every row, chosen before every step, that together bring the most tokens a second.

    Time has a price: the tokens a second that all rows together can have. Each row takes the plan that brings most
    after paying for the time it takes, so that in a crowd only those draft whose guesses stay. Of a small target, whose
    steps are short, all rows take the same plan. What does not pay in a text is tried again after growing pauses, and
    so is another drafter where there are several.

    Args:
        drafters: what was measured of one drafter or of several.
        clock: tells seconds, by which it learns what steps cost now: a machine is slower at some times than at others,
            and not for all plans alike. None takes what was measured for ever.
    """

    def __init__(self, *drafters: Known, clock: Callable[[], float] | None = None) -> None:
        if not drafters:
            raise DraftsmithError("a fitted policy without drafters has nothing to choose; give at least one.")
        self.known = drafters
        self._first = drafters[0].profile
        owned = [(number, known, arm) for number, known in enumerate(drafters) for arm in known.useful()]
        self._whose = [NOBODY, *(number for number, _, _ in owned)]
        self._arms = [self._first.arms[0], *(arm for _, _, arm in owned)]
        self._profiles = [self._first, *(known.profile for _, known, _ in owned)]
        self._accepts = [[arm.accepted(odds) for odds in ODDS] for arm in self._arms]
        self._growths = [[arm.growth(odds) for odds in ODDS] for arm in self._arms]
        self._of = [[at for at, whose in enumerate(self._whose) if whose == number] for number in range(len(drafters))]
        self._choices = [Choice(NO_DRAFT, drafters[0].name), *(Choice(arm.plan, known.name) for _, known, arm in owned)]
        self.steps = [0] * len(self._arms)
        """How many steps of a row took each of `choices`."""
        self._seconds: dict[int, list[float]] = {}
        self._pace = Pace(len(self._arms), clock)
        self._share_s = 0.0  # seconds that a row's share of the last step was measured to take, of all alike
        self._rows: WeakKeyDictionary[RowHistory, RowEvidence] = WeakKeyDictionary()
        self._accepted, self._expected = [0.0] * len(drafters), [0.0] * len(drafters)  # of all rows
        # What all rows do where they do the same, and, where that was nothing, how many decoded, who they were, and how
        # many steps lay behind them.
        self._crowd = RowEvidence([Evidence(PRIOR, PRIOR, USUAL) for _ in drafters], 0)
        self._idle: tuple[int, Sequence[RowHistory], int] | None = None
        self._reasons: Sequence[Reason] = ()
        self._hopeless: dict[int, bool] = {}

    @property
    def choices(self) -> tuple[Choice, ...]:
        return tuple(self._choices)

    @property
    def is_fixed(self) -> bool:
        return len(self._choices) == 1

    @property
    def typical(self) -> Arm:
        """The plan for one row of a text like those that were measured."""
        speeds = [(1 + own[USUAL]) / took for own, took in zip(self._accepts, self._times(1), strict=True)]
        return self._arms[speeds.index(max(speeds))]

    def choose(self, load: Load, rows: Sequence[RowHistory]) -> Sequence[Choice]:
        if len(self._choices) == 1 or not rows:
            self._reasons, self._idle = [NEVER] * len(rows), None
            self._pace.pause()
            return self._choices[:1] * len(rows)
        count = max(load.decoding, len(rows))
        seconds = self._times(count)
        if GROUP_SHARE * count * seconds[0] < GROUP_S:
            slower = self._pace.slower(load, rows, count, self._crowd.arm, self._share_s, self._passed())
            now = [took * times for took, times in zip(seconds, slower, strict=True)]
            arm = self._of_all(rows, now, count)
            self._share_s = self._share_s / slower[arm] if arm else seconds[0]
            return [self._choices[arm]] * len(rows)
        self._idle = None
        self._pace.pause()
        known = [self._look_at(history) for history in rows]
        price, worth = self._price(seconds, known), dict[tuple[int, ...], tuple[list[float], list[float]]]()
        found, reasons = [], []
        for row in known:
            odds = row.odds
            if odds not in worth:
                spent = self._spent(odds, seconds)
                worth[odds] = self._values(odds, price, spent), spent
            values, spent = worth[odds]
            row.arm = self._settle(row, values, price, spent, seconds)
            self.steps[row.arm] += 1
            found.append(self._choices[row.arm])
            reasons.append(self._reason(row, values, price, spent, count))
        self._reasons = reasons
        return found

    @property
    def holds(self) -> int:
        if self._idle is None:
            return 0
        return max(0, min(HELD, *(own.wait - own.since - 1 for own in self._crowd.evidence)))

    def reasons(self, load: Load, rows: Sequence[RowHistory]) -> Sequence[Reason]:
        return self._reasons

    def _of_all(self, rows: Sequence[RowHistory], seconds: Sequence[float], count: int) -> int:
        """Return one plan for all rows, by what it brings them on average."""
        crowd = self._crowd
        same = self._idle is not None and self._idle[:2] == (count, rows)
        if same and all(own.since + 1 < own.wait for own in crowd.evidence):
            # Nothing was drafted, so nothing was learnt; this is asked often, and has to cost next to nothing.
            for own in crowd.evidence:
                own.since += 1
            self.steps[0] += len(rows)
            self._idle = (count, rows, len(rows[0].accepted))
            return 0
        known = [self._look_at(history) for history in rows]
        brings, spent = self._average(known, seconds)
        price = max(tokens / took for tokens, took in zip(brings, spent, strict=True))
        values = [tokens - price * took for tokens, took in zip(brings, spent, strict=True)]
        for number, own in enumerate(crowd.evidence):
            own.hit = any(row.evidence[number].hit for row in known)
            if self._of[number]:
                # Of a text whose guesses stay so often, the best plan would bring what it brings these on average.
                best = max(self._of[number], key=values.__getitem__)
                own.odds = min(bisect_left(self._accepts[best], brings[best] - 1), len(ODDS) - 1)
        crowd.arm = self._settle(crowd, values, price, spent, seconds, len(rows))
        self._share_s = spent[crowd.arm]
        self._reasons = [self._reason(crowd, values, price, spent, count)] * len(rows)
        for row in known:
            row.arm = crowd.arm
            for number, own in enumerate(crowd.evidence):
                if own.trial == TRIAL:
                    row.evidence[number].doubt()
        self.steps[crowd.arm] += len(rows)
        self._idle = None if crowd.arm else (count, list(rows), len(rows[0].accepted))
        return crowd.arm

    def _passed(self) -> int:
        """Return how many steps were taken since the last question, and count those that nobody asked about."""
        if self._idle is None:
            return 1
        _, rows, before = self._idle
        unasked = max(0, len(rows[0].accepted) - before - 1)
        for own in self._crowd.evidence:
            own.since += unasked
        self.steps[0] += unasked * len(rows)
        return 1 + unasked

    def _average(self, rows: Sequence[RowEvidence], seconds: Sequence[float]) -> tuple[list[float], list[float]]:
        """Return the tokens that every plan brings a row, and the seconds that it takes, on average."""
        brings, spent, counts = [1.0] * len(self._arms), list(seconds), Counter(row.odds for row in rows)
        for at in range(1, len(brings)):
            accepts, growths, whose = self._accepts[at], self._growths[at], self._whose[at]
            brings[at] += sum(accepts[odds[whose]] * count for odds, count in counts.items()) / len(rows)
            growth = sum(growths[odds[whose]] * count for odds, count in counts.items()) / len(rows)
            spent[at] = seconds[0] + growth * (seconds[at] - seconds[0])
        return brings, spent

    def _times(self, rows: int) -> list[float]:
        """Return the seconds that a row's plan adds to a step of so many rows, for every plan."""
        found = self._seconds.get(rows)
        if found is None:
            # Plain steps were timed beside each drafter, and took a little more or less beside one than another.
            plain = self._first.seconds(self._arms[0], rows) / rows
            found = self._seconds[rows] = [
                plain * profile.seconds(arm, rows) / profile.seconds(profile.arms[0], rows)
                for arm, profile in zip(self._arms, self._profiles, strict=True)
            ]
        return found

    def _look_at(self, history: RowHistory) -> RowEvidence:
        """Return what is known of a row, its last step included."""
        row, steps = self._rows.get(history), len(history.accepted)
        if row is None:
            row = self._rows[history] = RowEvidence([self._begin(number) for number in range(len(self._of))], steps)
        elif steps > row.seen:
            # Steps behind that one were not asked about: a prediction drafted them.
            stayed, expected, number = history.accepted[row.seen], self._accepts[row.arm][USUAL], self._whose[row.arm]
            row.seen = steps
            if expected:
                own = row.evidence[number]
                own.accepted, own.expected = DECAY * own.accepted + stayed, DECAY * own.expected + expected
                own.odds, own.hit = self._odds(row.arm, own.accepted / own.expected), own.hit or stayed > 0
                self._accepted[number] = COMMON_DECAY * self._accepted[number] + stayed
                self._expected[number] = COMMON_DECAY * self._expected[number] + expected
        return row

    def _begin(self, number: int) -> Evidence:
        """Return what stands for a drafter's evidence in a new text: that of other texts."""
        common = (self._accepted[number] + PRIOR) / (self._expected[number] + PRIOR)
        arms = self._of[number]
        return Evidence(PRIOR * common, PRIOR, self._odds(arms[-1], common) if arms else USUAL)

    def _odds(self, arm: int, share: float) -> int:
        """Return the odds at which a plan accepts so many times what was measured."""
        accepts = self._accepts[arm]
        return min(bisect_left(accepts, share * accepts[USUAL]), len(ODDS) - 1)

    def _spent(self, odds: Sequence[int], seconds: Sequence[float]) -> list[float]:
        """Return the seconds that every plan takes where guesses stay so often."""
        plain, *drafted = seconds
        whose = self._whose[1:]
        return [plain, *(
            plain + own[odds[one]] * (took - plain)
            for own, one, took in zip(self._growths[1:], whose, drafted, strict=True)
        )]

    def _values(self, odds: Sequence[int], price: float, seconds: Sequence[float]) -> list[float]:
        """Return the tokens that every plan brings, less what its time costs."""
        mine = [0 if whose == NOBODY else odds[whose] for whose in self._whose]
        return [1 + own[at] - price * took for own, at, took in zip(self._accepts, mine, seconds, strict=True)]

    def _price(self, seconds: Sequence[float], rows: Sequence[RowEvidence]) -> float:
        """Return the most tokens a second that these rows can have, each with a plan of its own (Dinkelbach's way)."""
        counts = Counter(row.odds for row in rows)
        price, before = 1 / seconds[0], 0.0
        while price > before:
            tokens = took = 0.0
            for odds, count in counts.items():
                spent = self._spent(odds, seconds)
                values = self._values(odds, price, spent)
                arm = values.index(max(values))
                tokens += count * (values[arm] + price * spent[arm])
                took += count * spent[arm]
            price, before = tokens / took, price
        return price

    def _settle(
        self, row: RowEvidence, values: Sequence[float], price: float, spent: Sequence[float], seconds: Sequence[float],
        rows: int = 1,
    ) -> int:
        """Return the plan of a row, or of so many rows that do the same; none is changed for a little.

        Args:
            spent: seconds that every plan takes here.
            seconds: that it would take if guesses stayed as often as measured.
        """
        def beats(one: int, other: int) -> bool:
            return values[one] - values[other] > (PATIENCE - 1) * (values[other] + price * spent[other])

        best = max(range(1, len(values)), key=values.__getitem__)
        if row.arm and not beats(best, row.arm):
            best = row.arm
        chosen = best if beats(best, 0) else 0
        drafting = self._whose[row.arm]
        on_trial = drafting != NOBODY and row.evidence[drafting].goes_on(rows)
        if on_trial:
            chosen = max(self._of[drafting], key=values.__getitem__)
        for number, own in enumerate(row.evidence):
            taken = self._whose[chosen] == number
            own.since = own.since + 1 if taken == (self._whose[row.arm] == number) else 0
            if taken and own.since >= FIRST_WAIT:
                own.wait = FIRST_WAIT
        tried = chosen if on_trial else self._tried(row, chosen, values, price, seconds, rows)
        row.trying = on_trial or tried != chosen
        return tried

    def _tried(
        self, row: RowEvidence, chosen: int, values: Sequence[float], price: float, seconds: Sequence[float], rows: int
    ) -> int:
        """Return the plan of a drafter whose turn it is; none is tried that could not pay if all its guesses stayed."""
        for number, own in enumerate(row.evidence):
            if own.since < own.wait or number == self._whose[chosen]:
                continue
            most = [seconds[0] + self._growths[arm][-1] * (seconds[arm] - seconds[0]) for arm in self._of[number]]
            hoped = [
                1 + self._accepts[arm][-1] - price * took for arm, took in zip(self._of[number], most, strict=True)
            ]
            # Asked again after as long a pause, not at every step until then.
            own.since = 0
            if max(hoped, default=values[chosen]) > values[chosen]:
                best = max(self._of[number], key=values.__getitem__)
                # What nearly pays is tried oftener: a trial costs little then, and much is lost where it would succeed.
                lasts = -(-TRIAL // rows)
                longest = max(FIRST_WAIT, round(lasts * (values[chosen] - values[best]) / LOST))
                own.wait, own.trial = min(2 * own.wait, LONGEST_WAIT, longest), TRIAL
                own.doubt()
                return best
        return chosen

    def _reason(
        self, row: RowEvidence, values: Sequence[float], price: float, seconds: Sequence[float], count: int
    ) -> Weighed:
        """Return why a row does what it was just settled that it does."""
        at = row.arm or max(range(1, len(values)), key=values.__getitem__)
        if row.arm:
            kind: Label = "probing" if row.trying else "pays"
        else:
            kind = "batch_too_large" if self._is_hopeless(count) else "does_not_pay"
        whose = self._whose[at]
        odds = ODDS[row.evidence[whose].odds]
        return Weighed(kind, self._arms, seconds, at, self._of[whose], odds, price, PATIENCE - 1, count)

    def _is_hopeless(self, count: int) -> bool:
        """Return whether in a step of so many rows nothing would be gained even if all guesses stayed."""
        found = self._hopeless.get(count)
        if found is None:
            plain, *drafted = self._times(count)
            gains = [
                own[-1] - growths[-1] * (took / plain - 1)
                for own, growths, took in zip(self._accepts[1:], self._growths[1:], drafted, strict=True)
            ]
            found = self._hopeless[count] = max(gains) <= PATIENCE - 1
        return found
