"""Regular expressions mean what they say: alone, and as the patterns of strings in JSON."""

import itertools
import re

import pytest
import xgrammar
from xgrammar.testing import _is_grammar_accept_string

from draftsmith.constraints import check_constraint
from draftsmith.engine import Engine
from draftsmith.patterns import of_lines
from draftsmith.types import MOST_PATTERN, Constraint, DraftsmithError, SamplingParams
from tests.helpers.constrained import target_with


def allows(pattern: str, text: str) -> bool:
    """Return whether the compiled pattern allows a text."""
    checked = check_constraint(Constraint("regex", pattern))
    return _is_grammar_accept_string(xgrammar.Grammar.from_regex(of_lines(checked.text)), text)


def allows_in_json(schema: dict[str, object], text: str) -> bool:
    """Return whether the compiled schema allows an answer, which need not be JSON."""
    checked = check_constraint(Constraint.of_schema(schema))
    return _is_grammar_accept_string(xgrammar.Grammar.from_json_schema(checked.text), text)


@pytest.mark.parametrize("text", ["a\nb", "a\rb", "aéb", "a.b", "ab"])
def test_a_dot_stands_for_no_end_of_a_line(text: str):
    assert allows("a.b", text) == (text in ("aéb", "a.b"))
    assert allows(r"a[.]b|a\.b", text) == (text == "a.b")


def test_texts_under_dots_have_one_line():
    """However likely the end of a line is; a pattern may still be as long as any other."""
    line_end = target_with("byte-level").tokenizer("\n")["input_ids"][0]  # type: ignore[index,union-attr]
    params = SamplingParams(max_tokens=8, constraint=Constraint("regex", ".{6}"), logit_bias={line_end: 50.0})
    (found,) = Engine(target_with("byte-level")).generate([[5, 6]], params)
    assert re.fullmatch(".{6}", found.text), found.text
    assert check_constraint(Constraint("regex", "." * MOST_PATTERN))


NEEDS = [
    r'^"a"$', r"^[A-Z]:(\\\w+)+$", r"a\n", "a\n", '["]{2}', r"[\\]", r"\x22", r"\u005c", r"\cA", r"\0b", r"\t+",
    r"[\x00-\x1f]", r'["\\]', r'(a"|\\)', r'(?:a|b")\t', r'(?:"){0,2}\n', r"\\{1,2}",
]


@pytest.mark.parametrize("pattern", NEEDS)
def test_what_needs_a_character_that_json_escapes_is_refused(pattern: str):
    """The compiler would write it as it is, and the answer would be no JSON."""
    strings = {"type": "string", "pattern": pattern}
    named = {"type": "object", "patternProperties": {pattern: {"type": "null"}}}
    for schema in (strings, named, {"type": "array", "items": strings}):
        with pytest.raises(DraftsmithError, match="needs a quotation mark, a backslash or a control character"):
            check_constraint(Constraint.of_schema(schema))
    assert check_constraint(Constraint("regex", pattern)).text == pattern


@pytest.mark.parametrize(
    ("pattern", "value", "not_json"),
    [
        (r'^"?b$', "b", '""b"'), (r"(?:\\|/)b", "/b", r'"\b"'), (r'^(\\.|[^"\\])*$', "ab", r'"\"'),
        (r"b\n{0,3}", "b", '"b\n"'), (r'(a"|b)', "b", '"a""'), (r'["a]', "a", '"""'),
        (r'[!-"]', "!", '"""'), (r"[\n-]", "-", '"\n"'),
    ],
)
def test_what_can_do_without_it_does(pattern: str, value: str, not_json: str):
    schema = {"type": "string", "pattern": pattern}
    assert allows_in_json(schema, f'"{value}"') and not allows_in_json(schema, not_json)


@pytest.mark.parametrize("pattern", ["^[^a]{2}$", r"^\W\D$", "^..$", r"^[\\/]{2}$"])
def test_classes_leave_out_what_json_would_have_to_escape(pattern: str):
    strings = {"type": "string", "pattern": pattern}
    assert allows_in_json(strings, '"//"')
    assert not any(allows_in_json(strings, f'"/{one}"') for one in ('"', "\\", "\n"))


@pytest.mark.parametrize(
    ("pattern", "text"),
    [("^a$", "a"), ("^a|b$", "b"), ("(^a|^b)c", "bc"), ("a(b$|c)", "ab"), ("^(?:a|b)$", "a"), ("(^a$)?", "a"),
     (r"\^a\$", "^a$"), ("[$^]a", "^a"), ("a{2}$", "aa"), (r"\(^", None), ("a$b", None), ("x^y", None),
     ("(^a|b$)c", None), ("(^a)+", None), ("(a$){2}", None), ("a(b|^c)", None)],
)
def test_anchors_may_only_stand_at_the_ends(pattern: str, text: str | None):
    """They are ignored by the compiler, so that `a$b`, which no text matches, would allow `ab`."""
    if text is not None:
        assert re.fullmatch(pattern, text) and allows(pattern, text)
        return
    for constraint in (Constraint("regex", pattern), Constraint.of_schema({"type": "string", "pattern": pattern})):
        with pytest.raises(DraftsmithError, match=r"has \^ not at the beginning, or \$ not at the end"):
            check_constraint(constraint)


@pytest.mark.parametrize("pattern", [r"\Aa\Z", r"a\z", r"\h", r"[\A]", r"[\p]"])
def test_unknown_escapes_are_refused(pattern: str):
    """The compiler takes them for the letters."""
    with pytest.raises(DraftsmithError, match="which has no meaning here"):
        check_constraint(Constraint("regex", pattern))


def test_a_class_without_end_is_refused_at_once():
    with pytest.raises(DraftsmithError, match="without its ]"):
        check_constraint(Constraint("regex", "a[b"))


@pytest.mark.parametrize(
    ("pattern", "values"),
    [
        ("^[^é]$", ["a", "日", "😀"]), (r"^[a-zà-ÿ\s]+$", ["zoé", "a"]), ("日?[^a]", ["日b", "é"]),
        ("^é?.$", ["é", "éa"]),
        ("é|a", ["é", "a"]), (r"\é{2}", ["éé"]), ("[😀é]", ["😀", "é"]), (r"\u{65e5}", ["日"]), ("", [""]),
    ],
)
def test_letters_of_any_language_keep_strings_in_json(pattern: str, values: list[str]):
    """What has to be escaped is left out beside them as it is elsewhere."""
    schema = {"type": "string", "pattern": pattern}
    named = {"type": "object", "patternProperties": {pattern: {"type": "null"}}, "additionalProperties": False}
    for value in values:
        assert allows_in_json(schema, f'"{value}"')
        assert allows_in_json(named, f'{{"{value}": null}}')
    for bad in ("\n", '"', "\\", "é\n", "日\n", 'é"', "\x01"):
        assert not allows_in_json(schema, f'"{bad}"') and not allows_in_json(named, f'{{"{bad}": null}}')


@pytest.mark.parametrize(
    "pattern",
    [
        "^(a*b)?$", "(a+b)?c", "((a*b)?c)?", "(?:a*b)?b+", "((b*a)?){2}", "a{2}b(a*b)?", "(a*b)??", "(a?b)?",
        "(a|b*c)?", "(?P<x>a*b)?", "a*(b)?",
    ],
)
def test_groups_that_may_be_left_out_are_whole_otherwise(pattern: str):
    """Every word of up to four letters is allowed, alone and in JSON, exactly where Python's expressions match it."""
    schema = {"type": "string", "pattern": pattern}
    checked = check_constraint(Constraint.of_schema(schema))
    inside = xgrammar.Grammar.from_json_schema(checked.text)
    alone = xgrammar.Grammar.from_regex(of_lines(pattern.replace("?P<x>", "?:")))
    for word in ("".join(letters) for count in range(5) for letters in itertools.product("abc", repeat=count)):
        matches = re.fullmatch(pattern, word) is not None
        assert _is_grammar_accept_string(inside, f'"{word}"') == matches, word
        assert _is_grammar_accept_string(alone, word) == matches, word


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("^(?!a)[ab]$", r"has \(\?!"), ("(?=b)[ab]", r"has \(\?="), ("(?<!a)b", r"has \(\?<!"),
        ("(?<=a)b", r"has \(\?<="), ("(?i)a", r"has \(\?i"), ("(?>a)b", r"has \(\?>"),
        ("a\\", "ends in a single backslash"), ("(\\", "ends in a single backslash"),
        (r"\u{22}", "needs a quotation mark"),
    ],
)
def test_what_the_compiler_would_pass_over_is_refused(pattern: str, said: str):
    strings = {"type": "string", "pattern": pattern}
    named = {"type": "object", "patternProperties": {pattern: {"type": "null"}}}
    for schema in (strings, named):
        with pytest.raises(DraftsmithError, match=said):
            check_constraint(Constraint.of_schema(schema))


def test_two_patterns_that_become_one_are_refused():
    named = {"type": "object", "patternProperties": {"é": {"type": "null"}, r"\u00e9": {"type": "string"}}}
    with pytest.raises(DraftsmithError, match="the same pattern twice"):
        check_constraint(Constraint.of_schema(named))
