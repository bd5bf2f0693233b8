"""Constraints that cannot be kept are refused, alone and with a sentence; compiling them is bounded."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import pytest
from xgrammar import TokenizerInfo

from draftsmith import grammar_process
from draftsmith.constraints import check_constraint, check_schema
from draftsmith.drafters.lookup.ngram import NgramConfig, NgramDrafter
from draftsmith.engine import AsyncEngine, ClosedError, Engine
from draftsmith.engine.requests import guide
from draftsmith.engine.requests.grammars import MOST_GRAMMARS, Grammars
from draftsmith.engine.requests.guarded import GuardedCompiler
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
    "nothing there": (Constraint.of_schema({"$ref": "#/$defs/x"}), "'#/$defs/x', where no schema stands"),
    "no alternative": (Constraint.of_schema({"type": "object", "properties": {"a": {"anyOf": []}}}), "at least one"),
    "alternatives that are none": (Constraint.of_schema({"allOf": 3}), "allOf = 3; give a list of schemas"),
    "properties that are none": (Constraint.of_schema({"type": "object", "properties": 3}), "an object with schemas"),
    "patterns that are none": (Constraint.of_schema({"type": "object", "patternProperties": [3]}), "an object with"),
    "a format that is none": (Constraint.of_schema({"type": "string", "format": []}), "the format []"),
    "too deep": (Constraint("json_schema", '{"items": ' * 300 + "{}" + "}" * 300), "levels deep"),
    "too deep to read": (Constraint("json_schema", "[" * 30_000 + "]" * 30_000), "levels deep"),
    "too many": (Constraint.of_schema({"type": "array", "items": {}, "minItems": 10**9}), "minItems = 1000000000"),
    "an open bracket": (Constraint("regex", "(a"), "cannot be compiled"),
    "brackets in brackets": (Constraint("regex", "(" * 2000 + "a" + ")" * 2000), "brackets inside each other"),
    "looking ahead": (Constraint("regex", "(?=a)b"), "has (?=, which cannot be kept"),
    "repeats": (Constraint("regex", "(a{100}){100000}"), "the most is 10000"),
    "no rule": (Constraint("grammar", 'start ::= "a"'), "cannot be compiled"),
    "an unknown rule": (Constraint("grammar", "root ::= other"), "cannot be compiled"),
    "no list": (Constraint("choice", '{"a": 1}'), "JSON list of strings"),
    "nothing to choose": (Constraint.of_choices([]), "JSON list of strings"),
    "half a character": (Constraint.of_choices(["a", "\ud800"]), "the choice '\\ud800' has half of a surrogate pair"),
    "required and undescribed": (
        Constraint.of_schema({"type": "object", "properties": {}, "required": ["z"], "additionalProperties": False}),
        "requires 'z', which its properties do not describe",
    ),
    "required by a pattern": (
        Constraint.of_schema({"type": "object", "patternProperties": {"^x": True}, "required": ["x1"]}),
        "requires 'x1'",
    ),
    "required that is no list": (Constraint.of_schema({"type": "object", "required": "z"}), "required = \"z\"; give a"),
    "a value of another type": (Constraint.of_schema({"type": "integer", "const": "x"}), "no value of its type \"int"),
    "values of another type": (Constraint.of_schema({"type": ["null", "string"], "enum": [1]}), "no value of its type"),
    "required beside a schema of the rest": (
        Constraint.of_schema({"type": "object", "required": ["b"], "additionalProperties": {"type": "null"}}),
        "requires 'b'",
    ),
    "values that are no list": (Constraint.of_schema({"type": "string", "enum": "x"}), 'enum = "x"; give a list'),
    "alternatives of which two fit": (
        Constraint.of_schema({"oneOf": [{"type": "null"}, {"type": "integer", "maximum": 5}, {"type": "number"}]}),
        "the alternatives 1 and 2",
    ),
    "properties beside patterns": (
        Constraint.of_schema({"type": "object", "properties": {"a": True}, "patternProperties": {"^a": True}}),
        "'properties' beside 'patternProperties'",
    ),
    "properties beside names": (
        Constraint.of_schema({"type": "object", "properties": {"a": True}, "propertyNames": {"pattern": "^b$"}}),
        "'properties' beside 'propertyNames', which would not hold",
    ),
    "many of any name": (
        Constraint.of_schema({"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 2}),
        "minProperties = 2",
    ),
    "a number too large": (Constraint("json_schema", '{"type": "number", "maximum": 1e999}'), "use numbers that are"),
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
    for number in (float("inf"), float("nan")):
        with pytest.raises(DraftsmithError, match="use numbers that are finite"):
            Constraint.of_schema({"type": "number", "maximum": number})
    assert Constraint("regex", "a", origin="x") == Constraint("regex", "a")


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


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it is not a dead one that nobody has asked about."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def until(true: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not become so"
        time.sleep(0.01)


def child_of(pid: int) -> int:
    """Return the child of a process that is about to have one."""
    found: list[int] = []
    until(lambda: found.extend(children_of(pid)) or found)  # type: ignore[func-returns-value]
    return found[0]


def in_the_middle(guarded: GuardedCompiler, act: Callable[[int, int], None]) -> str:
    """Return how a slow form is refused when something is done to the process and its child meanwhile."""
    process = guarded._process
    assert process is not None
    with ThreadPoolExecutor(1) as pool:
        compiling = pool.submit(guarded.compile, check_constraint(SLOW))
        act(process.pid, child_of(process.pid))
        return str(compiling.exception(20))


def texts(count: int, longest: int) -> Constraint:
    one = {"type": "string", "minLength": 1, "maxLength": longest}
    return Constraint.of_schema({"type": "object", "properties": {f"k{number}": one for number in range(count)}})


HARD, SLOW = texts(200, 300), texts(300, 9000)
NO_MEMORY = "the JSON schema takes more memory to compile than there is for it; make it simpler."


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_what_strangers_send_is_compiled_elsewhere_within_limits():
    target = target_with("byte-level")
    engine = Engine(target)
    expected = engine.generate([[5, 6]], replace(GREEDY, constraint=CONSTRAINTS["json_schema"][0]))[0]
    engine.grammars = Grammars(target)
    engine.grammars.guard(20.0)
    guarded = engine.grammars._guarded
    assert guarded is not None

    def check(pattern: str) -> None:
        found = engine.generate([[5, 6]], replace(GREEDY, constraint=Constraint("regex", pattern)))[0]
        assert re.fullmatch(pattern, found.text)

    try:
        found = engine.generate([[5, 6]], replace(GREEDY, constraint=CONSTRAINTS["json_schema"][0]))[0]
        assert found.tokens == expected.tokens
        with pytest.raises(DraftsmithError, match="the regular expression cannot be compiled"):
            engine.generate([[5, 6]], replace(GREEDY, constraint=BAD["an open bracket"][0]))
        first = guarded._process
        assert first is not None
        descriptors = len(os.listdir(f"/proc/{first.pid}/fd")), len(os.listdir("/proc/self/fd"))
        guarded._seconds = 0.3
        for _ in range(2):  # the second time it is remembered
            with pytest.raises(DraftsmithError, match="takes more than 0.3 seconds to compile"):
                engine.generate([[5, 6]], replace(GREEDY, constraint=SLOW))
        guarded._seconds = 20.0
        check("[0-9]{3}")
        # As if a child had run out of memory.
        assert in_the_middle(guarded, lambda _, child: os.kill(child, signal.SIGKILL)) == NO_MEMORY
        check("[0-9]{4}")
        # The process has begun once, and nothing is left of its children.
        assert guarded._process is first and first.poll() is None
        assert children_of(first.pid) == []
        assert descriptors == (len(os.listdir(f"/proc/{first.pid}/fd")), len(os.listdir("/proc/self/fd")))
        # The process itself dies: with a form, and while it does nothing.
        gone: list[int] = []

        def end(process: int, child: int) -> None:
            gone.extend([process, child])
            os.kill(process, signal.SIGKILL)

        assert in_the_middle(guarded, end) == NO_MEMORY
        second = guarded._process
        assert second is not None and second is not first
        second.kill()
        second.wait()
        check("[0-9]{5}")
        in_the_middle(guarded, lambda *both: (gone.extend(both), engine.grammars.close()))  # type: ignore[func-returns-value]
        assert len(gone) == 4
        until(lambda: not any(map(is_running, gone)))
        assert guarded._process is None
    finally:
        engine.grammars.close()


SMALL = """
import sys
from multiprocessing.connection import Connection
from draftsmith import grammar_process
grammar_process.ROOM = 2**27
try:
    grammar_process.serve(Connection(int(sys.argv[1])))
except EOFError:
    sys.exit(7)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a process's memory is limited on Linux only")
def test_a_form_with_too_little_memory_is_told_and_the_process_ends_with_its_server():
    ours, theirs = Pipe()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", SMALL, str(theirs.fileno())], pass_fds=(theirs.fileno(),),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    slow = ["json_schema", check_constraint(SLOW).text, 60.0]

    def ask(pattern: str) -> dict[str, str]:
        ours.send_bytes(json.dumps(["regex", pattern, 60.0]).encode())
        answer: dict[str, str] = json.loads(ours.recv_bytes())
        return answer

    try:
        tokens = TokenizerInfo([bytes([value]) for value in range(256)], vocab_size=256, stop_token_ids=[])
        ours.send_bytes(tokens.serialize_json().encode())
        assert ours.recv_bytes() == grammar_process.READY
        assert ask("((([a-c]{1,998}){1,998}){1,998})") == {"failed": grammar_process.MEMORY}
        assert ask("(a")["error"].endswith("The parenthesis is not closed.")
        assert ask("[ab]{3}").keys() == {"grammar"}
        ours.send_bytes(json.dumps(slow).encode())
        child = child_of(process.pid)
        ours.close()
        assert process.wait(20) == 7 and not is_running(child)
    finally:
        process.kill()
        process.wait()


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


def test_required_properties_come_and_values_are_of_the_type():
    schemas = (
        ({"type": "object", "required": ["b"]}, r'\{\s*"b"\s*:'),
        (
            {"type": "array", "items": {"type": "string", "enum": ["x", None]}, "minItems": 3},
            r'\[(\s*"x"\s*,){2}\s*"x"',
        ),
    )
    for schema, expected in schemas:
        params = replace(GREEDY, max_tokens=40, constraint=Constraint.of_schema(schema))
        (found,) = Engine(target_with("byte-level")).generate([[5, 6]], params)
        assert re.match(expected, found.text), found.text
