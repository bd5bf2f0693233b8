"""Made-up profiles of drafters, and a policy that is asked and answered by them."""

from draftsmith.engine.arm import Arm
from draftsmith.engine.fitted import Fitted
from draftsmith.engine.policy import Load, RowHistory
from draftsmith.engine.profile import Profile
from draftsmith.plan import NO_DRAFT, Plan

CHAINS = [Plan((1,) * depth) for depth in range(1, 5)]
KEPT = (0.6, 0.4, 0.2, 0.1)


def profile(cost: float = 0.1, survival: tuple[float, ...] = KEPT, rows: tuple[int, ...] = (1, 4)) -> Profile:
    """Chains of one to four; a guess costs so many plain steps, and four rows pay twice that."""
    def arm(plan: Plan) -> Arm:
        seconds = tuple(1.0 + cost * plan.depth * (1 if count == 1 else 2) for count in rows)
        return Arm(plan, survival[: plan.depth], seconds)

    return Profile(rows, tuple(arm(plan) for plan in (NO_DRAFT, *CHAINS)))


def tokens_found(steps: float, kept: float, behind: float = 0.0) -> float:
    """The share of tokens that come from this share of steps, which accept so many guesses, the others `behind`."""
    found, missed = steps * (1 + kept), (1 - steps) * (1 + behind)
    return found / (found + missed)


def growth(one: float, other: float) -> float:
    """How many times as high the odds of the first share are as those of the second."""
    return one / (1 - one) / (other / (1 - other))


def lookup(seconds: float, full: float = 5.0) -> Profile:
    """Four guesses in a quarter of the steps, which take `full` and accept all in four of five of these, or none.

    Its steps take `seconds` on average.
    """
    arm = Arm(CHAINS[3], (0.8, 0.8, 0.8, 0.8), (seconds,), found=tokens_found(0.25, 3.2), full=(full,))
    return Profile((1,), (Arm(NO_DRAFT, (), (1.0,)), arm))


def load(rows: int) -> Load:
    return Load(decoding=rows, reading=0, waiting=0, max_batch=8)


def go(policy: Fitted, history: RowHistory, steps: int, stay: int) -> list[int]:
    """Ask and answer: of every draft so many guesses stay; return how deep the drafts were."""
    depths = []
    for _ in range(steps):
        (choice,) = policy.choose(load(1), [history])
        depths.append(choice.plan.depth)
        history.note(min(stay, choice.plan.depth), choice.plan.depth, NO_DRAFT)
    return depths
