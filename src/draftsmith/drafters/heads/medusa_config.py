"""The options of Medusa heads, and what the registry knows of them."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from draftsmith.drafters.config import FREE
from draftsmith.drafters.family import Compared, trained_in
from draftsmith.drafters.heads.head_config import HeadConfig
from draftsmith.drafters.tree_choices import MEDUSA_TREE


class MedusaConfig(HeadConfig):
    """The sizes and options of Medusa heads."""

    tie_to_target: bool = Field(
        default=False,
        description="score by the target's own head for good: fewer weights, which are read once for all heads",
    )
    decay: Annotated[float, Field(gt=0, le=1), FREE] = Field(
        default=0.8, description=HeadConfig.model_fields["decay"].description
    )

    renamed: ClassVar[Mapping[str, str]] = {
        **HeadConfig.renamed, "num_heads": "medusa_num_heads", "num_layers": "medusa_num_layers",
    }


def recognises(config: Mapping[str, Any]) -> bool:
    """Recognise it by medusa_num_heads: published files have no model_type; whole models with heads have theirs."""
    return "medusa_num_heads" in config and config.get("model_type", "medusa") == "medusa"


FAMILY = trained_in(
    "draftsmith.drafters.heads.medusa:MedusaDrafter", "medusa",
    "Medusa heads: each guesses one token further ahead from the target's state (arXiv:2401.10774)", MedusaConfig,
    recognises, tree=MEDUSA_TREE, compared=Compared(starts={"init_from_target": (True, False)}),
)
