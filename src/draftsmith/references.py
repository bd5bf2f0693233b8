"""References of a JSON schema: JSON pointers (RFC 6901), made into the plain names that the compiler reads."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

from draftsmith.types import DraftsmithError

DEEPEST = 64
"""Most levels of a schema."""
MOST_NAME = 80
"""Characters that are told of the name of a place in a schema."""
NAMED = ("$defs", "definitions", "properties", "patternProperties")
"""Keywords whose values hold schemas under names of the client's choice."""
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "unevaluatedItems", "propertyNames", "additionalProperties", "unevaluatedProperties")
_SPECIAL = frozenset("/~%")
_NO_BYTE = re.compile("%(?![0-9A-Fa-f]{2})")
_NO_ESCAPE = re.compile("~(?![01])")


class Place(NamedTuple):
    """Where a schema stands: `holder[key]`."""

    holder: Any
    key: str | int

    @property
    def schema(self) -> Any:
        """What stands there."""
        return self.holder[self.key]


def places_in(schema: Mapping[str, Any]) -> Iterator[tuple[str, Place]]:
    """Yield where schemas stand directly inside this one, with their names."""
    for keyword in NAMED:
        found = schema.get(keyword)
        if isinstance(found, dict):
            yield from ((str(name), Place(found, name)) for name in found)
    for keyword in _LISTS:
        found = schema.get(keyword)
        if isinstance(found, list):
            yield from ((f"{keyword} {number}", Place(found, number)) for number in range(len(found)))
    for keyword in _SINGLE:
        if schema.get(keyword) is not None:
            yield keyword, Place(schema, keyword)


def make_plain(root: Any, name: str) -> None:
    """Let every reference of a schema lead to where it points by plain names; the schema is changed in place.

    What plain names cannot reach moves to `$defs`, and a reference takes its place.

    Args:
        name: what the schema is called in messages.

    Raises:
        DraftsmithError: a reference leads to no schema, or is no JSON pointer.
    """
    # All are looked up before anything moves, because some lead through what is moved.
    referring = list(_referring(root, name))
    found: dict[str, tuple[list[str], Place | None, bool]] = {}
    for told, schema in referring:
        reference = schema["$ref"]
        if reference not in found:
            keys = _keys_of(reference, told)
            found[reference] = keys, *_located(root, keys, told, reference)
    plain, moved = dict[str, str](), dict[tuple[int, str | int], str]()
    number = 0
    for reference, (keys, place, is_plain) in found.items():
        if place is None or is_plain:
            plain[reference] = "/".join(["#", *keys])
            continue
        spot = id(place.holder), place.key
        if spot not in moved:
            definitions = root.setdefault("$defs", {})
            if not isinstance(definitions, dict):
                raise DraftsmithError(f"{name} has $defs that are no object; make them one.")
            while f"moved{number}" in definitions:
                number += 1
            moved[spot] = f"#/$defs/moved{number}"
            definitions[f"moved{number}"] = place.schema
            place.holder[place.key] = {"$ref": moved[spot]}
        plain[reference] = moved[spot]
    for _, schema in referring:
        schema["$ref"] = plain[schema["$ref"]]


def found_at(root: Any, reference: str) -> Any:
    """Return what a plain reference leads to, None where nothing stands."""
    found = root
    for key in reference.split("/")[1:]:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _keys_of(reference: str, told: str) -> list[str]:
    """Return the names and numbers of a reference such as `#/$defs/a~1b`, from the root on: `$defs` and `a/b`."""
    try:
        pointer = None if _NO_BYTE.search(reference) else unquote(reference, errors="strict")
    except UnicodeDecodeError:
        pointer = None
    if pointer is None:
        raise DraftsmithError(
            f"{told} refers to {reference[:MOST_NAME]!r} with a '%' that stands for no character in UTF-8; write '%' "
            "as %25."
        )
    if _NO_ESCAPE.search(pointer):
        raise DraftsmithError(
            f"{told} refers to {reference[:MOST_NAME]!r} with a '~' that is neither ~0 nor ~1; write '~' as ~0 and '/' "
            "in a name as ~1."
        )
    return [key.replace("~1", "/").replace("~0", "~") for key in pointer.split("/")[1:]]


def _number(key: str) -> float:
    """Return the number of an entry of a list, infinity for what is none."""
    return int(key) if len(key) < 10 and key.isascii() and key.isdigit() and key == str(int(key)) else math.inf


def _referring(root: Any, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the schemas that refer to others in the same text, with their names."""
    left = [(name, root, 1)]
    while left:
        name, schema, depth = left.pop()
        if not isinstance(schema, dict) or depth > DEEPEST:
            continue
        reference = schema.get("$ref")
        if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
            yield name, schema
        left += [
            (f"{name[:MOST_NAME]}, {inner[:MOST_NAME]}", place.schema, depth + 1) for inner, place in places_in(schema)
        ]


def _located(root: Any, keys: Sequence[str], told: str, reference: str) -> tuple[Place | None, bool]:
    """Return where names lead, None for the root, and whether the compiler finds it by these names.

    They lead from schema to schema only: what stands within a value is none, whatever it looks like.
    """
    place, schema, rest = None, root, iter(keys)
    is_plain = all(key and _SPECIAL.isdisjoint(key) for key in keys)
    for keyword in rest:
        inner = schema.get(keyword) if isinstance(schema, dict) else None
        if keyword in NAMED and isinstance(inner, dict) and (key := next(rest, None)) in inner:
            place = Place(inner, str(key))
            is_plain = is_plain and keyword != "patternProperties"  # whose patterns are written in another way later
        elif keyword in _LISTS and isinstance(inner, list) and (number := _number(next(rest, ""))) < len(inner):
            place, is_plain = Place(inner, int(number)), False
        elif keyword in _SINGLE and inner is not None:
            place = Place(schema, keyword)
        else:
            raise DraftsmithError(
                f"{told} refers to {reference[:MOST_NAME]!r}, where no schema stands; define it there, or correct the "
                "reference."
            )
        schema = place.schema
    return place, is_plain
