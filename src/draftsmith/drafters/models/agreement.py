"""How likely the target is to choose what a copy of it chooses: the smaller the lead of a token, the less likely.

A copy in fewer bits gives every token nearly the score that the target gives it. So where two tokens are close, the
target may choose the other one, however sure of the first the copy is; and where one leads clearly, the target chooses
it too, however unsure both are. The differences are taken to be normally distributed, and to be as large everywhere.

Shapes: B rows, T tokens, V vocabulary.
"""

import hashlib
import json
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftsmith.files import replace_text
from draftsmith.targets.calibration import own_texts
from draftsmith.user_cache import cache_folder

if TYPE_CHECKING:
    from draftsmith.targets import Target

TEXTS, LONGEST = 16, 9
"""Number and length of the texts by which a copy is compared: few, because a first draft waits for them."""
FORMAT = 1
"""Increased when a spread is measured otherwise; then each is measured again."""

WORTH_IT = 0.15
"""The least chance of a token beside a chain: to verify a guess costs some time. guesses.cpp has the same number."""
NO_TOKEN = -1
"""In the place of a token that there is not; the native operator writes the same."""


@torch.no_grad()
def spread_of(copy: "Target", target: "Target") -> float:
    """Return how far the lead of a copy's best token over its second differs from theirs in the target.

    It is the root of the mean square, over texts that the target writes after random tokens; 0 if its scores are not
    finite.
    """
    longest = min(LONGEST, target.max_length)
    tokens_BT = own_texts(target, TEXTS * longest, longest)
    own_BTV, whole_BTV = (one.encode(tokens_BT, (), logits=True)[1] for one in (copy, target))
    assert own_BTV is not None and whole_BTV is not None
    two = own_BTV.topk(2, dim=-1)
    there_BT2 = whole_BTV.gather(-1, two.indices)
    difference_BT = (two.values.double() - there_BT2.double()).diff(dim=-1).squeeze(-1)
    spread = float(difference_BT.square().mean().sqrt())
    return spread if math.isfinite(spread) else 0.0


def kept_spread(target: "Target", rounding: str, measure: Callable[[], float]) -> float:
    """Return the spread of a copy of this target from the user's cache; measured, and kept there, if it has none.

    If the file or the folder is unusable, the only cost is measuring again.

    Args:
        rounding: names how the copy's weights are rounded.
    """
    path = _place(target, rounding)
    with suppress(OSError, ValueError, TypeError, KeyError):
        spread = float(json.loads(path.read_text(encoding="utf-8"))["spread"])
        if math.isfinite(spread) and spread >= 0:
            return spread
    spread = measure()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps({"spread": spread}))
    return spread


def _place(target: "Target", rounding: str) -> Path:
    what = [
        FORMAT, TEXTS, LONGEST, rounding, str(target.dtype), target.backend.description, target.weights_hash,
        target.config.to_json_string(),
    ]
    return cache_folder("spreads") / f"{hashlib.sha256(json.dumps(what).encode()).hexdigest()[:24]}.json"


def chance_of(lead: Tensor, spread: float) -> Tensor:
    """Return the chance that the target, too, ranks one token before another that it leads by so much in the copy."""
    return torch.special.ndtr(lead.double() / spread) if spread > 0 else torch.ones_like(lead, dtype=torch.float64)
