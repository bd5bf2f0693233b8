"""The schema that tool calls must follow, made from the schemas of the tools."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from draftsmith.references import NAMED, found_at, make_plain
from draftsmith.serving.errors import bad
from draftsmith.serving.openai_fields import Tool
from draftsmith.types import DraftsmithError

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_VALUES = frozenset({"const", "enum", "default", "examples"})
"""Keywords that hold values; those are no schemas, whatever they look like."""


def calls_schema(tools: Sequence[Tool], most: int | None) -> dict[str, Any]:
    """Return the schema of a list of one call to `most` calls; ApiError as for `arguments_schema`."""
    defined: dict[str, Any] = {}
    kinds = []
    for number, tool in enumerate(tools):
        arguments, key = arguments_schema(tool), f"tool{number}"
        # References start from the root, which is a different schema now.
        moved = _moved(arguments, f"#/$defs/{key}")
        if moved != arguments:
            defined[key], arguments = moved, {"$ref": f"#/$defs/{key}"}
        kinds.append({
            "type": "object", "properties": {"name": {"const": tool.function.name}, "arguments": arguments},
            "required": ["name", "arguments"], "additionalProperties": False,
        })
    limit = {} if most is None else {"maxItems": most}
    items = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    return {"type": "array", "items": items, "minItems": 1, **limit, **({"$defs": defined} if defined else {})}


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments, which form an object; ApiError if its parameters are no object."""
    name, written = tool.function.name[:40], tool.function.parameters or NO_ARGUMENTS
    for place in ("$defs", "definitions"):
        if not isinstance(written.get(place, {}), dict):
            raise bad(f"the tool {name!r} has a {place} that is no object; make it one.", "tools")
    try:
        # References are made plain first, because alternatives that are left out change the places of others.
        given = deepcopy(written)
        make_plain(given, f"the schema of the tool {name!r}")
        found = _of_objects(given, given, {})
    except DraftsmithError as error:
        raise bad(str(error), "tools") from error
    except RecursionError as error:
        raise bad(
            f"the tool {name!r} has parameters that are too deep, or references that lead too far; make them simpler.",
            "tools",
        ) from error
    if found is None:
        raise bad(f'the tool {name!r} has parameters that are no object; give a schema of the type "object".', "tools")
    return found


def _of_objects(schema: Any, root: dict[str, Any], allowing: dict[str, bool]) -> Any:
    """Return a schema without its alternatives that are no objects; None where nothing is left.

    Args:
        root: the schema that references start from; references are not replaced.
        allowing: whether what a reference leads to allows objects. Each is followed once, however many alternatives
            share it; one that leads back to itself is taken to allow some meanwhile.
    """
    if not isinstance(schema, dict):
        return schema
    kinds = schema.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        return None
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference not in allowing:
            allowing[reference] = True
            # What is none of its references leads nowhere, which is refused later.
            found = found_at(root, reference) if reference[:1] == "#" else True
            allowing[reference] = _of_objects(found, root, allowing) is not None
        return schema if allowing[reference] else None
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            fitting = [found for one in schema[key] if (found := _of_objects(one, root, allowing)) is not None]
            return {**schema, key: fitting} if fitting else None
    if "const" in schema:
        return schema if isinstance(schema["const"], dict) else None
    if isinstance(schema.get("enum"), list):
        objects = [one for one in schema["enum"] if isinstance(one, dict)]
        return {**schema, "enum": objects} if objects else None
    # Beside "allOf", a type could not be enforced.
    return schema if "allOf" in schema else {**schema, "type": "object"}


def _moved(schema: Any, root: str) -> Any:
    """Return a schema whose references start from another root."""
    if isinstance(schema, list):
        return [_moved(one, root) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, below in schema.items():
        if key == "$ref" and isinstance(below, str):
            found[key] = root + below[1:] if below == "#" or below.startswith("#/") else below
        elif key in NAMED and isinstance(below, dict):
            found[key] = {name: _moved(one, root) for name, one in below.items()}
        else:
            found[key] = below if key in _VALUES else _moved(below, root)
    return found
