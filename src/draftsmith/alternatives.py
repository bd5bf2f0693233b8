"""Whether the alternatives of a JSON schema exclude each other, so that what is written for one fits no other."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from draftsmith.references import found_at

DEEPEST = 4
"""References that are followed one after the other, and schemas inside each other that are looked into."""
MOST = 50_000
"""How much is compared of one whole: one for each pair of schemas, and one for each of the values and names in it."""
_JOINED = ("anyOf", "oneOf", "allOf")
_ARRAY = ("items", "prefixItems", "unevaluatedItems")
_OBJECT = ("properties", "additionalProperties", "unevaluatedProperties")
_Schema = Mapping[str, Any]


class TooManyError(Exception):
    """There is more to compare than is quickly done."""


class Comparing:
    """Compares alternatives of one schema, and no more than is quickly done: a stranger may have sent it.

    Args:
        root: the whole schema, whose references are plain.
    """

    def __init__(self, root: Any) -> None:
        self._root, self._left = root, MOST
        self._found: dict[str, Any] = {}  # by reference, which may be long, and may be followed for every pair

    def overlapping(self, alternatives: Sequence[Any]) -> tuple[int, int] | None:
        """Return the numbers of two alternatives that one value may fit, None if there are none.

        They exclude each other if it can be told from their types, from their values, or from a property that both
        require; or if each requires a property that the other one does not have.

        Raises:
            TooManyError: this and what was compared before is too much.
        """
        for first, second in combinations(range(len(alternatives)), 2):
            if not self._are_apart(alternatives[first], alternatives[second], DEEPEST):
                return first, second
        return None

    def _are_apart(self, one: Any, other: Any, deeper: int) -> bool:
        """Return whether it can be told that what is written for one schema never fits the other."""
        one, other = self._resolved(one), self._resolved(other)
        if one is None or other is None or deeper < 0:
            return False
        self._spend(1 + sum(len(schema["enum"]) for schema in (one, other) if isinstance(schema.get("enum"), list)))
        for joined, beside in ((one, other), (other, one)):
            inner = next((joined[key] for key in _JOINED if isinstance(joined.get(key), list)), None)
            if inner is not None:
                return all(self._are_apart(single, beside, deeper - 1) for single in inner)
        kinds = _kinds(one), _kinds(other)
        if not kinds[0] & kinds[1]:
            return True
        values = _values(one), _values(other)
        if values[0] is not None and values[1] is not None:
            return not values[0] & values[1]
        if not kinds[0] == kinds[1] == {"object"}:
            return False
        names, others = _required(one), _required(other)
        self._spend(len(names) + len(others))
        described, beside = _properties(one), _properties(other)
        if any(self._are_apart(described.get(name), beside.get(name), deeper - 1) for name in sorted(names & others)):
            return True
        return _lacks(one, others) and _lacks(other, names)

    def _resolved(self, schema: Any) -> _Schema | None:
        """Follow references; None for what cannot be found, or is no object."""
        for _ in range(DEEPEST):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            reference = schema["$ref"]
            if not isinstance(reference, str):
                return None
            if reference not in self._found:
                self._found[reference] = found_at(self._root, reference)
            schema = self._found[reference]
        return schema if isinstance(schema, dict) and "$ref" not in schema else None

    def _spend(self, work: int) -> None:
        self._left -= work
        if self._left < 0:
            raise TooManyError


def _kinds(schema: _Schema) -> set[str]:
    """Return the types of JSON values that may fit; whole numbers are numbers."""
    every = {"null", "boolean", "number", "string", "array", "object"}
    values = _values(schema)
    if values is not None:
        return {kind for kind, _ in values}
    if "type" not in schema:
        return {"object"} if schema.keys() & set(_OBJECT) else {"array"} if schema.keys() & set(_ARRAY) else every
    words = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return {"number" if word == "integer" else word for word in words if isinstance(word, str)} or every


def _values(schema: _Schema) -> set[tuple[str, str]] | None:
    """Return the only values that fit, each with its type; None if there may be any, or values inside values."""
    if "const" not in schema and "enum" not in schema:
        return None
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    if not isinstance(values, list) or any(isinstance(value, dict | list) for value in values):
        return None
    return {_with_type(value) for value in values}


def _with_type(value: Any) -> tuple[str, str]:
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
    if any(schema.get(key, False) is not False for key in ("additionalProperties", "unevaluatedProperties")):
        return False
    if any(schema.get(key) for key in ("patternProperties", "propertyNames")):
        return False
    return bool(names - _properties(schema).keys() - _required(schema))
