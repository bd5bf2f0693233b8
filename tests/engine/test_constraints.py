"""Text under a constraint is what plain decoding writes under it, token for token, whatever is drafted; and it fits."""

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
from draftsmith.engine import AsyncEngine, Engine
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


# ---- refusals


BAD: dict[str, tuple[Constraint, str]] = {
    "no json": (Constraint("json_schema", "{'type'"), "is not JSON"),
    "no schema": (Constraint("json_schema", "3"), "a schema is an object"),
    "a type that is none": (Constraint("json_schema", '{"type": "text"}'), "cannot be compiled"),
    "what cannot be kept": (Constraint.of_schema({"type": "array", "uniqueItems": True}), "has 'uniqueItems'"),
    "two at once": (Constraint.of_schema({"anyOf": [{"type": "null"}], "properties": {}}), "'properties' beside"),
    "a format": (Constraint.of_schema({"type": "string", "format": "isbn"}), "the format 'isbn'"),
    "elsewhere": (Constraint.of_schema({"$ref": "http://example.com/x.json"}), "only what begins with #/"),
    "nothing there": (Constraint.of_schema({"$ref": "#/$defs/x"}), "cannot be compiled"),
    "too deep": (Constraint("json_schema", '{"items": ' * 300 + "{}" + "}" * 300), "levels deep"),
    "too deep to read": (Constraint("json_schema", "[" * 30_000 + "]" * 30_000), "levels deep"),
    "too many": (Constraint.of_schema({"type": "array", "items": {}, "minItems": 10**9}), "minItems = 1000000000"),
    "an open bracket": (Constraint("regex", "(a"), "cannot be compiled"),
    "brackets in brackets": (Constraint("regex", "(" * 2000 + "a" + ")" * 2000), "brackets inside each other"),
    "looking ahead": (Constraint("regex", "(?=a)b"), "cannot be compiled"),
    "repeats": (Constraint("regex", "(a{100}){100000}"), "the most is 10000"),
    "no rule": (Constraint("grammar", 'start ::= "a"'), "cannot be compiled"),
    "an unknown rule": (Constraint("grammar", "root ::= other"), "cannot be compiled"),
    "no list": (Constraint("choice", '{"a": 1}'), "JSON list of strings"),
    "nothing to choose": (Constraint.of_choices([]), "JSON list of strings"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_kept_is_refused(name: str):
    constraint, said = BAD[name]
    engine = Engine(target_with("byte-level"))
    with pytest.raises(DraftsmithError, match=re.escape(said)) as caught:
        engine.generate([[5, 6], [5]], [GREEDY, replace(GREEDY, constraint=constraint)])
    assert ".cc" not in str(caught.value) and "\n" not in str(caught.value)
    assert not engine.core.has_work


def test_a_pattern_may_have_line_ends_in_it():
    params = replace(GREEDY, max_tokens=4, constraint=Constraint("regex", "[ab\n]{2}\nc"))
    (found,) = Engine(target_with("byte-level", ends=False)).generate([[5, 6]], params)
    assert re.fullmatch("[ab\n]{2}\nc", found.text)


def test_a_constraint_says_what_is_wrong_with_itself():
    for kind, text, said in (
        ("xml", "a", "kind is 'xml'"), ("regex", "", "needs a text"), ("json_object", "{}", "takes no text"),
        ("regex", "a" * 5_000, "may have 4096"), ("grammar", "a" * 70_000, "may have 65536"), ("regex", 3, "type int"),
    ):
        with pytest.raises(DraftsmithError, match=said):
            Constraint(kind, text)  # type: ignore[arg-type]
    with pytest.raises(DraftsmithError, match="constraint is 'json'"):
        SamplingParams(constraint="json")  # type: ignore[arg-type]


def test_what_the_tokens_cannot_write_is_refused():
    target = target_of_letters("abc")
    with pytest.raises(DraftsmithError, match="allows none of the tokens of tiny-letters"):
        Engine(target).generate([[1]], replace(GREEDY, constraint=Constraint("regex", "[0-9]+")))
    (found,) = Engine(target).generate([[1]], replace(GREEDY, constraint=Constraint("regex", "(abc){2}[0-9]")))
    assert found.finish_reason == "error" and found.text == "abcabc"
    assert found.error is not None and "after 6 tokens" in found.error


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "xgrammar", None)
    with pytest.raises(DraftsmithError, match=re.escape("pip install draftsmith[serve]")):
        Engine(target_with("byte-level")).generate([[5]], replace(GREEDY, constraint=Constraint("json_object")))


def test_few_grammars_are_kept():
    from draftsmith.engine.requests.grammars import MOST_GRAMMARS, Grammars

    grammars = Grammars(target_of_letters("abc"))
    made = [grammars.compiled(Constraint("regex", f"a{{{count}}}")) for count in range(1, MOST_GRAMMARS + 10)]
    assert grammars.compiled(Constraint("regex", f"a{{{MOST_GRAMMARS + 9}}}")) is made[-1]
    assert grammars.compiled(Constraint("regex", "a{1}")) is not made[0]


# ---- served


async def _two(engine: Engine) -> tuple[list[Completion], str]:
    good = replace(GREEDY, constraint=CONSTRAINTS["grammar"][0])
    async with AsyncEngine(engine) as served:
        completions = await served.generate([5, 6], good)
        try:
            await served.generate([5, 6], replace(GREEDY, constraint=BAD["an open bracket"][0]))
        except DraftsmithError as error:
            return completions + await served.generate([5, 6], good), str(error)
    raise AssertionError("it was not refused")


def test_a_bad_constraint_is_told_to_its_own_caller_alone():
    import asyncio

    target = target_with("byte-level")
    completions, said = asyncio.run(_two(Engine(target, NgramDrafter(NgramConfig()))))
    (expected,) = Engine(target).generate([[5, 6]], replace(GREEDY, constraint=CONSTRAINTS["grammar"][0]))
    assert [c.tokens for c in completions] == [expected.tokens] * 2
    assert "cannot be compiled" in said


# ---- compiled in a process of its own


def test_what_strangers_send_is_compiled_elsewhere_within_limits():
    from draftsmith.engine.requests.grammars import Grammars

    target = target_with("byte-level")
    engine = Engine(target)
    expected = engine.generate([[5, 6]], replace(GREEDY, constraint=CONSTRAINTS["json_schema"][0]))[0]
    engine.grammars = Grammars(target)
    engine.grammars.guard(20.0)
    try:
        found = engine.generate([[5, 6]], replace(GREEDY, constraint=CONSTRAINTS["json_schema"][0]))[0]
        assert found.tokens == expected.tokens
        with pytest.raises(DraftsmithError, match="the regular expression cannot be compiled"):
            engine.generate([[5, 6]], replace(GREEDY, constraint=BAD["an open bracket"][0]))
        process = engine.grammars._guarded._process  # type: ignore[union-attr]
        assert process is not None
        process.kill()  # as if it had run out of memory
        process.wait()
        found = engine.generate([[5, 6]], replace(GREEDY, constraint=Constraint("regex", "[0-9]{3}")))[0]
        assert re.fullmatch("[0-9]{3}", found.text)
        engine.grammars._guarded._seconds = 0.005  # type: ignore[union-attr]
        with pytest.raises(DraftsmithError, match="takes more than 0.005 seconds to compile"):
            engine.generate([[5, 6]], replace(GREEDY, constraint=Constraint("regex", "(.{0,9000}a)")))
        assert process.poll() is not None
    finally:
        engine.grammars.close()


def test_lengths_of_strings_let_no_control_characters_through():
    from draftsmith.constraints import check_schema

    schema = '{"type": "object", "properties": {"a": {"type": "string", "minLength": 2, "maxLength": 5}}}'
    kept = __import__("json").loads(check_schema(schema))
    assert kept["properties"]["a"] == {"type": "string", "pattern": '^[^\\x00-\\x1f"\\\\]{2,5}$'}
