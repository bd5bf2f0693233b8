"""What a run says where other programs took the processor while its steps were timed."""

import io

import pytest
from rich.console import Console

from draftsmith.processor import BUSY
from draftsmith.training.disturbance import SHORT_PLAN, disturbance_in_words, watched


def told(others: float | None) -> str:
    console = Console(file=io.StringIO(), width=400)
    with watched(console, SHORT_PLAN, lambda: others):
        pass
    return console.file.getvalue()


def test_what_others_took_is_said_once_it_matters():
    for others in (None, 0.0):
        assert told(others) == ""
    assert "so the plan may have fewer steps than would fit into the time; start again" in told(1e6)
    assert disturbance_in_words(2 * BUSY, 2, "so.") is None
    assert disturbance_in_words(1.26, 2, "so.") == "Other programs took 1.3 of 2 cores while steps were timed, so."
    assert disturbance_in_words(7.0, 1, "so.") == "Other programs took 1.0 of 1 core while steps were timed, so."


def test_nothing_is_said_of_what_was_not_measured():
    console = Console(file=io.StringIO())
    with pytest.raises(ValueError), watched(console, SHORT_PLAN, lambda: 1e6):
        raise ValueError
    assert console.file.getvalue() == ""
