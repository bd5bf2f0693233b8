"""Hydra: heads like Medusa's that also read the tokens drafted before theirs.

"Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding" (arXiv:2402.05109), section 3:

    x_d = [state; emb(root); emb(guess 1); … emb(guess d)]        logits_d = head_d block_d(… block_d(x_d))

emb is the target's own, frozen table. The first block of head d narrows d + 2 widths to one. Hydra++ (section 4) has
more blocks (`num_layers: 4`), the target's own distribution as the teacher (`distillation.weight: 1`), and instead of
the state, a decoder layer's output for it and the states before it (`prefix_attention: true`).

The folder is the published one: config.json with hydra_num_heads, hydra_num_layers, hydra_head_arch "mlp",
grounded_heads, hidden_state_offset, base_model_name_or_path; tensors `hydra_mlp.{head}.{layer}.linear.{weight,bias}`,
`hydra_mlp.{head}.0.res_connection.{weight,bias}`, `hydra_lm_head.{head}.{weight,bias}`. The authors publish these in a
pickle, hydra_lm_head.pt, which is refused; hydra_lm_head.safetensors holds the same. With prefix attention
hydra_head_arch is "prefix-mlp", `hydra_mlp.{head}.{2 layer + 1}` and `hydra_lm_head.{head}.1` leave room for dropout,
all blocks behind a head's first are one and the same, stored under each of its names, and the layer is that of a Llama
behind `prefix_embeding_layer.` (so spelled). Its sizes are the target's; ours are also in the key `prefix_layer`.

Shapes: B rows, R rows of any origin, F width of the target's states, W drafted vocabulary.
"""

from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.drafters.attention.layer_sizes import LayerSizes, read_llama
from draftsmith.drafters.attention.prefix_attention import PrefixAttention
from draftsmith.drafters.heads.base import HeadDrafter, ResidualBlock, native_steps
from draftsmith.drafters.heads.hydra_config import PREFIX_ARCH, HydraConfig, recognises
from draftsmith.drafters.trainable import storage
from draftsmith.drafters.trainable.batch import TrainingBatch
from draftsmith.drafters.trainable.drafter import FrozenTable
from draftsmith.native import NativeObject
from draftsmith.native.heads import ALL, NativeHead, native_heads
from draftsmith.plan import Plan
from draftsmith.types import Context, DraftsmithError

if TYPE_CHECKING:
    from draftsmith.targets import KVCache, Target

GROUNDED = {"grounded_heads": True, "hidden_state_offset": 0}
BORROWED = ("input_embed_fn.weight", "prefix_embeding_layer.embed_tokens.weight")
"""Tensors that published files have besides the heads: the target's table, and one that is never read."""


class HydraDrafter(HeadDrafter):
    """The heads. Their input grows by one embedding per depth, and is their whole state."""

    family_name = "a set of Hydra heads"
    weights_file = "hydra_lm_head.safetensors"
    model_type = "hydra"
    config_class = HydraConfig
    config: HydraConfig
    architecture = "mlp"
    tensor_of_first_head = "hydra_lm_head.0.weight"

    def __init__(self, config: HydraConfig, draft_tokens: Tensor | None = None) -> None:
        super().__init__(config, draft_tokens)
        width = config.hidden_size
        self.embedding = FrozenTable(self.vocab_size, width)
        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(ResidualBlock(width, depth + 1), *self.later_blocks()) for depth in range(config.num_heads)
        )
        self.hydra_lm_head = nn.ModuleList(nn.Linear(width, config.scored) for _ in range(config.num_heads))
        for projection in self.projections():
            nn.init.zeros_(projection.bias)

    def later_blocks(self) -> list[ResidualBlock]:
        """Return new blocks for one head, except its first."""
        return [ResidualBlock(self.config.hidden_size) for _ in range(self.config.num_layers - 1)]

    def projections(self) -> list[nn.Linear]:
        """Return the layers to the vocabulary."""
        return [layer for layer in self.hydra_lm_head if isinstance(layer, nn.Linear)]

    def stage(self, depth: int, state: Tensor, tokens: Tensor) -> Tensor:
        """Append the token's embedding to what was read before: (…, (d + 1) F) becomes (…, (d + 2) F)."""
        return torch.cat([state, F.embedding(tokens, self.embedding.weight)], dim=-1)

    def score(self, depth: int, state: Tensor) -> Tensor:
        """Return the logits (…, W) of one head."""
        scores: Tensor = self.hydra_lm_head[depth](self.hydra_mlp[depth](state))
        return scores

    def native_form(self) -> NativeObject | None:
        """Return the operator of heads that read the embeddings of all tokens before theirs."""
        heads = [
            NativeHead(native_steps(blocks), scores)
            for blocks, scores in zip(self.hydra_mlp, self.hydra_lm_head, strict=True)
        ]
        return native_heads(heads, self.config.hidden_size, ALL, self.embedding.weight, d2t=self.d2t)

    @torch.no_grad()
    def bind(self, target: "Target") -> None:
        """Point the heads at the target's embedding."""
        like = self.embedding.weight
        self.embedding.weight = target.embedding_weight_VF.detach().to(like)[: self.vocab_size]

    def describe(self) -> dict[str, Any]:
        """Return the published config.json."""
        values, kind = super().describe(), {"hydra_head_arch": self.architecture, **GROUNDED}
        first = {key: values.pop(key) for key in ("model_type", "hydra_num_heads", "hydra_num_layers")}
        return first | kind | values

    @classmethod
    def recognises(cls, config: Mapping[str, Any]) -> bool:
        """Recognise it by hydra_num_heads."""
        return recognises(config)

    @classmethod
    def read_config(
        cls, config: Mapping[str, Any], origin: Path, tensors: Mapping[str, Tensor]
    ) -> tuple[HydraConfig, Tensor | None]:
        """Return the config; DraftsmithError for heads of another architecture."""
        for key, supported in {"hydra_head_arch": cls.architecture, **GROUNDED}.items():
            if config.get(key, supported) != supported:
                raise DraftsmithError(
                    f"{origin} says {key} {config[key]!r}, but only {supported!r} is supported; convert it, or train "
                    "heads of that kind."
                )
        prefix, scores = cls.architecture == PREFIX_ARCH, cls.tensor_of_first_head
        layer = LayerSizes(**read_llama(config["prefix_layer"], origin)) if "prefix_layer" in config else None
        told = HydraConfig.from_json(config, origin, prefix_attention=prefix, prefix_layer=layer)
        return told.sized_by(tensors, scores, scores), tensors.get("d2t")

    @classmethod
    def read_tensors(cls, folder: Path) -> dict[str, Tensor]:
        """Read the weights, without the other tables in published files."""
        tensors = super().read_tensors(folder)
        return {name: tensor for name, tensor in tensors.items() if name not in BORROWED}


class HydraPrefixDrafter(HydraDrafter):
    """The heads of Hydra++ behind their prefix attention."""

    family_name = "a set of Hydra++ heads"
    architecture = PREFIX_ARCH
    tensor_of_first_head = "hydra_lm_head.0.1.weight"
    reads_prompt = True
    can_compile = False

    def __init__(self, config: HydraConfig, draft_tokens: Tensor | None = None) -> None:
        super().__init__(config, draft_tokens)
        assert config.prefix_layer is not None
        self.prefix = PrefixAttention(config.prefix_layer)

    def later_blocks(self) -> list[ResidualBlock]:
        """Return one new block, repeated as often as there are layers, as in the published code."""
        return super().later_blocks()[:1] * (self.config.num_layers - 1)

    def attach(self, cache: "KVCache", plan: Plan) -> None:
        """Start with an empty memory."""
        self.prefix.attach(cache, self.embedding.weight)

    def ready(self, context: Context) -> Hashable | None:
        """Note where rows are; the rest of a draft needs the device alone."""
        return None if self._native is not None else self.prefix.ready(context)

    def reset_rows(self, rows: list[int]) -> None:
        """Forget rows that ended."""
        self.prefix.forget(rows)

    def follow(self, context: Context) -> None:
        """Store the committed entries, without guessing."""
        self.prefix.store(context, self.work_dtype)

    def begin(self, context: Context) -> tuple[Tensor, Tensor]:
        """Start from the root and the layer's output for the state that predicted it."""
        return self.prefix.roots(context, self.work_dtype)

    def forward(self, tokens_BT: Tensor, features_BTF: Tensor) -> list[Tensor]:
        """Predict at every depth, see `TrainableDrafter.forward`."""
        return self.predict(tokens_BT, self.prefix(self.start(features_BTF)))

    def losses(self, examples: TrainingBatch) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy of every depth, mixed with the divergence from the target if that is requested."""
        return self.losses_from(
            examples, self.prefix(self.start(examples.features_BTF), examples.positions_BP).flatten(0, 1)
        )

    def hidden_matrices(self) -> list[nn.Parameter]:
        """Return the matrices of the blocks and of the layer."""
        matrices = [parameter for parameter in self.prefix.parameters() if parameter.ndim == 2]
        return [*super().hidden_matrices(), *matrices]

    def pack(self, pack_layers: Callable[[nn.Module], bool]) -> None:
        """Merge products that read the same input, and pack."""
        self.prefix.layer.merge()
        super().pack(pack_layers)

    def native_form(self) -> NativeObject | None:
        """Return None: the operator does not support a layer in front."""
        return None

    def published_name(self, name: str) -> str:
        """Leave room for the dropout of the published code."""
        part, *rest = name.split(".")
        if part == "prefix":
            return ".".join(["prefix_embeding_layer", *rest])
        if part == "hydra_mlp":
            return ".".join([part, rest[0], str(2 * int(rest[1]) + 1), *rest[2:]])
        return ".".join([part, rest[0], "1", *rest[1:]]) if part == "hydra_lm_head" else name

    @torch.no_grad()
    def load_published(self, tensors: Mapping[str, Tensor], origin: Path) -> None:
        """Copy checkpoint tensors in, except tables of angles; all copies of the repeated block have to be equal."""
        own = {name: tensor for name, tensor in tensors.items() if not name.endswith(".rotary_emb.inv_freq")}
        for name, tensor in own.items():
            part, *rest = name.split(".")
            if part == "hydra_mlp" and rest[1] not in ("1", "3"):
                first = own.get(".".join([part, rest[0], "3", *rest[2:]]))
                if first is None or not torch.equal(first, tensor):
                    raise DraftsmithError(
                        f"tensor {name} in {origin} differs from that of layer 3, but the published code repeats one "
                        "block; train heads of that kind."
                    )
        super().load_published(own, origin)

    def describe(self) -> dict[str, Any]:
        """Return the published config.json, and the sizes of the layer."""
        return super().describe() | {"prefix_layer": {"model_type": "llama", **self.prefix.sizes.to_llama()}}

    @classmethod
    def recognises(cls, config: Mapping[str, Any]) -> bool:
        """Recognise it by the architecture that Hydra's config names."""
        return HydraDrafter.recognises(config) and config.get("hydra_head_arch") == PREFIX_ARCH


def make_hydra(config: HydraConfig, target: "Target", draft_tokens: Tensor | None) -> HydraDrafter:
    """Make untrained heads of either architecture.

    With prefix attention, they score the normalised state by the target's head; its likeliest token is the same.
    """
    return (HydraPrefixDrafter if config.prefix_attention else HydraDrafter).new(config, target, draft_tokens)


def hydra_in(folder: Path) -> type[HydraDrafter]:
    """Return the class for the architecture of the heads in a folder."""
    config = storage.read_json(Path(folder) / "config.json")
    return HydraPrefixDrafter if HydraPrefixDrafter.recognises(config) else HydraDrafter


def load_hydra(folder: Path, target: "Target") -> HydraDrafter:
    """Load heads of either architecture for decoding."""
    return hydra_in(folder).load(folder, target)


def reopen_hydra(folder: Path, target: "Target | None", dtype: torch.dtype) -> HydraDrafter:
    """Load heads of either architecture for training."""
    return hydra_in(folder).from_pretrained(folder, target, dtype)
