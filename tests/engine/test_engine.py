"""The engine on tiny float64 targets: its text is transformers' own, whatever is drafted, however rows come and go."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from draftsmith.engine import Engine
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.targets import Target
from draftsmith.types import Completion, DraftsmithError, SamplingParams
from tests.helpers.contract import CheckedDrafter
from tests.helpers.oracle import OracleDrafter, oracle_for
from tests.helpers.tiny import ARCHITECTURES, CONTEXT, VOCABULARY, greedy_reference, prompts, tiny_model, tiny_target

CHAIN = Plan((1, 1, 1, 1))
TREE = Plan((3, 2, 1))
SHAPES = [CHAIN, TREE, Plan((1,)), Plan((4,))]


def tokens_of(completions: Sequence[Completion]) -> list[list[int]]:
    return [completion.tokens for completion in completions]


# ---- greedy text


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_text_is_transformers_own(architecture: str):
    target, model = tiny_target(architecture), tiny_model(architecture)
    questions = prompts(8)
    answers = [greedy_reference(model, question, 24) for question in questions]
    for plan in (NO_DRAFT, CHAIN, TREE):
        oracle = OracleDrafter(
            [q + a for q, a in zip(questions, answers, strict=True)], VOCABULARY, error_rate=0.3, ragged=True
        )
        engine = Engine(target, oracle, plan=plan)
        for size in (1, 3, 8):
            assert tokens_of(engine.generate(questions[:size], SamplingParams(max_tokens=24))) == answers[:size]


@pytest.mark.parametrize("plan", SHAPES)
def test_every_accepted_length_occurs(plan: Plan):
    oracle = oracle_for(tiny_model(), prompts(8), error_rate=0.35)
    completions = Engine(tiny_target(), oracle, plan=plan).generate(prompts(8), SamplingParams(max_tokens=40))
    assert {n for c in completions for n in c.accepted_lengths} == set(range(plan.depth + 1))


def test_a_perfect_oracle_is_accepted_whole():
    oracle = oracle_for(tiny_model(), prompts(3))
    for completion in Engine(tiny_target(), oracle, plan=CHAIN).generate(prompts(3), SamplingParams(max_tokens=41)):
        assert completion.accepted_lengths == [4] * 8
        assert completion.statistics.tokens_per_step == 5


def test_memory_that_was_never_written_cannot_matter(uninitialised_is_nan: None):
    questions = prompts(5)
    engine = Engine(tiny_target(), oracle_for(tiny_model(), questions, error_rate=0.3), plan=TREE, max_batch=3)
    answers = [greedy_reference(tiny_model(), question, 12) for question in questions]
    assert tokens_of(engine.generate(questions, SamplingParams(max_tokens=12))) == answers


def test_a_prompt_read_in_pieces_gives_the_same_text():
    questions = prompts(4)
    answers = [greedy_reference(tiny_model("mistral"), question, 12) for question in questions]
    engine = Engine(tiny_target("mistral"), oracle_for(tiny_model("mistral"), questions), plan=TREE, piece_tokens=5)
    assert tokens_of(engine.generate(questions, SamplingParams(max_tokens=12))) == answers


def test_the_context_can_be_filled_to_the_last_token():
    question = prompts(1)[0]
    room = CONTEXT - len(question)
    answer = greedy_reference(tiny_model("gpt2"), question, room)
    oracle = OracleDrafter([question + answer + [0] * 9], VOCABULARY)
    engine = Engine(tiny_target("gpt2"), oracle, plan=TREE)
    assert engine.generate([question], SamplingParams(max_tokens=room))[0].tokens == answer


# ---- how a text ends


@pytest.mark.parametrize("plan", [NO_DRAFT, CHAIN, TREE])
@pytest.mark.parametrize("place", range(6))
def test_an_end_token_inside_an_accepted_path_ends_the_text(plan: Plan, place: int):
    question = prompts(1)[0]
    answer = greedy_reference(tiny_model(), question, 30)
    end = answer[place]
    model = tiny_model(eos_token_id=end)
    expected = greedy_reference(model, question, 30)
    assert expected == answer[: answer.index(end) + 1]
    oracle = OracleDrafter([question + answer], VOCABULARY, place="any")
    engine = Engine(Target(tiny_model(eos_token_id=end)), oracle, plan=plan)
    stopped, went_on = engine.generate(
        [question] * 2, [SamplingParams(max_tokens=30), SamplingParams(max_tokens=30, ignore_eos=True)]
    )
    assert (stopped.tokens, stopped.finish_reason) == (expected, "stop")
    assert (went_on.tokens, went_on.finish_reason) == (answer, "length")


@pytest.mark.parametrize("plan", [NO_DRAFT, CHAIN, TREE])
def test_max_tokens_is_exact_in_the_middle_of_a_path(plan: Plan):
    question = prompts(1)[0]
    answer = greedy_reference(tiny_model(), question, 12)
    engine = Engine(tiny_target(), OracleDrafter([question + answer + [0] * 9], VOCABULARY), plan=plan)
    params = [SamplingParams(max_tokens=n) for n in range(1, 13)]
    for n, completion in enumerate(engine.generate([question] * 12, params), start=1):
        assert (completion.tokens, completion.finish_reason) == (answer[:n], "length")
        assert completion.statistics.new_tokens == n


def test_stop_token_ids_end_the_text_and_stay():
    question = prompts(1)[0]
    answer = greedy_reference(tiny_model(), question, 20)
    engine = Engine(tiny_target(), OracleDrafter([question + answer], VOCABULARY), plan=CHAIN)
    completion = engine.generate([question], SamplingParams(max_tokens=20, stop_token_ids=(answer[9], 95)))[0]
    first = min(answer.index(token) for token in (answer[9], 95) if token in answer)
    assert (completion.tokens, completion.finish_reason) == (answer[: first + 1], "stop")


# ---- rows, copies, streams


@pytest.mark.parametrize("max_batch", [1, 2, 3, 5])
def test_rows_join_and_leave_without_touching_each_other(max_batch: int):
    questions = prompts(9, seed=5)
    answers = [greedy_reference(tiny_model("qwen3"), question, 30) for question in questions]
    params = [SamplingParams(max_tokens=1 + (7 * i) % 30) for i in range(9)]
    oracle = oracle_for(tiny_model("qwen3"), questions, error_rate=0.3)
    checked = CheckedDrafter(oracle, tiny_target("qwen3"))
    found = Engine(tiny_target("qwen3"), checked, plan=TREE, max_batch=max_batch).generate(questions, params)
    assert tokens_of(found) == [answer[: p.max_tokens] for answer, p in zip(answers, params, strict=True)]
    assert not oracle.text_of_row


def test_copies_come_prompt_by_prompt():
    questions = prompts(2)
    engine = Engine(tiny_target(), oracle_for(tiny_model(), questions), plan=CHAIN, max_batch=4)
    greedy = engine.generate(questions, SamplingParams(max_tokens=6, n=2))
    assert [c.prompt_tokens for c in greedy] == [questions[0], questions[0], questions[1], questions[1]]
    assert greedy[0].tokens == greedy[1].tokens
    sampled = engine.generate(questions, SamplingParams(max_tokens=12, n=3, temperature=1.0, seed=4))
    assert len({tuple(c.tokens) for c in sampled[:3]}) == 3
    single = engine.generate(questions, SamplingParams(max_tokens=12, temperature=1.0, seed=4))
    assert sampled[0].tokens == single[0].tokens


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_streams_add_up_to_what_generate_returns(temperature: float):
    questions = prompts(5)
    engine = Engine(tiny_target(), oracle_for(tiny_model(), questions, error_rate=0.3), plan=TREE, max_batch=3)
    params = SamplingParams(max_tokens=15, temperature=temperature, seed=3)
    expected = engine.generate(questions, params)
    streamed: list[list[int]] = [[] for _ in questions]
    done: dict[int, Completion] = {}
    for chunk in engine.stream(questions, params):
        assert chunk.index not in done
        streamed[chunk.index] += chunk.tokens
        if chunk.completion is not None:
            done[chunk.index] = chunk.completion
    assert streamed == tokens_of(expected)
    assert [done[i].tokens for i in range(5)] == streamed


def test_a_stream_left_early_leaves_the_engine_usable():
    questions = prompts(4)
    oracle = oracle_for(tiny_model(), questions)
    engine = Engine(tiny_target(), oracle, plan=CHAIN, max_batch=2)
    expected = tokens_of(engine.generate(questions, SamplingParams(max_tokens=12)))
    stream = engine.stream(questions, SamplingParams(max_tokens=12))
    for _ in range(6):
        next(stream)
    assert oracle.text_of_row
    stream.close()
    assert not oracle.text_of_row
    assert tokens_of(engine.generate(questions, SamplingParams(max_tokens=12))) == expected


def test_progress_counts_every_token():
    counts: list[int] = []
    engine = Engine(tiny_target(), oracle_for(tiny_model(), prompts(3)), plan=CHAIN)
    engine.generate(prompts(3), SamplingParams(max_tokens=11), on_progress=counts.append)
    assert sum(counts) == 33


# ---- noise


SAMPLED = SamplingParams(
    max_tokens=16,
    temperature=0.9,
    top_k=40,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logit_bias={3: 1.5, 7: -2.0},
    seed=12,
)


@pytest.mark.parametrize("plan", [CHAIN, TREE])
@pytest.mark.parametrize("error_rate", [0.0, 0.4])
def test_sampled_text_does_not_depend_on_a_deterministic_draft(plan: Plan, error_rate: float):
    questions = prompts(4)
    plain = Engine(tiny_target()).generate(questions, SAMPLED)
    texts = [question + completion.tokens for question, completion in zip(questions, plain, strict=True)]
    oracle = OracleDrafter(texts, VOCABULARY, error_rate=error_rate)
    drafted = Engine(tiny_target(), oracle, plan=plan).generate(questions, SAMPLED)
    assert tokens_of(drafted) == tokens_of(plain)
    assert sum(c.statistics.accepted for c in drafted) > 20


@pytest.mark.parametrize("plan", [NO_DRAFT, TREE, Plan((1, 1), sampled=True), Plan((2, 2), sampled=True)])
def test_a_seed_gives_one_text_whatever_shares_the_batch(plan: Plan):
    questions = prompts(5)
    params = [SamplingParams(max_tokens=14, temperature=1.0, seed=seed) for seed in range(5)]
    oracle = oracle_for(tiny_model(), questions, error_rate=0.3)
    engine = Engine(tiny_target(), oracle, plan=plan)
    together = engine.generate(questions, params)
    alone = [engine.generate([q], p)[0] for q, p in zip(questions, params, strict=True)]
    backwards = Engine(tiny_target(), oracle, plan=plan, max_batch=2).generate(questions[::-1], params[::-1])[::-1]
    assert tokens_of(together) == tokens_of(alone) == tokens_of(backwards)


def test_without_a_seed_two_runs_differ():
    engine = Engine(tiny_target())
    params = SamplingParams(max_tokens=20, temperature=1.5)
    assert tokens_of(engine.generate(prompts(1), params)) != tokens_of(engine.generate(prompts(1), params))


def test_greedy_rows_and_sampled_rows_share_a_batch():
    questions = prompts(4)
    greedy, sampled = SamplingParams(max_tokens=10), SamplingParams(max_tokens=10, temperature=1.0, seed=1)
    engine = Engine(tiny_target(), oracle_for(tiny_model(), questions, error_rate=0.3), plan=TREE)
    mixed = engine.generate(questions, [greedy, sampled, greedy, sampled])
    assert mixed[0].tokens == greedy_reference(tiny_model(), questions[0], 10)
    assert mixed[3].tokens == engine.generate([questions[3]], sampled)[0].tokens


def test_a_repetition_penalty_is_transformers_own():
    model, questions = tiny_model(), prompts(3)
    engine = Engine(tiny_target(), oracle_for(model, questions), plan=TREE)
    found = engine.generate(questions, SamplingParams(max_tokens=20, repetition_penalty=1.4))
    for question, completion in zip(questions, found, strict=True):
        with torch.no_grad():
            out = model.generate(
                torch.tensor([question]),
                attention_mask=torch.ones((1, len(question)), dtype=torch.long),
                max_new_tokens=20,
                do_sample=False,
                repetition_penalty=1.4,
            )
        assert completion.tokens == out[0, len(question) :].tolist()


# ---- log-probabilities and statistics


@pytest.mark.parametrize("plan", [NO_DRAFT, CHAIN, TREE])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logprobs_are_the_targets_own_before_any_filter(plan: Plan, temperature: float):
    model, questions = tiny_model(), prompts(3)
    engine = Engine(tiny_target(), oracle_for(model, questions, error_rate=0.3), plan=plan)
    params = SamplingParams(max_tokens=9, temperature=temperature, top_k=5, seed=2, logprobs=4)
    for completion in engine.generate(questions, params):
        assert completion.logprobs is not None and len(completion.logprobs) == 9
        whole = completion.prompt_tokens + completion.tokens
        with torch.no_grad():
            logprobs_TV = torch.log_softmax(model(torch.tensor([whole])).logits[0], dim=-1)
        for place, entry in enumerate(completion.logprobs, start=len(completion.prompt_tokens)):
            expected_V = logprobs_TV[place - 1]
            assert entry.token == whole[place]
            assert entry.logprob == pytest.approx(expected_V[entry.token].item(), abs=1e-6)
            assert list(entry.top) == expected_V.topk(4).indices.tolist()
            assert list(entry.top.values()) == pytest.approx(expected_V.topk(4).values.tolist(), abs=1e-6)


def test_logprobs_are_absent_unless_asked_for_and_may_ask_for_no_alternatives():
    engine = Engine(tiny_target())
    params = [SamplingParams(max_tokens=3), SamplingParams(max_tokens=3, logprobs=0)]
    silent, spoken = engine.generate(prompts(2), params)
    assert silent.logprobs is None
    assert spoken.logprobs is not None and [entry.top for entry in spoken.logprobs] == [{}, {}, {}]


@pytest.mark.parametrize("plan", SHAPES)
def test_statistics_add_up(plan: Plan):
    engine = Engine(tiny_target(), oracle_for(tiny_model(), prompts(4), error_rate=0.4), plan=plan)
    for completion in engine.generate(prompts(4), SamplingParams(max_tokens=30)):
        s = completion.statistics
        assert s.new_tokens == len(completion.tokens) == 30
        assert s.prompt_tokens == len(completion.prompt_tokens)
        assert s.steps == len(completion.accepted_lengths)
        assert s.accepted == sum(completion.accepted_lengths) == sum(s.accepted_by_depth)
        assert s.drafted == s.steps * plan.max_nodes
        assert all(deeper <= shallower for shallower, deeper in pairwise(s.accepted_by_depth))
        cut = 1 + s.steps + s.accepted - s.new_tokens
        assert cut in (0, 1), "every step adds one token of the target's own, unless the end cuts it off"
        assert s.prefill_s > 0 and s.target_s > 0 and s.drafter_s > 0 and s.rest_s > 0


def test_plain_decoding_has_one_token_a_step():
    completion = Engine(tiny_target()).generate(prompts(1), SamplingParams(max_tokens=10))[0]
    assert completion.accepted_lengths == [0] * 9
    assert (completion.statistics.drafted, completion.statistics.tokens_per_step) == (0, 1.0)


def test_drafting_stops_above_a_load_and_comes_back():
    model, questions = tiny_model(), prompts(3)
    answers = [greedy_reference(model, question, 12) for question in questions]
    oracle = oracle_for(model, questions)
    engine = Engine(tiny_target(), oracle, plan=Plan((1, 1)), max_batch=3, draft_rows=2)
    params = [SamplingParams(max_tokens=n) for n in (12, 12, 3)]
    found = engine.generate(questions, params)
    assert [c.tokens for c in found] == [answers[0], answers[1], answers[2][:3]]
    # Three rows: the first token and two steps without a draft; then two rows, three tokens a step.
    assert found[2].accepted_lengths == [0, 0]
    assert found[0].accepted_lengths == [0, 0, 2, 2, 2]
    with pytest.raises(DraftsmithError, match="draft_rows is -1; use 0"):
        Engine(tiny_target(), oracle, draft_rows=-1)
