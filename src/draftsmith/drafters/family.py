"""What the registry knows of a family of drafters: its name, what a user may set, and how one is made or loaded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from draftsmith.drafters.base import Drafter
from draftsmith.types import DraftsmithError

if TYPE_CHECKING:
    from draftsmith.drafters.learner import Learner
    from draftsmith.target import Target


class Options(BaseModel):
    """What a user may set of a family: unknown keys are errors, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TrainedOptions(Options):
    """What all families that are trained share.

    Args:
        draft_vocab_size: how many tokens, the most frequent ones, are scored; 0 means all.
    """

    draft_vocab_size: Annotated[int, Field(ge=0)] = 0


Choices = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Compared:
    """How a comparison takes a family, where that is not as all others.

    Args:
        options: in place of the defaults, which may be those of a large target.
        static_tree: its tree is the family's published one at every step, cut to as many nodes as all others have.
        confident_twin: the name under which the same weights take part once more, with a tree of what they are surest
            of; None where they do not.
        better_than: contenders that it guesses better than, by the literature.
        better_on_repeats: the same for text that repeats what came before.
        looks_up: whether it finds guesses in text that is there already, so that new text is the harder for it.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    static_tree: bool = False
    confident_twin: str | None = None
    better_than: tuple[str, ...] = ()
    better_on_repeats: tuple[str, ...] = ()
    looks_up: bool = False


@dataclass(frozen=True)
class Family:
    """A kind of drafter.

    Args:
        name: the word for it in recipes, tables and on the command line.
        summary: one line for lists.
        options: the settings of a new drafter, a subclass of `Options`; of `TrainedOptions` if it is trained.
        make: (options, target, draft_tokens) to a new drafter. One that is to be trained comes untrained, in fp32, its
            weights drawn from PyTorch's global generator; `draft_tokens` (W) lists the only tokens it should score, or
            is None for all. Families without training return a drafter that is ready, and ignore `draft_tokens`.
        load: (folder, target) to a drafter that is ready to decode; None where there is nothing to load.
        recognises: whether a config.json's object, with the names of the tensors (`storage.read_config`), belongs to
            this family.
        trainable: whether `make` returns a `Learner` that a recipe can train.
        rate: the learning rate that a small new one starts with, where nobody chose one.
        reopen: (folder, target, dtype) to the `Learner` that was trained, to be trained on, or to be held against its
            training forward where the drafter that `load` returns has none. Without a target its sizes can be read.
        tree: the static tree that was published with it, see `Plan.choices`; `--plan NAME` takes it.
        compared: how a comparison takes it.
    """

    name: str
    summary: str
    options: type[Options]
    make: Callable[[Any, "Target", Tensor | None], "Drafter | Learner"]
    load: Callable[[Path, "Target"], Drafter] | None = None
    recognises: Callable[[Mapping[str, Any]], bool] = lambda config: False
    trainable: bool = False
    rate: float = 1e-3
    reopen: Callable[[Path, "Target | None", torch.dtype], "Learner"] | None = None
    tree: Choices = ()
    compared: Compared = Compared()

    def ready(self, options: Options, target: "Target") -> Drafter:
        """Make a drafter that needs no training; DraftsmithError for a family that does."""
        made = None if self.trainable else self.make(options, target, None)
        if not isinstance(made, Drafter):
            raise DraftsmithError(f"a drafter of the family {self.name!r} has to be trained; give the folder of one.")
        return made

    def read_options(self, values: Mapping[str, Any], where: str) -> Options:
        """Check plain values; DraftsmithError names the key, after `where`, and the nearest right one."""
        try:
            return self.options.model_validate(dict(values))
        except ValidationError as error:
            raise DraftsmithError(explain(error, self.options, where)) from error


def explain(error: ValidationError, options: type[BaseModel], where: str) -> str:
    """Turn the first complaint about options into one sentence with the mend."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = list(options.model_fields)
        near = get_close_matches(key, known, n=1, cutoff=0.5)
        if not known:
            return f"{where}{key} is unknown; there is nothing to set here."
        hint = f"did you mean {where}{near[0]}?" if near else f"known here are {', '.join(known)}."
        return f"{where}{key} is unknown; {hint}"
    if first["type"] == "missing":
        return f"{where}{key} is missing; it has no default, so give it."
    return f"{where}{key} is {first['input']!r}; {complaint(first)}."


# What pydantic's kinds of error ask for, where its own words are those of Python's types.
WANTED = {
    "tuple_type": "give a list, in brackets", "list_type": "give a list, in brackets",
    "int_type": "give a whole number", "int_parsing": "give a whole number", "int_from_float": "give a whole number",
    "float_type": "give a number", "float_parsing": "give a number", "bool_type": "give true or false",
    "bool_parsing": "give true or false", "string_type": "give a word or text",
    "model_type": "give fields with values", "dict_type": "give fields with values",
}


def complaint(error: Mapping[str, Any]) -> str:
    """Say in plain words what a value should have been, of one of a ValidationError's errors."""
    if error["type"] == "literal_error":
        return f"give {error['ctx']['expected']}"
    own = error["msg"][0].lower() + error["msg"][1:]
    return WANTED.get(error["type"], own)


def read_spec(text: str) -> tuple[str, dict[str, Any]]:
    """Split "family:key=value,key=value" into the name and plain values, typed as in YAML.

    >>> read_spec("ngram:max_length=4")
    ('ngram', {'max_length': 4})
    """
    name, _, rest = text.partition(":")
    values: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise DraftsmithError(f"drafter {text!r} has {part!r} where key=value is needed, as in ngram:max_length=4.")
        try:
            values[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise DraftsmithError(f"the value of {part!r} in drafter {text!r} cannot be read; quote it.") from error
    return name, values
