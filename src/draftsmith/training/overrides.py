"""Changes a recipe from the command line: `section.field=value`, and the message for anything of another form."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import yaml

from draftsmith.types import DraftsmithError

OPTIONS = {
    "target": ("--target {}", "target.name={}"),
    "data": ("--data {}", "data.sources.0.path={}"),
    "drafter": ("--family {}", "drafter.family={}"),
    "family": ("--family {}", "drafter.family={}"),
    "init_from": ("--drafter {}", "drafter.init_from={}"),
    "out": ("--out {}", "output.folder={}"),
    "output": ("--out {}", "output.folder={}"),
    "minutes": ("--minutes {}", None),
}
"""For words that are no sections: the option, and the key of the recipe, that they probably mean."""


def apply_override(values: dict[str, Any], override: str) -> dict[str, Any]:
    """Return the values with one `section.field=value` applied; a number in the path indexes a list."""
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise DraftsmithError(f"override {override!r} is not of the form section.field=value.")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise DraftsmithError(f"the value of override {override!r} is no YAML; quote it.") from error
    changed: dict[str, Any] = _put(values, keys, value, override)
    return changed


def _put(node: Any, keys: list[str], value: Any, override: str) -> Any:
    if not keys:
        return value
    if isinstance(node, list):
        if not keys[0].isdigit() or int(keys[0]) >= len(node):
            raise DraftsmithError(f"override {override!r} wants item {keys[0]!r} of {len(node)}; count from 0.")
        index = int(keys[0])
        return [*node[:index], _put(node[index], keys[1:], value, override), *node[index + 1 :]]
    if node is not None and not isinstance(node, dict):
        raise DraftsmithError(f"override {override!r} goes below {node!r}, which has no fields.")
    node = node or {}
    return {**node, keys[0]: _put(node.get(keys[0]), keys[1:], value, override)}


def keys_in(overrides: Sequence[str]) -> list[str]:
    """Return the keys that the overrides set; for an override of a whole section, the keys named in it."""
    found = []
    for override in overrides:
        key, _, value = override.partition("=")
        section = yaml.safe_load(value)
        found += [f"{key.strip()}.{name}" for name in section] if isinstance(section, dict) else [key.strip()]
    return found


def wrong_form(override: str, fields: Mapping[str, Sequence[str]]) -> str | None:
    """Return how to write an override that lacks its section or its field; None if its form is right.

    Args:
        fields: the fields of each section.
    """
    path, _, value = override.partition("=")
    key = path.strip()
    if "." in key or _is_mapping(value):
        return None
    if key in OPTIONS:
        option, full = (form and form.format(value) for form in OPTIONS[key])
        return f"{override!r} is no override; write {option}{f' (in a recipe: {full})' if full else ''}."
    if key in fields:
        return f"{override!r} is no override, as {key} has fields; write {key}.{fields[key][0]}=VALUE, for example."
    leaves = {leaf for known in fields.values() for leaf in known}
    near = [key] if key in leaves else get_close_matches(key, leaves, 1)
    if not near or (key not in leaves and get_close_matches(key, fields, 1, 0.7)):
        return None
    forms = [f"{section}.{near[0]}={value}" for section, known in fields.items() if near[0] in known]
    return f"{override!r} does not say which section; write {' or '.join(forms)}."


def _is_mapping(value: str) -> bool:
    try:
        return isinstance(yaml.safe_load(value), dict | type(None))
    except yaml.YAMLError:
        return False
