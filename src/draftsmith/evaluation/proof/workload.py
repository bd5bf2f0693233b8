"""How much `prove` does."""

from dataclasses import dataclass

from draftsmith.plan import Plan
from draftsmith.types import DraftsmithError

SMALL_PLANS = (
    Plan((2, 1)),
    Plan((1, 1)),
    Plan((1, 1), sampled=True),
    Plan((1, 1), sampled=True, acceptance="block"),
    Plan((2, 1), sampled=True),
)


@dataclass(frozen=True)
class Workload:
    """How much to do.

    Args:
        new_tokens: greedy tokens of each prompt.
        batch: rows of the ragged batch.
        draws: draws from the real target with each plan.
        small_draws: draws from the small alphabet with each plan.
        small_plans: the plans to draw with there; the last one also with penalties.
        joint_tokens: length of the continuations whose joint distribution is tested.
        top_k: the top-k of the draws from the real target.
        rows: continuations drawn together.
    """

    new_tokens: int = 48
    batch: int = 8
    draws: int = 100_000
    small_draws: int = 1_000_000
    small_plans: tuple[Plan, ...] = SMALL_PLANS
    joint_tokens: int = 3
    top_k: int = 6
    rows: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("new_tokens", 1), ("batch", 1), ("joint_tokens", 2), ("top_k", 2), ("rows", 1)):
            if getattr(self, name) < least:
                raise DraftsmithError(f"{name} is {getattr(self, name)}; it must be at least {least}.")
