"""The core when a step breaks off, when others step it too, when a drafter serves two, when a text cannot be read."""

import pytest
import torch
from torch import Tensor

from draftsmith.engine import Engine
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.targets import BLOCK, Target
from draftsmith.types import Context, Draft, DraftsmithError, SamplingParams
from tests.helpers.contract import run_out
from tests.helpers.oracle import OracleDrafter, oracle_for
from tests.helpers.tiny import greedy_reference, prompts, tiny_model, tiny_target

CHAIN, TREE = Plan((1, 1, 1)), Plan((3, 2, 1))


class Interrupted(OracleDrafter):
    """Is interrupted, once asked to be, when it learns what became of a tree: rows before it are committed by then."""

    observes = True
    now = False

    def observe(self, context: Context, draft: Draft, choice_BM: Tensor) -> None:
        if self.now and not draft.is_chain:
            raise KeyboardInterrupt("by the user")


def test_a_step_that_breaks_off_ends_what_runs_and_nothing_else():
    questions = prompts(2)
    drafter = oracle_for(tiny_model(), questions, kind=Interrupted)
    engine = Engine(tiny_target(), drafter, plan=CHAIN)
    params = SamplingParams(max_tokens=20)
    first, second = (engine.stream([q], params, plan) for q, plan in zip(questions, [CHAIN, TREE], strict=True))
    next(first), next(second)
    drafter.now = True
    with pytest.raises(KeyboardInterrupt):
        list(first)
    drafter.now = False
    (*_, last) = list(second)
    assert last.completion is not None and last.completion.finish_reason == "error"
    assert "broke off (KeyboardInterrupt: by the user)" in str(last.completion.error)
    answers = [greedy_reference(tiny_model(), question, 20) for question in questions]
    assert last.completion.tokens == answers[1][: len(last.completion.tokens)]
    assert not engine.core.has_work
    assert [c.tokens for c in engine.generate(questions, params)] == answers
    assert engine.core.blocks.held_tokens == 0


class Shallow(OracleDrafter):
    """Makes two guesses in a row and no more."""

    max_depth = 2  # type: ignore[assignment]


def test_a_plan_deeper_than_its_drafter_is_refused_before_it_harms_anybody():
    questions = prompts(2)
    drafter = oracle_for(tiny_model(), questions, kind=Shallow)
    with pytest.raises(DraftsmithError, match="3 tokens ahead, but the drafter .* reaches 2"):
        Engine(tiny_target(), drafter, plan=CHAIN)
    engine = Engine(tiny_target(), drafter, plan=Plan((1, 1)))
    stream = engine.stream([questions[0]], SamplingParams(max_tokens=20))
    tokens = list(next(stream).tokens)
    with pytest.raises(DraftsmithError, match="reaches 2"):
        engine.generate([questions[1]], SamplingParams(max_tokens=4), CHAIN)
    assert tokens + [t for chunk in stream for t in chunk.tokens] == greedy_reference(tiny_model(), questions[0], 20)


class Clings(OracleDrafter):
    """Cannot forget a row, once."""

    clings = True

    def reset_rows(self, rows: list[int]) -> None:
        if self.clings:
            self.clings = False
            raise RuntimeError("no")
        super().reset_rows(rows)


def test_a_drafter_that_cannot_forget_a_row_keeps_no_row_alive():
    questions = prompts(2)
    engine = Engine(tiny_target(), oracle_for(tiny_model(), questions, kind=Clings), plan=CHAIN, max_batch=2)
    leaves, stays = (engine.admit_call([question], SamplingParams(max_tokens=30))[0] for question in questions)
    for request in (leaves, stays):
        engine.core.add(request)
    engine.core.step()
    with pytest.raises(RuntimeError, match="no"):
        engine.core.abort(leaves.id)
    run_out(engine)
    assert stays.completion().tokens == greedy_reference(tiny_model(), questions[1], 30)
    assert not engine.core.has_work and engine.core.blocks.held_tokens == 0


def test_who_steps_or_aborts_by_hand_takes_nothing_from_a_stream():
    question = prompts(1)[0]
    answer = greedy_reference(tiny_model(), question, 20)
    engine = Engine(tiny_target(), oracle_for(tiny_model(), [question]), plan=CHAIN)
    stream = engine.stream([question], SamplingParams(max_tokens=20))
    tokens = list(next(stream).tokens)
    engine.core.step()
    tokens += [token for chunk in stream for token in chunk.tokens]
    assert tokens == answer
    stream = engine.stream([question], SamplingParams(max_tokens=20))
    next(stream)
    engine.core.abort(next(iter(engine.core.scheduler.decoding)))
    (*_, last) = list(stream)
    assert last.completion is not None and last.completion.finish_reason == "abort"


def test_a_drafter_that_remembers_serves_one_core_at_a_time():
    question = prompts(1)[0]
    oracle = oracle_for(tiny_model(), [question])
    one, other = (Engine(tiny_target(), oracle, plan=CHAIN) for _ in range(2))
    stream = one.stream([question], SamplingParams(max_tokens=9))
    next(stream)
    with pytest.raises(DraftsmithError, match="drafting for another engine"):
        other.generate([question], SamplingParams(max_tokens=4))
    stream.close()
    assert other.generate([question], SamplingParams(max_tokens=4))[0].tokens == greedy_reference(
        tiny_model(), question, 4
    )


def test_an_engine_that_never_drafts_needs_no_memory_and_finds_it_when_a_request_does():
    question = prompts(1)[0]
    oracle = oracle_for(tiny_model(), [question])
    engine = Engine(tiny_target(), oracle, plan=NO_DRAFT)
    (plain,) = engine.admit_call([question], SamplingParams(max_tokens=9))
    engine.core.add(plain)
    engine.core.step()
    (drafted,) = engine.admit_call([question], SamplingParams(max_tokens=9), CHAIN)
    engine.core.add(drafted)
    run_out(engine)
    answer = greedy_reference(tiny_model(), question, 9)
    assert plain.completion().tokens == drafted.completion().tokens == answer
    assert sum(drafted.history.accepted) > 0 and sum(plain.history.drafted) == 0


def test_what_was_not_read_to_a_finite_end_is_not_shared():
    """One piece holds a token that cannot be read: PyTorch's attention spoils the keys of those before it."""
    model = tiny_model()
    token = 77
    good = [t for t in prompts(1, shortest=90, longest=90, seed=8)[0] if t != token][:BLOCK]
    good += [5] * (BLOCK - len(good))
    model.get_input_embeddings().weight.data[token] = torch.nan
    target = Target(model, name="broken")
    engine = Engine(target, piece_tokens=BLOCK + 16)
    (sick,) = engine.admit_call([[*good, token, *good[:30]]], SamplingParams(max_tokens=3))
    engine.core.add(sick)
    engine.core.step()
    engine.core.abort(sick.id)
    params = SamplingParams(max_tokens=6, logit_bias={token: -1e4})
    expected = Engine(target, share_prefixes=False).generate([[*good, 1]], params)[0]
    found = engine.generate([[*good, 1]], params)[0]
    assert found.finish_reason == "length" and found.tokens == expected.tokens
