"""The schemas of tools inside the one that calls are held to: references, and arguments that are objects."""

import json
from functools import cache
from typing import Any

import pytest
from xgrammar import GrammarMatcher

from draftsmith.engine.requests.grammars import Grammars
from draftsmith.serving.errors import ApiError
from draftsmith.serving.openai_fields import Function, Tool
from draftsmith.serving.tool_schemas import arguments_schema, calls_schema
from draftsmith.types import Constraint
from tests.serving.toy import target

TREE = {
    "type": "object", "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["v"], "additionalProperties": False,
}


def tool(name: str, parameters: dict[str, Any] | None) -> Tool:
    return Tool(type="function", function=Function(name=name, parameters=parameters))


@cache
def grammars() -> Grammars:
    return Grammars(target())


def fits(schema: dict[str, Any], name: str, arguments: str) -> bool:
    grammar = grammars().compiled(Constraint.of_schema(schema))
    matcher = GrammarMatcher(grammar, terminate_without_stop_token=True)
    return matcher.accept_string(f'[{{"name": "{name}", "arguments": {arguments}}}]') and matcher.is_terminated()


@pytest.mark.parametrize("others", [(), (tool("clock", None),)], ids=["alone", "beside another one"])
def test_a_tree_is_held_to_its_own_schema(others: tuple[Tool, ...]):
    schema = calls_schema([*others, tool("tree", TREE)], 1)
    for arguments in ('{"v": 1}', '{"v": 1, "kids": [{"v": 2, "kids": [{"v": 3}]}, {"v": 4}]}'):
        assert fits(schema, "tree", arguments), arguments
    for arguments in (
        '{"v": 1, "kids": [{"w": 2}]}', '{"v": 1, "kids": [{"v": "x"}]}', '{"v": 1, "kids": [[]]}',
        '{"v": 1, "kids": [{"name": "tree", "arguments": {"v": 1}}]}',
    ):
        assert not fits(schema, "tree", arguments), arguments


def test_references_to_properties_and_definitions_are_followed():
    parameters = {
        "type": "object", "required": ["a", "b", "c"], "additionalProperties": False, "$defs": {"n": {"const": 5}},
        "properties": {"a": {"enum": ["x", "y"]}, "b": {"$ref": "#/properties/a"}, "c": {"$ref": "#/$defs/n"}},
    }
    schema = calls_schema([tool("f", parameters)], None)
    assert fits(schema, "f", '{"a": "x", "b": "y", "c": 5}')
    for arguments in ('{"a": "x", "b": "z", "c": 5}', '{"a": "x", "b": "x", "c": 6}'):
        assert not fits(schema, "f", arguments), arguments


def test_what_alternatives_share_is_followed_once():
    """Followed for each of them, forty levels of two would take weeks, and the server with them."""
    ends = {"last": {"type": "object"}, "none": {"type": "string"}}
    for end, kept in (("last", True), ("none", False)):
        shared = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(39)}
        parameters = {"$defs": {**shared, **ends, "d39": {"$ref": f"#/$defs/{end}"}}, "$ref": "#/$defs/d0"}
        if kept:
            assert arguments_schema(tool("f", parameters)) == parameters
            continue
        with pytest.raises(ApiError, match="no object"):
            arguments_schema(tool("f", parameters))


def test_references_that_lead_too_far_are_refused():
    chain = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(3000)}
    with pytest.raises(ApiError, match="references that lead too far"):
        arguments_schema(tool("f", {"$defs": {**chain, "d3000": {"type": "object"}}, "$ref": "#/$defs/d0"}))


def test_two_tools_may_define_the_same_name_differently():
    def defining(kind: str) -> dict[str, Any]:
        return {
            "type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"],
            "additionalProperties": False, "$defs": {"n": {"type": kind}},
        }

    schema = calls_schema([tool("f", defining("integer")), tool("g", defining("boolean"))], None)
    assert fits(schema, "f", '{"a": 3}') and fits(schema, "g", '{"a": true}')
    assert not fits(schema, "f", '{"a": true}') and not fits(schema, "g", '{"a": 3}')


def test_what_only_looks_like_a_reference_stays():
    parameters = {
        "type": "object", "default": {"$ref": "#"}, "examples": [{"$ref": "#/x"}], "required": ["$ref", "p", "e", "c"],
        "properties": {
            "$ref": {"type": "integer"}, "p": {"$ref": "#/properties/$ref"}, "e": {"enum": [{"$ref": "#"}]},
            "c": {"const": {"$ref": "#/y"}}, "const": {"$ref": "#/properties/p"},
        },
        "additionalProperties": False,
    }
    schema = calls_schema([tool("f", parameters)], None)
    moved = schema["$defs"]["tool0"]
    assert moved["properties"] == {
        **parameters["properties"], "p": {"$ref": "#/$defs/tool0/properties/$ref"},  # type: ignore[dict-item]
        "const": {"$ref": "#/$defs/tool0/properties/p"},
    }
    assert {**moved, "properties": 0} == {**parameters, "properties": 0}
    assert fits(schema, "f", '{"$ref": 1, "p": 2, "e": {"$ref":"#"}, "c": {"$ref":"#/y"}, "const": 3}')
    assert not fits(schema, "f", '{"$ref": 1, "p": "x", "e": {"$ref":"#"}, "c": {"$ref":"#/y"}}')


def test_a_schema_without_references_stands_where_it_is_used():
    parameters = {"type": "object", "properties": {"a": {"enum": [1]}}, "$defs": {"unused": {"const": {"$ref": "#"}}}}
    schema = calls_schema([tool("f", parameters)], 3)
    assert schema["items"]["properties"]["arguments"] == parameters and "$defs" not in schema
    assert schema["maxItems"] == 3


def test_references_of_a_tool_are_followed_as_json_pointers():
    parameters = {
        "type": "object", "properties": {"x": {"$ref": "#/$defs/a~1b"}}, "required": ["x"],
        "additionalProperties": False, "$defs": {"a/b": {"const": 5}},
    }
    schema = calls_schema([tool("f", parameters), tool("clock", None)], 1)
    assert fits(schema, "f", '{"x": 5}') and not fits(schema, "f", '{"x": 6}')


OBJECTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "says nothing of types": ({"description": "x"}, {"description": "x", "type": "object"}),
    "an object among others": ({"type": ["null", "object"]}, {"type": "object"}),
    "one of several": (
        {"anyOf": [{"type": "string"}, {"properties": {}}]}, {"anyOf": [{"properties": {}, "type": "object"}]},
    ),
    "several values": ({"enum": ["x", {}, 3]}, {"enum": [{}]}),
    "defined": ({"$ref": "#/$defs/a", "$defs": {"a": TREE}}, {"$ref": "#/$defs/a", "$defs": {"a": TREE}}),
    "itself": ({"$ref": "#"}, {"$ref": "#"}),
    "an alternative that is left out": (
        {"anyOf": [{"type": "integer"}, {"type": "object", "properties": {"x": {"$ref": "#/anyOf/0"}}}]},
        {
            "anyOf": [{"type": "object", "properties": {"x": {"$ref": "#/$defs/moved0"}}}],
            "$defs": {"moved0": {"type": "integer"}},
        },
    ),
}
NONE: dict[str, dict[str, Any]] = {
    "a string": {"type": "string"},
    "a string, or nothing": {"type": ["string", "null"]},
    "no type at all": {"type": 3},
    "values": {"enum": ["x", 3]},
    "a value": {"const": "x"},
    "one of several": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "integer"}}},
    "one under another name": {"anyOf": [{"$ref": "#/$defs/a~1b"}], "$defs": {"a/b": {"type": "integer"}}},
}


@pytest.mark.parametrize("name", OBJECTS)
def test_arguments_are_objects(name: str):
    given, expected = OBJECTS[name]
    before = json.dumps(given)
    assert arguments_schema(tool("f", given)) == expected and json.dumps(given) == before


@pytest.mark.parametrize("name", NONE)
def test_arguments_that_are_no_objects_are_refused(name: str):
    with pytest.raises(ApiError, match="the tool 'f' has parameters that are no object") as caught:
        arguments_schema(tool("f", NONE[name]))
    assert (caught.value.status, caught.value.param) == (400, "tools")


def test_a_reference_of_a_tool_that_leads_nowhere_is_refused():
    with pytest.raises(ApiError, match="the tool 'f' refers to '#/x/y', where no schema stands") as caught:
        arguments_schema(tool("f", {"$ref": "#/x/y"}))
    assert (caught.value.status, caught.value.param) == (400, "tools")
