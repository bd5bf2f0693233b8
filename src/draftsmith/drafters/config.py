"""Options of drafter families: one frozen class per family, which states each option's name, limits, default, meaning.

A recipe or a command sets the options. Fields that come from the target are marked `OF_TARGET`; they are 0 or empty
until `for_target` fills them in, and are written into config.json beside the options. All values are checked here,
wherever they come from; a mistake is reported in one sentence that names the value and how to fix it.
"""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.fields import FieldInfo

from draftsmith.types import DraftsmithError

if TYPE_CHECKING:
    from draftsmith.targets import Target

OF_TARGET = "decided by the target"
"""Marks, in `Annotated`, fields that no recipe sets."""
FREE = "shapes no weights"
"""Marks fields that may differ from the drafter that a new one starts from: the draft, the loss, the first weights."""

Divergence = Literal["forward_kl", "reverse_kl", "js", "tv", "lk"]
"""A measure of how far apart two distributions are, see `trainable.divergence`."""

Count = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=0)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Counts = tuple[Count, ...]


class Config(BaseModel):
    """The options of a family. Every field has a description, which `draftsmith families` shows."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def options(cls) -> dict[str, FieldInfo]:
        """Return the fields that a user may set."""
        return {name: field for name, field in cls.model_fields.items() if OF_TARGET not in field.metadata}

    @classmethod
    def read(cls, values: Mapping[str, Any], where: str = "") -> Self:
        """Check a user's values; DraftsmithError names the wrong key, after `where`, and the most similar right one."""
        for key in values:
            if key in cls.model_fields and key not in cls.options():
                raise DraftsmithError(f"{where}{key} is the target's own; leave it out.")
        return cls.model_validate(dict(values), context={"where": where})

    def chosen(self) -> dict[str, Any]:
        """Return the values of the options, defaults included."""
        return self.model_dump(include=set(self.options()))

    def changed(self, **values: Any) -> Self:
        """Return a copy with other values, which are checked like all values."""
        return type(self).model_validate({name: getattr(self, name) for name in type(self).model_fields} | values)

    def for_target(self, target: "Target") -> Self:
        """Return a copy with the target's sizes filled in."""
        return self

    def rules(self) -> Iterator[tuple[bool, str, str]]:
        """Yield the conditions between fields: whether it holds, the field to change, and what that must be."""
        yield from ()

    @model_validator(mode="wrap")
    @classmethod
    def _check(cls, values: Any, make: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        context = info.context or {}
        where, called = context.get("where", ""), context.get("called", {})
        try:
            made = make(values)
        except ValidationError as error:
            raise DraftsmithError(where + explain(error, list(cls.options()), where, called)) from error
        for holds, name, rule in made.rules():
            if not holds:
                raise DraftsmithError(f"{where}{called.get(name, name)} is {getattr(made, name)!r}; it must be {rule}.")
        return made


class TrainedConfig(Config):
    """What all trained families share: two sizes of the target, the drafted vocabulary, and config.json."""

    hidden_size: Annotated[Size, OF_TARGET] = Field(default=0, description="width of the target's states")
    vocab_size: Annotated[Size, OF_TARGET] = Field(default=0, description="width of the target's logits")
    draft_vocab_size: Size = Field(
        default=0, description="score only this many tokens, the most frequent ones of the training data; 0 scores all"
    )
    decay: Annotated[float, Field(gt=0, le=1), FREE] = Field(
        default=1.0, description="how much each depth counts in the loss, as a part of the depth before"
    )

    layout: ClassVar[tuple[str, ...]] = ()
    """The fields that config.json holds, in its order; () stands for all."""
    only_if_set: ClassVar[tuple[str, ...]] = ("draft_vocab_size",)
    """Fields that config.json omits if they have their defaults."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """The names of fields in the published files, where they differ."""
    needed: ClassVar[tuple[str, ...]] = ()
    """Keys that a file must have; other keys have defaults, or are known from the tensors or the target."""

    @property
    def scored(self) -> int:
        """W, the number of tokens that are scored."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def borrows(self) -> str:
        """What a checkpoint needs the target for, as the rest of a sentence; empty if it needs none."""
        return ""

    def made_for(self) -> dict[str, Any]:
        """Return what is known about the target, see `check_target`."""
        return {"hidden_size": self.hidden_size or None, "vocab_size": self.vocab_size or None}

    def for_target(self, target: "Target") -> Self:
        """Return a copy with the target's sizes filled in."""
        return super().for_target(target).changed(hidden_size=target.hidden_size, vocab_size=target.vocab_size)

    def limited_to(self, tokens: int) -> Self:
        """Return a copy that scores `tokens` tokens."""
        return self.changed(draft_vocab_size=tokens)

    def rules(self) -> Iterator[tuple[bool, str, str]]:
        """Yield the condition that the drafted vocabulary is a part of the target's."""
        yield not self.vocab_size or self.draft_vocab_size <= self.vocab_size, "draft_vocab_size", (
            f"between 0 (all) and the target's {self.vocab_size} tokens"
        )

    def shapes(self) -> dict[str, Any]:
        """Return what has to agree so that weights can be taken over from another drafter."""
        fields = type(self).model_fields
        return {name: getattr(self, name) for name, field in fields.items() if FREE not in field.metadata}

    def to_json(self) -> dict[str, Any]:
        """Return the keys of config.json, in its order."""
        values, fields = self.model_dump(mode="json"), type(self).model_fields
        return {
            self.renamed.get(name, name): values[name] for name in self.layout or fields
            if name not in self.only_if_set or getattr(self, name) != fields[name].default
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any], origin: Path, **told: Any) -> Self:
        """Read a config.json's object; keys of other programs are ignored.

        Args:
            told: fields that are known from elsewhere.
        """
        keys = {name: cls.renamed.get(name, name) for name in cls.layout or cls.model_fields}
        missing = sorted(key for name, key in keys.items() if name in cls.needed and key not in values)
        if missing:
            raise DraftsmithError(f"{origin} lacks {', '.join(missing)}; use a whole config.json.")
        known = {name: values[key] for name, key in keys.items() if key in values}
        return cls.model_validate(known | told, context={"where": f"{origin}: ", "called": cls.renamed})


def explain(
    error: ValidationError, known: list[str], where: str = "", called: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return one sentence, beginning with the key, that says what the first mistake is and how to fix it.

    Args:
        known: the valid keys at the place of an unknown one.
        where: text to put before a key.
        called: the names of fields in the source of the values, if they differ.
    """
    first = error.errors()[0]
    parts = [called.get(str(part), str(part)) for part in first["loc"]]
    key = ".".join(parts)
    if first["type"] == "extra_forbidden":
        if not known:
            return f"{key} is unknown; there is nothing to set here."
        near = get_close_matches(parts[-1], known, n=1, cutoff=0.5)
        if not near:
            return f"{key} is unknown; known here are {', '.join(known)}."
        return f"{key} is unknown; did you mean {where}{'.'.join([*parts[:-1], near[0]])}?"
    if first["type"] == "missing":
        return f"{key} is missing; it has no default, so give it."
    if first["type"] == "value_error":
        return f"{key} cannot be used: {first['msg'].removeprefix('Value error, ')}."
    return f"{key} is {first['input']!r}; {complaint(first)}."


# What pydantic's kinds of errors require, in plain words; names in braces refer to the error's context.
WANTED = {
    "tuple_type": "give a list, in brackets", "list_type": "give a list, in brackets",
    "int_type": "give a whole number", "int_parsing": "give a whole number", "int_from_float": "give a whole number",
    "float_type": "give a number", "float_parsing": "give a number", "finite_number": "give a finite number",
    "bool_type": "give true or false", "bool_parsing": "give true or false", "string_type": "give a word or text",
    "model_type": "give fields with values", "dict_type": "give fields with values",
    "greater_than_equal": "use at least {ge}", "greater_than": "use more than {gt}",
    "less_than_equal": "use at most {le}", "less_than": "use less than {lt}", "literal_error": "give {expected}",
}


def complaint(error: Mapping[str, Any]) -> str:
    """Return in plain words what a value should have been, for one of the errors of a ValidationError."""
    if error["type"] in WANTED:
        return WANTED[error["type"]].format(**error.get("ctx", {}))
    return str(error["msg"][0].lower() + error["msg"][1:])
