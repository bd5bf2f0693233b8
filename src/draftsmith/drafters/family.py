"""What the registry knows of a family of drafters: its name, what a user may set, and how one is made or loaded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    """What all families that are trained share: how many tokens, the most frequent ones, are scored; 0 means all."""

    draft_vocab_size: Annotated[int, Field(ge=0)] = 0


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
    """

    name: str
    summary: str
    options: type[Options]
    make: Callable[[Any, "Target", Tensor | None], "Drafter | Learner"]
    load: Callable[[Path, "Target"], Drafter] | None = None
    recognises: Callable[[Mapping[str, Any]], bool] = lambda config: False
    trainable: bool = False
    rate: float = 1e-3

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
    message = first["msg"][0].lower() + first["msg"][1:]
    return f"{where}{key} is {first['input']!r}; {message}."


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
