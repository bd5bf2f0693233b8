"""How long steps take now, compared with what was measured, where rows draft each in its own way.

Three numbers say it. How long a plain step takes changes with what other programs do to the memory. Steps with guesses
may be bound by arithmetic, and then hardly change with it. So they are taken to last as long as before until they are
timed again, and what guesses add to a plain step is what is left.
"""

from dataclasses import dataclass
from typing import NamedTuple

KNOWN = 0.25
"""How many timed steps count as much as what was known of plain ones before."""
MEASURED, MEASURED_MORE = 1.0, 0.1
"""How many steps count as much as knowing that guesses add nothing besides what was measured, and as that measurement
itself; for the latter, steps whose guesses add as much as a plain step takes."""
HALVED = 16
"""After so many steps of the same kind (with guesses, or without), a timed step counts half as much."""
PLAIN_HALVED, DRAFTS_HALVED = 32, 512
"""The same after so many steps of the other kind, or of other numbers of rows, for plain steps and for others. The few
plain steps between long stretches of drafts are to outweigh those of long ago; but a single one that was slow by chance
must not decide alone what drafts are worth until the next one. What was too slow to be drafted must not be forgotten
soon."""
MOST_SLOWER, MOST_FASTER = 1.5, 0.5
"""A step counts as at most and at least this many times as long as expected: if it took longer, the cause was something
else."""
LEAST = 0.2
"""Guesses are taken to add at least this many times as much as measured."""
COLD_STEPS = 2
"""So many steps behind a prompt are not counted. The targets whose rows draft each in its own way are too large for a
processor's caches, so that these hold nothing that later steps would find."""
FIRST_WAIT, EARLY_WAIT, WAIT, LONG_WAIT = 5, 12, 32, 128
"""After so many steps with guesses one without them comes, to see what it costs now: the first one soon, since all may
have been measured at another time, and later ones late where drafts gain `CLEARLY`. These do not come late once steps
with guesses take another time than was expected, by more than `STEADY`. Where drafts gain less, they come early if the
last one took another time than was expected."""
STEADY, CLEARLY = 0.1, 1.5
SURPRISED = 0.2
"""By how much each step with guesses counts in the mean by which that is noticed."""
PUT_OFF = 2
"""Such a step does not interrupt rows on trial, unless that would put it off to more than this many times as long."""


class Slower(NamedTuple):
    """How steps differ from what was measured.

    Args:
        plain: how many times as long a step without guesses takes.
        more: how many times as much guesses add to it.
        once: what any guesses add besides, in plain steps as measured.
    """

    plain: float = 1.0
    more: float = 1.0
    once: float = 0.0


AS_MEASURED = Slower()


@dataclass
class Sums:
    """Of timed steps, each with a weight; all times are in plain steps as measured.

    Args:
        weight: of all steps.
        took: what they took.
        more: what guesses were to add.
        squares: the squares of that.
        products: what the steps took times what guesses were to add.
    """

    weight: float = 0.0
    took: float = 0.0
    more: float = 0.0
    squares: float = 0.0
    products: float = 0.0

    def fade(self, times: float) -> None:
        """Let all steps count so many times as much."""
        self.weight *= times
        self.took *= times
        self.more *= times
        self.squares *= times
        self.products *= times

    def add(self, more: float, took: float) -> None:
        """Add a step."""
        self.weight += 1.0
        self.took += took
        self.more += more
        self.squares += more * more
        self.products += more * took


@dataclass
class Group:
    """What is known of steps of about one number of rows.

    Args:
        slower: how they differ from what was measured.
        plain: steps without guesses.
        drafts: steps with guesses.
        drafted: how many of the latter there were since one without guesses.
        has_plain: whether any step without guesses was timed.
        is_unsteady: whether the last of these took another time than expected.
        surprise: by which share steps with guesses lately took longer than expected.
        is_surprised: whether that was much at any time since the last step without guesses.
    """

    slower: Slower
    plain: Sums
    drafts: Sums
    drafted: int = 0
    has_plain: bool = False
    is_unsteady: bool = False
    surprise: float = 0.0
    is_surprised: bool = False


@dataclass(frozen=True)
class Coming:
    """Steps to come, one or several alike, that do nothing but decode `rows` rows.

    Args:
        plain_s: seconds of such a step without guesses, as measured.
        more_s: what its guesses add to them.
        drafts: whether any row drafts.
    """

    rows: int
    plain_s: float
    more_s: float
    drafts: bool


class MixedPace:
    """Learns from the seconds of steps whose rows take plans of their own, for numbers of rows of about one size.

    What plain steps take is learnt from plain steps alone, and what guesses add is what other steps take beyond that.
    To tell both from steps with more guesses and with fewer would rely on how straight a line their times lie on. Until
    plain steps were timed, all steps are taken to be slower alike.

    Args:
        learns: whether to learn at all; otherwise the measured costs hold for ever.
    """

    def __init__(self, learns: bool) -> None:
        self._learns = learns
        self._groups: dict[int, Group] = {}  # numbers of rows are grouped by powers of two
        self._latest = AS_MEASURED  # of the group that something was learnt of last
        self._coming: Coming | None = None
        self._drafting: Group | None = None  # whose steps these are, if rows draft in them
        self._took: list[float] = []

    @property
    def steps(self) -> int:
        """How many steps were timed since the last question, at least 1."""
        return max(1, len(self._took))

    def of(self, rows: int) -> Slower:
        """Return how steps of so many rows differ from what was measured."""
        found = self._groups.get(rows.bit_length())
        return self._latest if found is None else found.slower

    def begin(self, coming: Coming, youngest: int) -> None:
        """Note which steps come until `learn` or `pause`.

        Args:
            youngest: steps that the youngest row has behind it.
        """
        self._took.clear()
        self._coming = coming if self._learns and youngest >= COLD_STEPS else None
        group = self._group(coming.rows)
        group.drafted = group.drafted + 1 if coming.drafts else 0
        self._drafting = group if coming.drafts else None

    def passed(self, steps: int) -> None:
        """Note that so many further steps were taken without a question."""
        if self._drafting is not None:
            self._drafting.drafted += steps

    def pause(self) -> None:
        """Note that the next steps say nothing."""
        self._coming = self._drafting = None
        self._took.clear()

    def timed(self, seconds: float) -> None:
        """Take in how long a step took."""
        if self._coming is not None:
            self._took.append(seconds)

    def learn(self, unexpected_s: float) -> None:
        """Learn from the last steps, if they were timed.

        Args:
            unexpected_s: how much more the guesses that were really made add, as measured, than those expected.
        """
        coming, self._coming = self._coming, None
        if coming is None or not self._took:
            return
        group, before = self._group(coming.rows), self.of(coming.rows)
        own, steps = (group.drafts if coming.drafts else group.plain), len(self._took)
        for other in self._groups.values():
            for sums, halved in ((other.plain, PLAIN_HALVED), (other.drafts, DRAFTS_HALVED)):
                sums.fade(0.5 ** (steps / (HALVED if sums is own else halved)))
        more = max(0.0, coming.more_s + unexpected_s) / coming.plain_s if coming.drafts else 0.0
        expected = before.plain + before.more * more + (before.once if coming.drafts else 0.0)
        for seconds in self._took:
            took = seconds / coming.plain_s
            own.add(more, min(MOST_SLOWER * expected, max(MOST_FASTER * expected, took)))
        if not coming.drafts:
            differed = sum(self._took) / steps / coming.plain_s - before.plain
            group.has_plain, group.is_unsteady = True, abs(differed) >= STEADY * before.plain
            group.surprise, group.is_surprised = 0.0, False
        else:
            # On average over the steps: a lookup finds much in one of them and nothing in the next.
            surprise = min(MOST_SLOWER, max(MOST_FASTER, sum(self._took) / steps / coming.plain_s / expected)) - 1
            group.surprise += (1 - (1 - SURPRISED) ** steps) * (surprise - group.surprise)
            group.is_surprised = group.is_surprised or abs(group.surprise) > STEADY
        group.slower = self._latest = _found(group, before)

    def reminds(self, rows: int, gain: float, on_trial: bool) -> bool:
        """Return whether the coming step, whose rows draft, is to be one without guesses, because that is long ago.

        Args:
            gain: how many times as fast as without guesses steps are expected to be.
            on_trial: whether any row is on trial.
        """
        group = self._group(rows)
        if not group.has_plain:
            wait = FIRST_WAIT
        elif gain > CLEARLY:
            wait = WAIT if group.is_surprised else LONG_WAIT
        else:
            wait = EARLY_WAIT if group.is_unsteady else WAIT
        return self._learns and group.drafted >= (PUT_OFF * wait if on_trial else wait)

    def _group(self, rows: int) -> Group:
        """Return the group of a number of rows, which begins with what the latest one has shown."""
        size = rows.bit_length()
        if size not in self._groups:
            self._groups[size] = Group(self._latest, Sums(), Sums())
        return self._groups[size]


def _found(group: Group, before: Slower) -> Slower:
    """Return what the steps of a group show, beside what was known before."""
    plain, drafts = group.plain, group.drafts
    if not group.has_plain:
        expected = before.plain * drafts.weight + before.more * drafts.more + before.once * drafts.weight
        times = (KNOWN + drafts.took) / (KNOWN + expected)
        return Slower(*(times * one for one in before))
    slower = (KNOWN * before.plain + plain.took) / (KNOWN + plain.weight)
    # The least squares of what remains unexplained, beside what was measured.
    took, products = drafts.took - slower * drafts.weight, MEASURED_MORE + drafts.products - slower * drafts.more
    weight, squares = MEASURED + drafts.weight, MEASURED_MORE + drafts.squares
    once = (took * squares - products * drafts.more) / (weight * squares - drafts.more**2)
    if once <= 0:
        return Slower(slower, max(LEAST, products / squares))
    return Slower(slower, max(LEAST, (products - once * drafts.more) / squares), once)
