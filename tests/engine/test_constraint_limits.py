"""Constraints that cannot be kept are refused, alone and with a sentence; compiling them is bounded."""

import asyncio
import json
import re
import sys
import time
from dataclasses import replace

import pytest

from draftsmith.constraints import check_schema
from draftsmith.drafters.lookup.ngram import NgramConfig, NgramDrafter
from draftsmith.engine import AsyncEngine, ClosedError, Engine
from draftsmith.engine.requests import guide
from draftsmith.engine.requests.grammars import MOST_GRAMMARS, Grammars
from draftsmith.types import Completion, Constraint, DraftsmithError, SamplingParams
from tests.helpers.constrained import CONSTRAINTS, target_of_letters, target_with
from tests.helpers.oracle import OracleDrafter

GREEDY = SamplingParams(max_tokens=100)

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
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(DraftsmithError, match=re.escape("pip install draftsmith[serve]")):
        Engine(target_with("byte-level")).generate([[5]], replace(GREEDY, constraint=Constraint("json_object")))


def test_few_grammars_are_kept():
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
    target = target_with("byte-level")
    completions, said = asyncio.run(_two(Engine(target, NgramDrafter(NgramConfig()))))
    (expected,) = Engine(target).generate([[5, 6]], replace(GREEDY, constraint=CONSTRAINTS["grammar"][0]))
    assert [c.tokens for c in completions] == [expected.tokens] * 2
    assert "cannot be compiled" in said


# ---- compiled in a process of its own


def test_what_strangers_send_is_compiled_elsewhere_within_limits():
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
        # It is remembered, and the process that has begun meanwhile has nothing to do with whoever asks again.
        engine.grammars._guarded._seconds = 20.0  # type: ignore[union-attr]
        with pytest.raises(DraftsmithError, match="takes more than 0.005 seconds to compile"):
            engine.generate([[5, 6]], replace(GREEDY, constraint=Constraint("regex", "(.{0,9000}a)")))
        found = engine.generate([[5, 6]], replace(GREEDY, constraint=Constraint("regex", "[0-9]{4}")))[0]
        assert re.fullmatch("[0-9]{4}", found.text)
    finally:
        engine.grammars.close()


HARD = Constraint.of_schema({
    "type": "object",
    "properties": {f"k{number}": {"type": "string", "minLength": 1, "maxLength": 300} for number in range(200)},
})


def test_the_time_of_a_call_and_the_end_of_the_engine_hold_for_constraints_too():
    """Of two that wait while one is compiled: one has no time left, the other is told that the engine was closed."""
    engine = Engine(target_with("byte-level"))
    engine.grammars.guard(3.0)

    async def main() -> tuple[list[Completion], float, BaseException]:
        async with AsyncEngine(engine) as served:
            hard = asyncio.create_task(served.generate([5, 6], replace(GREEDY, constraint=HARD)))
            await asyncio.sleep(0)
            begun = time.monotonic()
            two = replace(GREEDY, n=2, constraint=Constraint("regex", "[a-c]"))
            late = await served.generate([5, 6], two, timeout=0.3)
            took = time.monotonic() - begun
            other = replace(GREEDY, constraint=Constraint("regex", "[a-d]"))
            waits = asyncio.create_task(served.generate([5, 6], other))
            await asyncio.sleep(0.05)
        _, told = await asyncio.gather(hard, waits, return_exceptions=True)
        assert isinstance(told, BaseException)
        return late, took, told

    try:
        late, took, told = asyncio.run(main())
    finally:
        engine.grammars.close()
    assert [one.finish_reason for one in late] == ["deadline"] * 2 and took < 2
    assert isinstance(told, ClosedError)


def test_guesses_that_take_too_long_to_look_at_go_and_the_text_stays(monkeypatch: pytest.MonkeyPatch):
    target, params = target_with("byte-level"), replace(GREEDY, constraint=CONSTRAINTS["json_schema"][0])
    plain = Engine(target).generate([[5, 6]], params)[0]
    known = [plain.prompt_tokens + plain.tokens]
    engine = Engine(target, OracleDrafter(known, vocabulary=target.vocab_size))
    assert engine.generate([[5, 6]], params)[0].statistics.accepted > 0
    monkeypatch.setattr(guide, "MOST_SECONDS_OF_GUESSES", -1.0)
    found = engine.generate([[5, 6]], params)[0]
    assert found.tokens == plain.tokens and found.error is None and found.statistics.drafted == 0


def test_lengths_of_strings_let_no_control_characters_through():
    schema = '{"type": "object", "properties": {"a": {"type": "string", "minLength": 2, "maxLength": 5}}}'
    kept = json.loads(check_schema(schema))
    assert kept["properties"]["a"] == {"type": "string", "pattern": '^[^\\x00-\\x1f"\\\\]{2,5}$'}
