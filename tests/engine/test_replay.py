"""Steps that are recorded and replayed: whatever a recording overwrites, every text is its own.

A GPU is not needed: a recorder that works on a CPU stands for CUDA's.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from draftsmith.drafters import draws
from draftsmith.drafters.attention.eagle import Eagle
from draftsmith.drafters.attention.eagle3 import Eagle3
from draftsmith.drafters.attention.eagle_config import Eagle3Config, EagleConfig
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.heads.hydra import make_hydra
from draftsmith.drafters.heads.hydra_config import HydraConfig
from draftsmith.drafters.heads.medusa import MedusaDrafter
from draftsmith.drafters.heads.medusa_config import MedusaConfig
from draftsmith.drafters.heads.mlp import MLPSpeculator
from draftsmith.drafters.heads.mlp_config import MLPConfig
from draftsmith.drafters.lookup.lookup_first import LookupFirst
from draftsmith.drafters.lookup.ngram import NgramConfig, NgramDrafter
from draftsmith.drafters.trainable.drafter import TrainableDrafter
from draftsmith.engine import Engine
from draftsmith.engine.core import EngineCore
from draftsmith.engine.guarded import Guarded
from draftsmith.engine.policy import Choice, Load, Policy, RowHistory
from draftsmith.engine.steps.replay import Replayed
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.targets import Target
from draftsmith.types import Context, Draft, SamplingParams
from tests.helpers.recorder import OnCPU
from tests.helpers.tiny import VOCABULARY, WIDTH, greedy_reference, prompts, tiny_model, tiny_target


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw guesses by PyTorch's operations: the native ones are for CPUs."""
    monkeypatch.setattr(draws, "LIBRARY", False)


class InTurns(Policy):
    """Every row drafts by another of the plans at every step."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self._choices, self._turn = tuple(Choice(plan) for plan in plans), 0

    @property
    def choices(self) -> tuple[Choice, ...]:
        return self._choices

    def choose(self, load: Load, rows: Sequence[RowHistory]) -> Sequence[Choice]:
        self._turn += 1
        return [self._choices[(b + self._turn) % len(self._choices)] for b in range(len(rows))]


def replaying(
    target: Target, drafter: Drafter | None, max_batch: int, policy: Policy | None = None
) -> tuple[Engine, list[OnCPU]]:
    recorders: list[OnCPU] = []

    def recorder() -> OnCPU:
        recorders.append(OnCPU())
        return recorders[-1]

    engine = Engine(target, drafter, max_batch=max_batch, policy=policy)
    core = engine.core
    engine.core = EngineCore(target, core.drafters, core.policy, core.limits, runner=Replayed(target, recorder))
    return engine, recorders


def heads(name: str) -> Drafter:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name == "mlp":
            config = MLPConfig(hidden_size=WIDTH, vocab_size=VOCABULARY, inner_dim=16, top_k_tokens_per_head=(3, 2, 2))
            return MLPSpeculator(config).double().eval()
        if name == "medusa":
            return MedusaDrafter(MedusaConfig(hidden_size=WIDTH, vocab_size=VOCABULARY)).double().eval()
        return with_memory(name)


def with_memory(name: str) -> Drafter:
    """A drafter that keeps keys and values of its own, as it decodes."""
    target = tiny_target("llama")
    made: dict[str, Callable[[], TrainableDrafter]] = {
        "eagle": lambda: Eagle.new(EagleConfig(), target, None),
        "eagle3": lambda: Eagle3.new(Eagle3Config(), target, None),
        "hydra": lambda: make_hydra(HydraConfig(prefix_attention=True), target, None),
    }
    drafter = made[name]()
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return drafter.double().for_decoding(target)


MEMORIES = ("eagle", "eagle3", "hydra")
PLANS = [NO_DRAFT, Plan((1, 1, 1)), Plan((3, 2)), Plan((2, 2, 1), paths=3), Plan((1, 1), sampled=True),
         Plan(choices=((0,), (0, 0), (0, 1), (1,)))]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("drafter", ["mlp", "medusa", "ngram", *MEMORIES])
def test_replayed_texts_are_those_of_each_step_run_anew(drafter: str, plan: Plan):
    """Rows come and go, are drawn or greedy, change their group, and have penalties."""
    target = tiny_target("llama" if drafter in MEMORIES else "mistral")
    guesser = NgramDrafter(NgramConfig()) if drafter == "ngram" else heads(drafter)
    engine, recorders = replaying(target, guesser, max_batch=3)
    questions = prompts(6)
    rules = [
        SamplingParams(max_tokens=14), SamplingParams(max_tokens=9, temperature=0.9, seed=5),
        SamplingParams(max_tokens=17, temperature=1.0, top_k=20, presence_penalty=0.5, seed=6),
        SamplingParams(max_tokens=12, temperature=0.8, top_k=1), SamplingParams(max_tokens=11),
        SamplingParams(max_tokens=3, temperature=1.1, seed=8),
    ]
    plain = Engine(target, guesser, max_batch=3)
    for _ in range(2):
        found, expected = engine.generate(questions, rules, plan), plain.generate(questions, rules, plan)
        assert [one.tokens for one in found] == [one.tokens for one in expected]
        assert [one.statistics.accepted for one in found] == [one.statistics.accepted for one in expected]
    forward, commit, draft = recorders[:3]
    assert forward.replays > 20 and commit.replays > 5
    assert (draft.replays > 5) == (drafter != "ngram" and bool(plan.depth))


@pytest.mark.parametrize("drafter", ["mlp", "medusa", *MEMORIES])
def test_groups_of_a_step_do_not_overwrite_each_other(drafter: str):
    target, guesser, questions = tiny_target("llama"), heads(drafter), prompts(12)
    rules = [SamplingParams(max_tokens=9 + b, temperature=0.9 * (b % 3 == 2), seed=b) for b in range(12)]
    plain = Engine(target, max_batch=8)
    engine, recorders = replaying(target, guesser, 8, InTurns([Plan((1, 1)), NO_DRAFT, Plan((2, 2)), Plan((3,))]))
    expected = [one.tokens for one in plain.generate(questions, rules)]
    for _ in range(2):
        assert [one.tokens for one in engine.generate(questions, rules)] == expected
    assert sum(recorder.replays for recorder in recorders) > 100


@pytest.mark.parametrize("inner", ["mlp", "eagle3"])
def test_drafters_with_parts_are_drafted_for_as_they_are(inner: str):
    """They are not recorded, and what says which part guessed does not make more recordings of commitments."""
    target, questions = tiny_target("llama"), [question * 2 for question in prompts(6)]
    drafter = LookupFirst(NgramDrafter(NgramConfig(min_length=1)), heads(inner))
    engine, recorders = replaying(target, drafter, max_batch=4)
    rules = SamplingParams(max_tokens=24)
    expected = [one.tokens for one in Engine(target).generate(questions, rules)]
    for _ in range(2):
        assert [one.tokens for one in engine.generate(questions, rules, Plan((1, 1, 1)))] == expected
    _, commit, draft = recorders[:3]
    assert not draft.replays and commit.replays > 80 and len(commit.computed) < 6


@pytest.mark.parametrize("inner", ["mlp", *MEMORIES])
def test_guarded_drafters_are_recorded_too(inner: str):
    target, questions = tiny_target("llama"), prompts(4)
    engine, recorders = replaying(target, Guarded(heads(inner), inner, VOCABULARY), max_batch=2)
    plain, rules, plan = Engine(target, heads(inner), max_batch=2), SamplingParams(max_tokens=20), Plan((2, 1))
    for _ in range(2):
        found, expected = engine.generate(questions, rules, plan), plain.generate(questions, rules, plan)
        assert [one.tokens for one in found] == [one.tokens for one in expected]
        assert [one.statistics.accepted for one in found] == [one.statistics.accepted for one in expected]
    assert recorders[2].replays > 5


class FailsOnce(MLPSpeculator):
    """Fails at its draft of a number."""

    fails_at, drafts = 0, 0
    error: Exception = ValueError("out of order")

    def propose(self, context: Context, plan: Plan) -> Draft:
        self.drafts += 1
        if self.drafts == self.fails_at:
            raise self.error
        return super().propose(context, plan)


@pytest.mark.parametrize(
    ("fails_at", "error", "recorded", "failures"),
    [
        (1, ValueError("out of order"), True, 1),
        (2, ValueError("out of order"), False, 0),
        (2, RuntimeError("operation not permitted when stream is capturing"), False, 0),
        (2, torch.OutOfMemoryError("CUDA out of memory"), True, 0),
    ],
    ids=["before", "while", "cannot", "full"],
)
@pytest.mark.parametrize("guards", [1, 2])
def test_a_failure_is_not_recorded(
    guards: int, fails_at: int, error: Exception, recorded: bool, failures: int, caplog: pytest.LogCaptureFixture
):
    """Neither one before the recording nor one while it is made empties the drafts that follow."""
    target, questions = tiny_target("llama"), prompts(4)
    inner = FailsOnce(MLPConfig(hidden_size=WIDTH, vocab_size=VOCABULARY, inner_dim=16)).double().eval()
    inner.fails_at, inner.error = fails_at, error
    guarded = Guarded(inner, "mlp", VOCABULARY)
    drafter = guarded if guards == 1 else Guarded(guarded, "again", VOCABULARY)
    engine, recorders = replaying(target, drafter, max_batch=1)
    for question in questions:
        [found] = engine.generate([question], SamplingParams(max_tokens=20), Plan((1, 1)))
        assert found.tokens == greedy_reference(tiny_model("llama"), question, 20)
        steps = found.statistics.steps
        assert found.statistics.drafted >= 2 * (steps - 3)  # the first steps, and the last ones, may draft less
    assert (recorders[2].replays > 5, guarded.failures) == (recorded, failures)
    told = [record.message for record in caplog.records if "cannot be recorded" in record.message]
    assert [message.endswith(str(error)) for message in told] == [True] * (not recorded)


def test_it_may_run_in_inference_mode():
    target, question = tiny_target("llama"), prompts(1)[0]
    engine, recorders = replaying(target, heads("mlp"), max_batch=1)
    expected = greedy_reference(tiny_model("llama"), question, 20)
    for inside in (True, False, True):
        with torch.inference_mode(inside):
            [found] = engine.generate([question], SamplingParams(max_tokens=20), Plan((1, 1)))
        assert found.tokens == expected
    assert recorders[0].replays > 10


def test_a_replayed_greedy_text_is_the_models_own():
    engine, _ = replaying(tiny_target("llama"), heads("mlp"), max_batch=2)
    for question in prompts(3):
        [found] = engine.generate([question], SamplingParams(max_tokens=20), Plan((2, 1)))
        assert found.tokens == greedy_reference(tiny_model("llama"), question, 20)


def test_padded_drafts_stay_within_the_room_of_their_row():
    """A tree of three guesses cannot be deeper than three, however deep its plan is."""
    engine, _ = replaying(tiny_target("llama"), NgramDrafter(NgramConfig(min_length=1)), max_batch=1)
    question = list(range(57))
    plain = Engine(tiny_target("llama")).generate([question], SamplingParams(max_tokens=40))
    for _ in range(2):
        found = engine.generate([question], SamplingParams(max_tokens=40), Plan((2,) + (1,) * 15, nodes=3))
        assert found[0].tokens == plain[0].tokens
        assert found[0].statistics.drafted


class Waits:
    """Cannot record, as where a function asks the device for a number."""

    def record(self, function: Callable[[], Any]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")


def test_what_cannot_be_recorded_runs_as_it_is(caplog: pytest.LogCaptureFixture):
    target, question = tiny_target("llama"), prompts(1)[0]
    engine = Engine(target, heads("mlp"))
    core = engine.core
    engine.core = EngineCore(target, core.drafters, core.policy, core.limits, runner=Replayed(target, Waits))
    [found] = engine.generate([question], SamplingParams(max_tokens=12), Plan((2, 1)))
    assert found.tokens == greedy_reference(tiny_model("llama"), question, 12)
    told = [record.message for record in caplog.records if "cannot be recorded" in record.message]
    assert len(told) == 3, "once for each piece: drafting, forward, commitment"
    assert told[0].endswith("operation not permitted when stream is capturing")
