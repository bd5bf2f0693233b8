"""The loop of every speed comparison: all ways take turns in random order, so a drift in speed affects all alike."""

import random
from collections.abc import Collection, Iterator
from typing import Generic, NamedTuple, TypeVar

Way = TypeVar("Way")


class Trial(NamedTuple, Generic[Way]):
    """One run of one way in round `number`; `timed` is False where it warms up, and its time is thrown away."""

    number: int
    way: Way
    timed: bool


def interleaved(ways: Collection[Way], rounds: int, rng: random.Random, warmups: int = 0) -> Iterator[Trial[Way]]:
    """Yield the trials of `warmups` + `rounds` rounds, each with every way once, in random order."""
    for number in range(warmups + rounds):
        for way in rng.sample(list(ways), len(ways)):
            yield Trial(number, way, number >= warmups)
