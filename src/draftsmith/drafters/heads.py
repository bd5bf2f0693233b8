"""What the families of heads on the target's last state share: options, residual blocks, vocabulary, checkpoints.

Shapes: N heads, F width of the target's states, V vocabulary, W drafted vocabulary, R rows of any origin.
"""

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import torch
import torch.nn.functional as F
from pydantic import Field, ValidationError, model_validator
from torch import Tensor, nn

from draftsmith.drafters.family import TrainedOptions, explain
from draftsmith.drafters.learner import check_target
from draftsmith.drafters.trainable import RowwiseDrafter
from draftsmith.native.heads import NARROW, RESIDUAL
from draftsmith.plan import Plan
from draftsmith.types import DraftsmithError

if TYPE_CHECKING:
    from draftsmith.target import Target

Count = Annotated[int, Field(ge=1)]
OWN_KEYS = ("draft_vocab_size", "default_branching", "default_beam", "default_nodes")


class HeadOptions(TrainedOptions):
    """What a recipe may set of new heads.

    Args:
        num_heads: how many, and so the deepest draft.
        num_layers: residual blocks of each.
        init_from_target: start each projection to the vocabulary as the target's own head; False draws it.
        default_branching: children a node, depth by depth, of the draft when nobody chose a plan; () is a chain, or
            what the family says.
        default_beam: nodes that are expanded at each depth of that draft; 0 expands all.
        default_nodes: nodes that are kept of that draft, the most probable ones; 0 keeps all.
    """

    num_heads: Count = 4
    num_layers: Count = 1
    init_from_target: bool = True
    default_branching: tuple[Count, ...] = ()
    default_beam: Annotated[int, Field(ge=0)] = 0
    default_nodes: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _deep_enough(self) -> Self:
        if len(self.default_branching) > self.num_heads:
            raise ValueError(f"default_branching is deeper than num_heads, which is {self.num_heads}")
        return self

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
    """Heads that each predict one of the tokens after the root from the state that predicted the root.

    Args:
        hidden_size: F.
        vocab_size: V.
        base_name: what config.json calls the target; None where it does not say.
        draft_tokens: the only tokens (W) to score, where the options limit them.
    """

    taps = (-1,)
    can_compile = True
    options_class: type[HeadOptions]

    def __init__(
        self, options: HeadOptions, hidden_size: int, vocab_size: int, base_name: str | None = None,
        draft_tokens: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.options, self.hidden_size, self.base_name = options, hidden_size, base_name
        self._vocab_size = vocab_size
        self.limit_vocabulary(draft_tokens, options.draft_vocab_size)
        self.build()

    @abstractmethod
    def build(self) -> None:
        """Make the modules."""

    @abstractmethod
    def projections(self) -> list[nn.Linear]:
        """Return the trained layers that score the drafted vocabulary."""

    @classmethod
    @abstractmethod
    def read_config(
        cls, config: Mapping[str, Any], origin: Path, tensors: Mapping[str, Tensor]
    ) -> tuple[dict[str, Any], tuple[str, str]]:
        """Return the options under the family's own keys, and the names of two tensors: (·, F) and (W, ·)."""

    @property
    def scored(self) -> int:
        """W."""
        return self.options.draft_vocab_size or self._vocab_size

    @property
    def vocab_size(self) -> int:
        """V."""
        return self._vocab_size

    @property
    def max_depth(self) -> int:
        """The number of heads."""
        return self.options.num_heads

    def default_plan(self) -> Plan:
        """Return the draft that the options ask for."""
        return self.options.plan()

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

    def shared_keys(self) -> dict[str, Any]:
        """Return what config.json says beside the family's own keys; our options only where they were set."""
        values = self.options.model_dump(mode="json", include=set(OWN_KEYS), exclude_defaults=True)
        base = {} if self.base_name is None else {"base_model_name_or_path": self.base_name}
        return base | {"hidden_size": self.hidden_size, "vocab_size": self._vocab_size} | values

    def sizes(self) -> dict[str, Any]:
        """Return what shapes the weights, under the names that a recipe has for it."""
        values = self.options.model_dump(exclude={"init_from_target"})
        return {name: value for name, value in values.items() if not name.startswith("default_")}

    def head_rows_WF(self, target: "Target") -> Tensor:
        """Return the rows of the target's head that stand for the drafted tokens, where and as the weights are."""
        device = next(self.parameters()).device
        head_VF = target.head_weight_VF.detach().to(device, self.work_dtype)[: self._vocab_size]
        return head_VF if self.d2t is None else head_VF[self.d2t.to(device)]

    @torch.no_grad()
    def start_as_target(self, target: "Target") -> None:
        """Let every head say what the target's own head says."""
        rows_WF = self.head_rows_WF(target)
        for projection in self.projections():
            projection.weight.copy_(rows_WF)

    def like(self, options: HeadOptions, draft_tokens: Tensor | None) -> Self:
        """Return new heads of other options for the same target."""
        return type(self)(options, self.hidden_size, self._vocab_size, self.base_name, draft_tokens)

    def restricted(self, draft_tokens: Tensor) -> Self:
        """Return a copy that scores only these tokens (W), with the rows of the heads that stand for them."""
        if self.d2t is not None:
            raise DraftsmithError(f"these heads score {len(self.d2t)} tokens only; start from whole ones.")
        options = self.options.model_copy(update={"draft_vocab_size": len(draft_tokens)})
        fewer = self.like(options, draft_tokens)
        cut = {id(parameter) for projection in self.projections() for parameter in projection.parameters()}
        tensors = {
            name: tensor[draft_tokens] if id(tensor) in cut else tensor
            for name, tensor in self.state_dict(keep_vars=True).items()
        }
        fewer.to(self.device, self.work_dtype).load_state_dict(tensors | {"d2t": draft_tokens})
        return fewer

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], origin: Path, target: "Target | None", tensors: Mapping[str, Tensor]
    ) -> Self:
        """Build what config.json and the tensors describe; published files tell the sizes in their tensors only."""
        values, (wide, tall) = cls.read_config(config, origin, tensors)
        hidden_size, vocab_size = config.get("hidden_size"), config.get("vocab_size")
        if hidden_size is None and wide in tensors:
            hidden_size = tensors[wide].shape[-1]
        if vocab_size is None and tall in tensors:
            vocab_size = tensors[tall].shape[0]
        base = config.get("base_model_name_or_path")
        if target is not None:
            made_for = {"hidden_size": hidden_size, "vocab_size": vocab_size, "name": base}
            check_target(origin.parent, made_for, target.facts())
            hidden_size, vocab_size = target.hidden_size, target.vocab_size
        if hidden_size is None or vocab_size is None:
            raise DraftsmithError(f"{origin} does not say how large its target is; load it with that target.")
        values |= {key: config[key] for key in OWN_KEYS if key in config}
        try:
            options = cls.options_class.model_validate(values)
        except ValidationError as error:
            raise DraftsmithError(explain(error, cls.options_class, f"{origin}: ")) from error
        return cls(options, hidden_size, vocab_size, base, tensors.get("d2t"))
