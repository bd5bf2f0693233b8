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
LEAST = (("new_tokens", 1), ("batch", 1), ("small_draws", 1), ("joint_tokens", 2), ("top_k", 2), ("rows", 1))
LEAST_DRAWS, MOST_CONTINUATIONS = 1_000, 5_000


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
        check_draws(self.draws)
        for name, least in LEAST:
            if getattr(self, name) < least:
                raise DraftsmithError(f"{name} is {getattr(self, name)}; it must be at least {least}.")
        check_continuations(self.top_k, self.joint_tokens)


def check_draws(draws: int) -> None:
    """Raise DraftsmithError when there are too few draws to test a distribution by."""
    if draws < LEAST_DRAWS:
        raise DraftsmithError(f"--draws is {draws}; the test of a distribution needs at least {LEAST_DRAWS}.")


def check_continuations(kept: int, length: int, most: int = MOST_CONTINUATIONS) -> None:
    """Raise DraftsmithError when `kept` tokens at each of `length` positions are too many to enumerate."""
    if kept**length > most:
        raise DraftsmithError(
            f"{kept} tokens at each of {length} positions make {kept**length:,} continuations, too many to enumerate "
            f"({most:,}); lower --top-k or --joint-tokens."
        )
