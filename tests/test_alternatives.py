"""Alternatives of a schema are allowed where none of their values fits another one."""

import json
from typing import Any

import pytest

from draftsmith.alternatives import overlapping
from draftsmith.constraints import check_schema

CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "age": {"type": "integer"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "puppy"]}}, "required": ["kind"]}
NAMED = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
APART: dict[str, list[Any]] = {
    "types": [{"type": "null"}, {"type": ["string", "integer"]}, {"type": "object", "properties": {}}],
    "values": [{"const": 1}, {"enum": [2, "1", True]}, {"const": None}, {"const": 1.5}],
    "a property that tells": [CAT, DOG],
    "references": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
    "properties that others lack": [NAMED, {"type": "object", "properties": {"id": True}, "required": ["id"]}],
    "false": [{"type": "string"}, {"enum": [0, 1]}],
}
TOGETHER: dict[str, list[Any]] = {
    "whole numbers": [{"type": "integer"}, {"type": "number"}],
    "equal values": [{"const": 1}, {"enum": [3, 1.0]}],
    "a property of one alone": [NAMED, {"type": "object", "properties": {}}],
    "other properties allowed": [
        {**NAMED, "additionalProperties": True}, {"type": "object", "properties": {"id": True}, "required": ["id"]},
    ],
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
    assert overlapping(APART[name], ROOT) is None
    check_schema(json.dumps({"oneOf": APART[name], **ROOT}))


@pytest.mark.parametrize("name", TOGETHER)
def test_what_one_value_may_fit_is_found(name: str):
    assert overlapping(TOGETHER[name], ROOT) == (0, 1)
    assert overlapping([{"type": "boolean"}, *TOGETHER[name]], ROOT) is not None


def test_what_strangers_send_takes_no_time():
    many = [{"const": number} for number in range(100_000)]
    assert overlapping(many, ROOT) is not None
    deep: Any = {"type": "object", "properties": {}, "required": []}
    for _ in range(4):
        names = [f"n{at}" for at in range(60)]
        deep = {"type": "object", "properties": dict.fromkeys(names, deep), "required": names}
    assert overlapping([deep, deep], ROOT) == (0, 1)
    long = [{"enum": list(range(at, at + 50_000))} for at in range(0, 1_000_000, 50_000)]
    assert overlapping(long, ROOT) is not None
    assert overlapping(many[:100], ROOT) is None
