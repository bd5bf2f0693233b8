"""The core: requests come and go while it runs, and whatever shares a step with a text, the text is its own."""

import time
from collections.abc import Sequence
from random import Random

import pytest
import torch

from draftsmith.drafters.attention.eagle import Eagle, EagleConfig
from draftsmith.drafters.lookup.ngram import NgramConfig, NgramDrafter
from draftsmith.drafters.registry import load_drafter
from draftsmith.engine import Engine
from draftsmith.engine.guarded import Guarded
from draftsmith.engine.policy import Choice, Load, Policy, RowHistory
from draftsmith.engine.requests.request import Request
from draftsmith.native import LIBRARY
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.targets import BLOCK, Target
from draftsmith.types import DraftsmithError, SamplingParams
from tests.helpers.contract import CheckedDrafter, run_out
from tests.helpers.oracle import oracle_for
from tests.helpers.tiny import CONTEXT, greedy_reference, prompts, tiny_model, tiny_target

CHAIN, TREE = Plan((1, 1, 1)), Plan((3, 2, 1))


class AtRandom(Policy):
    """Another draft for every row at every step, or for all rows together."""

    def __init__(self, choices: Sequence[Choice], seed: int, together: bool = False) -> None:
        self._choices, self._random, self._together = tuple(choices), Random(seed), together
        self.loads: list[Load] = []

    @property
    def choices(self) -> tuple[Choice, ...]:
        return self._choices

    def choose(self, load: Load, rows: Sequence[RowHistory]) -> Sequence[Choice]:
        self.loads.append(load)
        assert len(rows) <= load.decoding, "those that bring a plan of their own are not asked about"
        if self._together:
            return [self._random.choice(self._choices)] * len(rows)
        return [self._random.choice(self._choices) for _ in rows]


# ---- whatever happens around it, a text is its own


RULES = [
    SamplingParams(max_tokens=14),
    SamplingParams(max_tokens=9, temperature=0.9, top_k=30, seed=5),
    SamplingParams(max_tokens=17, repetition_penalty=1.3, frequency_penalty=0.4),
    SamplingParams(max_tokens=12, temperature=1.1, top_p=0.9, presence_penalty=0.5, logit_bias={3: 2.0}, seed=7),
    SamplingParams(max_tokens=1),
]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["float64", "bf16"])
def test_texts_are_those_of_each_alone(kind: str, seed: int):
    """Random arrivals, aborts, priorities, sizes, pieces, plans, drafters, and a policy that is never content."""
    if kind == "bf16" and not LIBRARY:
        pytest.skip("needs the native kernels")
    random = Random(seed)
    dtype = torch.float64 if kind == "float64" else torch.bfloat16
    target = Target(tiny_model("llama" if seed % 2 else "mistral", dtype=dtype))
    beginnings = [prompts(1, shortest=70, longest=70, seed=9)[0], []]
    questions = [random.choice(beginnings) + question for question in prompts(10, seed=seed)]
    rules = [random.choice(RULES) for _ in questions]
    alone = Engine(target, share_prefixes=False, max_batch=1)
    expected = [alone.generate([q], p)[0].tokens for q, p in zip(questions, rules, strict=True)]
    oracle = CheckedDrafter(oracle_for(tiny_model(), [], error_rate=0.4), target)
    oracle.inner.texts = [q + e for q, e in zip(questions, expected, strict=True)]  # type: ignore[attr-defined]
    drafters = {"oracle": oracle, "ngram": NgramDrafter(NgramConfig())}
    choices = [Choice(CHAIN), Choice(NO_DRAFT), Choice(TREE, "oracle"), Choice(Plan((1, 1)), "ngram")]
    policy = AtRandom(choices, seed, together=seed % 2 == 0)
    engine = Engine(
        target, drafters, policy=policy, max_batch=random.choice([1, 2, 3, 5]), share_prefixes=bool(seed % 3),
        piece_tokens=random.choice([3, 16, 200]), max_tokens_in_flight=random.choice([2 * CONTEXT, 9 * CONTEXT]),
    )
    waiting = list(range(len(questions)))
    random.shuffle(waiting)
    found: dict[int, list[int]] = {}
    dropped = set()
    running: dict[int, int] = {}
    requests: dict[int, Request] = {}
    while waiting or engine.core.has_work:
        for _ in range(random.choice([0, 0, 1, 3])):
            if waiting:
                number = waiting.pop()
                plan = random.choice([None, None, TREE, NO_DRAFT])
                (request,) = engine.admit_call([questions[number]], rules[number], plan, random.choice([0, 1]))
                running[engine.core.add(request)] = number
                requests[number] = request
        if running and random.random() < 0.03:
            id = random.choice(list(running))
            dropped.add(running.pop(id))
            engine.core.abort(id)
        for progress in engine.core.step():
            number = running[progress.request.id]
            found.setdefault(number, []).extend(progress.tokens)
            if progress.finished:
                del running[progress.request.id]
                assert progress.request.completion().tokens == found[number]
    assert {n: t for n, t in found.items() if n not in dropped} == {
        n: expected[n] for n in range(len(questions)) if n not in dropped
    }
    for number in dropped:
        assert requests[number].finish_reason == "abort"
        assert requests[number].tokens == expected[number][: len(requests[number].tokens)]
    assert engine.core.blocks.held_tokens == 0
    assert not oracle.inner.text_of_row  # type: ignore[attr-defined]
    assert len(policy.loads) > 5


def test_ids_are_never_used_twice():
    engine = Engine(tiny_target(), max_batch=2)
    ids = []
    for _ in range(3):
        requests = engine.admit_call(prompts(2), SamplingParams(max_tokens=2))
        ids += [engine.core.add(request) for request in requests]
        run_out(engine)
    assert len(set(ids)) == 6


# ---- whose turn it is


def test_first_come_first_served_within_a_priority():
    engine = Engine(tiny_target(), max_batch=1)
    order = []
    for number, priority in enumerate([0, 0, 2, 1, 2]):
        (request,) = engine.admit_call(prompts(1), SamplingParams(max_tokens=2), priority=priority)
        request.index = number
        engine.core.add(request)
    order = [request.index for request in run_out(engine)]
    assert order == [2, 4, 3, 0, 1]


def test_a_prompt_of_a_higher_priority_is_read_before_one_that_is_being_read():
    engine = Engine(tiny_target(), max_batch=3, piece_tokens=8)
    running, long, urgent = prompts(1, shortest=4, longest=4) + prompts(2, shortest=40, longest=40, seed=1)
    for text, priority in ((running, 0), (long, 0), (urgent, 1)):
        (request,) = engine.admit_call([text], SamplingParams(max_tokens=30), priority=priority)
        engine.core.add(request)
        engine.core.step()
    begun: list[int] = []
    while len(begun) < 2:
        begun += [one.request.priority for one in engine.core.step() if one.made is None and one.tokens]
    assert begun == [1, 0]


def test_nothing_overtakes_a_request_that_waits_for_room():
    engine = Engine(tiny_target(), max_batch=3, max_tokens_in_flight=100)
    sizes = [(60, 20), (50, 30), (5, 3)]
    for number, (length, tokens) in enumerate(sizes):
        (request,) = engine.admit_call([[1 + number] * length], SamplingParams(max_tokens=tokens))
        request.index = number
        engine.core.add(request)
    seen = []
    while engine.core.has_work:
        seen.append((engine.core.scheduler.tokens, engine.core.blocks.held_tokens))
        engine.core.step()
    assert max(tokens for tokens, _ in seen) <= 100
    assert next(tokens for tokens, _ in seen if tokens) == 80 and 88 in {tokens for tokens, _ in seen}


def test_what_can_never_fit_is_refused_before_anything_runs():
    engine = Engine(tiny_target(), max_tokens_in_flight=40)
    with pytest.raises(DraftsmithError, match="30 tokens that asks for 11 more can never fit into 40"):
        engine.generate([[1], [1] * 30], SamplingParams(max_tokens=11))
    assert not engine.core.has_work
    with pytest.raises(DraftsmithError, match="logit_bias"):
        engine.generate([[1], [2]], [SamplingParams(max_tokens=2), SamplingParams(max_tokens=2, logit_bias={96: 1.0})])
    assert not engine.core.has_work


def test_a_deadline_ends_a_text_with_what_it_has():
    engine = Engine(tiny_target(), max_batch=1)
    requests = [engine.admit_call(prompts(1), SamplingParams(max_tokens=60), timeout=t)[0] for t in (1000, 1000, None)]
    for request in requests:
        engine.core.add(request)
    for _ in range(5):
        engine.core.step()
    requests[0].deadline = requests[1].deadline = time.monotonic()
    run_out(engine)
    answer = greedy_reference(tiny_model(), prompts(1)[0], 60)
    assert [request.finish_reason for request in requests] == ["deadline", "deadline", "length"]
    assert [request.completion().tokens for request in requests] == [answer[:5], [], answer]
    with pytest.raises(DraftsmithError, match="timeout is 0"):
        engine.admit_call(prompts(1), timeout=0)


def test_running_rows_get_tokens_while_a_long_prompt_is_read():
    engine = Engine(tiny_target(), max_batch=2, piece_tokens=8)
    (short,) = engine.admit_call([[1, 2, 3]], SamplingParams(max_tokens=40))
    engine.core.add(short)
    engine.core.step()
    (long,) = engine.admit_call([[5] * 80], SamplingParams(max_tokens=4))
    engine.core.add(long)
    before = []
    while not long.tokens:
        before.append(long.read)
        assert next(one.request for one in engine.core.step()) is short
    assert before == list(range(0, 80, 8))
    run_out(engine)
    assert short.completion().tokens == greedy_reference(tiny_model(), [1, 2, 3], 40)
    assert long.completion().tokens == greedy_reference(tiny_model(), [5] * 80, 4)


def test_what_ends_early_has_its_share_of_the_time():
    engine = Engine(tiny_target())
    (request,) = engine.admit_call(prompts(1), SamplingParams(max_tokens=60))
    engine.core.add(request)
    for _ in range(4):
        engine.core.step()
    engine.core.abort(request.id)
    assert request.completion().statistics.decode_s > 0


# ---- memory


@pytest.mark.parametrize("kind", ["float64", "bf16"])
def test_what_prompts_have_in_common_is_read_and_stored_once(kind: str):
    if kind == "bf16" and not LIBRARY:
        pytest.skip("needs the native kernels")
    target = Target(tiny_model(dtype=torch.float64 if kind == "float64" else torch.bfloat16))
    system = prompts(1, shortest=BLOCK + 5, longest=BLOCK + 5, seed=3)[0]
    questions = [system + question[:10] for question in prompts(4, seed=4)]
    params = SamplingParams(max_tokens=12)
    apart = Engine(target, share_prefixes=False).generate(questions, params)
    engine = Engine(target, max_batch=4)
    held = []
    requests = engine.admit_call(questions, params)
    for request in requests:
        engine.core.add(request)
    while engine.core.has_work:
        engine.core.step()
        held.append(engine.core.blocks.held_tokens)
    assert [request.completion().tokens for request in requests] == [completion.tokens for completion in apart]
    assert [request.shared for request in requests] == [0, BLOCK, BLOCK, BLOCK]
    assert max(held) == BLOCK + 4 * BLOCK
    # The next turn of a chat begins with all of the last one.
    turn = questions[0] + apart[0].tokens + [7, 8]
    (again,) = engine.admit_call([turn[: CONTEXT - 12]], params)
    engine.core.add(again)
    run_out(engine)
    assert again.shared == (len(questions[0]) + 11) // BLOCK * BLOCK
    expected = Engine(target, share_prefixes=False).generate([again.prompt], params)[0].tokens
    assert again.completion().tokens == expected
    assert engine.core.blocks.held_tokens == 0


def test_copies_of_a_prompt_read_it_once():
    engine = Engine(tiny_target(), max_batch=4)
    question = prompts(1, shortest=BLOCK + 30, longest=BLOCK + 30)[0]
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=3, n=4)
    copies = engine.generate([question], params)
    apart = Engine(tiny_target(), share_prefixes=False, max_batch=4).generate([question], params)
    assert [c.tokens for c in copies] == [c.tokens for c in apart]
    assert engine.core.blocks.hits == 3 * BLOCK


def eagle() -> tuple[Target, Eagle]:
    target = tiny_target()
    torch.manual_seed(0)
    drafter = Eagle.new(EagleConfig(), target, None)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    drafter = drafter.double()
    drafter.bind(target)
    return target, drafter


def test_a_drafter_that_the_policy_never_lets_draft_does_not_stop_the_others():
    target, drafter = eagle()
    policy = AtRandom([Choice(NO_DRAFT, "eagle"), Choice(CHAIN, "ngram")], seed=0)
    engine = Engine(target, {"eagle": drafter, "ngram": NgramDrafter(NgramConfig())}, policy=policy, max_batch=2)
    for completion, prompt in zip(engine.generate(prompts(2), SamplingParams(max_tokens=20)), prompts(2), strict=True):
        assert completion.tokens == greedy_reference(tiny_model(), prompt, 20)


def test_a_guarded_drafter_that_remembers_rows_serves_one_engine_at_a_time():
    target, drafter = eagle()
    guarded = Guarded(drafter, "eagle", target.vocab_size)
    begun = Engine(target, guarded, plan=CHAIN).stream(prompts(1), SamplingParams(max_tokens=20))
    next(begun)
    with pytest.raises(DraftsmithError, match="drafting for another engine"):
        Engine(target, drafter, plan=CHAIN).generate(prompts(1), SamplingParams(max_tokens=4))
    begun.close()
    assert Engine(target, drafter, plan=CHAIN).generate(prompts(1), SamplingParams(max_tokens=4))


def test_a_guarded_drafter_that_cannot_be_attached_costs_its_guesses_alone(monkeypatch: pytest.MonkeyPatch):
    target, drafter = eagle()

    def attach(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(drafter, "attach", attach)
    engine = Engine(target, Guarded(drafter, "eagle", target.vocab_size), plan=CHAIN)
    (completion,) = engine.generate(prompts(1), SamplingParams(max_tokens=20))
    assert completion.tokens == greedy_reference(tiny_model(), prompts(1)[0], 20)


def test_pieces_of_a_stream_that_waited_carry_their_own_logprobs():
    target = tiny_target()
    engine = Engine(target, oracle_for(tiny_model(), prompts(1)), plan=CHAIN, max_batch=2)
    params = SamplingParams(max_tokens=24, logprobs=2, prompt_logprobs=1)
    (alone,) = engine.generate(prompts(1), params)
    stream = engine.stream(prompts(1), params)
    pieces = [next(stream)]
    engine.generate(prompts(2)[1:], SamplingParams(max_tokens=60))
    pieces += stream
    assert len(pieces) > 3 and all(len(piece.logprobs or ()) == len(piece.tokens) for piece in pieces)
    assert [one for piece in pieces for one in piece.logprobs or ()] == alone.logprobs
    assert [piece.prompt_logprobs is not None for piece in pieces] == [True] + [False] * (len(pieces) - 1)


def test_a_short_engine_can_be_prepared():
    target = tiny_target()
    assert Engine(target, oracle_for(tiny_model(), prompts(1)), plan=Plan((1,) * 8), max_length=24).prepare() > 0


def test_a_drafter_with_a_memory_hears_of_what_was_not_read_again():
    """EAGLE reads the target's states of the whole prompt, whoever's request they were computed for."""
    target, drafter = eagle()
    question = prompts(1, shortest=BLOCK - 14, longest=BLOCK - 14)[0]
    params = SamplingParams(max_tokens=30)
    answer = greedy_reference(tiny_model(), question, 30)

    def guesses(shared: bool, piece: int) -> list[list[list[int]]]:
        checked = CheckedDrafter(drafter, target)
        engine = Engine(target, checked, plan=CHAIN, share_prefixes=shared, piece_tokens=piece)
        for text in (question, question + answer):
            checked.drafts.clear()
            engine.generate([text], params)
        assert bool(engine.core.blocks.hits) == shared
        return [draft.tokens_BN.tolist() for draft in checked.drafts]

    expected = guesses(False, 1000)
    assert len(expected) > 5
    assert guesses(True, 1000) == expected and guesses(False, 7) == expected and guesses(True, 7) == expected


def test_memory_is_given_back_and_stays_within_its_limit():
    engine = Engine(tiny_target(), max_batch=3, max_tokens_in_flight=3 * CONTEXT)
    for seed in range(6):
        engine.generate(prompts(5, shortest=BLOCK, longest=BLOCK + 20, seed=seed), SamplingParams(max_tokens=20))
    blocks = engine.core.blocks
    assert blocks.held_tokens == 0
    assert 0 < blocks.cached_bytes <= blocks.limit // BLOCK * blocks.block_bytes
    blocks.trim()
    assert blocks.cached_bytes == 0


def test_a_row_that_does_not_draft_keeps_no_room_for_those_who_write_into_its_cache():
    target = tiny_target()
    engine = Engine(target, load_drafter("early-exit:layers=1", target), max_batch=2, max_length=64)
    expected, held = [greedy_reference(tiny_model(), prompt, 12) for prompt in prompts(2)], []
    for plan in (NO_DRAFT, Plan((1, 1))):
        requests = engine.admit_call(prompts(2), SamplingParams(max_tokens=12), plan)
        for request in requests:
            engine.core.add(request)
        most = 0
        while engine.core.has_work:
            engine.core.step()
            most = max(most, engine.core.blocks.held_tokens)
        held.append(most)
        assert [request.tokens for request in requests] == expected
    assert held[0] == 2 * BLOCK < held[1]
