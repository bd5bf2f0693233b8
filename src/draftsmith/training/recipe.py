"""The recipe of a training run: one typed YAML file, changed from the command line by `section.field=value`."""

from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError

from draftsmith.drafters.config import explain
from draftsmith.training.overrides import apply_override, wrong_form
from draftsmith.training.sections import (
    DataSection,
    DistillationSection,
    DrafterSection,
    EvaluationSection,
    GroundTruthSection,
    JointSection,
    OnPolicySection,
    OptimizerSection,
    OutputSection,
    Section,
    TargetSection,
)
from draftsmith.types import DraftsmithError


class Recipe(Section):
    """A whole run."""

    target: TargetSection = TargetSection()
    drafter: DrafterSection = DrafterSection.model_validate({})
    data: DataSection = DataSection()
    stage1: GroundTruthSection = GroundTruthSection()
    stage2: OnPolicySection = OnPolicySection()
    optimizer: OptimizerSection = OptimizerSection()
    distillation: DistillationSection = DistillationSection()
    output: OutputSection = OutputSection()
    evaluation: EvaluationSection = EvaluationSection()
    joint: JointSection | None = None
    seed: Annotated[int, Field(ge=0)] = Field(default=0, description="of everything random")

    def to_yaml(self) -> str:
        """Return the whole recipe, defaults included; reading it back gives the same recipe."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def load_recipe(path: str | Path, overrides: tuple[str, ...] | list[str] = ()) -> Recipe:
    """Read a YAML recipe and apply `section.field=value` overrides, values typed as in YAML.

    Raises:
        DraftsmithError: for a missing or broken file, an unknown key (with the nearest right one) or a bad value.
    """
    path = Path(path)
    if not path.is_file():
        names = [str(p) for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        near = get_close_matches(str(path), names, n=1)
        raise DraftsmithError(f"recipe {path} does not exist; " + (f"did you mean {near[0]}?" if near else "check it."))
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise DraftsmithError(f"recipe {path} is no YAML ({' '.join(str(error).split())}); fix it.") from error
    return build_recipe({} if values is None else values, overrides)


def build_recipe(values: Any, overrides: tuple[str, ...] | list[str] = ()) -> Recipe:
    """Check plain values after applying the overrides, and return the recipe."""
    if not isinstance(values, dict):
        raise DraftsmithError(f"a recipe is a mapping of sections, not {type(values).__name__}; see recipes/.")
    for override in overrides:
        check_form(override)
        values = apply_override(values, override)
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise DraftsmithError(_explain(error)) from error


def check_vocabulary(recipe: Recipe, tokens: int, target: str) -> None:
    """Refuse a drafted vocabulary larger than the target's.

    Args:
        tokens: the target's tokens.
        target: the target's name, for the message.
    """
    size = recipe.drafter.config.draft_vocab_size
    if size > tokens:
        raise DraftsmithError(
            f"recipe key drafter.draft_vocab_size is {size}, more than the target's {tokens} tokens ({target}); use 0 "
            "to score all of them, or a smaller number."
        )


def check_form(override: str) -> None:
    """Refuse an override of a whole section, or of a key without its section; the message shows the right form."""
    if "=" not in override:
        return
    fields = {
        name: list(model_of(field.annotation).model_fields)
        for name, field in Recipe.model_fields.items() if model_of(field.annotation) is not None
    }
    advice = wrong_form(override, fields)
    if advice is not None:
        raise DraftsmithError(advice)


def model_of(annotation: Any) -> Any:
    """Return the section class in a type, alone, in a tuple or with None; None if there is no section."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := model_of(part)) is not None), None)


def _fields_at(location: tuple[int | str, ...]) -> list[str]:
    """Return the field names of the section that contains an error's location."""
    model: Any = Recipe
    for key in location:
        if isinstance(key, str):
            model = model.model_fields[key].annotation
        else:
            model = next(item for item in get_args(model) if item is not Ellipsis)
        # The type of an optional section is a union with None.
        model = next(iter(get_args(model)), model) if type(None) in get_args(model) else model
    return list(model.model_fields)


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    known = _fields_at(first["loc"][:-1]) if first["type"] == "extra_forbidden" else []
    return f"recipe key {explain(error, known)}"
