"""References of a JSON schema: JSON pointers (RFC 6901); the compiler reads only plain names between slashes."""

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

NOWHERE = object()
"""What is found where a reference leads nowhere."""
_SPECIAL = frozenset("/~%")


def keys_of(reference: str) -> list[str]:
    """Return the names and numbers of a reference such as `#/$defs/a~1b`, from the root on: `$defs` and `a/b`."""
    names = unquote(reference).split("/")[1:]
    return [name.replace("~1", "/").replace("~0", "~") for name in names]


def found_at(root: Any, keys: Iterable[str]) -> Any:
    """Return what stands at a place below the root; NOWHERE where nothing does."""
    found = root
    for key in keys:
        found = _inside(found, key)
    return found


def make_plain(root: dict[str, Any], holders: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Move what references cannot reach by plain names to `$defs`, leaving a reference in its place.

    Every reference has to lead somewhere.

    Args:
        root: the schema; changed in place.
        holders: the schemas in it that refer to others.

    Returns:
        what to write for each reference.
    """
    # All are looked up before anything is moved, because some lead through what is moved.
    places = {holder["$ref"]: keys_of(holder["$ref"]) for holder in holders}
    found = {reference: (found_at(root, keys[:-1]), found_at(root, keys)) for reference, keys in places.items()}
    told: dict[str, str] = {}
    moved: dict[tuple[str, ...], str] = {}
    for reference, (around, schema) in found.items():
        keys = places[reference]
        if _is_plain(root, keys):
            told[reference] = "/".join(["#", *keys])
            continue
        if tuple(keys) not in moved:
            definitions = root.setdefault("$defs", {})
            name = _free_name(definitions)
            definitions[name] = schema
            around[int(keys[-1]) if isinstance(around, list) else keys[-1]] = {"$ref": f"#/$defs/{name}"}
            moved[tuple(keys)] = name
        told[reference] = f"#/$defs/{moved[tuple(keys)]}"
    return told


def _inside(found: Any, key: str) -> Any:
    if isinstance(found, dict):
        return found.get(key, NOWHERE)
    if isinstance(found, list) and key.isascii() and key.isdigit() and len(key) < 10 and int(key) < len(found):
        return found[int(key)]
    return NOWHERE


def _is_plain(root: Any, keys: Iterable[str]) -> bool:
    """Say whether the compiler finds a place by its names as they are."""
    found = root
    for key in keys:
        if not key or not isinstance(found, dict) or not _SPECIAL.isdisjoint(key):
            return False
        found = found.get(key)
    return True


def _free_name(definitions: Mapping[str, Any]) -> str:
    number = len(definitions)
    while f"moved{number}" in definitions:
        number += 1
    return f"moved{number}"
