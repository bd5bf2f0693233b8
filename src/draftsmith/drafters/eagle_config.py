"""The sizes and options of the EAGLE families, and how they stand in a Llama-like config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field

from draftsmith.drafters.decoder_layer import LayerSizes
from draftsmith.drafters.family import TrainedOptions
from draftsmith.drafters.static_tree import EAGLE_TREE, plan_of
from draftsmith.plan import Plan
from draftsmith.types import DraftsmithError

if TYPE_CHECKING:
    from draftsmith.target import Target

Count = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=0)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Shape = Literal["chain", "static", "dynamic"]


class FeatureOptions(TrainedOptions):
    """What the EAGLE families share; sizes of 0 are the target's own, the last five options are those of `Tree`."""

    intermediate_size: Size = 0
    num_attention_heads: Size = 0
    num_key_value_heads: Size = 0
    head_dim: Size = 0
    depth: Count = 5
    tree: Shape = "static"
    branching: tuple[Count, ...] = ()
    beam: Count = 4
    nodes: Count = 16

    def default_tree(self) -> "Tree":
        """Return the draft to make when nobody chose a plan."""
        return Tree(self.depth, self.tree, self.branching, self.beam, self.nodes)

    def layer_sizes(self, target: "Target") -> LayerSizes:
        """Fill in what is 0 from the target."""
        kv_heads, width, _, _ = target.kv_shapes[-1]
        config = target.config
        heads = self.num_attention_heads or config.num_attention_heads
        return LayerSizes(
            hidden_size=target.hidden_size,
            intermediate_size=self.intermediate_size or target_value(target, "intermediate_size")
            or 4 * target.hidden_size,
            num_attention_heads=heads,
            num_key_value_heads=self.num_key_value_heads or (heads if heads % kv_heads else kv_heads),
            head_dim=self.head_dim or width,
            rms_norm_eps=target_value(target, "rms_norm_eps") or 1e-6,
            attention_bias=False,
            rope_parameters=target_rotary(target),
        )


class EagleOptions(FeatureOptions):
    """What a recipe may set of a new EAGLE drafter.

    Args:
        bias: whether the layer that joins embedding and feature has a bias.
        feature_weight: of the regression of the next feature in the loss.
        token_weight: of the cross-entropy against the target's own distribution in the loss.
        noise: width of the uniform noise on features in training, for 512 tokens; T tokens get 512 / T times it.
    """

    bias: bool = False
    feature_weight: Weight = 1.0
    token_weight: Weight = 0.1
    noise: Weight = 0.2


class Eagle3Options(FeatureOptions):
    """What a recipe may set of a new EAGLE-3 drafter.

    Args:
        taps: layers of the target to read, by their outputs from 0; () takes a low, a middle and a high one.
        norm_before_residual: whether the residual stream starts from the normalised state.
        decay: every depth counts this much of the one before in the loss.
        init_head_from_target: start the head from the target's rows of the drafted tokens.
    """

    tree: Shape = "dynamic"
    taps: tuple[int, ...] = ()
    norm_before_residual: bool = False
    decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    init_head_from_target: bool = True


@dataclass(frozen=True)
class Tree:
    """The draft to make when nobody chose a plan.

    Args:
        depth: the deepest draft.
        shape: a "chain", a "static" tree (EAGLE-1), or the "dynamic" one of EAGLE-2, which expands the `beam` most
            probable nodes of each depth by their `beam` best tokens and keeps the best `nodes` of all.
        branching: children a node of the static tree, depth by depth; () is EAGLE's published tree, which has another
            shape under each node.
        beam: of the dynamic tree; EAGLE-2 published 10.
        nodes: of the dynamic tree; EAGLE-2 published 59 beside the root.
    """

    depth: int
    shape: Shape = "static"
    branching: tuple[int, ...] = ()
    beam: int = 4
    nodes: int = 16

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise DraftsmithError(f"depth is {self.depth}; use at least 1.")
        if self.shape not in ("chain", "static", "dynamic"):
            raise DraftsmithError(f"tree is {self.shape!r}; use chain, static or dynamic.")
        if len(self.branching) > self.depth:
            raise DraftsmithError(
                f"branching {self.branching} is {len(self.branching)} deep, but depth is {self.depth}; shorten it."
            )

    def plan(self, vocabulary: int) -> Plan:
        """Return the plan, with no more children a node than there are tokens."""
        if self.shape == "chain":
            return Plan((1,) * self.depth)
        if self.shape == "static":
            if not self.branching:
                return plan_of(EAGLE_TREE, self.depth, vocabulary)
            return Plan(tuple(min(k, vocabulary) for k in self.branching))
        k = min(self.beam, vocabulary)
        return Plan((k,) * self.depth, beam=k, nodes=self.nodes)

    def to_json(self) -> dict[str, Any]:
        """Return our own keys of config.json."""
        return {
            "depth": self.depth, "tree": self.shape, "branching": list(self.branching), "beam": self.beam,
            "nodes": self.nodes,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any], otherwise: Shape) -> Self:
        """Read our own keys of config.json; published files have none."""
        return cls(
            values.get("depth", 5), values.get("tree", otherwise), tuple(values.get("branching", ())),
            values.get("beam", 4), values.get("nodes", 16),
        )


def target_value(target: "Target", name: str) -> Any:
    """Return an entry of the target's config, or None."""
    return target.config.to_dict().get(name)


def target_rotary(target: "Target") -> dict[str, Any]:
    """Return the target's rotary parameters, plain where it has none, or several, or another kind."""
    given = target_value(target, "rope_parameters") or {}
    theta = given.get("rope_theta") or 10000.0
    if given.get("rope_type", "default") in ("llama3", "linear", "yarn") and "partial_rotary_factor" not in given:
        return dict(given)
    return {"rope_type": "default", "rope_theta": theta}


def sizes_to_json(sizes: LayerSizes) -> dict[str, Any]:
    """Return the keys that Llama-like config.json files have."""
    rotary = dict(sizes.rope_parameters)
    theta, kind = rotary.pop("rope_theta", 10000.0), rotary.get("rope_type", "default")
    return {
        "model_type": "llama", "num_hidden_layers": 1, "hidden_act": "silu", "tie_word_embeddings": False,
        "hidden_size": sizes.hidden_size, "intermediate_size": sizes.intermediate_size,
        "num_attention_heads": sizes.num_attention_heads, "num_key_value_heads": sizes.num_key_value_heads,
        "head_dim": sizes.head_dim, "rms_norm_eps": sizes.rms_norm_eps, "attention_bias": sizes.attention_bias,
        "rope_theta": theta, "rope_scaling": None if kind == "default" else rotary,
    }


def sizes_from_json(values: Mapping[str, Any], origin: Path) -> LayerSizes:
    """Read a Llama-like config.json; DraftsmithError for what is missing or not supported."""
    missing = {"hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"} - values.keys()
    if missing:
        raise DraftsmithError(f"{origin} lacks {', '.join(sorted(missing))}; use a whole config.")
    if values.get("num_hidden_layers", 1) != 1:
        raise DraftsmithError(f"{origin} has {values['num_hidden_layers']} layers; one is supported.")
    if values.get("hidden_act", "silu") != "silu":
        raise DraftsmithError(f"{origin} has the activation {values['hidden_act']!r}; silu is supported.")
    rotary = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    if "type" in rotary:
        rotary["rope_type"] = rotary.pop("type")
    theta = rotary.get("rope_theta") or values.get("rope_theta") or 10000.0
    heads = values["num_attention_heads"]
    return LayerSizes(
        hidden_size=values["hidden_size"], intermediate_size=values["intermediate_size"], num_attention_heads=heads,
        num_key_value_heads=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or values["hidden_size"] // heads,
        rms_norm_eps=values.get("rms_norm_eps", 1e-6),
        attention_bias=bool(values.get("attention_bias", values.get("qkv_bias", False))),
        rope_parameters={"rope_type": "default", **rotary, "rope_theta": theta},
    )


def default_taps(layers: int) -> tuple[int, ...]:
    """Return the low, middle and high layer that the authors read: the inputs of layers 2, L / 2 and L - 3.

    A tap counts outputs, so each is one less. Targets too shallow for that give their first, middle and last layer.
    """
    published = (1, layers // 2 - 1, layers - 4)
    if published[0] < published[1] < published[2]:
        return published
    return tuple(sorted({0, (layers - 1) // 2, layers - 1}))


def read_taps(config: Mapping[str, Any], origin: Path, layers: int) -> tuple[int, ...]:
    """Return the taps that a config names, or the default ones.

    `eagle_config.eagle_aux_hidden_state_layer_ids` counts layers by their outputs, as SGLang reads it and as we do; the
    same key outside counts them by their inputs, as vLLM and speculators read it.
    """
    inner = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    outer = config.get("eagle_aux_hidden_state_layer_ids")
    taps = tuple(inner) if inner else tuple(index - 1 for index in outer or ()) or default_taps(layers)
    if not all(0 <= tap < layers for tap in taps):
        raise DraftsmithError(f"{origin} reads the outputs of layers {taps}, but the target's are 0 to {layers - 1}.")
    return taps


def taps_to_json(taps: tuple[int, ...]) -> dict[str, Any]:
    """Return the keys that name the taps, for both kinds of readers."""
    return {
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in taps],
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(taps)},
    }
