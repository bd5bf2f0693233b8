"""Finds the fastest plan on this machine for texts like the given ones: quick, where `measure_profile` is thorough."""

import random
from collections.abc import Sequence

from draftsmith.engine import Engine
from draftsmith.evaluation.measuring.interleaving import interleaved
from draftsmith.evaluation.measuring.measure import measure
from draftsmith.plan import Plan
from draftsmith.types import SamplingParams


def fastest_plan(
    engine: Engine, plans: Sequence[Plan], prompts: Sequence[Sequence[int]], new_tokens: int, seed: int = 0
) -> Plan:
    """Decode prompts, greedily and alone, with every plan in turn; return the one that took least time.

    All of them write the same texts, so only their times have to be compared.
    """
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    seconds = dict.fromkeys(plans, 0.0)
    for number, plan, timed in interleaved(plans, len(prompts), random.Random(seed), warmups=1):
        found = measure(engine, [prompts[number % len(prompts)]], params, plan)
        if timed:
            seconds[plan] += found.wall_s
    return min(plans, key=seconds.__getitem__)
