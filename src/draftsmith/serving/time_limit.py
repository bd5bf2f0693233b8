"""A time limit for chat templates, which are programs that come with a model."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

TEMPLATE = "<template>"
"""The file name that Jinja gives to the code of its templates."""


class TooSlow(Exception):
    """A template took longer than it may."""


@contextmanager
def templates_within(seconds: float) -> Iterator[None]:
    """Raise `TooSlow` inside this thread's templates once time is up; a thread cannot be stopped from outside."""
    end = time.monotonic() + seconds

    def each_line(frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > end:
            raise TooSlow(f"it took longer than {seconds:g} seconds")
        return each_line

    def each_call(frame: FrameType, event: str, argument: Any) -> Any:
        return each_line if frame.f_code.co_filename == TEMPLATE else None

    before = sys.gettrace()
    sys.settrace(each_call)
    try:
        yield
    finally:
        sys.settrace(before)
