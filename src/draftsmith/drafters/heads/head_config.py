"""The options of the families of heads on the target's last state."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import Field

from draftsmith.drafters.config import FREE, OF_TARGET, Count, Counts, Size, TrainedConfig
from draftsmith.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor


class HeadConfig(TrainedConfig):
    """What the families of heads share."""

    base_name: Annotated[str | None, OF_TARGET, FREE] = Field(
        default=None, description="what config.json calls the target"
    )
    num_heads: Count = Field(default=4, description="number of heads, one a drafted token, and so the deepest draft")
    num_layers: Count = Field(default=1, description="residual blocks of each head")
    init_from_target: Annotated[bool, FREE] = Field(
        default=True, description="start the layers that score as the target's own head; false draws them"
    )
    default_branching: Annotated[Counts, FREE] = Field(
        default=(),
        description="children of a node, depth by depth, where no plan is given; [] is a chain, or Medusa's tree",
    )
    default_beam: Annotated[Size, FREE] = Field(
        default=0,
        description="nodes of that draft that get children at each depth, the likeliest ones; 0 gives them to all",
    )
    default_nodes: Annotated[Size, FREE] = Field(
        default=0, description="nodes of that draft that are kept, the likeliest ones; 0 keeps all"
    )

    layout = (
        "num_heads", "num_layers", "base_name", "hidden_size", "vocab_size", "draft_vocab_size", "default_branching",
        "default_beam", "default_nodes",
    )
    renamed: ClassVar[Mapping[str, str]] = {"base_name": "base_model_name_or_path"}
    only_if_set = ("base_name", "draft_vocab_size", "default_branching", "default_beam", "default_nodes")

    def rules(self) -> Iterator[tuple[bool, str, str]]:
        """Yield the conditions between fields."""
        yield from super().rules()
        yield len(self.default_branching) <= self.num_heads, "default_branching", (
            f"at most num_heads = {self.num_heads} numbers"
        )

    def made_for(self) -> dict[str, Any]:
        """Return what is known about the target, see `check_target`."""
        return super().made_for() | {"name": self.base_name}

    def sized_by(self, tensors: Mapping[str, "Tensor"], wide: str, tall: str) -> Self:
        """Return a copy with the target's sizes, which published files give only in two tensors, (·, F) and (W, ·)."""
        hidden_size = self.hidden_size or (tensors[wide].shape[-1] if wide in tensors else 0)
        vocab_size = self.vocab_size or (tensors[tall].shape[0] if tall in tensors else 0)
        return self.changed(hidden_size=hidden_size, vocab_size=vocab_size)

    def plan(self) -> Plan:
        """Return the default plan."""
        branching = self.default_branching or (1,) * self.num_heads
        return Plan(branching, beam=self.default_beam or None, nodes=self.default_nodes or None)
