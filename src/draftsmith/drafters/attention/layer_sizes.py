"""The sizes of one decoder layer: the target's unless set, stored like in a Llama's config.json."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field

from draftsmith.drafters.config import OF_TARGET, Config, Size
from draftsmith.types import DraftsmithError

if TYPE_CHECKING:
    from draftsmith.targets import Target

# Kinds of scaling whose frequencies do not depend on the length of the text.
ROTARY_KINDS = ("default", "linear", "llama3", "yarn")


class LayerSizes(Config):
    """The sizes of a layer, under the names of a Llama config.json; 0 stands for the target's own size."""

    hidden_size: Annotated[Size, OF_TARGET] = Field(default=0, description="width of the target's states")
    intermediate_size: Size = Field(default=0, description="inner width of the layer's MLP; 0 takes the target's")
    num_attention_heads: Size = Field(default=0, description="query heads of the layer; 0 takes the target's number")
    num_key_value_heads: Size = Field(
        default=0,
        description="key and value heads of the layer, a divisor of the query heads; 0 takes the target's number",
    )
    head_dim: Size = Field(default=0, description="width of a head, an even number; 0 takes the target's")
    rms_norm_eps: Annotated[float, OF_TARGET] = Field(default=0.0, description="added to the mean square by the norms")
    attention_bias: Annotated[bool, OF_TARGET] = Field(default=False, description="biases of queries, keys and values")
    rope_parameters: Annotated[dict[str, Any], OF_TARGET] = Field(
        default={}, description="rope_type, rope_theta and what the type needs, as transformers has them"
    )

    def rules(self) -> Iterator[tuple[bool, str, str]]:
        """Yield the conditions between fields."""
        yield from super().rules()
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        yield not (heads and groups) or heads % groups == 0, "num_attention_heads", (
            f"a multiple of num_key_value_heads, which is {groups}"
        )
        yield self.head_dim % 2 == 0, "head_dim", "an even number, for rotary positions"
        kind = self.rope_parameters.get("rope_type", "default")
        yield kind in ROTARY_KINDS, "rope_parameters", f"of a rope_type among {', '.join(ROTARY_KINDS)}"

    def for_target(self, target: "Target") -> Self:
        """Return a copy with the target's sizes filled in."""
        kv_heads, width, _, _ = target.kv_shapes[-1]
        told = target.config.to_dict()
        heads = self.num_attention_heads or target.config.num_attention_heads
        return super().for_target(target).changed(
            hidden_size=target.hidden_size,
            intermediate_size=self.intermediate_size or told.get("intermediate_size") or 4 * target.hidden_size,
            num_attention_heads=heads,
            num_key_value_heads=self.num_key_value_heads or (heads if heads % kv_heads else kv_heads),
            head_dim=self.head_dim or width,
            rms_norm_eps=self.rms_norm_eps or told.get("rms_norm_eps") or 1e-6,
            rope_parameters=self.rope_parameters or rotary_of(told),
        )

    def to_llama(self) -> dict[str, Any]:
        """Return the keys that follow the model_type in Llama-like config.json files."""
        rotary = dict(self.rope_parameters)
        theta, kind = rotary.pop("rope_theta", 10000.0), rotary.get("rope_type", "default")
        return {
            "num_hidden_layers": 1, "hidden_act": "silu", "tie_word_embeddings": False,
            "hidden_size": self.hidden_size, "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_attention_heads, "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim, "rms_norm_eps": self.rms_norm_eps, "attention_bias": self.attention_bias,
            "rope_theta": theta, "rope_scaling": None if kind == "default" else rotary,
        }


def read_llama(values: Mapping[str, Any], origin: Path) -> dict[str, Any]:
    """Read the layer's sizes from a Llama-like config.json; DraftsmithError for missing or unsupported ones."""
    missing = [key for key in ("hidden_size", "intermediate_size", "num_attention_heads") if not values.get(key)]
    if missing:
        raise DraftsmithError(f"{origin} lacks {', '.join(missing)}; use a whole config.json.")
    if values.get("num_hidden_layers", 1) != 1:
        raise DraftsmithError(f"{origin} has {values['num_hidden_layers']} layers; one is supported.")
    if values.get("hidden_act", "silu") != "silu":
        raise DraftsmithError(f"{origin} has the activation {values['hidden_act']!r}; silu is supported.")
    rotary = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    if "type" in rotary:
        rotary["rope_type"] = rotary.pop("type")
    theta = rotary.get("rope_theta") or values.get("rope_theta") or 10000.0
    heads = values["num_attention_heads"]
    return {
        "hidden_size": values["hidden_size"], "intermediate_size": values["intermediate_size"],
        "num_attention_heads": heads, "num_key_value_heads": values.get("num_key_value_heads") or heads,
        "head_dim": values.get("head_dim") or values["hidden_size"] // heads,
        "rms_norm_eps": values.get("rms_norm_eps", 1e-6),
        "attention_bias": bool(values.get("attention_bias", values.get("qkv_bias", False))),
        "rope_parameters": {"rope_type": "default", **rotary, "rope_theta": theta},
    }


def rotary_of(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters of a target's config; plain ones if it has none, several, or an unsupported kind."""
    given = told.get("rope_parameters") or {}
    theta = given.get("rope_theta") or 10000.0
    if given.get("rope_type", "default") in ("llama3", "linear", "yarn") and "partial_rotary_factor" not in given:
        return dict(given)
    return {"rope_type": "default", "rope_theta": theta}
