"""Finds the fastest chain on this machine for texts like the given ones: quick, where `measure_profile` is thorough."""

import random
from collections.abc import Sequence

from draftsmith.engine import Engine
from draftsmith.evaluation.measuring.interleaving import interleaved
from draftsmith.evaluation.measuring.measure import measure
from draftsmith.plan import Plan
from draftsmith.types import SamplingParams


def fastest_chain(
    engine: Engine, lengths: Sequence[int], prompts: Sequence[Sequence[int]], new_tokens: int, seed: int = 0
) -> Plan:
    """Decode prompts, greedily and alone, with chains of every length in turn; return the one that took least time.

    All chains write the same texts, so only their times have to be compared.
    """
    plans = {length: Plan((1,) * length) for length in lengths}
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    seconds = dict.fromkeys(lengths, 0.0)
    for number, length, timed in interleaved(lengths, len(prompts), random.Random(seed), warmups=1):
        found = measure(engine, [prompts[number % len(prompts)]], params, plans[length])
        if timed:
            seconds[length] += found.wall_s
    return plans[min(lengths, key=seconds.__getitem__)]
