"""How the drafters of a family are handed to vLLM: the layout that it reads, and its name for them.

What is written here was found out with vLLM 0.32.0; `draftsmith export --check` finds out whether it still holds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

VERSION = "0.32.0"
"""The version of vLLM whose layouts are written."""
LONGEST = "max_position_embeddings"


@dataclass(frozen=True)
class Published:
    """A drafter as its folder holds it: the object of config.json, and the tensors by their published names."""

    config: Mapping[str, Any]
    tensors: "Mapping[str, Tensor]"

    def changed(self, config: Mapping[str, Any], tensors: "Mapping[str, Tensor] | None" = None) -> "Published":
        """Return the same with other values of the config's keys, and with other tensors if some are given."""
        return Published({**self.config, **config}, self.tensors if tensors is None else tensors)

    def without(self, *names: str) -> "Published":
        """Return the same without some keys and tensors."""
        return Published(
            {key: value for key, value in self.config.items() if key not in names},
            {name: tensor for name, tensor in self.tensors.items() if name not in names},
        )


@dataclass(frozen=True)
class VllmTarget:
    """What vLLM's form of a drafter depends on in its target.

    Args:
        max_length: the most tokens of a text.
        fingerprint: of a target that was changed together with its drafter; None for all others.
        head: returns the projection to the vocabulary (V, F), for which the weights have to be loaded.
    """

    name: str
    hidden_size: int
    vocab_size: int
    max_length: int
    fingerprint: str | None
    head: "Callable[[], Tensor]"


@dataclass(frozen=True)
class VllmForm:
    """What the drafters of a family are to vLLM.

    Args:
        method: the `method` of vLLM's `speculative_config`.
        adapt: returns a drafter in vLLM's layout; DraftsmithError for one that vLLM cannot run.
        learnt: how many tokens in a row it learnt to guess.
        is_bounded: whether it can guess no more than these.
        reads: the name of a tensor whose last dimension is the width of the target's states, and how many times it is;
            None for drafters that read none.
        weights_file: the name of the file with the tensors.
    """

    method: str
    adapt: Callable[[Published, VllmTarget], Published]
    learnt: Callable[[Published], int]
    is_bounded: bool = False
    reads: tuple[str, int] | None = None
    weights_file: str = "model.safetensors"


def unchanged(drafter: Published, target: VllmTarget) -> Published:
    """Return a drafter whose layout vLLM reads as it is."""
    return drafter


def as_long_as(target: VllmTarget, drafter: Published) -> dict[str, Any]:
    """Return the key that says how long texts may be: without it vLLM takes 2,048 and stops drafting behind them."""
    return {LONGEST: max(target.max_length, drafter.config.get(LONGEST) or 0)}
