"""What a run says when Ctrl-C stops it, before its first checkpoint and after it."""

from collections.abc import Iterator
from contextlib import contextmanager

from draftsmith.training.checkpoint import Checkpoints
from draftsmith.types import DraftsmithError


class TrainingInterrupted(DraftsmithError):
    """The user stopped the run; everything is saved, or the message says that there is nothing yet."""

    exit_code = 130


@contextmanager
def interrupted_before_a_checkpoint(checkpoints: Checkpoints) -> Iterator[None]:
    """Say at a Ctrl-C inside the `with` block that there is nothing to go on from, unless there is a checkpoint.

    Raises:
        TrainingInterrupted: in the place of a KeyboardInterrupt, which stays one where a run can be gone on with.
    """
    try:
        yield
    except KeyboardInterrupt:
        if checkpoints.steps():
            raise
        if checkpoints.run.exists():
            left = f"what is in {checkpoints.run} is no run that could be resumed"
        else:
            left = f"nothing was written to {checkpoints.run}"
        raise TrainingInterrupted(
            f"Interrupted before the first checkpoint: {left}; give the same command again to start from the beginning."
        ) from None
