"""How drafts fared while a server was measured, from the counters at its `/metrics`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DRAFTS = "spec_decode_num_drafts"
DRAFTED = "spec_decode_num_draft_tokens"
ACCEPTED = "spec_decode_num_accepted_tokens"
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"
PREFIXES = ("vllm:", "llamacpp:")
"""Prefixes of the servers whose counters have these names: vLLM, whose names our server uses too, and llama.cpp."""
FORMULA = "acceptance length = 1 + accepted / drafts; acceptance rate = accepted / drafted"

_LINE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?\s*")
_POSITION = re.compile(r'(?:^|,)\s*position="(\d+)"')


@dataclass(frozen=True)
class Counters:
    """What the server had counted at one moment, over all its engines and models."""

    drafts: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    per_position: Mapping[int, float] = field(default_factory=dict)


def read_counters(exposition: str) -> Counters | None:
    """Return the counters of speculation in a Prometheus exposition; None where it has none."""
    sums: dict[str, float] = {}
    per_position: dict[int, float] = {}
    for line in exposition.splitlines():
        if line.startswith("#"):
            continue
        shown = _LINE.fullmatch(line)
        if shown is None:
            continue
        prefix = next((one for one in PREFIXES if shown["name"].startswith(one)), None)
        if prefix is None:
            continue
        name = shown["name"].removeprefix(prefix).removesuffix("_total")
        try:
            value = float(shown["value"])
        except ValueError:
            continue
        if name == PER_POSITION:
            position = _POSITION.search(shown["labels"] or "")
            if position is not None:
                per_position[int(position[1])] = per_position.get(int(position[1]), 0.0) + value
        elif name in (DRAFTS, DRAFTED, ACCEPTED):
            sums[name] = sums.get(name, 0.0) + value
    if not sums:
        return None
    return Counters(sums.get(DRAFTS, 0.0), sums.get(DRAFTED, 0.0), sums.get(ACCEPTED, 0.0), per_position)


def acceptance(before: Counters | None, after: Counters | None) -> dict[str, Any]:
    """Return the counts between two moments, by the names that serving benchmarks use; {} if nothing was drafted.

    The acceptance rate is in percent, as in those benchmarks; the rates by position are shares of the drafts.
    """
    if before is None or after is None:
        return {}
    drafts, drafted = after.drafts - before.drafts, after.drafted - before.drafted
    accepted = after.accepted - before.accepted
    if drafts <= 0 or drafted < 0 or accepted < 0:
        return {}
    rates = [
        (after.per_position[at] - before.per_position.get(at, 0.0)) / drafts for at in sorted(after.per_position)
    ]
    while rates and rates[-1] == 0:
        rates.pop()
    return {
        "spec_decode_acceptance_rate": 100 * accepted / drafted if drafted else 0.0,
        "spec_decode_acceptance_length": 1 + accepted / drafts,
        "spec_decode_num_drafts": int(drafts),
        "spec_decode_num_draft_tokens": int(drafted),
        "spec_decode_draft_tokens": int(drafted),
        "spec_decode_num_accepted_tokens": int(accepted),
        "spec_decode_accepted_tokens": int(accepted),
        "spec_decode_per_position_acceptance_rates": rates,
    }
