"""The learning rate and the start that a family is trained with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Trial = Mapping[str, Any]
"""The result of a trial, as plain JSON: `rate`, `options` and `tokens_per_step`, which is None if the loss blew up."""


@dataclass(frozen=True)
class Choice:
    """The best trial's rate and options, and all trials; `at_edge`: its rate is the smallest or largest one tried."""

    rate: float
    options: Mapping[str, Any]
    trials: Sequence[Trial] = ()
    at_edge: bool = False
