"""What a step takes by what its rows draft, how many they are, and how long their texts have grown."""

from collections.abc import Sequence

from draftsmith.engine.profile import Arm, Costs, Profile


class StepCosts:
    """The costs of several drafters' plans, each by its own profile.

    Args:
        arms: all plans, the first of which drafts nothing.
        profiles: of which profile each of them is.
    """

    def __init__(self, arms: Sequence[Arm], profiles: Sequence[Profile]) -> None:
        self._arms, self._profiles = arms, profiles
        self._short: dict[int, Costs] = {}
        # The whole text is read for every token and for every guess; a lookup makes guesses in some steps only.
        guesses = [profile.reading.guess * arm.plan.max_nodes for arm, profile in zip(arms, profiles, strict=True)]
        self._per_token = Costs(
            [profiles[0].reading.plain + more * arm.share() for more, arm in zip(guesses, arms, strict=True)],
            [more * (arm.found or 0.0) for more, arm in zip(guesses, arms, strict=True)],
        )

    def of(self, rows: int, tokens: float = 0.0) -> Costs:
        """Return what a row's plan adds to a step of so many rows, for every plan, behind texts of so many tokens."""
        short, beyond = self._of_short_texts(rows), tokens - self._profiles[0].reading.behind
        return short.plus(self._per_token, beyond) if beyond > 0 else short

    def _of_short_texts(self, rows: int) -> Costs:
        """Return it behind texts as short as those that steps were timed with."""
        found = self._short.get(rows)
        if found is None:
            # Plain steps were timed beside each drafter, and took a little more or less beside one than another.
            plain = self._profiles[0].seconds(self._arms[0], rows) / rows
            each = [
                profile.costs((profile.arms[0], arm), rows)
                for arm, profile in zip(self._arms, self._profiles, strict=True)
            ]
            found = self._short[rows] = Costs(
                [plain * one.seconds[1] / one.plain for one in each], [plain * one.more[1] / one.plain for one in each]
            )
        return found
