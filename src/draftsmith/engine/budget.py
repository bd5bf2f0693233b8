"""One budget of guesses for rows that each take a plan of their own.

What a guess costs depends on all guesses of the step together: up to some number of tokens a processor verifies them at
about the price of one, and the next ones cost clearly more. So a row's plan is weighed by how much longer the step
takes with it, beside what the other rows draft. That holds for plans that make as many guesses at every step. How many
a lookup makes, or a chain that ends where its drafter is unsure, differs from step to step, and so does whether there
is room for them. These plans cost what was measured of them, whatever other rows draft; but they leave less room for
the guesses of others.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import NamedTuple

from draftsmith.engine.expected import at_most, values_of
from draftsmith.engine.mixed_pace import AS_MEASURED, Slower
from draftsmith.engine.profile import WidthCost

KEPT = 1.1
"""Guesses of the plan that a row took last count this many times when it is decided whose are taken first, so that
equal rows do not take turns."""
STAYS = 1.02
"""Rows go on as before unless other plans make all of them together this many times as fast."""
FEWEST = 1e-6
"""No plan counts as making fewer guesses than this more than another, so that there is something to divide by."""


class Plans(NamedTuple):
    """What every plan brings and costs a row.

    Args:
        brings: tokens of a step.
        guesses: those that it makes at every step; 0 for plans that make more or fewer of them from step to step.
        varying: for the latter, how many they make on average; 0 for the others.
        alike: a row's share of the seconds of a step, if all rows take the plan.
        drafting: seconds that each row with this plan adds to what the drafter takes.
        begun: seconds that the drafter takes once, if any row has this plan: a draft model reads its weights for one
            row as for many.
    """

    brings: Sequence[float]
    guesses: Sequence[float]
    varying: Sequence[float]
    alike: Sequence[float]
    drafting: Sequence[float]
    begun: Sequence[float]

    def within(self, left: float) -> "Plans":
        """Return the same for a text that may write so many further tokens."""
        brings = at_most(self.brings, left)
        return self if brings is self.brings else self._replace(brings=brings)


class Wish(NamedTuple):
    """A row's plans, the one that it took last, and whether it takes this one again whatever is best."""

    plans: Plans
    taken: int
    held: bool = False


class Budget:
    """What steps of a number of rows take, by the guesses of all of them.

    Args:
        width: what the target's steps take by the number of tokens.
        plain: a row's share of the seconds of a step without guesses.
        plain_short: the same behind texts as short as those that `width` was measured with.
        rows: how many rows there are.
        slower: how steps differ now from what was measured.
    """

    def __init__(
        self, width: WidthCost, plain: float, plain_short: float, rows: int, slower: Slower = AS_MEASURED
    ) -> None:
        self.rows, self.slower = rows, slower
        self._width, self._plain, self._plain_short, self._narrowest = width, plain, plain_short, width.of(rows)
        # Other rows and another time than those of the measurement; what longer texts cost comes on top.
        self._scale = rows * plain_short / self._narrowest
        self._added = dict[int, float]()  # what numbers of guesses add, in quarters of a guess, as measured

    def now(self, slower: Slower) -> "Budget":
        """Return the same at a time at which steps differ so from what was measured."""
        found = Budget(self._width, self._plain, self._plain_short, self.rows, slower)
        found._added = self._added
        return found

    def step_s(self, guesses: float, varying: float = 0.0) -> float:
        """Return the seconds in which the target verifies so many guesses, all rows together.

        Args:
            varying: how many guesses other plans make on average, whose own cost is not counted here: they leave less
                room for these.
        """
        added_s = self._added_s(varying + guesses) - self._added_s(varying) if varying else self._added_s(guesses)
        return self.slower.plain * self.rows * self._plain + self.slower.more * added_s

    @property
    def once_s(self) -> float:
        """Seconds that a step takes longer if any row drafts, beyond what its guesses take."""
        return self.slower.once * self.rows * self._plain

    def _added_s(self, guesses: float) -> float:
        """Return what so many guesses of all rows add to a step of the target, as measured."""
        quarters = round(4 * guesses)
        found = self._added.get(quarters)
        if found is None:
            found = self._scale * (self._width.of(self.rows + quarters / 4) - self._narrowest)
            self._added[quarters] = found
        return found

    def plans(
        self, brings: Sequence[float], guesses: Sequence[float], alike: Sequence[float], alone: Sequence[float],
        varying: Sequence[float] = (),
    ) -> Plans:
        """Return what plans bring and cost now, see `Plans`.

        Args:
            alike: see `Plans`, as measured.
            alone: what the drafter takes for a single row, as measured.
            varying: see `Plans`; empty means that all plans make as many guesses at every step.
        """
        (slower, more, once), plain = self.slower, self._plain
        drafting, begun = list[float](), list[float]()
        for took, made, one in zip(alike, guesses, alone, strict=True):
            whole = max(0.0, self.rows * (took - plain) - self._added_s(self.rows * made))
            each = min(whole / self.rows, max(0.0, whole - one) / max(1, self.rows - 1))
            drafting.append(more * each)
            begun.append(more * (whole - self.rows * each))
        none_s, any_s = slower * plain, (slower + once) * plain
        now = [(any_s if arm else none_s) + more * (took - plain) for arm, took in enumerate(alike)]
        return Plans(brings, guesses, varying or [0.0] * len(brings), now, drafting, begun)

    def beside(
        self, plans: Plans, others: float = 0.0, varying: float = 0.0, taken: Collection[int] = ()
    ) -> list[float]:
        """Return what plans cost a row: its share of a step without guesses, and what its own add to the step.

        Args:
            others: the guesses of all other rows.
            varying: those of their plans that make more or fewer of them, on average.
            taken: their plans.
        """
        shared = self.step_s(0.0) / self.rows - self.step_s(others, varying)
        first_s = 0.0 if any(taken) else self.once_s
        each = enumerate(zip(plans.guesses, plans.varying, plans.drafting, plans.begun, strict=True))
        return [
            shared + self.step_s(others + made, varying + loose) + took + (0.0 if arm in taken else begun)
            + (first_s if arm else 0.0)
            for arm, (made, loose, took, begun) in each
        ]

    def shared_out(self, wishes: Sequence[Wish]) -> "Shares":
        """Return plans of all rows that together bring nearly the most tokens a second.

        Guesses are taken in the order of what each of them brings, as many as pay, and of the others those that still
        pay then; or one plan is taken by all rows that gain by it. What rows took last is kept if it is about as good.
        """
        found, price = [0] * len(wishes), self.rows / self.step_s(0.0)
        for _ in range(2):  # what drafters cost is weighed by the price, which is known only then
            ways = self._taken_in_order(wishes, price), self._with_one_plan(wishes, price)
            found, price = max(ways, key=lambda way: way[1])
        before = Step(self, wishes, [wish.taken for wish in wishes])
        if price <= STAYS * before.speed:
            found, price = before.plans, before.speed
        return Shares(self, wishes, found, price)

    def with_held_only(self, wishes: Sequence[Wish]) -> "Shares":
        """Return plans with which only those rows draft that do so in any case."""
        step = Step(self, wishes, [wish.taken if wish.held else 0 for wish in wishes])
        return Shares(self, wishes, step.plans, step.speed)

    def _with_one_plan(self, wishes: Sequence[Wish], price: float) -> tuple[list[int], float]:
        """Return the best of the choices in which all rows that draft anew do so by one plan, and its tokens a second.

        What a drafter takes once, for one row as for many, is worth it only for many.
        """
        held = Step(self, wishes, [wish.taken if wish.held else 0 for wish in wishes])
        alike: dict[int, list[int]] = {}
        for row, wish in enumerate(wishes):
            if not wish.held:
                alike.setdefault(id(wish.plans), []).append(row)
        kinds = [(wishes[rows[0]].plans, rows) for rows in alike.values()]
        nets = [(values_of(plans.brings, price, plans.drafting), plans, rows) for plans, rows in kinds]
        speed, found = held.speed, held.plans
        for arm in range(1, len(nets[0][0]) if nets else 1):
            step, taken = held.copy(), held.plans.copy()
            gains = [net[arm] for net, _, _ in nets]
            for at in sorted(range(len(nets)), key=gains.__getitem__, reverse=True):
                _, plans, rows = nets[at]
                step.take_alike(plans, arm, len(rows))
                for row in rows:
                    taken[row] = arm
                if step.speed > speed:
                    speed, found = step.speed, taken.copy()
        return found, speed

    def _taken_in_order(self, wishes: Sequence[Wish], price: float) -> tuple[list[int], float]:
        offered, paths = list[tuple[float, int, int]](), dict[tuple[int, int], list[tuple[float, int]]]()
        for row, wish in enumerate(wishes):
            if wish.held:
                continue
            key = id(wish.plans), wish.taken  # most rows are like another one
            if key not in paths:
                paths[key] = _path(wish, price)
            offered += [(worth, row, arm) for worth, arm in paths[key]]
        offered.sort(key=lambda one: -one[0])
        step = Step(self, wishes, [wish.taken if wish.held else 0 for wish in wishes])
        best, found = step.speed, step.plans.copy()
        count = 0
        for at, (_, row, arm) in enumerate(offered, start=1):
            step.take(row, arm)
            if step.speed > best:
                best, found, count = step.speed, step.plans.copy(), at
        step = Step(self, wishes, found)
        for _, row, arm in offered[count:]:  # what is too much for one row may be less for another
            before = step.plans[row]
            step.take(row, arm)
            if step.speed > best:
                best = step.speed
            else:
                step.take(row, before)
        return step.plans, best


class Step:
    """What a step brings and takes with a plan for every row.

    Args:
        plans: of each row, as indices.
    """

    def __init__(self, budget: Budget, wishes: Sequence[Wish], plans: Sequence[int]) -> None:
        self.plans = list(plans)
        self.guesses = self.varying = 0.0
        """Of all rows, see `Plans`."""
        self._budget, self._wishes, self._counts = budget, wishes, Counter(plans)
        self._tokens, self._drafting_s = float(budget.rows - len(wishes)), 0.0
        self._begun = dict[int, float]()
        for wish, arm in zip(wishes, plans, strict=True):
            self._add(wish.plans, arm, 1)

    @property
    def seconds(self) -> float:
        """What the step takes."""
        begun_s = sum([took for arm, took in self._begun.items() if self._counts[arm] > 0])
        if self._counts[0] < len(self.plans):
            begun_s += self._budget.once_s
        return self._budget.step_s(self.guesses, self.varying) + self._drafting_s + begun_s

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self._tokens / self.seconds

    def take(self, row: int, arm: int) -> None:
        """Give a row another plan."""
        before = self.plans[row]
        if arm != before:
            self._counts[before] -= 1
            self._counts[arm] += 1
            self._add(self._wishes[row].plans, before, -1)
            self._add(self._wishes[row].plans, arm, 1)
            self.plans[row] = arm

    def copy(self) -> "Step":
        """Return the same, to be changed by itself, but for the plans of the rows."""
        other = Step(self._budget, (), ())
        other.plans, other.guesses, other.varying = self.plans, self.guesses, self.varying
        other._counts, other._begun = self._counts.copy(), self._begun.copy()
        other._tokens, other._drafting_s = self._tokens, self._drafting_s
        return other

    def take_alike(self, plans: Plans, arm: int, rows: int) -> None:
        """Count a plan for so many rows that drafted nothing; `plans` of the rows stay as they are."""
        self._counts[0] -= rows
        self._counts[arm] += rows
        self._add(plans, 0, -rows)
        self._add(plans, arm, rows)

    def others(self, row: int) -> list[int]:
        """Return the plans that other rows have."""
        own = self.plans[row]
        return [arm for arm, count in self._counts.items() if count > (arm == own)]

    def _add(self, plans: Plans, arm: int, times: int) -> None:
        self._tokens += times * plans.brings[arm]
        self.guesses += times * plans.guesses[arm]
        self.varying += times * plans.varying[arm]
        self._drafting_s += times * plans.drafting[arm]
        self._begun[arm] = plans.begun[arm]


def _path(wish: Wish, price: float) -> list[tuple[float, int]]:
    """Return the plans worth taking one after the other, those of few guesses first, each with what a guess brings.

    None of them brings less for its guesses than a mixture of others.
    """
    guesses = wish.plans.guesses
    net = values_of(wish.plans.brings, price, wish.plans.drafting)

    def each(before: int, arm: int) -> float:
        return (net[arm] - net[before]) / max(FEWEST, guesses[arm] - guesses[before])

    path = [0]
    for arm in sorted(range(1, len(net)), key=lambda at: (guesses[at], -net[at])):
        if net[arm] <= net[path[-1]]:
            continue
        while len(path) > 1 and each(path[-2], arm) >= each(path[-2], path[-1]):
            path.pop()
        path.append(arm)
    kept = guesses[wish.taken]
    return [
        (each(before, arm) * (KEPT if guesses[arm] <= kept else 1.0), arm) for before, arm in pairwise(path)
    ]


class Shares:
    """The plans of all rows in the coming step.

    Args:
        found: plans that together bring nearly the most; a row may take another one.
        price: the tokens a second that they bring.
    """

    def __init__(self, budget: Budget, wishes: Sequence[Wish], found: Sequence[int], price: float) -> None:
        self.price = price
        self._budget, self._wishes, self._step = budget, wishes, Step(budget, wishes, found)

    def spent(self, row: int, plans: Plans) -> list[float]:
        """Return what plans cost a row beside those of the others, see `Budget.beside`."""
        step, own, at = self._step, self._wishes[row].plans, self._step.plans[row]
        others, varying = step.guesses - own.guesses[at], step.varying - own.varying[at]
        return self._budget.beside(plans, others, varying, step.others(row))

    def take(self, row: int, plan: int) -> None:
        """Note the plan that a row takes."""
        self._step.take(row, plan)

    def beats(self, other: "Shares", patience: float) -> bool:
        """Return whether decoding is enough faster than with other plans, with which fewer rows draft.

        A drafter's weights are read for all rows or for none, so each row may gain beside the others while all of them
        together lose.

        Args:
            patience: how many times as fast it has to be if all rows begin to draft, and less accordingly if few do.
        """
        began = sum(at > 0 for at in self.plans) - sum(at > 0 for at in other.plans)
        return self.price > other.price * (1 + (patience - 1) * began / self._budget.rows)

    @property
    def plans(self) -> Sequence[int]:
        """The plans of all rows."""
        return self._step.plans

    @property
    def seconds(self) -> float:
        """What the step takes."""
        return self._step.seconds

    @property
    def added_s(self) -> float:
        """What all guesses add to the step, as measured."""
        budget = self._budget
        added_s = self._step.seconds - budget.step_s(0.0) - (budget.once_s if any(self.plans) else 0.0)
        return max(0.0, added_s) / budget.slower.more
