"""`prove --serving`: a healthy pair is lossless behind the server too, and what is planted there is found."""

import time
from collections.abc import Sequence
from copy import copy, deepcopy
from typing import Any

import pytest
import torch

from draftsmith.engine import Choice, Engine, Load, Policy, RowHistory
from draftsmith.engine.requests.request import Request
from draftsmith.evaluation.proof.prove import Proof, SmallPair, Workload
from draftsmith.evaluation.proof.small_target import STAND_IN, TableDrafter, small_target
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.serving.service import Call, Service
from draftsmith.serving.settings import Settings
from draftsmith.serving.speculation import Drafting
from draftsmith.targets import Target
from draftsmith.types import DraftsmithError, SamplingParams
from draftsmith.verify import Stream
from draftsmith.verify.noise import race
from draftsmith.workflows.serving_proof import Visit, answers, prove_served
from tests.evaluation.planted import StaleEntry
from tests.helpers.tiny import prompts, tiny_model, tiny_target

PLAN = Plan((2, 1, 1))


def proof_of(target: Target, small_draws: int = 1_000, **how: Any) -> Proof:
    toy = small_target()
    return prove_served(
        target, TableDrafter(target), PLAN, prompts(6, seed=4), SmallPair(toy, TableDrafter(toy), STAND_IN),
        Workload(new_tokens=12, draws=1_000, small_draws=small_draws, joint_tokens=2),
        sampling_prompts=prompts(2, shortest=4, longest=4), **how,
    )


def test_a_healthy_pair_is_lossless_behind_the_server():
    told: list[tuple[str, int, int]] = []
    proof = proof_of(tiny_target(), batches=(1, 16), on_progress=lambda *what: told.append(what))
    assert proof.verdict == "lossless", proof.sentence()
    assert proof.greedy.batches == (1, 16) and proof.greedy.compared == 12 and proof.greedy.tokens_per_step > 1
    cells = proof.sampling.cells
    assert [cell.plan.rpartition(" ")[2] for cell in cells] == ["1", "16"] * 4
    assert {cell.where for cell in cells} == {"this target", "small alphabet"}
    assert all(cell.accepted_per_step > 0.02 and cell.draws >= 50 for cell in cells)
    ends = [(done, total) for _, done, total in told if done == total]
    assert len(ends) == 3, "every part is told to its end"


def test_draws_behind_the_server_end_with_a_short_context():
    target = copy(tiny_target())
    target.max_length = 16
    toy = small_target()
    proof = prove_served(
        target, TableDrafter(target), PLAN, prompts(6, shortest=3, longest=8, seed=4),
        SmallPair(toy, TableDrafter(toy), STAND_IN),
        Workload(new_tokens=8, draws=1_000, small_draws=1_000, joint_tokens=2),
        sampling_prompts=prompts(2, shortest=8, longest=8), batches=(4,),
    )
    assert proof.verdict == "lossless", proof.sentence()


def test_a_text_that_fails_is_told_in_words_that_are_true_without_a_server():
    model = deepcopy(tiny_model())
    with torch.no_grad():
        model.get_input_embeddings().weight[1] = torch.nan
    service = Service(Engine(Target(model, name="broken")), Settings(names=("broken",)), {})
    call = Call([[2, 1]], SamplingParams(max_tokens=4), Drafting(), "", time.monotonic() + 60)
    with pytest.raises(DraftsmithError, match=r"not answered \(status 500\): a step of the engine failed"):
        answers(service, [Visit(call)], 1, lambda texts: None)


class Watched(Engine):
    """An engine whose policy drafts only if the noise of the token to come favours the alphabet's first half."""

    def __init__(self, *parts: Any, policy: Policy, **sizes: Any) -> None:
        self.requests: dict[RowHistory, Request] = {}
        super().__init__(*parts, policy=Peeking(self.requests), **sizes)

    def admit_call(self, *call: Any, **how: Any) -> list[Request]:
        requests = super().admit_call(*call, **how)
        self.requests |= {request.history: request for request in requests}
        return requests


class Peeking(Policy):
    def __init__(self, requests: dict[RowHistory, Request]) -> None:
        self._requests = requests
        self._draft, self._plain = Choice(Plan((1, 1), sampled=True)), Choice(NO_DRAFT)

    @property
    def choices(self) -> tuple[Choice, ...]:
        return self._draft, self._plain

    def choose(self, load: Load, rows: Sequence[RowHistory]) -> Sequence[Choice]:
        asked = [self._requests[row] for row in rows]
        seeds_B = torch.tensor([request.seed for request in asked], dtype=torch.long)
        positions_B = torch.tensor([request.length for request in asked], dtype=torch.long)
        # Who would come first if all of eight tokens were as likely.
        equal_BV = torch.ones((len(asked), 8), dtype=torch.float64)
        firsts_B = race(equal_BV, seeds_B, positions_B, Stream.TARGET)
        return [self._draft if first < 4 else self._plain for first in firsts_B.tolist()]


def test_a_policy_that_peeks_is_caught_behind_the_server():
    proof = proof_of(tiny_target(), small_draws=24_000, batches=(16,), make_engine=Watched)
    assert proof.verdict == "defect" and not proof.greedy.defects
    assert all(cell.refused for cell in proof.sampling.cells if cell.where == "small alphabet")


def test_a_stale_cache_is_caught_behind_the_server():
    proof = proof_of(StaleEntry(tiny_target()), batches=(4,))
    assert proof.verdict == "defect" and proof.greedy.defects
