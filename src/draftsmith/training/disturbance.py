"""Notices other programs that take processor time while steps are timed, and says what that means for the run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from draftsmith.processor import BUSY, Watch, usable_cores
from draftsmith.training.terminal import say

SHORT_PLAN = (
    "so the plan may have fewer steps than would fit into the time; start again when they are done, or set "
    "stage1.steps and stage2.steps."
)
LONG_ESTIMATE = "so the estimate may be too long; the run itself takes as many steps as without them."


@contextmanager
def watched(
    console: Console, consequence: str, others: Callable[[], float | None] | None = None
) -> Iterator[list[str]]:
    """Say at the end of the `with` block whether other programs disturbed what was timed in it.

    What was said is in the list that it gives.

    Args:
        consequence: what they may have done to the result, as the end of the sentence.
        others: returns the time that others took, in cores; None where the system does not tell, and nothing is said.
    """
    taken = Watch().others if others is None else others
    said: list[str] = []
    yield said
    told = disturbance_in_words(taken(), len(usable_cores()), consequence)
    if told is not None:
        said.append(told)
        say(console, told)


def disturbance_in_words(others: float | None, cores: int, consequence: str) -> str | None:
    """Return a sentence about the time that others took, in cores; None if it was too little to matter, or unknown."""
    if others is None or others <= BUSY * cores:
        return None
    have = f"{cores} core{'' if cores == 1 else 's'}"
    return f"Other programs took {min(others, cores):.1f} of {have} while steps were timed, {consequence}"
