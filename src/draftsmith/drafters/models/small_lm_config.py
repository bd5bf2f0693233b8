"""The options of a small language model, and what the registry knows of it."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from draftsmith.drafters.config import FREE, Count, Size, TrainedConfig
from draftsmith.drafters.family import Compared, Family, later
from draftsmith.drafters.models.depth import MAX_DEPTH
from draftsmith.drafters.vllm import Published, VllmForm, unchanged

DRAWN = 0.02
"""The standard deviation of new weights, as Llama's config has it."""


class SmallLMConfig(TrainedConfig):
    """The options of a small language model; its checkpoint is described by a Llama's config."""

    layers: Count = Field(default=1, description="decoder layers")
    width: Size = Field(
        default=0, description="width of the states, a multiple of 64 or an even number below it; 0 takes the target's"
    )
    guesses: Annotated[int, Field(ge=1, le=MAX_DEPTH)] = Field(
        default=4, description="tokens that are drafted, as a chain"
    )
    init_from_target: bool = Field(
        default=True, description="start embedding and head as the target's, where the widths agree; false draws them"
    )
    init_width: Annotated[float, Field(gt=0, allow_inf_nan=False), FREE] = Field(
        default=1.0, description=f"what is drawn begins with this times the standard deviation {DRAWN}"
    )


def is_llama(config: Mapping[str, Any]) -> bool:
    """Recognise it by the class that the config names."""
    return bool(config.get("architectures") == ["LlamaForCausalLM"])


def trained_here(config: Mapping[str, Any]) -> bool:
    """Tell a folder of ours from that of another language model by the keys that only we write into config.json."""
    return "draftsmith" in config and is_llama(config)


def guesses_told(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the option `guesses` that a config.json names; {} for one that a program other than ours wrote."""
    return {"guesses": config["guesses"]} if "guesses" in config else {}


def guesses_of(drafter: Published) -> int:
    """Return how many tokens it was made to draft."""
    return SmallLMConfig.read(guesses_told(drafter.config)).guesses


MODULE = "draftsmith.drafters.models.small_lm"
FAMILY = Family(
    "small-lm", "a small Llama with the target's vocabulary, trained here, drafts as a draft model (arXiv:2310.08461)",
    SmallLMConfig, later(f"{MODULE}:make_small_lm"), later(f"{MODULE}:load_small_lm"),
    trained_here, trainable=True, reopen=later(f"{MODULE}:SmallLM.from_pretrained"),
    compared=Compared(
        options={"draft_vocab_size": 0}, starts={"init_from_target": (True, False), "init_width": (1.0, 0.5, 2.0)}
    ),
    vllm=VllmForm("draft_model", unchanged, guesses_of), is_model=True,
)
