"""Checks constraints before they are compiled: what is too long, too deep or not a constraint at all is refused.

Parts of JSON schema that cannot be enforced here are refused too, instead of being ignored. Keywords are only looked
for where a schema stands, so that a property may have any name. PyTorch is not imported here, so that mistakes on the
command line are reported at once.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from draftsmith.alternatives import Comparing, TooManyError
from draftsmith.dates import PATTERNS
from draftsmith.patterns import check_in_json, in_json, read_pattern
from draftsmith.references import DEEPEST, MOST_NAME, make_plain, places_in
from draftsmith.types import MOST_PATTERN, Constraint, DraftsmithError


class UnmetError(DraftsmithError):
    """No text can begin as a constraint asks."""


class TooHardError(DraftsmithError):
    """A constraint takes more time or memory to compile than is allowed."""


MOST_REPEATS = 10_000
"""Most items, characters or repetitions that a schema or a pattern may ask for."""

FORMATS = frozenset({
    "email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri", "uri-reference",
    "uri-template", "json-pointer", "relative-json-pointer",
})
_NOTES = frozenset({
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema", "$id",
    "$defs", "definitions", "$anchor", "discriminator",
})
_ALONE = {
    "$ref": frozenset[str](), "const": frozenset({"type"}), "enum": frozenset({"type"}), "anyOf": frozenset[str](),
    "oneOf": frozenset[str](), "allOf": frozenset[str](),
}
"""Keywords that decide a schema by themselves, with the keywords that may stand beside them."""
_KNOWN = _NOTES | _ALONE.keys() | {
    "type", "format", "pattern", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "items", "prefixItems", "minItems", "maxItems", "unevaluatedItems", "properties", "required",
    "patternProperties", "propertyNames", "additionalProperties", "unevaluatedProperties", "minProperties",
    "maxProperties",
}
_TELL_A_TYPE = frozenset({
    "properties", "additionalProperties", "unevaluatedProperties", "items", "prefixItems", "unevaluatedItems",
})
_OF_A_TYPE = _KNOWN - _NOTES - _ALONE.keys() - _TELL_A_TYPE - {"type"}
SURROGATES = re.compile("[\ud800-\udfff]")
"""Halves of characters, which no tokenizer reads."""
_REPEATS = re.compile(r"\{\s*(\d{1,18})\s*(?:,\s*(\d{0,18})\s*)?\}")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_FORMS: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (
        ("anyOf", "oneOf", "allOf"), lambda value: isinstance(value, list) and bool(value),
        "a list of schemas, at least one",
    ),
    (("prefixItems",), lambda value: isinstance(value, list), "a list of schemas"),
    (
        ("properties", "patternProperties", "$defs", "definitions"), lambda value: isinstance(value, dict),
        "an object with schemas",
    ),
)
"""What keywords hold that hold several schemas, in words too."""
_TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None, "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1,
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "string": lambda value: isinstance(value, str), "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
"""Whether a value is of a type."""
NAMES = {
    "json_schema": "the JSON schema", "json_object": "the grammar of JSON", "regex": "the regular expression",
    "grammar": "the grammar", "choice": "the list of choices",
}
"""What a constraint of each kind is called in messages."""


def check_constraint(constraint: Constraint) -> Constraint:
    """Return the constraint in the form to be compiled; DraftsmithError for one that must not be compiled."""
    text, name = constraint.text, NAMES[constraint.kind]
    match constraint.kind:
        case "json_schema":
            return Constraint("json_schema", check_schema(text))
        case "regex":
            check_pattern(text)
        case "grammar":
            check_depth(text, name)
            check_repeats(text, name)
        case "choice":
            choices_in(text)
    return constraint


def choices_in(text: str) -> list[str]:
    """Return the strings of a constraint of choices; DraftsmithError if `text` is not a JSON list of valid strings."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DraftsmithError("the list of choices is no JSON list of strings; fix it.") from error
    if not isinstance(found, list) or not found or not all(isinstance(one, str) and one for one in found):
        raise DraftsmithError("the list of choices has to be a JSON list of strings, none of them empty; fix it.")
    half = next((one for one in found if SURROGATES.search(one)), None)
    if half is not None:
        raise DraftsmithError(f"the choice {ascii(half)[:60]} has half of a surrogate pair, which is no text; fix it.")
    return found


def check_schema(text: str) -> str:
    """Return the schema in a form that is enforced as a whole.

    String lengths become patterns, because as lengths they would allow control characters, and so do formats with
    dates, because as formats they would allow 30 February. Values of `enum` that are of another `type` are left out,
    and required properties are described: the compiler passes over both. References lead by plain names to where they
    point, see `make_plain`.

    Raises:
        DraftsmithError: for anything that is not a JSON schema, and for keywords that cannot be enforced here.
    """
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise DraftsmithError(f"the JSON schema is not JSON ({error}); fix it.") from error
    except RecursionError as error:
        raise _too_deep() from error
    make_plain(schema, "the JSON schema")
    places, comparing = [("the JSON schema", schema, 1)], Comparing(schema)
    while places:
        name, found, depth = places.pop()
        if depth > DEEPEST:
            raise _too_deep()
        if isinstance(found, bool):
            continue
        if not isinstance(found, dict):
            raise DraftsmithError(f"{name} is {json.dumps(found)[:60]}; a schema is an object, true or false.")
        _check_one(name, found)
        _check_together(name, found, comparing)
        _check_values(name, found)
        _check_names(name, found)
        if "minLength" in found or "maxLength" in found:
            most = found.pop("maxLength", "")
            found["pattern"] = f'^[^\\x00-\\x1f"\\\\]{{{found.pop("minLength", 0)},{most}}}$'
        if found.get("format") in PATTERNS:
            found["pattern"] = PATTERNS[found.pop("format")]
        # Names of the client's choice may be long, and there may be many inside each other.
        places += [(f"{name[:MOST_NAME]}, {key[:MOST_NAME]}", below, depth + 1) for key, below in _below(found)]
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise DraftsmithError(f"the JSON schema is not JSON ({error}); use numbers that are finite.") from error


def check_pattern(pattern: str, name: str = "the regular expression") -> list[str]:
    """Return the tokens of a pattern.

    Raises:
        DraftsmithError: for a pattern that is too long or too deep, has too many repetitions, or would be compiled to
            something else than it says.
    """
    if len(pattern) > MOST_PATTERN:
        raise DraftsmithError(f"{name} has {len(pattern)} characters; it may have {MOST_PATTERN}.")
    check_depth(pattern, name)
    check_repeats(pattern, name)
    return read_pattern(pattern, name)


def _pattern_in_json(pattern: str, name: str) -> str:
    """Return a pattern as it is compiled for strings in JSON; raises like `check_pattern`, see `check_in_json` too."""
    tokens = check_pattern(pattern, name)
    check_in_json(tokens, name)
    return in_json(tokens)


def check_depth(text: str, name: str) -> None:
    """Raise DraftsmithError if brackets are nested too deep; brackets in literals count too."""
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}" and depth > 0)
        if depth > DEEPEST:
            raise DraftsmithError(f"{name} has more than {DEEPEST} brackets inside each other; make it simpler.")


def check_repeats(text: str, name: str) -> None:
    """Raise DraftsmithError if the counts of repetitions such as `{2,5}` are too large together."""
    counts = [int(most or least) for least, most in _REPEATS.findall(text)]
    if sum(counts) > MOST_REPEATS:
        raise DraftsmithError(f"{name} repeats something {sum(counts)} times; the most is {MOST_REPEATS}.")


def _check_one(name: str, schema: dict[str, Any]) -> None:
    """Check the keywords of one schema, but not the schemas inside it."""
    unknown = next((key for key in schema if key not in _KNOWN), None)
    if unknown is not None:
        raise DraftsmithError(f"{name} has {unknown!r}, which no text can be held to here; leave it out.")
    for keys, fits, wanted in _FORMS:
        wrong = next((key for key in keys if key in schema and not fits(schema[key])), None)
        if wrong is not None:
            raise DraftsmithError(f"{name} has {wrong} = {json.dumps(schema[wrong])[:60]}; give {wanted}.")
    for key, beside in _ALONE.items():
        ignored = next((other for other in schema if other != key and other not in _NOTES | beside), None)
        if key in schema and ignored is not None:
            raise DraftsmithError(
                f"{name} has {ignored!r} beside {key!r}, and only the latter could be kept; put them into one."
            )
    if len(schema.get("allOf", ())) > 1:
        raise DraftsmithError(f"{name} has several schemas in 'allOf', which cannot be kept together; join them.")
    reference = schema.get("$ref", "#")
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise DraftsmithError(f"{name} refers to {reference!r}; only what begins with #/ in the schema can be kept.")
    form = schema.get("format", "uuid")
    if not isinstance(form, str) or form not in FORMATS:
        raise DraftsmithError(
            f"{name} has the format {form!r}; those that can be kept are {', '.join(sorted(FORMATS))}."
        )
    bare = next((key for key in schema if key in _OF_A_TYPE), None)
    if bare is not None and "type" not in schema and not schema.keys() & _TELL_A_TYPE:
        raise DraftsmithError(f"{name} has {bare!r} but no 'type', without which it cannot be kept; add the type.")
    given = ["format"] * ("format" in schema) + ["pattern"] * ("pattern" in schema)
    given += ["minLength or maxLength"] * ("minLength" in schema or "maxLength" in schema)
    if len(given) > 1:
        raise DraftsmithError(f"{name} has {' and '.join(given)}, of which only one can be kept; leave the others out.")
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = _pattern_in_json(schema["pattern"], f"the pattern of {name}")
    if "patternProperties" in schema:
        named = {_pattern_in_json(one, f"a pattern of {name}"): of for one, of in schema["patternProperties"].items()}
        if len(named) < len(schema["patternProperties"]):
            raise DraftsmithError(f"{name} has the same pattern twice in 'patternProperties'; join them.")
        schema["patternProperties"] = named
    for key in _COUNTS:
        count = schema.get(key, 0)
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MOST_REPEATS:
            raise DraftsmithError(f"{name} has {key} = {count!r}; use a whole number from 0 to {MOST_REPEATS}.")


def _check_together(name: str, schema: dict[str, Any], comparing: Comparing) -> None:
    """Refuse keywords that hold by themselves, but of which only one would be kept together."""
    try:
        both = comparing.overlapping(schema.get("oneOf", ()))
    except TooManyError:
        message = f"{name} has a 'oneOf' with too much to compare; use 'anyOf', or make it smaller."
        raise DraftsmithError(message) from None
    if both is not None:
        raise DraftsmithError(
            f"{name} has 'oneOf' with the alternatives {both[0]} and {both[1]}, which one value might fit both; use "
            "'anyOf', or give them other types, values of 'const', or a required property that tells them apart."
        )
    vacuous: tuple[Any, ...] = (None, True, {}, {"type": "string"})
    names = next((key for key in ("patternProperties", "propertyNames") if schema.get(key) not in vacuous), "")
    if names and schema.get("properties"):
        raise DraftsmithError(
            f"{name} has 'properties' beside {names!r}, which would not hold for what 'properties' describes; use one."
        )
    others = (schema.get(key, False) for key in ("additionalProperties", "unevaluatedProperties"))
    required = schema.get("required", [])
    sure = max(1, len(set(map(str, required)))) if isinstance(required, list) else 1  # none of those is left out
    if (names or any(one is not False for one in others)) and schema.get("minProperties", 0) > sure:
        raise DraftsmithError(
            f"{name} has minProperties = {schema['minProperties']}, but names of any choice, of which one could come "
            "twice; leave it out, or describe the properties."
        )


def _check_values(name: str, schema: dict[str, Any]) -> None:
    """Leave out the values that are of another type than the schema's; refuse it if none is left."""
    types = schema.get("type")
    if types is None or not schema.keys() & {"const", "enum"}:
        return
    words = types if isinstance(types, list) else [types]
    allowed = [fits for word, fits in _TYPES.items() if word in words]
    values = schema.get("enum", [schema.get("const")])
    if not isinstance(values, list):
        raise DraftsmithError(f"{name} has enum = {json.dumps(values)[:60]}; give a list of values.")
    kept = [value for value in values if any(fits(value) for fits in allowed)]
    if not kept:
        raise DraftsmithError(f"{name} has no value of its type {json.dumps(types)[:60]}; correct one of them.")
    if "enum" in schema:
        schema["enum"] = kept


def _check_names(name: str, schema: dict[str, Any]) -> None:
    """Describe all required properties; refuse those of which it does not say plainly what they may be.

    A server does this before anything bounds its time: so no pattern of a client's is run, and nothing is multiplied.
    """
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
        raise DraftsmithError(f"{name} has required = {json.dumps(required)[:60]}; give a list of names.")
    described = schema.get("properties", {})
    missing = [one for one in required if one not in described]
    if not missing:
        return
    rest = schema.get("additionalProperties", schema.get("unevaluatedProperties", True))
    if rest not in (True, {}) or schema.get("patternProperties") or schema.get("propertyNames", True) is not True:
        raise DraftsmithError(
            f"{name} requires {missing[0][:MOST_NAME]!r}, which its properties do not describe; describe it there."
        )
    schema["properties"] = described | dict.fromkeys(missing, True)


def _below(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas directly inside this one, with their names."""
    names = schema.get("propertyNames")
    if isinstance(names, dict):
        names.setdefault("type", "string")
    for name, place in places_in(schema):
        yield name, place.schema


def _too_deep() -> DraftsmithError:
    return DraftsmithError(f"the JSON schema is more than {DEEPEST} levels deep; make it flatter.")
