"""Text under a constraint is what plain decoding writes under it, token for token, whatever is drafted; and it fits."""

import doctest
import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.lookup.lookahead import LookaheadDrafter
from draftsmith.drafters.lookup.lookahead_config import LookaheadConfig
from draftsmith.drafters.lookup.ngram import NgramConfig, NgramDrafter
from draftsmith.engine import Engine
from draftsmith.engine.steps import allowed
from draftsmith.native import LIBRARY
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.targets import Target
from draftsmith.types import Completion, Constraint, DraftsmithError, SamplingParams
from tests.helpers.constrained import CONSTRAINTS, Stubborn, target_of_letters, target_with
from tests.helpers.oracle import OracleDrafter, StagewiseOracle
from tests.helpers.tiny import prompts, tiny_model

CHAIN, TREE = Plan((1, 1, 1, 1)), Plan((3, 2, 1))
GREEDY = SamplingParams(max_tokens=100)
RULES = {
    "greedy": GREEDY,
    "penalised": replace(GREEDY, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias={7: 3.0}),
    "sampled": replace(GREEDY, temperature=1.3, seed=3),
    "top-k": replace(GREEDY, temperature=0.9, top_k=4, seed=5),
    "filtered": replace(GREEDY, temperature=1.1, top_p=0.9, min_p=0.01, presence_penalty=0.4, seed=7),
}
FREE = [replace(GREEDY, max_tokens=25), replace(GREEDY, max_tokens=25, temperature=0.8, top_p=0.9, seed=11)]


def questions_for(target_width: int, count: int) -> list[list[int]]:
    return prompts(count, below=min(96, target_width), seed=4)


def plainly(engine: Engine, questions: list[list[int]], params: list[SamplingParams]) -> list[Completion]:
    """Decode every prompt by itself and without drafts."""
    return [engine.generate([q], p, plan=NO_DRAFT)[0] for q, p in zip(questions, params, strict=True)]


# ---- the same text, whatever is drafted


@pytest.mark.parametrize("kind", CONSTRAINTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bf16"])
def test_text_is_that_of_plain_constrained_decoding(kind: str, dtype: torch.dtype):
    if dtype == torch.bfloat16 and not LIBRARY:
        pytest.skip("needs the native kernels")
    target, (constraint, fits) = target_with("byte-level", dtype=dtype), CONSTRAINTS[kind]
    params = [replace(rules, constraint=constraint) for rules in RULES.values()]
    # Between rows of other rules, with other constraints and with none.
    params = [FREE[0], *params, FREE[1], replace(GREEDY, constraint=CONSTRAINTS["choice"][0])]
    questions = questions_for(target.vocab_size, len(params))
    expected = plainly(Engine(target, max_batch=1), questions, params)
    texts = [q + e.tokens for q, e in zip(questions, expected, strict=True)]
    for errors, plan in product((0.0, 0.4), (CHAIN, TREE)):
        oracle = OracleDrafter(texts, target.vocab_size, error_rate=errors, ragged=True)
        found = Engine(target, oracle, plan=plan, max_batch=5).generate(questions, params)
        assert [c.tokens for c in found] == [c.tokens for c in expected]
        assert [c.text for c in found] == [c.text for c in expected]
        assert [c.finish_reason for c in found] == [c.finish_reason for c in expected]
        assert sum(c.statistics.accepted for c in found) > 25
    ended = [c for c in expected[1:-2] if c.finish_reason == "stop"]
    assert len(ended) >= {"json_object": 1, "json_schema": 2}.get(kind, 4)
    assert all(fits(c.text) for c in ended)


@pytest.mark.parametrize("plan", [replace(CHAIN, sampled=True), replace(CHAIN, sampled=True, acceptance="block"),
                                  replace(TREE, sampled=True)], ids=["chain", "block", "tree"])
def test_greedy_text_is_the_same_under_drafts_that_were_drawn(plan: Plan):
    target = target_with("byte-level")
    params = [replace(GREEDY, constraint=constraint) for constraint, _ in CONSTRAINTS.values()] + [FREE[0]]
    questions = questions_for(target.vocab_size, len(params))
    expected = plainly(Engine(target, max_batch=1), questions, params)
    texts = [q + e.tokens for q, e in zip(questions, expected, strict=True)]
    oracle = OracleDrafter(texts, target.vocab_size, error_rate=0.3)
    found = Engine(target, oracle, plan=plan).generate(questions, params)
    assert [c.tokens for c in found] == [c.tokens for c in expected]
    assert all(c.statistics.accepted <= c.statistics.drafted for c in found)


@pytest.mark.parametrize("make", [
    lambda: NgramDrafter(NgramConfig(min_length=1, branches=2)), lambda: LookaheadDrafter(LookaheadConfig(window=4)),
], ids=["ngram", "lookahead"])
def test_lookups_keep_to_constraints_too(make: Callable[[], Drafter]):
    """Lookahead learns from guesses that are never meant to stay, so that none of them may be taken from it."""
    target = target_with("byte-level")
    params = [replace(rules, constraint=CONSTRAINTS["json_object"][0]) for rules in RULES.values()]
    questions = questions_for(target.vocab_size, len(params))
    expected = plainly(Engine(target, max_batch=1), questions, params)
    found = Engine(target, make()).generate(questions, params)
    assert [c.tokens for c in found] == [c.tokens for c in expected]
    assert sum(c.statistics.drafted for c in found) > 0


def test_compiled_steps_keep_to_constraints():
    target = target_with("byte-level", dtype=torch.float32)
    params = [replace(GREEDY, max_tokens=12, constraint=CONSTRAINTS["grammar"][0]), replace(FREE[1], max_tokens=9)]
    questions = questions_for(target.vocab_size, len(params))
    expected = plainly(Engine(target, max_batch=1), questions, params)
    texts = [q + e.tokens for q, e in zip(questions, expected, strict=True)]
    oracle = OracleDrafter(texts, target.vocab_size, error_rate=0.4)
    found = Engine(target, oracle, plan=CHAIN, max_batch=3, compile="trace").generate(questions, params)
    assert [c.tokens for c in found] == [c.tokens for c in expected]


# ---- guesses that a constraint forbids


def test_a_policy_learns_of_a_constrained_row_only_whether_it_guessed():
    target = target_with("byte-level")
    engine = Engine(target, NgramDrafter(NgramConfig()), max_batch=2)
    rules = [replace(GREEDY, constraint=Constraint("regex", "7{9}")), FREE[0]]
    bound, free = engine.admit_call([[5, 6], [5, 6]], rules)
    assert bound.history.constrained and not free.history.constrained
    plan = Plan((1, 1, 1))
    assert (bound.history.guesses(1, plan, 2.5), free.history.guesses(3, plan, 2.5)) == (2.5, 3)


def test_forbidden_guesses_are_not_verified():
    target = target_with("byte-level")
    assert target.tokenizer is not None
    letters = target.tokenizer("zz", add_special_tokens=False)["input_ids"]
    params = replace(GREEDY, constraint=Constraint("regex", "[0-9]{20}"))
    (plain,) = Engine(target).generate([[5, 6, 7]], params)
    (found,) = Engine(target, Stubborn([*letters, 9])).generate([[5, 6, 7]], params)
    assert found.tokens == plain.tokens and re.fullmatch("[0-9]{20}", found.text)
    assert found.statistics.drafted == 0 and found.statistics.steps == len(found.tokens) - 1


def test_guesses_behind_the_end_are_not_verified():
    target = target_with("byte-level")
    assert target.tokenizer is not None
    (digit,) = target.tokenizer("7", add_special_tokens=False)["input_ids"]
    params = replace(GREEDY, constraint=Constraint("regex", "7{5}"))
    (found,) = Engine(target, Stubborn([digit] * 6)).generate([[5, 6, 7]], params)
    assert found.text == "77777" and found.finish_reason == "stop"
    assert found.tokens == [digit] * 5 + sorted(target.eos_token_ids)
    # One digit comes with the prompt, and of the six guesses behind it four are allowed.
    assert (found.statistics.drafted, found.statistics.accepted, found.statistics.steps) == (4, 4, 1)


def test_a_row_that_is_read_again_keeps_to_its_constraint():
    """A guess that the target cannot read spoils its whole tree, so that the row is read again without it."""
    whole = target_with("byte-level")
    assert whole.tokenizer is not None
    params = replace(GREEDY, constraint=Constraint("regex", "[0-9]{8}"))
    (plain,) = Engine(whole).generate([[5, 6, 7]], params)
    digit = next(digit for digit in "0123456789" if digit not in plain.text)
    (token,) = whole.tokenizer(digit, add_special_tokens=False)["input_ids"]
    (end,) = whole.eos_token_ids
    model = tiny_model(vocabulary=whole.vocab_size, eos_token_id=end)
    model.get_input_embeddings().weight[token] = torch.nan
    engine = Engine(Target(model, whole.tokenizer, name="broken"), Stubborn([token]))
    (found,) = engine.generate([[5, 6, 7]], params)
    assert found.tokens == plain.tokens and found.finish_reason == "stop"
    assert found.statistics.drafted == 0 and found.statistics.steps == len(found.tokens) - 1


# ---- the law of drawn drafts


LETTERS, PATTERN = "abcdef", "[abd][bcef][acd]"
DRAWS = 2_500


def joint_of(prompt: list[int]) -> torch.Tensor:
    """Return the probability of every text of three letters under the pattern, by the target's own logits."""
    target = target_of_letters(LETTERS)
    every = torch.tensor([[*prompt, *text] for text in product(range(len(LETTERS)), repeat=3)])
    _, logits_BTV = target.encode(every, logits=True)
    assert logits_BTV is not None
    joint = torch.ones(len(every), dtype=torch.float64)
    for place, group in enumerate(re.findall(r"\[(\w+)\]", PATTERN)):
        open_V = torch.tensor([letter in group for letter in LETTERS])
        p_BV = (logits_BTV[:, len(prompt) - 1 + place].double() / 1.4).masked_fill(~open_V, -torch.inf).softmax(-1)
        joint *= p_BV.gather(1, every[:, len(prompt) + place : len(prompt) + place + 1]).squeeze(1)
    return joint


def p_value(engine: Engine, plan: Plan) -> float:
    """Draw texts under the pattern, and test their joint distribution."""
    from tests.helpers.toy import chi_square_p_value

    prompt, size = [1, 2, 0], len(LETTERS)
    rules = SamplingParams(max_tokens=4, temperature=1.4, constraint=Constraint("regex", PATTERN))
    params = [replace(rules, seed=seed) for seed in range(DRAWS)]
    found = engine.generate([prompt] * DRAWS, params, plan)
    assert {c.finish_reason for c in found} == {"stop"}
    texts = torch.tensor([c.tokens for c in found])
    counts = torch.bincount(texts @ torch.tensor([size * size, size, 1]), minlength=size**3)
    return chi_square_p_value(counts, joint_of(prompt) * DRAWS)


def drawing_engine() -> Engine:
    oracle = StagewiseOracle([[1, 2, 0, 1, 4, 2, 3]], len(LETTERS), error_rate=0.5, seed=2)
    return Engine(target_of_letters(LETTERS), oracle, max_batch=1000, max_length=12)


@pytest.mark.parametrize("plan", [Plan((1,), sampled=True), Plan((1, 1), sampled=True), Plan((2, 2), sampled=True),
                                  Plan((1, 1), sampled=True, acceptance="block")],
                         ids=["one", "chain", "tree", "block"])
def test_drawn_drafts_leave_the_constrained_distribution(plan: Plan):
    assert p_value(drawing_engine(), plan) > 1e-4


def test_masking_after_the_rejection_would_be_found(monkeypatch: pytest.MonkeyPatch):
    from draftsmith.engine.steps.layout import Layout
    from draftsmith.engine.steps.rows import Rows
    from draftsmith.types import Context
    from draftsmith.verify import Acceptance, Stream, accept_sampled, categorical, probabilities, uniform

    engine = drawing_engine()
    right = engine.core.stepper.choose

    def late(rows: Rows, context: Context, logits_BMV: torch.Tensor, layout: Layout) -> Acceptance:
        draft = layout.draft
        if draft.q_BMV is None or layout.allowed is None:
            return right(rows, context, logits_BMV, layout)
        open_BMV = layout.allowed.apply(torch.zeros_like(logits_BMV)) == 0
        p_BMV = probabilities(logits_BMV, rows.sampling)
        seeds_B, places_B = context.seeds_B, context.lengths_B
        found = accept_sampled(p_BMV, draft, seeds_B, places_B)
        allowed_B = open_BMV[:, 0].gather(1, draft.tokens_BN).squeeze(1)
        counts_B = torch.where(allowed_B, found.counts_B, 0)
        rest_BV = torch.where(
            (counts_B == 1).unsqueeze(1), p_BMV[:, 1], torch.relu(p_BMV[:, 0] - draft.q_BMV[:, 0])
        )
        node_B = counts_B[:, None, None].expand(-1, 1, open_BMV.shape[2])
        rest_BV = rest_BV * open_BMV.gather(1, node_B).squeeze(1)
        empty_B1 = rest_BV.sum(1, keepdim=True) == 0
        rest_BV = torch.where(empty_B1, p_BMV[:, 0] * open_BMV[:, 0], rest_BV)
        u_B = uniform(seeds_B, places_B + counts_B, Stream.RESIDUAL, 0)
        return Acceptance(found.path_BD, counts_B, categorical(rest_BV, u_B))

    monkeypatch.setattr(engine.core.stepper, "choose", late)
    assert p_value(engine, Plan((1,), sampled=True)) < 1e-6


# ---- ends


def test_a_text_ends_where_its_grammar_does_without_an_end_token():
    target = target_with("byte-level", ends=False)
    params = [replace(GREEDY, constraint=Constraint("regex", pattern)) for pattern in ("[0-9]{4}", "[0-9]{4}.*")]
    one, other = Engine(target, OracleDrafter([], target.vocab_size), plan=CHAIN).generate([[5, 6], [5, 6]], params)
    assert re.fullmatch("[0-9]{4}", one.text) and one.finish_reason == "stop"
    assert re.match("[0-9]{4}", other.text) and other.finish_reason == "length"
    assert sum(1 + n for n in one.accepted_lengths) == len(one.tokens) - 1


def test_an_end_token_is_ignored_or_taken_as_the_caller_says():
    target = target_with("byte-level")
    assert target.tokenizer is not None
    pad = target.tokenizer.convert_tokens_to_ids("<pad>")
    assert isinstance(pad, int)
    rules = replace(GREEDY, constraint=Constraint("regex", "[0-9]{3}"))
    ended, ignored, padded = Engine(target).generate(
        [[5, 6]] * 3, [rules, replace(rules, ignore_eos=True), replace(rules, ignore_eos=True, stop_token_ids=[pad])]
    )
    assert ended.tokens[-1] in target.eos_token_ids and ended.tokens[:-1] == ignored.tokens
    assert padded.tokens == [*ignored.tokens, pad]
    assert {c.finish_reason for c in (ended, ignored, padded)} == {"stop"}
    assert ended.text == ignored.text == padded.text


def test_stops_of_the_caller_and_limits_hold_within_a_constraint():
    target = target_with("byte-level")
    rules = replace(GREEDY, constraint=Constraint("regex", "(ab|xy){30}"))
    whole, stopped, short = Engine(target).generate(
        [[5, 6]] * 3, [rules, replace(rules, stop=("b", "y")), replace(rules, max_tokens=7)]
    )
    assert stopped.text == whole.text[:1] and stopped.finish_reason == "stop"
    assert short.tokens == whole.tokens[:7] and short.finish_reason == "length"


# ---- tokenizers


@pytest.mark.parametrize("kind", ["llama", "metaspace-always", "metaspace-first", "unigram-bytes"])
def test_tokenizers_with_spaces_in_their_words(kind: str):
    target = target_with(kind)
    params = [replace(rules, constraint=CONSTRAINTS[name][0]) for rules in (GREEDY, RULES["sampled"])
              for name in ("json_schema", "regex", "choice")]
    assert target.tokenizer is not None
    questions = [target.tokenizer("Nobody knew who")["input_ids"]] * len(params)
    expected = plainly(Engine(target, max_batch=1), questions, params)
    texts = [q + e.tokens for q, e in zip(questions, expected, strict=True)]
    oracle = OracleDrafter(texts, target.vocab_size, error_rate=0.3)
    found = Engine(target, oracle, plan=TREE).generate(questions, params)
    assert [c.tokens for c in found] == [c.tokens for c in expected]
    ended = [c for c in expected if c.finish_reason == "stop"]
    assert len(ended) >= 4
    for completion, rules in zip(expected, params, strict=True):
        fits = next(fits for constraint, fits in CONSTRAINTS.values() if constraint == rules.constraint)
        assert completion.finish_reason == "length" or fits(completion.text)


def test_special_tokens_and_padding_are_never_written():
    target = target_with("byte-level")
    assert target.tokenizer is not None
    rules = SamplingParams(max_tokens=60, temperature=30.0, seed=1, n=20, constraint=Constraint("regex", "[^ÿ]*"))
    special = set(target.tokenizer.all_special_ids) | set(range(len(target.tokenizer), target.vocab_size))
    found = Engine(target).generate([[5, 6]], rules)
    free = Engine(target).generate([[5, 6]], replace(rules, constraint=None))
    assert special & {token for c in free for token in c.tokens} > target.eos_token_ids
    assert special & {token for c in found for token in c.tokens} == target.eos_token_ids
    assert all(token not in target.eos_token_ids for c in found for token in c.tokens[:-1])


@pytest.mark.parametrize("kind", ["word-piece", "word-ends"])
def test_a_tokenizer_that_joins_tokens_in_another_way_is_refused(kind: str):
    rules = replace(GREEDY, constraint=Constraint("json_object"))
    with pytest.raises(DraftsmithError, match=f"constraints need a tokenizer whose tokens are pieces.*tiny-{kind}"):
        Engine(target_with(kind)).generate([[5, 6]], rules)


def test_the_examples_in_the_code():
    done = doctest.testmod(allowed)
    assert done.attempted == 2 and not done.failed


@pytest.mark.parametrize("liked", ["\n", " ", "\n "])
def test_a_model_that_likes_white_space_cannot_fill_json_with_it(liked: str):
    """Between two parts there is nothing, a space, or one end of a line with the next line's indentation."""
    letters = '{}":ab1 \n'
    target = target_of_letters(letters)
    schema = {
        "type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False,
    }
    bias = {letters.index(one): 100.0 for one in liked}
    params = SamplingParams(max_tokens=120, constraint=Constraint.of_schema(schema), logit_bias=bias)
    [found] = Engine(target).generate(["{"], params)
    assert json.loads(found.text) == {"a": 1}
    assert re.sub(r"\n[ \t]{0,23}| ", "", found.text) == '{"a":1}', "no gap has two ends of lines"
    assert found.text.count("\n") in (range(3, 5) if "\n" in liked else (0,))
