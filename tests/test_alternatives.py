"""Alternatives of a schema are allowed where none of their values fits another one."""

import json
from typing import Any

import pytest

from draftsmith.alternatives import Comparing, TooManyError
from draftsmith.constraints import check_schema
from draftsmith.types import DraftsmithError

CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "age": {"type": "integer"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "puppy"]}}, "required": ["kind"]}
NAMED = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
APART: dict[str, list[Any]] = {
    "types": [{"type": "null"}, {"type": ["string", "integer"]}, {"type": "object", "properties": {}}],
    "values": [{"const": 1}, {"enum": [2, "1", True]}, {"const": None}, {"const": 1.5}],
    "a property that tells": [CAT, DOG],
    "references": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
    "properties that others lack": [NAMED, {"type": "object", "properties": {"id": True}, "required": ["id"]}],
    "alternatives in alternatives": [{"oneOf": [{"type": "string"}, {"type": "integer"}]}, {"type": "null"}],
    "one schema in allOf": [{"allOf": [{"$ref": "#/$defs/cat"}]}, DOG],
    "what tells a type": [{"items": {"type": "null"}}, {"additionalProperties": {"type": "null"}}, {"type": "string"}],
    "a type and values": [{"type": "string"}, {"enum": [0, 1]}],
}
TOGETHER: dict[str, list[Any]] = {
    "whole numbers": [{"type": "integer"}, {"type": "number"}],
    "equal values": [{"const": 1}, {"enum": [3, 1.0]}],
    "a property of one alone": [NAMED, {"type": "object", "properties": {}}],
    "other properties allowed": [
        {**NAMED, "additionalProperties": True}, {"type": "object", "properties": {"id": True}, "required": ["id"]},
    ],
    "other properties of any kind": [
        {**NAMED, "additionalProperties": {}}, {"type": "object", "properties": {"id": True}, "required": ["id"]},
    ],
    "alternatives of which one fits": [{"anyOf": [{"type": "string"}, {"type": "null"}]}, {"type": "null"}],
    "a property that need not be there": [{**CAT, "required": []}, DOG],
    "anything": [True, {"type": "null"}],
    "a reference to nothing": [{"$ref": "#/$defs/none"}, {"type": "null"}],
    "a reference to itself": [{"$ref": "#/$defs/round"}, {"type": "null"}],
    "what is no schema": [
        {"type": "object", "properties": 3, "required": 3}, {"type": "object", "properties": [], "required": [[]]},
    ],
    "no types": [{"type": 3, "enum": 3}, {"type": [[]], "$ref": 3}],
    "lists": [{"const": [1]}, {"const": [2]}],
}
ROOT = {"$defs": {"cat": CAT, "dog": DOG, "round": {"$ref": "#/$defs/round"}}}


@pytest.mark.parametrize("name", APART)
def test_what_excludes_each_other_is_found(name: str):
    assert Comparing(ROOT).overlapping(APART[name]) is None
    check_schema(json.dumps({"oneOf": APART[name], **ROOT}))


@pytest.mark.parametrize("name", TOGETHER)
def test_what_one_value_may_fit_is_found(name: str):
    assert Comparing(ROOT).overlapping(TOGETHER[name]) == (0, 1)
    assert Comparing(ROOT).overlapping([{"type": "boolean"}, *TOGETHER[name]]) is not None


def test_as_many_as_people_write_are_compared():
    tagged = [
        {
            "type": "object", "required": ["kind", *names],
            "properties": {"kind": {"const": number}, **{name: {"type": "string"} for name in names}},
        }
        for number in range(60) for names in [[f"n{at}" for at in range(8)]]
    ]
    assert Comparing(ROOT).overlapping(tagged) is None


def test_what_strangers_send_takes_no_time():
    deep: Any = {"type": "object", "properties": {}, "required": []}
    for _ in range(4):
        names = [f"n{at}" for at in range(60)]
        deep = {"type": "object", "properties": dict.fromkeys(names, deep), "required": names}
    long = [{"enum": list(range(at, at + 50_000))} for at in (0, 50_000)]
    for alternatives in ([{"const": number} for number in range(10_000)], [deep, deep], long):
        with pytest.raises(TooManyError):
            Comparing(ROOT).overlapping(alternatives)


def test_the_bound_is_that_of_a_whole_schema():
    values = [{"enum": list(range(at, at + 1_000))} for at in (0, 1_000)]
    named = {"one": values[0], "two": values[1]}
    union = {"oneOf": [{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/two"}]}
    check_schema(json.dumps({"type": "array", "prefixItems": [union] * 2, "$defs": named}))
    with pytest.raises(DraftsmithError, match="too much to compare"):
        check_schema(json.dumps({"type": "array", "prefixItems": [union] * 60, "$defs": named}))
