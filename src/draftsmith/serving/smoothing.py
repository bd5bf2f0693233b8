"""Sends tokens one by one at an even pace, although a step brings several at once; the text stays the same."""

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from draftsmith.serving.delta import Delta
from draftsmith.serving.streams import Followed

LONGEST_S = 0.5
"""The most seconds that one interval counts, so that a wait for room does not slow down what follows."""
WEIGHT = 0.2
"""The weight of the newest interval in the mean time between pieces."""


async def smooth(deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
    """Yield every piece one token at a time, spread over the usual time between two pieces of its text.

    Nothing is held up longer than that: as soon as a new piece is there, the rest of this one goes out at once.
    """
    paces: dict[int, _Pace] = {}
    async with Followed([deltas]) as pieces:
        async for piece in pieces:
            seconds = paces.setdefault(piece.choice, _Pace()).meet()
            parts = split(piece)
            for at, part in enumerate(parts):
                yield part
                if at + 1 < len(parts) and not pieces.has_more:
                    await asyncio.sleep(seconds / len(parts))


class _Pace:
    """The usual time between two pieces of one text."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._usual = 0.0

    def meet(self) -> float:
        """Note that a piece came; return the usual time between pieces in seconds."""
        now = time.monotonic()
        if self._last is not None:
            took = min(now - self._last, LONGEST_S)
            self._usual = took if not self._usual else (1 - WEIGHT) * self._usual + WEIGHT * took
        self._last = now
        return self._usual


def split(delta: Delta) -> list[Delta]:
    """Split a piece into one for every token; together they have its text, the last one all that is left of it."""
    if len(delta.tokens) < 2:
        return [delta]
    found, begin = [], 0
    for at, token in enumerate(delta.tokens):
        last = at + 1 == len(delta.tokens)
        end = len(delta.text) if last else min(len(delta.text), begin + len(delta.texts[at]))
        found.append(replace(
            delta, tokens=[token], text=delta.text[begin:end], texts=[delta.texts[at]],
            logprobs=None if delta.logprobs is None else delta.logprobs[at : at + 1],
            explained=_part(delta.explained, at), prompt_logprobs=delta.prompt_logprobs if at == 0 else None,
            completion=delta.completion if last else None,
        ))
        begin = end
    return found


def _part(explained: dict[str, Any] | None, at: int) -> dict[str, Any] | None:
    """Return the explanation of one token; that of the step goes with the first token."""
    if explained is None:
        return None
    return {**explained, "tokens": explained["tokens"][at : at + 1], "step": explained["step"] if at == 0 else None}
