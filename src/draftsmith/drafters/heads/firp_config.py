"""The options of a FIRP drafter, and what the registry knows of it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field

from draftsmith.drafters.config import FREE, Count, Counts, Size, TrainedConfig, Weight
from draftsmith.drafters.family import of_type, trained_in

if TYPE_CHECKING:
    from draftsmith.targets import Target

MODEL_TYPE = "firp"
MOST_DEPTHS = 32


class FIRPConfig(TrainedConfig):
    """The sizes and options of a FIRP drafter."""

    layer: Size | None = Field(
        default=None,
        description="the layer of the target, counted from 0, whose output is mapped; null takes the middle one",
    )
    n_predict: Annotated[int, Field(ge=1, le=MOST_DEPTHS)] = Field(
        default=3, description="tokens that are guessed, a map each"
    )
    branching: Annotated[Counts, FREE] = Field(
        default=(),
        description="children of a node in the drafted tree, depth by depth; depths that are left out have one",
    )
    n_candidates: Annotated[Count, FREE] = Field(
        default=5, description="paths of that tree that are kept, the likeliest ones"
    )
    state_weight: Annotated[Weight, FREE] = Field(
        default=0.1, description="weight, in the loss, of the distance between guessed and true states"
    )

    layout = (
        "hidden_size", "vocab_size", "layer", "n_predict", "branching", "n_candidates", "state_weight",
        "draft_vocab_size",
    )
    only_if_set = ()
    needed = ("hidden_size", "vocab_size", "layer", "n_predict")

    def rules(self) -> Iterator[tuple[bool, str, str]]:
        """Yield the conditions between fields."""
        yield from super().rules()
        yield len(self.branching) <= self.n_predict, "branching", f"at most n_predict = {self.n_predict} numbers"

    @property
    def borrows(self) -> str:
        """What a checkpoint needs the target for."""
        return "borrows its target's last layers"

    def for_target(self, target: "Target") -> Self:
        """Return a copy in which the target's sizes and its middle layer are filled in."""
        layer = (target.layers - 1) // 2 if self.layer is None else self.layer
        return super().for_target(target).changed(layer=layer)


FAMILY = trained_in(
    "draftsmith.drafters.heads.firp:FIRPDrafter", "firp",
    "FIRP: guessed intermediate states of future tokens, through the target's last layers (arXiv:2410.20488)",
    FIRPConfig, of_type(MODEL_TYPE),
)
