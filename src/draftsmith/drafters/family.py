"""What the registry knows of a drafter family: its name, its options, and how a drafter is made or loaded."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from draftsmith.drafters.config import Config
from draftsmith.drafters.tree_choices import Choices
from draftsmith.drafters.vllm import VllmForm
from draftsmith.types import DraftsmithError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from draftsmith.drafters.base import Drafter
    from draftsmith.drafters.trainable.drafter import TrainableDrafter
    from draftsmith.drafters.trainable.model import TrainableModel
    from draftsmith.targets import Target

OPTION = re.compile(r'(?:"(?:\\.|[^"\\])*"|\[(?:"(?:\\.|[^"\\])*"|[^\]"])*\]|[^,])+')
"""Text between commas that is neither in a list nor in quotes."""


@dataclass(frozen=True)
class Compared:
    """How a comparison treats a family, where it differs from the others.

    Args:
        options: options that replace the defaults, which may be meant for a large target.
        starts: options that say how the first weights are made, with the values of each to try before training, besides
            several learning rates.
        static_tree: whether every step uses the family's published tree, cut to as many nodes as all others have.
        confident_twin: the name under which the same weights take part a second time, with a tree of their most
            confident guesses; None if they do not.
        beats_in_papers: methods that it guesses better than, according to the literature.
        better_on_repeats: the same for text that repeats earlier text.
        looks_up: whether it finds guesses in existing text, so that new text is harder for it.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    starts: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    static_tree: bool = False
    confident_twin: str | None = None
    beats_in_papers: tuple[str, ...] = ()
    better_on_repeats: tuple[str, ...] = ()
    looks_up: bool = False


@dataclass(frozen=True)
class Family:
    """A kind of drafter.

    Args:
        name: its name in recipes, tables and on the command line.
        summary: one line for lists.
        config: its options; a `TrainedConfig` if it is trained.
        make: (config, target, draft_tokens) to a new drafter. One that is to be trained is returned untrained, in fp32,
            its weights drawn from PyTorch's global generator; `draft_tokens` (W) lists the only tokens it should score,
            or is None for all. Families without training return a drafter that is ready, and ignore `draft_tokens`.
        load: (folder, target) to a drafter that is ready to decode; None if there is nothing to load.
        recognises: whether a config.json's object, with the names of the tensors (`storage.read_config`), belongs to
            this family.
        trainable: whether `make` returns a `TrainableModel` that a recipe can train.
        rate: the initial learning rate of a small new drafter if none was chosen.
        reopen: (folder, target, dtype) to the trained `TrainableModel`, to continue its training, or to compare its
            training forward with a drafter from `load` that has none. Without a target, its sizes can still be read.
        tree: the static tree that was published with it, see `Plan.choices`; `--plan NAME` selects it.
        compared: how a comparison treats it.
        vllm: what its drafters are to vLLM; None if that has nothing of the kind.
        is_model: whether its drafters are whole language models, which may be targets as well.
    """

    name: str
    summary: str
    config: type[Config]
    make: Callable[[Any, "Target", "Tensor | None"], "Drafter | TrainableModel"]
    load: Callable[[Path, "Target"], "Drafter"] | None = None
    recognises: Callable[[Mapping[str, Any]], bool] = lambda config: False
    trainable: bool = False
    rate: float = 1e-3
    reopen: Callable[[Path, "Target | None", "torch.dtype"], "TrainableModel"] | None = None
    tree: Choices = ()
    compared: Compared = Compared()
    vllm: VllmForm | None = None
    is_model: bool = False

    def ready(self, config: Config, target: "Target") -> "Drafter":
        """Make a drafter that needs no training; DraftsmithError for a family that needs it."""
        from draftsmith.drafters.base import Drafter

        self.check_ready()
        made = self.make(config, target, None)
        assert isinstance(made, Drafter)
        return made

    def check_ready(self) -> None:
        """Raise DraftsmithError for a family that needs training."""
        if self.trainable:
            raise DraftsmithError(f"a drafter of the family {self.name!r} has to be trained; give the folder of one.")


def trained(name: str, summary: str, drafter: "type[TrainableDrafter]", **facts: Any) -> Family:
    """Return the family of a class of trained drafters; `facts` add what the class does not say, see `Family`."""
    return Family(
        name, summary, drafter.config_class, drafter.new, drafter.load, drafter.recognises, trainable=True,
        reopen=drafter.from_pretrained, **facts,
    )


def later(place: str) -> Callable[..., Any]:
    """Return a function that calls the function at "module:name" and imports the module only at the first call.

    So the facts about a family, which suffice to report most mistakes, can be read without importing its computations.
    """
    module, _, name = place.partition(":")

    def call(*arguments: Any) -> Any:
        return attrgetter(name)(import_module(module))(*arguments)

    return call


def trained_in(
    place: str, name: str, summary: str, config: type[Config], recognises: Callable[[Mapping[str, Any]], bool],
    **facts: Any,
) -> Family:
    """Return the family of the class of trained drafters at "module:class", which is imported when it is needed."""
    return Family(
        name, summary, config, later(f"{place}.new"), later(f"{place}.load"), recognises, trainable=True,
        reopen=later(f"{place}.from_pretrained"), **facts,
    )


def of_type(model_type: str) -> Callable[[Mapping[str, Any]], bool]:
    """Return a function that recognises a config.json by its model_type."""
    return lambda config: config.get("model_type") == model_type


def read_spec(text: str) -> tuple[str, dict[str, Any]]:
    """Split "family:key=value,key=[value,value]" into the name and plain values, typed as in YAML.

    >>> read_spec("ngram:max_length=4")
    ('ngram', {'max_length': 4})
    """
    name, _, rest = text.partition(":")
    values: dict[str, Any] = {}
    for part in OPTION.findall(rest):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise DraftsmithError(f"drafter {text!r} has {part!r} where key=value is needed, as in ngram:max_length=4.")
        try:
            values[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise DraftsmithError(f"the value of {part!r} in drafter {text!r} cannot be read; quote it.") from error
    return name, values
