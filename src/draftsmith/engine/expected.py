"""What every plan is expected to bring in a text, by what is known of the text."""

from collections import Counter
from collections.abc import Sequence

from draftsmith.engine.evidence import QUARTERS, Stand
from draftsmith.engine.known import ODDS
from draftsmith.engine.profile import Arm, Costs

MOST_STANDS = 4096
"""So many texts' stands are remembered with what follows from them."""


class Expected:
    """The tokens that plans bring a row, and how many guesses they make in it; see `Arm.accepted`.

    Args:
        arms: all plans, the first of which drafts nothing.
        whose: of which drafter each of the others is.
    """

    def __init__(self, arms: Sequence[Arm], whose: Sequence[int]) -> None:
        self._arms, self._whose = arms, whose
        self.kept = [[arm.kept(odds) for odds in ODDS] for arm in arms]
        """Of every plan, the guesses that stay where some are made, at each of the odds."""
        self.most_growths = [arm.most_growth * arm.most_length for arm in arms]
        """Of every plan, how many times as many guesses as measured it can make."""
        self.most = [1 + arm.accepted(ODDS[-1], arm.most_growth, arm.most_length) for arm in arms]
        """Of every plan, the tokens that a step brings at best."""
        self._stands: dict[Stand, tuple[list[float], list[float]]] = {}

    def of(self, stand: Stand) -> tuple[list[float], list[float]]:
        """Return the tokens that every plan brings in such a text, and how many times as many guesses it makes."""
        found = self._stands.get(stand)
        if found is None:
            if len(self._stands) == MOST_STANDS:
                self._stands.clear()
            brings, growths = [1.0], [1.0]
            for arm, whose, kept in zip(self._arms[1:], self._whose[1:], self.kept[1:], strict=True):
                odds, growth, length = stand[whose]
                times = arm.stretched(length / QUARTERS)
                brings.append(1 + arm.share(growth / QUARTERS) * min(arm.plan.depth, times * kept[odds]))
                growths.append(arm.made_times(growth / QUARTERS, length / QUARTERS))
            found = self._stands[stand] = brings, growths
        return found

    def average(self, stands: Sequence[Stand]) -> tuple[list[float], list[float]]:
        """Return the same, on average over these rows."""
        if len(stands) == 1:
            return self.of(stands[0])
        (stand, most), *others = Counter(stands).items()
        brings, growths = self.of(stand)
        if others:
            share = most / len(stands)
            brings, growths = [share * one for one in brings], [share * one for one in growths]
        for stand, count in others:
            share, (own, grown) = count / len(stands), self.of(stand)
            brings = [total + share * one for total, one in zip(brings, own, strict=True)]
            growths = [total + share * one for total, one in zip(growths, grown, strict=True)]
        return brings, growths

    def price(self, costs: Costs, stands: Sequence[Stand]) -> float:
        """Return the most tokens a second that these rows can have, each with a plan of its own (Dinkelbach's way)."""
        counts = Counter(stands)
        price, before = 1 / costs.plain, 0.0
        while price > before:
            tokens = took = 0.0
            for stand, count in counts.items():
                brings, growths = self.of(stand)
                spent = costs.grown(growths)
                values = values_of(brings, price, spent)
                arm = values.index(max(values))
                tokens += count * brings[arm]
                took += count * spent[arm]
            price, before = tokens / took, price
        return price


def values_of(brings: Sequence[float], price: float, spent: Sequence[float]) -> list[float]:
    """Return the tokens that every plan brings, less what its time costs."""
    return [tokens - price * took for tokens, took in zip(brings, spent, strict=True)]


def beats(
    values: Sequence[float], price: float, spent: Sequence[float], one: int, other: int, times: float
) -> bool:
    """Return whether a plan is so many times as fast as another."""
    return values[one] - values[other] > (times - 1) * (values[other] + price * spent[other])
