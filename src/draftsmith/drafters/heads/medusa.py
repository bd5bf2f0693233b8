"""Medusa: heads that each guess one token further ahead from one state of the target, and read no tokens.

"Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (arXiv:2401.10774), section 2.1.1:

    state_d = block_d(… block_d(state))        logits_d = head_d state_d        block(x) = x + SiLU(linear x)

The root is what the target's own head says of the state; head d guesses the (d + 1)-th token after it. With
`tie_to_target` the heads have blocks only and share the target's own projection, which is read once for all of them.

The folder is the published one: config.json with medusa_num_heads, medusa_num_layers, base_model_name_or_path, and
medusa_lm_head.safetensors with `{head}.{layer}.linear.{weight,bias}` and `{head}.{layers}.weight`, in some files behind
`medusa_head.`. Tied heads are what text-generation-inference calls version 2, which lacks the last kind of tensor.

Shapes: B rows, N heads, F width of the target's states, W drafted vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from draftsmith.drafters.heads.base import HeadDrafter, ResidualBlock, native_steps
from draftsmith.drafters.heads.medusa_config import PREFIX, WEIGHTS, MedusaConfig, recognises
from draftsmith.drafters.trainable import storage
from draftsmith.drafters.trainable.drafter import FrozenTable
from draftsmith.drafters.trainable.parallel import ParallelSteps
from draftsmith.drafters.tree_choices import MEDUSA_TREE, plan_of
from draftsmith.native import NativeObject
from draftsmith.native.heads import NativeHead, native_heads
from draftsmith.plan import Plan
from draftsmith.types import Context, DraftsmithError

if TYPE_CHECKING:
    from draftsmith.targets import Target


@dataclass(frozen=True)
class HeadOutputs:
    """The heads' outputs for every row: the scores of all, or the states (B, F) that each head has yet to read."""

    state_BF: Tensor
    scores_NBW: Tensor | None


class MedusaDrafter(ParallelSteps, HeadDrafter):
    """The heads. They read no tokens, so each runs once per row, however many nodes its guesses go under."""

    family_name = "a set of Medusa heads"
    weights_file = WEIGHTS
    model_type = "medusa"
    config_class = MedusaConfig
    config: MedusaConfig

    def __init__(self, config: MedusaConfig, draft_tokens: Tensor | None = None) -> None:
        super().__init__(config, draft_tokens)
        width, scored = config.hidden_size, config.scored
        # Tied heads get their projection in `bind`.
        self.shared: nn.Module | None = FrozenTable(scored, width) if config.tie_to_target else None
        heads = []
        for _ in range(config.num_heads):
            layers: list[nn.Module] = [ResidualBlock(width) for _ in range(config.num_layers)]
            if not config.tie_to_target:
                layers.append(nn.Linear(width, scored, bias=False))
            heads.append(nn.Sequential(*layers))
        self.heads = nn.ModuleList(heads)

    def default_plan(self) -> Plan:
        """Return the draft that the config asks for, or the authors' default tree as deep as there are heads."""
        config = self.config
        if config.default_branching or config.default_beam or config.default_nodes:
            return super().default_plan()
        return plan_of(MEDUSA_TREE, self.max_depth, config.scored)

    def projections(self) -> list[nn.Linear]:
        """Return the heads' own layers to the vocabulary; tied heads have none."""
        last = [head[-1] for head in self.heads if isinstance(head, nn.Sequential)]
        return [layer for layer in last if isinstance(layer, nn.Linear)]

    def stage(self, depth: int, state: Tensor, tokens: Tensor) -> Tensor:
        """Return the state unchanged: no head reads a token or another head."""
        return state

    def score(self, depth: int, state: Tensor) -> Tensor:
        """Return the logits (…, W) of one head."""
        read: Tensor = self.heads[depth](state)
        return read if self.shared is None else self.logit_form(self.shared(read))

    def prepare(self, context: Context, root_B: Tensor, feature_BF: Tensor) -> HeadOutputs:
        """Run tied heads at once; other heads run only as deep as the draft goes."""
        state_BF, scores_NBW = self.start(feature_BF), None
        if self.shared is not None:
            # All heads share one pass over the projection, whose weights are most of what is read.
            scores_NBW = self.logit_form(self.shared(torch.stack([head(state_BF) for head in self.heads])))
        return HeadOutputs(state_BF, scores_NBW)

    def depth_scores(self, depth: int, guessed: HeadOutputs) -> Tensor:
        """Return the logits (B, W) of one head."""
        return self.score(depth, guessed.state_BF) if guessed.scores_NBW is None else guessed.scores_NBW[depth]

    @torch.no_grad()
    def bind(self, target: "Target") -> None:
        """Point tied heads at the target's own projection."""
        if isinstance(self.shared, FrozenTable):
            self.shared.weight = self.head_rows_WF(target)
            self.logit_form = target.logit_form

    def pack(self, pack_layers: Callable[[nn.Module], bool]) -> None:
        """Pack as other families do, and the shared projection too."""
        if isinstance(self.shared, FrozenTable):
            self.shared = self.shared.as_layer()
        super().pack(pack_layers)

    def native_form(self) -> NativeObject | None:
        """Return the operator of heads that read no tokens; None if scores are more than products."""
        if not self.logit_form.plain:
            return None
        heads = []
        for head in self.heads:
            assert isinstance(head, nn.Sequential)
            blocks, scores = (head, self.shared) if self.shared is not None else (head[:-1], head[-1])
            heads.append(NativeHead(native_steps(blocks), scores))
        return native_heads(heads, self.config.hidden_size, d2t=self.d2t)

    def published_name(self, name: str) -> str:
        """Return the name in the published files, which hold the heads as a bare list."""
        return name.removeprefix("heads.")

    @classmethod
    def read_tensors(cls, folder: Path) -> dict[str, Tensor]:
        """Read the weights, with or without the prefix that some files have."""
        tensors = storage.read_tensors(folder, cls.weights_file)
        return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}

    def describe(self) -> dict[str, Any]:
        """Return the published config.json; tied heads are its version 2."""
        values, tied = super().describe(), {"version": "2"} if self.config.tie_to_target else {}
        first = {key: values.pop(key) for key in ("model_type", "medusa_num_heads", "medusa_num_layers")}
        return first | tied | values

    @classmethod
    def recognises(cls, config: Mapping[str, Any]) -> bool:
        """Recognise it by medusa_num_heads."""
        return recognises(config)

    @classmethod
    def read_config(
        cls, config: Mapping[str, Any], origin: Path, tensors: Mapping[str, Tensor]
    ) -> tuple[MedusaConfig, Tensor | None]:
        """Return the config; published configs give a wrong number of heads (2 for 5), so the tensors are counted."""
        counted = {int(name.split(".")[0]) for name in tensors if name[0].isdigit()}
        if not counted:
            raise DraftsmithError(f"{origin.parent / cls.weights_file} holds no Medusa heads; give a folder that does.")
        tall = f"0.{config.get('medusa_num_layers', 1)}.weight"
        tied = str(config.get("version")) == "2" and tall not in tensors
        told = MedusaConfig.from_json(config, origin, num_heads=max(counted) + 1, tie_to_target=tied)
        return told.sized_by(tensors, "0.0.linear.weight", tall), tensors.get("d2t")
