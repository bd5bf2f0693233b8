"""How long a step takes, by what its rows draft, how many there are, and how long their texts have grown."""

from collections.abc import Sequence

from draftsmith.engine.arm import Arm
from draftsmith.engine.budget import Budget
from draftsmith.engine.policy import RowHistory
from draftsmith.engine.profile import Costs, Profile, WidthCost

NO_WIDER = WidthCost((1, 2), (1.0, 1.0))
"""Where it was not measured what wider steps cost the target, guesses cost what the plan's own steps say."""
ALIKE_TOKENS = 64
"""Lengths are rounded down to multiples of this many tokens."""


class StepCosts:
    """The costs of several drafters' plans, each by its own profile.

    Args:
        arms: all plans, the first of which drafts nothing.
        profiles: for each of them, the profile that it belongs to.
    """

    def __init__(self, arms: Sequence[Arm], profiles: Sequence[Profile]) -> None:
        self._arms, self._profiles = arms, profiles
        self._short: dict[int, Costs] = {}
        # By the number of rows, since several are asked for in turn, each for the latest length of texts.
        self._longer: dict[int, tuple[float, Costs]] = {}
        self._budgets: dict[int, tuple[float, Budget]] = {}
        # That of the target, so it is the same whoever drafts.
        widths = (profile.width_cost for profile in profiles if profile.width_cost is not None)
        self._width = next(widths, NO_WIDER)
        self._measured_at = profiles[0].length_cost.measured_at
        # The target reads its text at the same cost whoever drafts, but not every profile may have measured that.
        plain = max(profile.length_cost.plain for profile in profiles)
        each = [profile.length_cost.guess for profile in profiles]
        # A lookup makes guesses in some steps only; plans that make more guesses where more stay cost more there.
        self._per_token = Costs(
            [plain + guess * (arm.usual + arm.usual_behind) for guess, arm in zip(each, arms, strict=True)],
            [guess * arm.usual if arm.full else 0.0 for guess, arm in zip(each, arms, strict=True)],
            [guess * arm.usual_behind for guess, arm in zip(each, arms, strict=True)],
        )

    def of(self, rows: int, tokens: float = 0.0) -> Costs:
        """Return what each plan adds to a step for one of `rows` rows, with texts of `tokens` tokens on average."""
        beyond = self._beyond(tokens)
        if not beyond:
            return self._of_short_texts(rows)
        found = self._longer.get(rows)
        if found is None or found[0] != beyond:
            found = self._longer[rows] = beyond, self._of_short_texts(rows).plus(self._per_token, beyond)
        return found[1]

    def of_made(self, costs: Costs, at: int, rows: Sequence[RowHistory], steps: int) -> float:
        """Return the seconds of a row's share of one of the last `steps` steps of some rows, all with plan number `at`.

        Where the number of guesses differs from step to step, it counts as many as were really made.

        Args:
            costs: of each plan.
        """
        arm = self._arms[at]
        if not arm.full:
            return costs.seconds[at]
        looked_up, others = 0.0, 0.0
        usual = 0.0 if arm.behind is None else arm.behind.made
        for row in rows:
            for _, drafted, behind in row.steps(-steps):
                if behind:
                    others += row.guesses(drafted, arm.plan, usual, True)
                else:
                    looked_up += row.guesses(drafted, arm.plan, arm.guesses)
        steps *= len(rows)
        return costs.of(at, (
            looked_up / steps / arm.usual, others / steps / arm.usual_behind if arm.usual_behind else 1.0
        ))

    def budget(self, rows: int, tokens: float) -> Budget:
        """Return what steps of so many rows take by all their guesses together."""
        beyond = self._beyond(tokens)
        found = self._budgets.get(rows)
        if found is None or found[0] != beyond:
            budget = Budget(self._width, self.of(rows, tokens).plain, self._of_short_texts(rows).plain, rows)
            found = self._budgets[rows] = beyond, budget
        return found[1]

    def _beyond(self, tokens: float) -> float:
        """Return by how many tokens texts are longer than those that steps were timed with, rounded down."""
        return max(0.0, (tokens - self._measured_at) // ALIKE_TOKENS * ALIKE_TOKENS)

    def _of_short_texts(self, rows: int) -> Costs:
        """Return the costs behind texts as short as those that steps were timed with."""
        found = self._short.get(rows)
        if found is None:
            # Each profile timed plain steps too, with slightly different results; the first one's are used for all.
            plain = self._profiles[0].seconds(self._arms[0], rows) / rows
            each = [
                profile.costs((profile.arms[0], arm), rows)
                for arm, profile in zip(self._arms, self._profiles, strict=True)
            ]
            found = self._short[rows] = Costs(*(
                [plain * took[1] / one.plain for took, one in zip(some, each, strict=True)]
                for some in zip(*((one.seconds, one.more, one.behind) for one in each), strict=True)
            ))
        return found
