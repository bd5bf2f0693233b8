"""What families of heads on the target's last state share: options, residual blocks, vocabulary, checkpoints.

Shapes: N heads, F width of the target's states, V vocabulary, W drafted vocabulary, R rows of any origin.
"""

from abc import abstractmethod
from typing import TYPE_CHECKING, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.drafters.heads.head_config import HeadConfig
from draftsmith.drafters.trainable.drafter import RowwiseDrafter
from draftsmith.native.heads import NARROW, RESIDUAL
from draftsmith.plan import Plan

if TYPE_CHECKING:
    from draftsmith.targets import Target


class ResidualBlock(nn.Module):
    """x + SiLU(linear x), which starts as the identity (arXiv:2401.10774, section 2.1.1).

    With `conditions`, x also holds that many embeddings beside the state. In the sum, x is then replaced by a linear
    map of x to the state's width, which starts by selecting the state (arXiv:2402.05109, section 3). With `drawn`, the
    layer starts at random, as PyTorch's layers do.
    """

    def __init__(self, width: int, conditions: int = 0, drawn: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear((conditions + 1) * width, width)
        if not drawn:
            nn.init.zeros_(self.linear.weight)
            # The published code leaves the bias random, so that its first guesses differ from the target's own.
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
    """Return the description of a sequence of residual blocks for the native operator."""
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
        """The dtype of the weights; packed ones are bf16."""
        return next((parameter.dtype for parameter in self.parameters()), torch.bfloat16)

    def hidden_matrices(self) -> list[nn.Parameter]:
        """Return the matrices of the residual blocks."""
        blocks = [module for module in self.modules() if isinstance(module, ResidualBlock)]
        return [parameter for block in blocks for parameter in block.parameters() if parameter.ndim == 2]

    @classmethod
    def new(cls, config: HeadConfig, target: "Target", draft_tokens: Tensor | None) -> Self:
        """Make untrained heads, which start like the target's own head unless the config starts them at random."""
        return super().new(config.changed(base_name=target.name), target, draft_tokens)

    def start_new(self, target: "Target") -> None:
        """Let every head start like the target's own head."""
        if self.config.init_from_target:
            self.start_as_target(target)

    def head_rows_WF(self, target: "Target") -> Tensor:
        """Return the rows of the target's head for the drafted tokens, with the device and dtype of the weights."""
        device = next(self.parameters()).device
        head_VF = target.head_weight_VF.detach().to(device, self.work_dtype)[: self.vocab_size]
        return head_VF if self.d2t is None else head_VF[self.d2t.to(device)]

    @torch.no_grad()
    def start_as_target(self, target: "Target") -> None:
        """Let every head start like the target's own head, without a cap of its logits."""
        rows_WF = target.logit_form.scaled(self.head_rows_WF(target))
        for projection in self.projections():
            projection.weight.copy_(rows_WF)
