"""What plans bring and cost rows that decode together and draft each in its own way."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from draftsmith.engine.arm import Times
from draftsmith.engine.budget import Budget, Plans
from draftsmith.engine.evidence import Stand
from draftsmith.engine.expected import Expected
from draftsmith.engine.mixed_pace import COLD_STEPS, Coming, MixedPace
from draftsmith.engine.policy import Load, RowHistory
from draftsmith.engine.profile import Costs
from draftsmith.engine.step_costs import StepCosts


@dataclass(frozen=True)
class Weighing:
    """What plans bring and cost rows in the coming step.

    Args:
        costs: of each plan, as measured.
        budget: of the guesses of all rows, at the present time.
        tokens: the length of the rows' texts, on average.
        stands: of every row.
        plans: for each of the stands.
        most: in the best case.
    """

    costs: Costs
    budget: Budget
    tokens: float
    stands: Sequence[Stand]
    plans: Mapping[Stand, Plans]
    most: Plans


class Together:
    """Weighs the plans of several rows, and learns from the seconds of their steps what steps cost now.

    Args:
        expected: what each plan brings.
        costs: what steps of each plan take, as measured.
        learns_times: see `Fitted`.
    """

    def __init__(self, expected: Expected, costs: StepCosts, learns_times: bool) -> None:
        self.pace = MixedPace(learns_times)
        """How long steps take now."""
        self._expected, self._costs = expected, costs
        self._steady_guesses = [float(arm.plan.max_nodes) if arm.is_steady else 0.0 for arm in expected.arms]
        # Of the last steps: what plans cost, as measured; and of each row whose number of guesses was not known before,
        # its plan, and what that was expected to cost.
        self._weighed: Costs | None = None
        self._varied = list[tuple[RowHistory, int, float]]()

    def weigh(self, stands: Sequence[Stand], count: int, tokens: float) -> Weighing:
        """Return what plans bring and cost rows with such stands now.

        Args:
            count: how many rows decode.
            tokens: the length of their texts, on average.
        """
        expected, steady = self._expected, self._steady_guesses
        costs, one = self._costs.of(count, tokens), self._costs.of(1, tokens)
        budget, narrow = self._costs.budget(count, tokens).now(self.pace.of(count)), self._costs.budget(1, tokens)
        target_s = [narrow.step_s(made) for made in steady]

        def plans_with(brings: Sequence[float], times: Sequence[Times]) -> Plans:
            alone = [max(0.0, took - own) for took, own in zip(one.grown(times), target_s, strict=True)]
            varying = [
                0.0 if arm.is_steady else arm.usual * found + arm.usual_behind * behind
                for arm, (found, behind) in zip(expected.arms, times, strict=True)
            ]
            return budget.plans(brings, steady, costs.grown(times), alone, varying)

        plans = {stand: plans_with(*expected.of(stand)) for stand in set(stands)}
        return Weighing(costs, budget, tokens, stands, plans, plans_with(expected.most, expected.most_times))

    @staticmethod
    def can_time(load: Load, rows: Sequence[RowHistory]) -> bool:
        """Whether something can be learnt from steps of these rows: they do nothing else, and no row has just begun."""
        return are_alone(load, rows) and min(len(row.accepted) for row in rows) >= COLD_STEPS

    def begin(
        self, load: Load, rows: Sequence[RowHistory], taken: Sequence[int], weighing: Weighing, added_s: float
    ) -> None:
        """Note which steps come until `learn` or `pause`.

        Args:
            taken: the plan of each row.
            added_s: what all guesses add to the step, as measured.
        """
        if not are_alone(load, rows):
            self.pause()
            return
        self._weighed, self._varied = weighing.costs, []
        for history, stand, at in zip(rows, weighing.stands, taken, strict=True):
            if self._expected.arms[at].full:
                self._varied.append((history, at, weighing.costs.of(at, self._expected.of(stand)[1][at])))
        coming = Coming(len(rows), len(rows) * weighing.costs.plain, added_s, any(taken))
        self.pace.begin(coming, min(len(row.accepted) for row in rows))

    def learn(self) -> None:
        """Learn from the steps since the last question, if they were timed."""
        costs = self._weighed
        if costs is not None:
            steps = self.pace.steps  # for which the answer stood
            really = (self._costs.of_made(costs, at, [row], steps) - expected for row, at, expected in self._varied)
            self.pace.learn(sum(really))
        self._weighed = None

    def pause(self) -> None:
        """Note that the next steps say nothing."""
        self._weighed = None
        self.pace.pause()


def are_alone(load: Load, rows: Sequence[RowHistory]) -> bool:
    """Whether a step does nothing but decode these rows."""
    return not load.reading and load.decoding == len(rows)
