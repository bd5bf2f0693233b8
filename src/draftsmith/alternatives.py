"""Whether the alternatives of a JSON schema exclude each other, so that what is written for one fits no other."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

DEEPEST = 4
"""References that are followed one after the other, and properties inside each other that are looked into."""
MOST = 20_000
"""Pairs of schemas that are compared, with their values and properties."""
_LONG = ("enum", "required", "type", "properties")
_OPEN = ("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames")
_Schema = Mapping[str, Any]


def overlapping(alternatives: Sequence[Any], root: Any) -> tuple[int, int] | None:
    """Return the numbers of two alternatives that one value may fit, None if there are none.

    They exclude each other if it can be told from their types, from their values, or from a property that both require;
    or if each requires a property that the other one does not have. Where that would take too long to find out, it
    counts as not told.

    Args:
        root: the whole schema, in which references are looked up.
    """
    comparing = _Comparing(root)
    for first, second in combinations(range(len(alternatives)), 2):
        if not comparing.are_apart(alternatives[first], alternatives[second], DEEPEST):
            return first, second
    return None


class _Comparing:
    """Compares schemas of one whole, and no more of them than is quickly done: a stranger may have sent them."""

    def __init__(self, root: Any) -> None:
        self._root, self._left = root, MOST

    def are_apart(self, one: Any, other: Any, deeper: int) -> bool:
        """Return whether it can be told that what is written for one schema never fits the other."""
        one, other = _resolved(one, self._root), _resolved(other, self._root)
        if one is None or other is None or not deeper:
            return False
        lists = [schema[key] for schema in (one, other) for key in _LONG if key in schema]
        self._left -= 1 + sum(len(some) for some in lists if isinstance(some, list | dict))
        if self._left < 0:
            return False
        kinds = _kinds(one), _kinds(other)
        if not kinds[0] & kinds[1]:
            return True
        values = _values(one), _values(other)
        if values[0] is not None and values[1] is not None:
            return not values[0] & values[1]
        if not kinds[0] == kinds[1] == {"object"}:
            return False
        names, others = _required(one), _required(other)
        described, beside = _properties(one), _properties(other)
        if any(self.are_apart(described.get(name), beside.get(name), deeper - 1) for name in names & others):
            return True
        return _lacks(one, others) and _lacks(other, names)


def _resolved(schema: Any, root: Any) -> _Schema | None:
    """Follow references; None for what cannot be found, or is no object."""
    for _ in range(DEEPEST):
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        path, schema = schema["$ref"], root
        for key in path.split("/")[1:] if isinstance(path, str) else ():
            schema = schema.get(key) if isinstance(schema, dict) else None
    return schema if isinstance(schema, dict) and "$ref" not in schema else None


def _kinds(schema: _Schema) -> set[str]:
    """Return the types of JSON values that may fit; whole numbers are numbers."""
    every = {"null", "boolean", "number", "string", "array", "object"}
    values = _values(schema)
    if values is not None:
        return {kind for kind, _ in values}
    if "type" not in schema:
        return {"object"} if "properties" in schema else every
    words = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return {"number" if word == "integer" else word for word in words if isinstance(word, str)} or every


def _values(schema: _Schema) -> set[tuple[str, str]] | None:
    """Return the only values that fit, each with its type; None if there may be any, or values inside values."""
    if "const" not in schema and "enum" not in schema:
        return None
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    if not isinstance(values, list) or any(isinstance(value, dict | list) for value in values):
        return None
    return {_told(value) for value in values}


def _told(value: Any) -> tuple[str, str]:
    if value is None or isinstance(value, bool):
        return ("null" if value is None else "boolean"), repr(value)
    if isinstance(value, str):
        return "string", value
    return "number", repr(int(value) if value == value // 1 else value)


def _required(schema: _Schema) -> set[str]:
    names = schema.get("required", [])
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def _properties(schema: _Schema) -> Mapping[str, Any]:
    described = schema.get("properties", {})
    return described if isinstance(described, dict) else {}


def _lacks(schema: _Schema, names: set[str]) -> bool:
    """Return whether what is written for a schema never has all of these properties."""
    if any(schema.get(key) not in (None, False, {}) for key in _OPEN):
        return False
    return bool(names - _properties(schema).keys() - _required(schema))
