"""References of a schema lead where JSON pointers lead, or are refused."""

import json
import re
from typing import Any

import pytest

from draftsmith.constraints import check_schema
from draftsmith.types import DraftsmithError
from tests.helpers.constrained import fits

pytest.importorskip("xgrammar", reason="constraints need xgrammar, of the extra `serve`")

NUMBER, WORD = {"type": "integer"}, {"enum": ["w"]}
DEFINED = {
    "a/b": NUMBER, "c~d": NUMBER, "~1": NUMBER, "/": WORD, "e%f": NUMBER, "two words": NUMBER, "é": NUMBER,
    "plain": NUMBER, "moved10": WORD, "c~0d": WORD, "either": {"anyOf": [NUMBER, {"type": "null"}]},
    "t/r/e/e": {
        "type": "object", "properties": {"k/ids": {"type": "array", "items": {"$ref": "#/$defs/t~1r~1e~1e"}}},
        "additionalProperties": False,
    },
}
NUMBERS = [
    "a~1b", "a%7E1b", "c~0d", "c%7e0d", "~01", "e%25f", "two words", "two%20words", "%C3%A9", "%c3%a9", "é", "plain",
    "either/anyOf/0", "either%2FanyOf%2f0",
]


def with_property(reference: str, **more: Any) -> dict[str, Any]:
    return {
        "type": "object", "properties": {"x": {"$ref": reference}, **more}, "required": ["x"],
        "additionalProperties": False, "$defs": DEFINED,
    }


@pytest.mark.parametrize("name", NUMBERS)
def test_a_reference_is_followed_as_a_json_pointer(name: str):
    schema = with_property(f"#/$defs/{name}")
    assert fits(schema, '{"x": 1}')
    assert not fits(schema, '{"x": "w"}') and not fits(schema, '{"x": null}')
    once = check_schema(json.dumps(schema))
    assert check_schema(once) == once


def test_what_refers_to_itself_under_such_a_name_is_followed_too():
    schema = with_property("#/$defs/t~1r~1e~1e", y={"$ref": "#/$defs/t~1r~1e~1e/properties/k~1ids"})
    assert fits(schema, '{"x": {"k/ids": [{}, {"k/ids": [{}]}]}, "y": [{}]}')
    assert not fits(schema, '{"x": {"k/ids": [1]}}') and not fits(schema, '{"x": {}, "y": [{"k": []}]}')


def test_such_names_of_properties_are_kept_as_they_are():
    schema = with_property("#/properties/y~1z", **{"y/z": NUMBER})
    assert fits(schema, '{"x": 1, "y/z": 2}') and not fits(schema, '{"x": 1, "y/z": "w"}')


def test_alternatives_are_compared_behind_such_references():
    apart = {"oneOf": [{"$ref": "#/$defs/a~1b"}, {"$ref": "#/$defs/~1"}], "$defs": DEFINED}
    assert fits(apart, "7") and fits(apart, '"w"')
    with pytest.raises(DraftsmithError, match="the alternatives 0 and 1"):
        fits({**apart, "oneOf": [{"$ref": "#/$defs/a~1b"}, {"$ref": "#/$defs/c~0d"}]}, "7")


@pytest.mark.parametrize("reference", [
    "#/$defs/none", "#/$defs/a/b", "#/$defs/a%2Fb", "#/$defs/either/anyOf/2", "#/$defs/either/anyOf/-1", "#/$defs/",
    "#/$defs/either/anyOf/00", "#/properties/y/const", "#/properties/z/enum/0", "#/$defs", "#/properties/x/$ref",
])
def test_what_leads_to_no_schema_is_refused(reference: str):
    told = f"the JSON schema, x refers to {reference!r}, where no schema stands"
    with pytest.raises(DraftsmithError, match=re.escape(told)):
        check_schema(json.dumps(with_property(
            reference, y={"const": {"type": "string", "uniqueItems": 1}}, z={"enum": [True, 1]}
        )))


@pytest.mark.parametrize("name", ["c~d", "~", "c~", "~2", "~~0", "c%7Ed"])
def test_a_tilde_that_escapes_nothing_is_refused(name: str):
    """RFC 6901 knows ~0 and ~1 only; with the name as it is, a misspelt reference would lead somewhere else."""
    told = f"the JSON schema, x refers to '#/$defs/{name}' with a '~' that is neither ~0 nor ~1; write '~' as ~0"
    with pytest.raises(DraftsmithError, match=re.escape(told)):
        check_schema(json.dumps({**with_property(f"#/$defs/{name}"), "$defs": {**DEFINED, name: NUMBER}}))


@pytest.mark.parametrize("name", ["e%f", "%", "e%2", "%zz", "%FF", "%C3", "%ED%A0%80"])
def test_a_percent_sign_that_stands_for_no_character_is_refused(name: str):
    told = f"the JSON schema, x refers to '#/$defs/{name}' with a '%' that stands for no character in UTF-8; write '%'"
    with pytest.raises(DraftsmithError, match=re.escape(told)):
        defined = {**DEFINED, name: NUMBER, "\ufffd": WORD}
        check_schema(json.dumps({**with_property(f"#/$defs/{name}"), "$defs": defined}))


def test_a_reference_may_lead_to_what_a_pattern_of_names_describes():
    schema = {
        "type": "object", "patternProperties": {"^é(a)?$": NUMBER}, "additionalProperties": False,
        "$defs": {"list": {"type": "array", "items": {"$ref": "#/patternProperties/^é(a)?$"}}},
    }
    assert fits(schema, '{"é": 1}') and not fits(schema, '{"é": "w"}')
    listed = {"$ref": "#/$defs/list", "$defs": {**schema["$defs"], "named": schema}}
    listed["$defs"]["list"] = {"type": "array", "items": {"$ref": "#/$defs/named/patternProperties/^é(a)?$"}}
    del schema["$defs"]
    assert fits(listed, "[1, 2]") and not fits(listed, '["w"]')


def test_definitions_that_are_no_object_are_refused_where_something_has_to_move_there():
    schema = {"anyOf": [NUMBER, {"type": "array", "items": {"$ref": "#/anyOf/0"}}], "$defs": []}
    with pytest.raises(DraftsmithError, match=r"the JSON schema has \$defs that are no object"):
        check_schema(json.dumps(schema))
