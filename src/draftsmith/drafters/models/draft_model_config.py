"""The options of a draft model, and what the registry knows of it."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from draftsmith.drafters.config import Config
from draftsmith.drafters.family import Family, later
from draftsmith.drafters.models.depth import MAX_DEPTH
from draftsmith.types import Quantization


class DraftModelConfig(Config):
    """The options of a draft model."""

    path: str = Field(description="folder or hub name of a causal language model")
    guesses: Annotated[int, Field(ge=1, le=MAX_DEPTH)] = Field(
        default=4, description="tokens that are drafted, as a chain"
    )
    quantize: Quantization = Field(
        default="none", description="int8 or int4 reads such weights by the native kernels, on a CPU"
    )


def is_language_model(config: Mapping[str, Any]) -> bool:
    """Whether a config.json belongs to a causal language model of transformers, by the class that it names."""
    named = config.get("architectures") or ()
    if not named:
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return not set(map(str, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())).isdisjoint(map(str, named))


MODULE = "draftsmith.drafters.models.draft_model"
FAMILY = Family(
    "draft-model", "a separate language model, with any tokenizer (arXiv:2211.17192, arXiv:2502.05202)",
    DraftModelConfig, later(f"{MODULE}:make_draft_model"), later(f"{MODULE}:load_draft_model"), is_language_model,
)
