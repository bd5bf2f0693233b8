"""What the families of heads on the target's last state share: options, residual blocks, vocabulary, checkpoints.

Shapes: N heads, F width of the target's states, V vocabulary, W drafted vocabulary, R rows of any origin.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from draftsmith.drafters.config import FREE, OF_TARGET, Count, Counts, Size, TrainedConfig
from draftsmith.drafters.trainable.drafter import RowwiseDrafter
from draftsmith.native.heads import NARROW, RESIDUAL
from draftsmith.plan import Plan

if TYPE_CHECKING:
    from draftsmith.targets import Target


class HeadConfig(TrainedConfig):
    """What the families of heads share."""

    base_name: Annotated[str | None, OF_TARGET, FREE] = Field(
        default=None, description="what config.json calls the target"
    )
    num_heads: Count = Field(default=4, description="number of heads, one a drafted token, and so the deepest draft")
    num_layers: Count = Field(default=1, description="residual blocks of each head")
    init_from_target: Annotated[bool, FREE] = Field(
        default=True, description="start the layers that score as the target's own head; false draws them"
    )
    default_branching: Annotated[Counts, FREE] = Field(
        default=(),
        description="children of a node, depth by depth, where no plan is given; [] is a chain, or Medusa's tree",
    )
    default_beam: Annotated[Size, FREE] = Field(
        default=0,
        description="nodes of that draft that get children at each depth, the likeliest ones; 0 gives them to all",
    )
    default_nodes: Annotated[Size, FREE] = Field(
        default=0, description="nodes of that draft that are kept, the likeliest ones; 0 keeps all"
    )

    layout = (
        "num_heads", "num_layers", "base_name", "hidden_size", "vocab_size", "draft_vocab_size", "default_branching",
        "default_beam", "default_nodes",
    )
    renamed: ClassVar[Mapping[str, str]] = {"base_name": "base_model_name_or_path"}
    only_if_set = ("base_name", "draft_vocab_size", "default_branching", "default_beam", "default_nodes")

    def rules(self) -> Iterator[tuple[bool, str, str]]:
        """What has to hold between fields."""
        yield from super().rules()
        yield len(self.default_branching) <= self.num_heads, "default_branching", (
            f"at most num_heads = {self.num_heads} numbers"
        )

    def made_for(self) -> dict[str, Any]:
        """Return what is known of the target, see `check_target`."""
        return super().made_for() | {"name": self.base_name}

    def sized_by(self, tensors: Mapping[str, Tensor], wide: str, tall: str) -> Self:
        """Return a copy with the target's sizes, which published files tell in two tensors only, (·, F) and (W, ·)."""
        hidden_size = self.hidden_size or (tensors[wide].shape[-1] if wide in tensors else 0)
        vocab_size = self.vocab_size or (tensors[tall].shape[0] if tall in tensors else 0)
        return self.changed(hidden_size=hidden_size, vocab_size=vocab_size)

    def plan(self) -> Plan:
        """Return the default plan."""
        branching = self.default_branching or (1,) * self.num_heads
        return Plan(branching, beam=self.default_beam or None, nodes=self.default_nodes or None)


class ResidualBlock(nn.Module):
    """x + SiLU(linear x), at first the identity (arXiv:2401.10774, section 2.1.1).

    With `conditions`, that many embeddings stand beside the state in x, and a linear map of x to the state's width, at
    first the choice of the state, takes the place of x in the sum (arXiv:2402.05109, section 3). With `drawn` the layer
    starts as PyTorch's do.
    """

    def __init__(self, width: int, conditions: int = 0, drawn: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear((conditions + 1) * width, width)
        if not drawn:
            nn.init.zeros_(self.linear.weight)
            # The published code leaves the bias random, which moves the first guesses off the target's own.
            nn.init.zeros_(self.linear.bias)
        self.res_connection: nn.Module | None = None
        if conditions:
            self.res_connection = nn.Linear((conditions + 1) * width, width)
            nn.init.eye_(self.res_connection.weight)
            nn.init.zeros_(self.res_connection.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Turn (…, (conditions + 1) F) into (…, F)."""
        kept: Tensor = x if self.res_connection is None else self.res_connection(x)
        return kept + F.silu(self.linear(x))


def native_steps(blocks: nn.Module) -> list[tuple[int, list[nn.Module]]]:
    """Return what the native operator is told of a sequence of residual blocks."""
    steps: list[tuple[int, list[nn.Module]]] = []
    for block in blocks.children():
        assert isinstance(block, ResidualBlock)
        kept = block.res_connection
        steps.append((RESIDUAL, [block.linear]) if kept is None else (NARROW, [block.linear, kept]))
    return steps


class HeadDrafter(RowwiseDrafter):
    """Heads that each predict one of the tokens after the root from the state that predicted the root."""

    taps = (-1,)
    can_compile = True
    config: HeadConfig

    @abstractmethod
    def projections(self) -> list[nn.Linear]:
        """Return the trained layers that score the drafted vocabulary."""

    @property
    def max_depth(self) -> int:
        """The number of heads."""
        return self.config.num_heads

    def default_plan(self) -> Plan:
        """Return the draft that the config asks for."""
        return self.config.plan()

    def start(self, features: Tensor) -> Tensor:
        """Return the states in the drafter's own dtype."""
        return features.to(self.work_dtype)

    @property
    def work_dtype(self) -> torch.dtype:
        """What the weights are in; packed ones are bf16."""
        return next((parameter.dtype for parameter in self.parameters()), torch.bfloat16)

    def hidden_matrices(self) -> list[nn.Parameter]:
        """Return the matrices of the residual blocks."""
        blocks = [module for module in self.modules() if isinstance(module, ResidualBlock)]
        return [parameter for block in blocks for parameter in block.parameters() if parameter.ndim == 2]

    @classmethod
    def new(cls, config: HeadConfig, target: "Target", draft_tokens: Tensor | None) -> Self:
        """Make untrained heads, which say what the target's own head says unless the config draws them."""
        return super().new(config.changed(base_name=target.name), target, draft_tokens)

    def start_new(self, target: "Target") -> None:
        """Let every head say what the target's own head says."""
        if self.config.init_from_target:
            self.start_as_target(target)

    def head_rows_WF(self, target: "Target") -> Tensor:
        """Return the rows of the target's head that stand for the drafted tokens, where and as the weights are."""
        device = next(self.parameters()).device
        head_VF = target.head_weight_VF.detach().to(device, self.work_dtype)[: self.vocab_size]
        return head_VF if self.d2t is None else head_VF[self.d2t.to(device)]

    @torch.no_grad()
    def start_as_target(self, target: "Target") -> None:
        """Let every head say what the target's own head says, but for a cap of its logits."""
        rows_WF = target.logit_form.scaled(self.head_rows_WF(target))
        for projection in self.projections():
            projection.weight.copy_(rows_WF)
