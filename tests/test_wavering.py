"""Text under a policy that changes its mind at every step follows the law; a policy that looks ahead is found out."""

from collections.abc import Sequence

import torch

from draftsmith.engine import Choice, Load, Policy, RowHistory
from draftsmith.engine.request import Request
from draftsmith.evaluation.chi_square import fit
from draftsmith.evaluation.law import enumerate_law, read_plainly
from draftsmith.evaluation.sampling_proof import ALPHA
from draftsmith.evaluation.small_world import PROMPT, TableDrafter, small_target
from draftsmith.evaluation.wavering import MakePolicy, Wavering, draw_under_policy
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.types import SamplingParams
from draftsmith.verify import Stream
from draftsmith.verify.noise import uniform

DRAWS = 30_000


def p_value(make_policy: MakePolicy) -> float:
    target, params = small_target(), SamplingParams(temperature=1.0, max_tokens=3, ignore_eos=True)
    law = enumerate_law(read_plainly(target), target, PROMPT, params, 3)
    draws = draw_under_policy(
        target, TableDrafter(target), PROMPT, params, DRAWS, batch=1000, seed=3, make_policy=make_policy
    )
    assert len(draws.texts) == DRAWS and draws.accepted_per_step > 0.1
    counts_C, impossible = law.count(draws.texts)
    return fit(counts_C, impossible, law.p_C).p_value


class Peeking(Policy):
    """Drafts only if the noise of the token to come would draw one from the end of the alphabet."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self._draft, self._plain = Choice(Plan((1, 1), sampled=True)), Choice(NO_DRAFT)

    @property
    def choices(self) -> tuple[Choice, ...]:
        return self._draft, self._plain

    def choose(self, load: Load, rows: Sequence[RowHistory]) -> Sequence[Choice]:
        known = {id(request.history): request for request in self._requests}
        asked = [known[id(row)] for row in rows]
        u_B = uniform(
            torch.tensor([request.seed for request in asked], dtype=torch.long),
            torch.tensor([request.length for request in asked], dtype=torch.long), Stream.TARGET, 0,
        )
        return [self._draft if u > 0.5 else self._plain for u in u_B.tolist()]


def test_a_policy_that_uses_what_was_known_leaves_the_law_as_it_is():
    assert p_value(lambda requests: Wavering()) > 1e-3


def test_a_policy_that_peeks_is_caught():
    assert p_value(Peeking) < ALPHA
