"""The options of Medusa heads, and what the registry knows of them."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from draftsmith.drafters.config import FREE
from draftsmith.drafters.family import Compared, trained_in
from draftsmith.drafters.heads.head_config import HeadConfig
from draftsmith.drafters.tree_choices import MEDUSA_TREE
from draftsmith.drafters.vllm import Published, VllmForm, VllmTarget
from draftsmith.types import DraftsmithError

WEIGHTS = "medusa_lm_head.safetensors"
PREFIX = "medusa_head."
"""What stands before the names of tensors in some published files."""


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


def heads_of(drafter: Published) -> int:
    """Count the heads; published configs give a wrong number (2 for 5)."""
    names = [name.removeprefix(PREFIX).partition(".")[0] for name in drafter.tensors]
    counted = {int(name) for name in names if name.isdigit()}
    if not counted:
        raise DraftsmithError(f"{WEIGHTS} holds no Medusa heads; give a folder that does.")
    return 1 + max(counted)


def medusa_for_vllm(drafter: Published, target: VllmTarget) -> Published:
    """Return Medusa heads in vLLM's layout; those that share the target's projection take a copy of all of it along.

    vLLM has a name for a part of the vocabulary, `token_map`, but refuses files that hold one.
    """
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in drafter.tensors.items()}
    own = f"0.{drafter.config.get('medusa_num_layers', 1)}.weight" in tensors
    keys: dict[str, Any] = {
        "architectures": ["MedusaModel"], "model_type": "medusa", "medusa_num_heads": heads_of(drafter),
        "hidden_size": target.hidden_size, "vocab_size": target.vocab_size,
        # Without this key vLLM leaves biases out, and says nothing.
        "medusa_fc_bias": any(name.endswith(".linear.bias") for name in tensors),
    }
    if tensors.pop("d2t", None) is not None and own:
        raise DraftsmithError(
            "vLLM runs no Medusa heads that score a part of the vocabulary by projections of their own; train some "
            "with drafter.draft_vocab_size=0, or with drafter.tie_to_target=true."
        )
    if not own:
        keys["original_lm_head"] = True
        tensors["lm_heads.0.weight"] = target.head()
    return drafter.without("draft_vocab_size").changed(keys, tensors)


FAMILY = trained_in(
    "draftsmith.drafters.heads.medusa:MedusaDrafter", "medusa",
    "Medusa heads: each guesses one token further ahead from the target's state (arXiv:2401.10774)", MedusaConfig,
    recognises, tree=MEDUSA_TREE, compared=Compared(starts={"init_from_target": (True, False)}),
    vllm=VllmForm("medusa", medusa_for_vllm, heads_of, True, ("0.0.linear.weight", 1), WEIGHTS),
)
