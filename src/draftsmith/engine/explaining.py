"""Says why rows draft what they do under a fitted policy."""

from collections.abc import Sequence

from draftsmith.engine.arm import Arm
from draftsmith.engine.evidence import GROWTHS, QUARTERS, RowEvidence
from draftsmith.engine.expected import Expected
from draftsmith.engine.known import ODDS
from draftsmith.engine.profile import Costs
from draftsmith.engine.reasons import Label, Weighed
from draftsmith.engine.step_costs import StepCosts


class Explaining:
    """Puts the numbers together that led to a plan.

    Args:
        arms: all plans, the first of which drafts nothing.
        whose: the number of the guesser that decides each plan.
        told: for each plan, the guessers that its steps say something about, the lookup first if there is one.
        costs: what steps of each plan take.
        expected: what each plan brings.
    """

    def __init__(
        self, arms: Sequence[Arm], whose: Sequence[int], told: Sequence[Sequence[int]], costs: StepCosts,
        expected: Expected,
    ) -> None:
        self._arms, self._whose, self._told = arms, whose, told
        self._costs, self._expected = costs, expected
        self._of = {number: [at for at, own in enumerate(whose) if own == number] for number in set(whose)}
        self._most_gains: dict[int, float] = {}  # by the number of rows, see `_most_gain`
        self._gain_at_last: tuple[Costs, float] | None = None  # costs that it was found for last, and what it was

    def reason(
        self, row: RowEvidence, values: Sequence[float], price: float, seconds: Sequence[float], count: int,
        tokens: float, patience: float, lost: Sequence[float] = (),
    ) -> Weighed:
        """Return why a row takes the plan that was just settled.

        Args:
            values: tokens that each plan brings, minus its time at the price.
            seconds: a row's share of the seconds of a step, for each plan.
            count: how many rows decode.
            tokens: the length of a row's text, on average.
            patience: how many times as fast as plain decoding a plan had to be.
            lost: for the rows of one call, how many times less each plan brings than on average over the rows, because
                they end apart.
        """
        at = row.arm or max(range(1, len(values)), key=values.__getitem__)
        kind: Label = "does_not_pay"
        if row.arm:
            kind = "probing" if row.trying else "pays"
        elif self._most_gain_of(count) <= patience:
            kind = "batch_too_large"
        elif self._most_gain_at(self._costs.of(count, tokens)) <= patience:
            kind = "text_too_long"
        own = row.evidence[self._whose[at]]
        first = row.evidence[self._told[at][0]]  # the lookup, if `own` guesses behind one
        worth, margin = price * (seconds[at] - seconds[0]), patience - 1
        if lost:  # so much more than on average it has to bring
            margin = lost[at] * (1 + worth + margin) - 1 - worth
        odds, growth, length = ODDS[first.odds], GROWTHS[first.growth], first.length / QUARTERS
        return Weighed(
            kind, self._arms, seconds, at, self._of[self._whose[at]], odds, growth, length, ODDS[own.odds], price,
            margin, count,
        )

    def _most_gain_of(self, count: int) -> float:
        """Return `_most_gain` for so many rows of short texts."""
        found = self._most_gains.get(count)
        if found is None:
            found = self._most_gains[count] = self._most_gain(self._costs.of(count))
        return found

    def _most_gain_at(self, costs: Costs) -> float:
        """Return `_most_gain`, which is remembered, because costs change only when texts have grown by many tokens."""
        if self._gain_at_last is None or self._gain_at_last[0] is not costs:
            self._gain_at_last = costs, self._most_gain(costs)
        return self._gain_at_last[1]

    def _most_gain(self, costs: Costs) -> float:
        """Return how many times as fast as plain decoding the best plan would be if all guesses stayed."""
        hoped = costs.grown(self._expected.most_times)
        most = [1 + arm.plan.depth for arm in self._arms]
        return max(tokens * hoped[0] / took for tokens, took in zip(most[1:], hoped[1:], strict=True))
