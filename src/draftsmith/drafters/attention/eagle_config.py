"""The options of the EAGLE families, and how a Llama-like config.json stores them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from draftsmith.drafters.attention.layer_sizes import LayerSizes, read_llama
from draftsmith.drafters.config import FREE, Count, Counts, TrainedConfig, Weight
from draftsmith.drafters.family import Compared, trained_in
from draftsmith.drafters.trainable.storage import TENSOR_NAMES
from draftsmith.drafters.tree_choices import EAGLE_TREE, plan_of
from draftsmith.drafters.vllm import Published, VllmForm, VllmTarget, as_long_as
from draftsmith.plan import Plan
from draftsmith.types import DraftsmithError

if TYPE_CHECKING:
    from draftsmith.targets import Target

Shape = Literal["chain", "static", "dynamic"]
SHAPES = "the draft: a chain, a static tree as in EAGLE-1, or a dynamic one as in EAGLE-2"
TREE = ("depth", "tree", "branching", "beam", "nodes")

ARCHITECTURES = ("LlamaForCausalLMEagle", "EagleLlamaForCausalLM")
JOINING = "fc.weight"


class FeatureConfig(LayerSizes, TrainedConfig):
    """Options shared by families of one attending layer: the sizes of the layer, and the draft if no plan is given.

    The draft is a chain, a static tree (EAGLE-1), or the dynamic one of EAGLE-2, which expands the `beam` most probable
    nodes of each depth by their `beam` best tokens and keeps the best `nodes` of all. EAGLE-2 published 10 and 59.
    """

    depth: Annotated[Count, FREE] = Field(default=5, description="most tokens that are guessed one after another")
    tree: Annotated[Shape, FREE] = Field(default="static", description=SHAPES)
    branching: Annotated[Counts, FREE] = Field(
        default=(), description="children of a node of the static tree, depth by depth; [] takes EAGLE's published tree"
    )
    beam: Annotated[Count, FREE] = Field(
        default=4, description="of the dynamic tree: nodes that get children at each depth, and children of each"
    )
    nodes: Annotated[Count, FREE] = Field(
        default=16, description="of the dynamic tree: nodes that are kept, the likeliest"
    )

    layout: ClassVar[tuple[str, ...]] = ("vocab_size", *TREE, "draft_vocab_size")
    needed = ("vocab_size",)

    def rules(self) -> Iterator[tuple[bool, str, str]]:
        """Yield the conditions between fields."""
        yield from super().rules()
        yield len(self.branching) <= self.depth, "branching", f"at most depth = {self.depth} numbers"

    @property
    def borrows(self) -> str:
        """What a checkpoint needs the target for."""
        return "borrows its target's embedding"

    def plan(self) -> Plan:
        """Return the draft to make if no plan was chosen, with no more children per node than there are tokens."""
        if self.tree == "chain":
            return Plan((1,) * self.depth)
        if self.tree == "static":
            if not self.branching:
                return plan_of(EAGLE_TREE, self.depth, self.scored)
            return Plan(tuple(min(k, self.scored) for k in self.branching))
        k = min(self.beam, self.scored)
        return Plan((k,) * self.depth, beam=k, nodes=self.nodes)

    def to_json(self) -> dict[str, Any]:
        """Return the keys of config.json, in its order."""
        return self.to_llama() | super().to_json()

    @classmethod
    def from_json(cls, values: Mapping[str, Any], origin: Path, **told: Any) -> Self:
        """Read a config.json's object; keys of other programs are ignored."""
        return super().from_json(values, origin, **read_llama(values, origin), **told)


class EagleConfig(FeatureConfig):
    """The sizes and options of an EAGLE drafter."""

    bias: bool = Field(default=False, description="give the layer that joins embedding and state a bias")
    feature_weight: Annotated[Weight, FREE] = Field(
        default=1.0, description="weight, in the loss, of the distance from the target's next state"
    )
    token_weight: Annotated[Weight, FREE] = Field(
        default=0.1, description="weight, in the loss, of the cross-entropy against the target's own distribution"
    )
    noise: Annotated[Weight, FREE] = Field(
        default=0.2,
        description="width of the uniform noise on states in training, for 512 tokens; for fewer it is wider",
    )

    layout = ("vocab_size", "bias", *TREE, "draft_vocab_size")

    @property
    def borrows(self) -> str:
        """What a checkpoint needs the target for."""
        return "borrows its target's embedding and head"


class Eagle3Config(FeatureConfig):
    """The sizes and options of an EAGLE-3 drafter."""

    tree: Annotated[Shape, FREE] = Field(default="dynamic", description=SHAPES)
    taps: tuple[int, ...] = Field(
        default=(),
        description="layers of the target whose outputs are read, counted from 0; [] takes a low, middle and high one",
    )
    norm_before_residual: bool = Field(
        default=False, description="start the residual stream from the normalised state instead of the state itself"
    )
    decay: Annotated[float, Field(gt=0, le=1), FREE] = Field(
        default=0.8, description=TrainedConfig.model_fields["decay"].description
    )
    init_head_from_target: Annotated[bool, FREE] = Field(
        default=True, description="start the head as the target's own; false draws it"
    )

    layout = ("vocab_size", "draft_vocab_size", *TREE)
    only_if_set = ()

    def for_target(self, target: "Target") -> Self:
        """Return a copy with the target's sizes and layers filled in; DraftsmithError for layers that it lacks."""
        taps, layers = self.taps or default_taps(target.layers), target.layers
        if not all(0 <= tap < layers for tap in taps):
            raise DraftsmithError(f"taps is {taps}, but the target's layers are 0 to {layers - 1}; name some of these.")
        return super().for_target(target).changed(taps=taps)

    def to_json(self) -> dict[str, Any]:
        """Return the keys of config.json, in its order; `draft_vocab_size` is always included."""
        values = super().to_json()
        tree = {name: values.pop(name) for name in TREE}
        return values | {
            "draft_vocab_size": self.scored, "target_hidden_size": self.hidden_size,
            "norm_before_residual": self.norm_before_residual, **taps_to_json(self.taps), **tree,
        }


def default_taps(layers: int) -> tuple[int, ...]:
    """Return the low, middle and high layer that the authors read: the inputs of layers 2, L / 2 and L - 3.

    Taps count outputs, so each number is one less. Targets that are too shallow use the first, middle and last layer.
    """
    published = (1, layers // 2 - 1, layers - 4)
    if published[0] < published[1] < published[2]:
        return published
    return tuple(sorted({0, (layers - 1) // 2, layers - 1}))


def taps_from_json(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the taps that a config.json names; () if it names none.

    `eagle_config.eagle_aux_hidden_state_layer_ids` counts layers by their outputs, as SGLang and Draftsmith do; the
    same key outside `eagle_config` counts them by their inputs, as vLLM and speculators do.
    """
    inner = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    outer = config.get("eagle_aux_hidden_state_layer_ids")
    return tuple(inner) if inner else tuple(index - 1 for index in outer or ())


def taps_to_json(taps: tuple[int, ...]) -> dict[str, Any]:
    """Return the keys that name the taps, for both kinds of readers."""
    return {
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in taps],
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(taps)},
    }


def is_eagle(config: Mapping[str, Any]) -> bool:
    """Recognise EAGLE by the architecture, or by the key `bias` or the tensor `fc.weight`, which a Llama lacks."""
    named = set(config.get("architectures") or ())
    if named & set(ARCHITECTURES):
        return True
    llama = config.get("model_type") == "llama" and config.get("num_hidden_layers") == 1
    told = "bias" in config or JOINING in config.get(TENSOR_NAMES, ())
    return llama and told and "draft_vocab_size" not in config and not any("eagle3" in name.lower() for name in named)


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Recognise EAGLE-3 by the architecture, or a one-layer Llama with a drafted vocabulary, as the authors write."""
    named = config.get("architectures") or ()
    if config.get("speculators_model_type") == "eagle3" or any("eagle3" in name.lower() for name in named):
        return True
    llama = config.get("model_type") == "llama" and config.get("num_hidden_layers") == 1
    return llama and "draft_vocab_size" in config and not set(named) & set(ARCHITECTURES)


def eagle_for_vllm(drafter: Published, target: VllmTarget) -> Published:
    """Return an EAGLE drafter in vLLM's layout, where it scores all tokens, as the target does.

    vLLM knows the class by another name than SGLang, whose name is in our folders.
    """
    if "fc.bias" in drafter.tensors:
        raise DraftsmithError("vLLM has no EAGLE drafter with a bias; train one with drafter.bias=false.")
    whole = drafter.without("d2t", "draft_vocab_size")
    return whole.changed({"architectures": ["EagleLlamaForCausalLM"], **as_long_as(target, drafter)})


def eagle3_for_vllm(drafter: Published, target: VllmTarget) -> Published:
    """Return an EAGLE-3 drafter in vLLM's layout."""
    return drafter.changed(as_long_as(target, drafter))


def depth_of(drafter: Published) -> int:
    """Return the depth of its drafts; files of others do not say any."""
    return int(drafter.config.get("depth", FeatureConfig.model_fields["depth"].default))


EAGLE = trained_in(
    "draftsmith.drafters.attention.eagle:Eagle", "eagle",
    "EAGLE: one decoder layer predicts the target's next state (arXiv:2401.15077, 2406.16858)", EagleConfig, is_eagle,
    tree=EAGLE_TREE, compared=Compared(static_tree=True, confident_twin="eagle2"),
    vllm=VllmForm("eagle", eagle_for_vllm, depth_of, reads=(JOINING, 2)),
)
EAGLE3 = trained_in(
    "draftsmith.drafters.attention.eagle3:Eagle3", "eagle3",
    "EAGLE-3: one decoder layer over states of several layers, trained on its own outputs (arXiv:2503.01840)",
    Eagle3Config, is_eagle3, compared=Compared(starts={"init_head_from_target": (True, False)}),
    vllm=VllmForm("eagle3", eagle3_for_vllm, depth_of),
)
