"""Every key of a recipe, read from its models: what `draftsmith train --keys` lists."""

import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from draftsmith.training.recipe import Recipe, model_of
from draftsmith.training.sections import DrafterSection


@dataclass(frozen=True)
class Key:
    """A key as an override writes it, its type, its default as YAML has it, and what it means."""

    name: str
    kind: str
    default: str
    meaning: str


def recipe_keys(drafter: DrafterSection | None = None) -> list[Key]:
    """Return all keys of a recipe, with the options of the family of a section `drafter`, by default the usual one."""
    return list(_keys(Recipe, "", drafter or DrafterSection.model_validate({})))


def _keys(model: type[BaseModel], where: str, drafter: DrafterSection) -> Iterator[Key]:
    # If the fields of a section have no description of their own, its docstring describes it as a whole.
    whole = (inspect.getdoc(model) or "").splitlines()[0]
    for name, field in model.model_fields.items():
        key, section = f"{where}{name}", model_of(field.annotation)
        listed = get_origin(field.annotation) is tuple
        if section is None or listed:
            default = field.get_default(call_default_factory=True)
            kind = "list" if listed else kind_of(field.annotation)
            yield Key(key, kind, json.dumps(default, ensure_ascii=False), field.description or whole)
        if section is not None:
            yield from _keys(section, f"{key}.0." if listed else f"{key}.", drafter)
    if model is DrafterSection:
        for name, option in drafter.config.options().items():
            default = json.dumps(getattr(drafter.config, name), ensure_ascii=False, default=str)
            meaning = f"{option.description} ({drafter.family})"
            yield Key(f"{where}{name}", kind_of(option.annotation), default, meaning)


def kind_of(annotation: Any) -> str:
    """Return a type in the words of a recipe."""
    if get_origin(annotation) is Literal:
        return " | ".join(map(str, get_args(annotation)))
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type):
        return {int: "whole number", float: "number", bool: "true | false", str: "text"}.get(annotation, "list")
    parts = get_args(annotation)
    if get_origin(annotation) is tuple:
        return "list"
    # Limits are beside the type itself, in Annotated.
    if parts and not isinstance(parts[1], type):
        return kind_of(parts[0])
    return " | ".join(kind_of(part) for part in parts)
