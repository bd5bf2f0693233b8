"""How long steps take now, compared with what was measured, where rows draft each in its own way.

Two numbers say it: how many times as long a step without guesses takes, and how many times as long what guesses add to
it. They change apart: where other programs read memory, too, plain steps become longer, and guesses, which cost
arithmetic, hardly do.
"""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

KNOWN = 0.25
"""How many timed steps count as much as what was known of plain ones before."""
MEASURED = 1.0
"""How many steps, whose guesses add as much as a plain step takes, count as much as what was measured of guesses. Steps
whose guesses add less count less, by the square: they say little of what guesses add."""
HALVED = 32
"""After so many steps of the same kind (with guesses, or without), a timed step counts half as much."""
PLAIN_HALVED, DRAFTS_HALVED = 64, 512
"""The same after so many steps of the other kind, or of other numbers of rows, for plain steps and for others. What
plain steps take changes with what other programs do to the memory. What guesses add changes less, and where it was too
much to draft, that must not be forgotten soon."""
MOST_SLOWER, MOST_FASTER = 1.5, 0.5
"""A step counts as at most and at least this many times as long as expected: if it took longer, the cause was something
else."""
LEAST = 0.2
"""Guesses are taken to add at least this many times as much as measured."""
COLD_STEPS = 2
"""So many steps behind a prompt are not counted. The targets whose rows draft each in its own way are too large for a
processor's caches, so that these hold nothing that later steps would find."""
REMINDERS = 2
"""So many steps without guesses come in a row now and then, to see what these cost now."""
EARLY_WAIT, WAIT, LONG_WAIT = 12, 32, 128
"""They come after so many steps with guesses: the first ones early, and late ones where drafts gain `CLEARLY`."""
CLEARLY = 1.5


class Slower(NamedTuple):
    """How many times as long as measured steps take: without guesses (`plain`), and what guesses add (`more`)."""

    plain: float = 1.0
    more: float = 1.0


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


class MixedPace:
    """Learns from the seconds of steps whose rows take plans of their own, for numbers of rows of about one size.

    What plain steps take is learnt from plain steps alone, and what guesses add is what other steps take beyond that.
    To tell both from steps with more guesses and with fewer would rely on how straight a line their times lie on. Until
    plain steps were timed, both numbers change alike.

    Args:
        learns: whether to learn at all; otherwise the measured costs hold for ever.
    """

    def __init__(self, learns: bool) -> None:
        self._learns = learns
        # Numbers of rows are grouped by powers of two; each group has the sums of steps without guesses and with some.
        self._sums: dict[int, tuple[Sums, Sums]] = {}
        self._found: dict[int, Slower] = {}
        self._latest = AS_MEASURED  # of the group that something was learnt of last
        self._drafted = Counter[int]()  # steps with guesses since one without
        self._plain = Counter[int]()  # steps without guesses that were timed
        self._reminding = 0  # steps left of a reminder
        # The steps that were chosen last, one or several alike: their group, seconds without guesses as measured and
        # what guesses add; and what they took.
        self._step: tuple[int, float, float] | None = None
        self._took: list[float] = []

    def of(self, rows: int) -> Slower:
        """Return how many times as long as measured steps of so many rows take."""
        return self._found.get(rows.bit_length(), self._latest)

    def begin(self, rows: int, plain_s: float, more_s: float, youngest: int) -> None:
        """Note what the next step does, and those after it until `learn`: nothing but decode these rows.

        Args:
            plain_s: its seconds without guesses, as measured.
            more_s: what its guesses add to them.
            youngest: steps that the youngest row has behind it.
        """
        size = rows.bit_length()
        self._took.clear()
        self._step = (size, plain_s, more_s) if self._learns and youngest >= COLD_STEPS else None
        self._drafted[size] = self._drafted[size] + 1 if more_s else 0

    def pause(self) -> None:
        """Note that the next step says nothing."""
        self._step = None

    def timed(self, seconds: float) -> None:
        """Take in how long a step took."""
        if self._step is not None:
            self._took.append(seconds)

    def learn(self, unexpected_s: float) -> None:
        """Learn from the last steps, if they were timed.

        Args:
            unexpected_s: how much more the guesses that were really made add, as measured, than those expected.
        """
        if self._step is None or not self._took:
            return
        size, plain_s, more_s = self._step
        more, drafts = max(0.0, more_s + unexpected_s) / plain_s, more_s > 0
        own = self._sums.setdefault(size, (Sums(), Sums()))
        self._plain[size] += 0 if drafts else len(self._took)
        for kinds in self._sums.values():
            for sums, others in zip(kinds, (PLAIN_HALVED, DRAFTS_HALVED), strict=True):
                sums.fade(0.5 ** (len(self._took) / (HALVED if sums is own[drafts] else others)))
        before = self._found.get(size, self._latest)
        expected = before.plain + before.more * more
        for seconds in self._took:
            own[drafts].add(more, min(MOST_SLOWER * expected, max(MOST_FASTER * expected, seconds / plain_s)))
        self._found[size] = self._latest = _means(*own, before)
        self._step = None

    def reminds(self, rows: int, gain: float) -> bool:
        """Return whether the coming step is to be one without guesses, because it is long ago that there was one.

        Args:
            gain: how many times as fast as without guesses steps are expected to be.
        """
        size = rows.bit_length()
        if self._reminding and not self._drafted[size]:
            self._reminding -= 1
            return True
        wait = EARLY_WAIT if self._plain[size] < REMINDERS else LONG_WAIT if gain > CLEARLY else WAIT
        if not self._learns or self._drafted[size] < wait:
            return False
        self._reminding = REMINDERS - 1
        return True


def _means(plain: Sums, drafts: Sums, before: Slower) -> Slower:
    """Return the two numbers, beside what was known before."""
    if not plain.weight:
        both = (KNOWN * before.plain + drafts.took) / (KNOWN + drafts.weight + drafts.more)
        return Slower(both, both)
    slower = (KNOWN * before.plain + plain.took) / (KNOWN + plain.weight)
    added = MEASURED + drafts.products - slower * drafts.more
    return Slower(slower, max(LEAST, added / (MEASURED + drafts.squares)))
