"""How the tokens of a step were made: which drafter guessed them, and which guesses stayed."""

from dataclasses import dataclass

from draftsmith.engine.reasons import Reason
from draftsmith.plan import Plan


@dataclass(slots=True)
class Tree:
    """The guesses of one step for one row.

    Args:
        tokens, parents: the nodes, as in `Draft`.
        accepted: the nodes that stayed, from the root on.
    """

    tokens: list[int]
    parents: list[int]
    accepted: list[int]


@dataclass(slots=True)
class Made:
    """How a step made its tokens: the first `accepted` of them were guessed, the last is the target's own.

    Args:
        drafter: the name of the drafter that guessed.
        plan: the shape of the guesses.
        drafted: how many guesses were verified.
        tree: the guesses, for a request that `shows_drafts`.
        why: why these guesses and no others; None where the policy gives no reason.
        part: which part of the drafter guessed, for a request that `shows_drafts`; None where it has no parts.
    """

    drafter: str
    plan: Plan
    drafted: int
    accepted: int
    tree: Tree | None = None
    why: Reason | None = None
    part: str | None = None
