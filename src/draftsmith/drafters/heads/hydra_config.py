"""The options of Hydra heads, and what the registry knows of them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import Field

from draftsmith.drafters.attention.layer_sizes import LayerSizes
from draftsmith.drafters.config import OF_TARGET, Count
from draftsmith.drafters.family import Compared, Family, later
from draftsmith.drafters.heads.head_config import HeadConfig

if TYPE_CHECKING:
    from draftsmith.targets import Target

PREFIX_ARCH = "prefix-mlp"


class HydraConfig(HeadConfig):
    """The sizes and options of Hydra heads."""

    num_layers: Count = Field(default=1, description="residual blocks of each head; Hydra has 1, Hydra++ 4")
    prefix_attention: bool = Field(
        default=False, description="put a decoder layer of the target's sizes in front of the heads, as in Hydra++"
    )
    prefix_layer: Annotated[LayerSizes | None, OF_TARGET] = Field(default=None, description="the sizes of that layer")

    renamed: ClassVar[Mapping[str, str]] = {
        **HeadConfig.renamed, "num_heads": "hydra_num_heads", "num_layers": "hydra_num_layers",
    }
    needed = ("num_heads",)

    @property
    def borrows(self) -> str:
        """What a checkpoint needs the target for."""
        lacking = self.prefix_attention and self.prefix_layer is None
        return "has a layer as large as its target's" if lacking else ""

    def for_target(self, target: "Target") -> Self:
        """Return a copy with the target's sizes filled in, including those of the layer."""
        made = super().for_target(target)
        if not self.prefix_attention or self.prefix_layer is not None:
            return made
        return made.changed(prefix_layer=LayerSizes().for_target(target))


def recognises(config: Mapping[str, Any]) -> bool:
    """Recognise it by hydra_num_heads: published files have no model_type."""
    return "hydra_num_heads" in config and config.get("model_type", "hydra") == "hydra"


MODULE = "draftsmith.drafters.heads.hydra"
FAMILY = Family(
    "hydra", "Hydra heads: Medusa's, reading the tokens guessed before theirs as well (arXiv:2402.05109)",
    HydraConfig, later(f"{MODULE}:make_hydra"), later(f"{MODULE}:load_hydra"), recognises, trainable=True,
    reopen=later(f"{MODULE}:reopen_hydra"),
    compared=Compared(starts={"init_from_target": (True, False)}, beats_in_papers=("medusa",)),
)
