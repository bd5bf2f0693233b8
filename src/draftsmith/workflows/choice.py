"""The learning rate and the start that a family is trained with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Trial = Mapping[str, Any]
"""What a trial brought, as plain JSON: `rate`, `options` and `tokens_per_step`, None where the loss blew up."""


@dataclass(frozen=True)
class Choice:
    """The rate and options of the best trial, and all trials; `at_edge` where no larger or no smaller one did worse."""

    rate: float
    options: Mapping[str, Any]
    trials: Sequence[Trial] = ()
    at_edge: bool = False
