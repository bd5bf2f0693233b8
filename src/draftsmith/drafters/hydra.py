"""Hydra: heads like Medusa's that also read the tokens drafted before theirs.

"Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding" (arXiv:2402.05109), section 3:

    x_d = [state; emb(root); emb(guess 1); … emb(guess d)]        logits_d = head_d block_d(… block_d(x_d))

emb is the target's own, frozen table. The first block of head d narrows d + 2 widths to one; with more blocks
(`num_layers: 4`) and the target's own distribution as the teacher (`distillation.weight: 1`) these are the heads of
Hydra++ (section 4), but for its attention layer over the prefix, which is not here.

The folder is the published one: config.json with hydra_num_heads, hydra_num_layers, hydra_head_arch "mlp",
grounded_heads, hidden_state_offset, base_model_name_or_path; tensors `hydra_mlp.{head}.{layer}.linear.{weight,bias}`,
`hydra_mlp.{head}.0.res_connection.{weight,bias}`, `hydra_lm_head.{head}.{weight,bias}`. The authors publish these in a
pickle, hydra_lm_head.pt, which is refused; hydra_lm_head.safetensors holds the same.

Shapes: B rows, R rows of any origin, F width of the target's states, W drafted vocabulary.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.drafters.family import Family
from draftsmith.drafters.heads import HeadDrafter, HeadOptions, ResidualBlock, native_steps
from draftsmith.drafters.trainable import FrozenTable
from draftsmith.native.heads import ALL, NativeHead, native_heads
from draftsmith.types import DraftsmithError

if TYPE_CHECKING:
    from draftsmith.target import Target

SUPPORTED = {"hydra_head_arch": "mlp", "grounded_heads": True, "hidden_state_offset": 0}


class HydraOptions(HeadOptions):
    """What a recipe may set of new Hydra heads; `num_layers` is 1 for Hydra and 4 for Hydra++."""


class HydraDrafter(HeadDrafter):
    """The heads. What they read grows by an embedding a depth, and is all of their state."""

    family_name = "a set of Hydra heads"
    weights_file = "hydra_lm_head.safetensors"
    options_class = HydraOptions

    def build(self) -> None:
        """Make the heads; the embedding comes with `bind`."""
        width, options = self.hidden_size, self.options
        self.embedding = FrozenTable(self.vocab_size, width)
        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(
                ResidualBlock(width, depth + 1), *(ResidualBlock(width) for _ in range(options.num_layers - 1))
            )
            for depth in range(options.num_heads)
        )
        self.hydra_lm_head = nn.ModuleList(nn.Linear(width, self.scored) for _ in range(options.num_heads))
        for projection in self.projections():
            nn.init.zeros_(projection.bias)

    def projections(self) -> list[nn.Linear]:
        """Return the layers to the vocabulary."""
        return [layer for layer in self.hydra_lm_head if isinstance(layer, nn.Linear)]

    def stage(self, depth: int, state: Tensor, tokens: Tensor) -> Tensor:
        """Put the token's embedding beside what was read before: (…, (d + 1) F) becomes (…, (d + 2) F)."""
        return torch.cat([state, F.embedding(tokens, self.embedding.weight)], dim=-1)

    def score(self, depth: int, state: Tensor) -> Tensor:
        """Return the logits (…, W) of one head."""
        scores: Tensor = self.hydra_lm_head[depth](self.hydra_mlp[depth](state))
        return scores

    def native_form(self) -> Any:
        """Return the operator of heads that read the embeddings of all tokens before theirs."""
        heads = [
            NativeHead(native_steps(blocks), scores)
            for blocks, scores in zip(self.hydra_mlp, self.hydra_lm_head, strict=True)
        ]
        return native_heads(heads, self.hidden_size, ALL, self.embedding.weight, d2t=self.d2t)

    @torch.no_grad()
    def bind(self, target: "Target") -> None:
        """Point the heads at the target's embedding."""
        like = self.embedding.weight
        self.embedding.weight = target.embedding_weight_VF.detach().to(like)[: self.vocab_size]

    def describe(self) -> dict[str, Any]:
        """Return the published config.json."""
        return {
            "model_type": "hydra", "hydra_num_heads": self.options.num_heads,
            "hydra_num_layers": self.options.num_layers, **SUPPORTED, **self.shared_keys(),
        }

    @classmethod
    def recognises(cls, config: Mapping[str, Any]) -> bool:
        """Tell by hydra_num_heads: published files have no model_type."""
        return "hydra_num_heads" in config and config.get("model_type", "hydra") == "hydra"

    @classmethod
    def read_config(
        cls, config: Mapping[str, Any], origin: Path, tensors: Mapping[str, Tensor]
    ) -> tuple[dict[str, Any], tuple[str, str]]:
        """Return the options; DraftsmithError for heads of another architecture."""
        for key, supported in SUPPORTED.items():
            if config.get(key, supported) != supported:
                raise DraftsmithError(
                    f"{origin} says {key} {config[key]!r}, but only {supported!r} is supported; convert it, or train "
                    "heads of that kind."
                )
        values = {"num_heads": config["hydra_num_heads"], "num_layers": config.get("hydra_num_layers", 1)}
        return values, ("hydra_lm_head.0.weight", "hydra_lm_head.0.weight")


def make_hydra(options: HydraOptions, target: "Target", draft_tokens: Tensor | None) -> HydraDrafter:
    """Make untrained heads, which say what the target's own head says unless the options draw them."""
    drafter = HydraDrafter(options, target.hidden_size, target.vocab_size, target.name, draft_tokens)
    if options.init_from_target:
        drafter.start_as_target(target)
    drafter.bind(target)
    return drafter


FAMILY = Family(
    "hydra", "Hydra heads: Medusa's, reading the tokens guessed before theirs as well (arXiv:2402.05109)",
    HydraOptions, make_hydra, HydraDrafter.load, HydraDrafter.recognises, trainable=True,
)
