"""A row without finite logits ends by itself: the rows beside it and those after it do not notice.

Targets here have NaN for the embedding of one token, so that whatever reads it has no finite state.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest
import torch

from draftsmith.drafters.attention.eagle import Eagle
from draftsmith.drafters.attention.eagle_config import EagleConfig
from draftsmith.engine import Engine
from draftsmith.evaluation.proof.chi_square import fit
from draftsmith.evaluation.proof.exact_distribution import enumerate_distribution, read_plainly
from draftsmith.evaluation.proof.small_target import PROMPT, TableDrafter, small_target
from draftsmith.native import LIBRARY
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.targets import KVCache, Target
from draftsmith.types import Completion, Context, Draft, DraftsmithError, SamplingParams, require_finished
from tests.helpers.contract import CheckedDrafter
from tests.helpers.oracle import OracleDrafter
from tests.helpers.tiny import VOCABULARY, greedy_reference, prompts, tiny_model, tiny_target

CHAIN, TREE = Plan((1, 1, 1)), Plan((3, 2, 1))
NEW_TOKENS = 14
SICK = 1


@dataclass(frozen=True)
class Case:
    """Prompts, what a whole target says to them, and the token that the broken one cannot read."""

    questions: list[list[int]]
    answers: list[list[int]]
    token: int
    most: int
    """So many tokens row `SICK` can have at most."""


def reference(architecture: str, questions: Sequence[list[int]]) -> list[list[int]]:
    return [greedy_reference(tiny_model(architecture), question, NEW_TOKENS) for question in questions]


def case(architecture: str, where: str, count: int = 3) -> Case:
    """Find a token that only row `SICK` meets, in its prompt or in its text."""
    questions = prompts(count, seed=4)
    answers = reference(architecture, questions)
    taken = {t for b in range(count) if b != SICK for t in questions[b] + answers[b]}
    if where == "prompt":
        token = next(t for t in range(1, VOCABULARY) if t not in taken)
        questions[SICK] = [*questions[SICK][:3], token, *questions[SICK][3:]]
        return Case(questions, answers, token, 0)
    text = answers[SICK]
    place = next(i for i in range(3, NEW_TOKENS - 2) if text[i] not in {*taken, *questions[SICK], *text[:i]})
    return Case(questions, answers, text[place], place + 1)


def broken(architecture: str, token: int, dtype: torch.dtype = torch.float64) -> Target:
    model = tiny_model(architecture, dtype=dtype)
    model.get_input_embeddings().weight[token] = torch.nan
    return Target(model, name="broken")


class Poisoner(OracleDrafter):
    """An oracle that now and then guesses the unreadable token."""

    token = 0

    def _choose(self, truth: int | None, children: int, random: Random) -> list[int]:
        guesses = super()._choose(truth, children, random)
        if random.random() < (0.03 if truth is None else 0.3) and self.token not in guesses and guesses[-1] != truth:
            guesses[-1] = self.token
        return guesses


def poisoner(of: Case) -> Poisoner:
    texts = [q + a for q, a in zip(of.questions, of.answers, strict=True)]
    drafter = Poisoner(texts, VOCABULARY, error_rate=0.25, place="first")
    drafter.token = of.token
    return drafter


def check_rows(found: Sequence[Completion], of: Case, exact: bool) -> None:
    for b, completion in enumerate(found):
        if b != SICK:
            assert (completion.tokens, completion.finish_reason) == (of.answers[b], "length")
            assert completion.error is None
            continue
        assert completion.finish_reason == "error" and completion.error is not None
        assert "broken" in completion.error and f"row {SICK}" in completion.error and "\n" not in completion.error
        assert completion.tokens == of.answers[b][: len(completion.tokens)]
        assert len(completion.tokens) == of.most if exact else len(completion.tokens) <= of.most
        assert sum(n + 1 for n in completion.accepted_lengths) + 1 == len(completion.tokens) or not completion.tokens


@pytest.mark.parametrize("plan", [NO_DRAFT, CHAIN, TREE], ids=["plain", "chain", "tree"])
@pytest.mark.parametrize("where", ["prompt", "text"])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "mixtral"])
def test_only_the_row_that_cannot_be_read_ends(architecture: str, where: str, plan: Plan):
    """Rows of a call, of the next call in the same slots, and the same call again when the target is whole."""
    of = case(architecture, where)
    target = broken(architecture, of.token)
    engine = Engine(target, poisoner(of), plan=plan, max_batch=3)
    params = SamplingParams(max_tokens=NEW_TOKENS)
    check_rows(engine.generate(of.questions, params), of, exact=True)
    one_by_one = Engine(target, poisoner(of), plan=plan, max_batch=1)
    check_rows(one_by_one.generate(of.questions, params), of, exact=True)
    healthy = [b for b in range(3) if b != SICK]
    for slots in (engine, one_by_one):
        again = slots.generate([of.questions[b] for b in healthy], params)
        assert [c.tokens for c in again] == [of.answers[b] for b in healthy]
    model = tiny_model(architecture)
    target.model.get_input_embeddings().weight[of.token] = model.get_input_embeddings().weight[of.token]
    assert [c.tokens for c in engine.generate(of.questions, params)] == reference(architecture, of.questions)


def test_a_guess_that_cannot_be_read_costs_no_text():
    """No row's own text has the token; drafts have it, and plain decoding would never read it."""
    of = case("llama", "text", count=6)
    questions, answers = of.questions[2:], of.answers[2:]
    target = broken("llama", of.token)
    for plan in (CHAIN, TREE):
        engine = Engine(target, poisoner(of), plan=plan, max_batch=3)
        found = engine.generate(questions, SamplingParams(max_tokens=NEW_TOKENS))
        assert [c.tokens for c in found] == answers
        assert any(c.statistics.accepted for c in found)
        rules = [
            SamplingParams(max_tokens=NEW_TOKENS, temperature=0.5, repetition_penalty=1.3, seed=i, logprobs=2,
                           logit_bias={of.token: -1e4})
            for i in range(len(questions))
        ]
        plain, drafted = engine.generate(questions, rules, NO_DRAFT), engine.generate(questions, rules)
        assert [c.tokens for c in drafted] == [c.tokens for c in plain] and not any(c.error for c in drafted)
        for one, other in zip(plain, drafted, strict=True):
            assert one.logprobs is not None and other.logprobs is not None
            assert [entry.token for entry in other.logprobs] == other.tokens
            torch.testing.assert_close([e.logprob for e in one.logprobs], [e.logprob for e in other.logprobs])


@pytest.mark.parametrize("compile", ["off", "trace"])
def test_padding_is_no_token_of_a_row(compile):
    """Token 0 fills up tensors; where it cannot be read, no row may notice."""
    asked = [question for question in prompts(12, seed=2) if 0 not in question]
    answers = reference("llama", asked)
    chosen = [b for b, answer in enumerate(answers) if 0 not in answer][:5]
    assert len(chosen) == 5
    engine = Engine(broken("llama", 0), max_batch=3, compile=compile)
    lengths = [NEW_TOKENS, 3, 9, NEW_TOKENS, 6]
    found = engine.generate([asked[b] for b in chosen], [SamplingParams(max_tokens=n) for n in lengths])
    assert [c.tokens for c in found] == [answers[b][:n] for b, n in zip(chosen, lengths, strict=True)]


@pytest.mark.parametrize("size", [1, 2])
def test_what_the_row_wrote_is_not_handed_on(size: int):
    """A short prompt takes the slot of a long one that could not be read."""
    short, beside = prompts(1, longest=4, seed=9)[0], prompts(1, seed=10)[0]
    answers = reference("llama", [beside, short])
    taken = {*beside, *short, *answers[0], *answers[1]}
    token = next(t for t in range(1, VOCABULARY) if t not in taken)
    sick = [token] * 40
    asked = [sick, short] if size == 1 else [beside, sick, short]
    found = Engine(broken("llama", token), max_batch=size).generate(asked, SamplingParams(max_tokens=NEW_TOKENS))
    assert found[-2].finish_reason == "error"
    assert found[-1].tokens == answers[1] and (size == 1 or found[0].tokens == answers[0])


def test_what_padding_wrote_is_not_handed_on():
    """The fourth slot is padding in the first call, and a row's in the second."""
    asked = [question[:4] for question in prompts(12, seed=2) if 0 not in question[:4]]
    answers = reference("llama", asked)
    chosen = [b for b, answer in enumerate(answers) if 0 not in answer][:4]
    assert len(chosen) == 4
    questions, answers = [asked[b] for b in chosen], [answers[b] for b in chosen]
    drafter = OracleDrafter([q + a for q, a in zip(questions, answers, strict=True)], VOCABULARY)
    engine = Engine(broken("llama", 0), drafter, plan=TREE, max_batch=4, compile="trace")
    params = SamplingParams(max_tokens=NEW_TOKENS)
    assert [c.tokens for c in engine.generate(questions[:3], params)] == answers[:3]
    assert [c.tokens for c in engine.generate(questions, params, NO_DRAFT)] == answers


@pytest.mark.parametrize("rules", [{}, {"top_k": 2}, {"top_p": 0.9, "repetition_penalty": 1.2}], ids=str)
def test_sampled_neighbours_draw_the_same(rules: dict):
    of = case("llama", "prompt")
    never = {of.token: -1e4}
    params = [SamplingParams(max_tokens=8, temperature=0.6, seed=b, logit_bias=never, **rules) for b in (5, 6, 7)]
    plain = Engine(tiny_target()).generate(of.questions, params)
    for plan in (NO_DRAFT, TREE):
        found = Engine(broken("llama", of.token), poisoner(of), plan=plan).generate(of.questions, params)
        assert [c.finish_reason for c in found] == ["length", "error", "length"]
        assert [found[b].tokens for b in (0, 2)] == [plain[b].tokens for b in (0, 2)]


@pytest.mark.skipif(not LIBRARY, reason="needs the native kernels")
@pytest.mark.parametrize("plan", [NO_DRAFT, CHAIN, TREE], ids=["plain", "chain", "tree"])
@pytest.mark.parametrize("architecture", ["llama", "gpt_neox"])
def test_native_rows_end_by_themselves(architecture: str, plan: Plan):
    """One native operator for the whole model, and native layers in a model of another shape."""
    questions = prompts(3, seed=4)
    whole = Target(tiny_model(architecture, dtype=torch.bfloat16))
    params = SamplingParams(max_tokens=NEW_TOKENS)
    answers = [c.tokens for c in Engine(whole).generate(questions, params)]
    met = {t for q, a in zip(questions, answers, strict=True) for t in q + a}
    # Every tenth token is read when the native forward is compared with the model's own.
    token = next(t for t in range(1, VOCABULARY) if t not in met and t % 10)
    questions[SICK] = [*questions[SICK][:3], token, *questions[SICK][3:]]
    of = Case(questions, answers, token, 0)
    target = broken(architecture, token, torch.bfloat16)
    assert target.backend.native and type(target.backend) is type(whole.backend)
    for size in (1, 3):
        engine = Engine(target, poisoner(of), plan=plan, max_batch=size)
        check_rows(engine.generate(questions, params), of, exact=True)
        again = engine.generate([questions[b] for b in (2, 0)], params)
        assert [c.tokens for c in again] == [answers[b] for b in (2, 0)]


def test_a_stream_ends_the_row_and_goes_on():
    of = case("llama", "text")
    stream = Engine(broken("llama", of.token), poisoner(of), plan=CHAIN).stream(
        of.questions, SamplingParams(max_tokens=NEW_TOKENS)
    )
    chunks = list(stream)
    last = {chunk.index: chunk.completion for chunk in chunks if chunk.completion is not None}
    check_rows([last[b] for b in range(3)], of, exact=True)
    assert [t for chunk in chunks if chunk.index == SICK for t in chunk.tokens] == last[SICK].tokens


def test_who_needs_whole_texts_is_told():
    of = case("llama", "prompt")
    engine = Engine(broken("llama", of.token))
    found = engine.generate(of.questions, SamplingParams(max_tokens=4))
    with pytest.raises(DraftsmithError, match=f"broken gave no finite logits after .* row {SICK}"):
        require_finished(found)
    assert require_finished(found[:1]) == found[:1]
    with pytest.raises(DraftsmithError, match="no finite logits"):
        Engine(broken("llama", 0)).pace()


@pytest.mark.parametrize(("dtype", "narrow"), [(torch.float64, False), (torch.float32, False), (torch.bfloat16, True)])
def test_more_bits_are_advised_only_where_there_are_more(dtype: torch.dtype, narrow: bool):
    model = tiny_model().to(dtype)
    with torch.no_grad():
        model.get_input_embeddings().weight[5] = torch.nan
    (found,) = Engine(Target(model, native=False)).generate([[1, 5]], SamplingParams(max_tokens=2))
    assert found.error is not None and "weights are damaged" in found.error and found.error.endswith(".")
    assert ("fp32" in found.error) == narrow


class Recorder(CheckedDrafter):
    """Keeps every guess for every row."""

    def attach(self, cache: KVCache, plan: Plan) -> None:
        super().attach(cache, plan)
        self.guesses: dict[int, list[list[int]]] = {}

    def propose(self, context: Context, plan: Plan) -> Draft:
        draft = super().propose(context, plan)
        for row, guesses in zip(context.rows_B.tolist(), draft.tokens_BN.tolist(), strict=True):
            self.guesses.setdefault(row, []).append(guesses)
        return draft


def test_a_drafters_memory_of_the_row_is_not_handed_on():
    """EAGLE reads the target's own embedding, so that its keys and values of the row are NaN too."""
    beside, sick, short = prompts(1, shortest=30, longest=30, seed=4)[0], [3, 1, 4], [5, 9, 2]
    answers = reference("llama", [beside, sick, short])
    taken = {*beside, *sick, *short, *greedy_reference(tiny_model(), beside, 30), *answers[2]}
    place = next(i for i in range(2, NEW_TOKENS - 2) if answers[1][i] not in {*taken, *answers[1][:i]})
    target = broken("llama", answers[1][place])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drafter = Eagle.new(EagleConfig(), target, None)
        for parameter in drafter.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    drafter = drafter.double()
    drafter.bind(target)
    recorder = Recorder(drafter, target)
    engine = Engine(target, recorder, plan=CHAIN, max_batch=2)
    rules = [SamplingParams(max_tokens=n) for n in (30, NEW_TOKENS, NEW_TOKENS)]
    found = engine.generate([beside, sick, short], rules)
    assert [c.finish_reason for c in found] == ["length", "error", "length"]
    guesses = list(recorder.guesses.values())
    alone = engine.generate([beside, short], [rules[0], rules[2]])
    assert [c.tokens for c in alone] == [found[0].tokens, found[2].tokens]
    assert list(recorder.guesses.values()) == [guesses[0], guesses[2]]


def test_every_place_of_an_accepted_path_is_looked_at():
    """At some places one score is minus infinity, which is never chosen: the places behind them are sound again."""
    questions = prompts(6, seed=4)
    model = tiny_model()
    texts = [q + greedy_reference(model, q, NEW_TOKENS) for q in questions]

    def spoil(head: torch.nn.Module, states: tuple[torch.Tensor], logits_BMV: torch.Tensor) -> None:
        logits_BMV[states[0][..., 0] > 1.5, -1] = -torch.inf

    model.get_output_embeddings().register_forward_hook(spoil)
    target, params = Target(model, name="broken"), SamplingParams(max_tokens=NEW_TOKENS)
    plain = Engine(target).generate(questions, params)
    assert {c.finish_reason for c in plain} == {"length", "error"}
    assert any(c.tokens for c in plain if c.error)
    for plan in (CHAIN, TREE):
        found = Engine(target, OracleDrafter(texts, VOCABULARY), plan=plan, max_batch=3).generate(questions, params)
        assert [(c.tokens, c.finish_reason) for c in found] == [(c.tokens, c.finish_reason) for c in plain]


@pytest.mark.parametrize("plan", [Plan((1, 1), sampled=True), Plan((2, 1), sampled=True)], ids=["chain", "tree"])
def test_drawn_guesses_that_cannot_be_read_leave_the_distribution_as_it_is(plan: Plan):
    """Chi-square at 1e-4 over every text of three tokens; a text ends behind the token whose logits are NaN.

    To draw again where such a guess was accepted gives 1e-9 and less.
    """
    target = small_target()
    drafter, params, draws, token = TableDrafter(target), SamplingParams(max_tokens=3, temperature=1.0), 1500, 3
    exact: dict[tuple[int, ...], float] = {}
    for text, p in enumerate_distribution(read_plainly(target), target, list(PROMPT), params, 3).as_dict().items():
        end = text.index(token) + 1 if token in text else 3
        exact[text[:end]] = exact.get(text[:end], 0.0) + p
    read: list[torch.Tensor] = []

    def spoil(head: torch.nn.Module, states: tuple[torch.Tensor], logits_BMV: torch.Tensor) -> None:
        logits_BMV[read.pop()[:, -logits_BMV.shape[1] :] == token] = torch.nan

    target.model.get_input_embeddings().register_forward_hook(lambda module, tokens, out: read.append(tokens[0]))
    target.model.get_output_embeddings().register_forward_hook(spoil)
    engine = Engine(target, drafter, plan=plan, max_batch=500)
    found = engine.generate([list(PROMPT)] * draws, [replace(params, seed=seed) for seed in range(draws)])
    assert all(c.finish_reason == ("length" if len(c.tokens) == 3 else "error") for c in found)
    assert sum(c.statistics.accepted for c in found) > draws / 10
    counts = Counter(tuple(c.tokens) for c in found)
    outside = sum(count for text, count in counts.items() if text not in exact)
    p_value = fit(np.array([counts[text] for text in exact]), outside, np.array(list(exact.values()))).p_value
    assert p_value > 1e-4
