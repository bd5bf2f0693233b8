"""Drafters with weights: one forward for training and decoding.

Shapes: B rows, T positions, R rows of any origin, N depths, F feature width, S state width, V vocabulary, W drafted
vocabulary (V, or the most frequent few tokens), k children.
"""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from draftsmith.drafters.base import StagewiseDrafter, best
from draftsmith.drafters.config import TrainedConfig
from draftsmith.drafters.draws import shared_noise
from draftsmith.drafters.grow import grow
from draftsmith.drafters.trainable.batch import TrainingBatch
from draftsmith.drafters.trainable.model import TrainableModel, check_target
from draftsmith.native import NativeObject
from draftsmith.plan import Plan
from draftsmith.targets.logit_form import LogitForm
from draftsmith.types import Context, Draft, DraftsmithError

if TYPE_CHECKING:
    from draftsmith.targets import Target


class TrainableDrafter(StagewiseDrafter, TrainableModel):
    """A trainable model that drafts by itself, one depth at a time.

    Tested for every family: what `propose` drafts greedily is what `forward` predicts when fed its own output.
    """

    config_class: type[TrainedConfig]
    """The class of its options; the annotation of `config` says the same to a type checker."""
    model_type: str
    """The family's name in config.json."""
    sure_behind = 0.05
    _weighed: tuple[int, int] | None = None
    """Number of its weights, and their bytes; set when it is made ready to decode, after which it can neither be
    trained nor saved."""
    logit_form: LogitForm = LogitForm()
    """How products of a borrowed head become scores, as in the target; set by `bind`."""
    _native: NativeObject | None = None
    """The operator that drafts with the packed layers; None if PyTorch's operations draft."""

    def __init__(self, config: Any, draft_tokens: Tensor | None = None) -> None:
        """Begin an untrained one; families add their modules, initialised from PyTorch's global generator.

        Args:
            config: the options, with the target's sizes.
            draft_tokens: the tokens (W) to score if the config limits them.
        """
        super().__init__()
        self.config = config
        self.limit_vocabulary(draft_tokens)

    @classmethod
    def new(cls, config: Any, target: "Target", draft_tokens: Tensor | None) -> Self:
        """Make an untrained drafter for a target."""
        made = cls(config.for_target(target), draft_tokens)
        made.start_new(target)
        made.bind(target)
        return made

    @torch.no_grad()
    def start_new(self, target: "Target") -> None:
        """Initialise weights from the target's tables; most families initialise all weights at random."""
        return

    def describe(self) -> dict[str, Any]:
        """Return the object of config.json."""
        return {"model_type": self.model_type, **self.config.to_json()}

    @classmethod
    def recognises(cls, config: Mapping[str, Any]) -> bool:
        """Recognise it by the model_type."""
        return config.get("model_type") == cls.model_type

    @classmethod
    def read_config(
        cls, config: Mapping[str, Any], origin: Path, tensors: Mapping[str, Tensor]
    ) -> tuple[Any, Tensor | None]:
        """Return what config.json and the tensors say: the config, and the tokens that are scored, or None for all."""
        return cls.config_class.from_json(config, origin), tensors.get(f"{cls.tensor_prefix}d2t")

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], origin: Path, target: "Target | None", tensors: Mapping[str, Tensor]
    ) -> Self:
        """Build the drafter that a config.json at `origin` describes, see `TrainableModel.from_config`."""
        told, draft_tokens = cls.read_config(config, origin, tensors)
        if target is not None:
            check_target(origin.parent, told.made_for(), target.facts())
            return cls(told.for_target(target), draft_tokens)
        if told.borrows:
            raise DraftsmithError(f"{origin.parent} {told.borrows}; load it with that target.")
        if not (told.hidden_size and told.vocab_size):
            raise DraftsmithError(f"{origin} does not say how large its target is; load it with that target.")
        return cls(told, draft_tokens)

    @torch.no_grad()
    def restricted(self, draft_tokens: Tensor) -> Self:
        """Return a copy that scores only these tokens (W), with the matching rows of tables."""
        if self.d2t is not None:
            raise DraftsmithError(f"this drafter scores {len(self.d2t)} tokens only; start from a whole one.")
        fewer = type(self)(self.config.limited_to(len(draft_tokens)), draft_tokens.to(self.device))
        wanted = fewer.to(next(self.parameters())).state_dict()
        # Tensors whose shapes differ have a row for every token that is scored.
        own = {
            name: tensor if tensor.shape == wanted[name].shape else tensor[draft_tokens.to(self.device)]
            for name, tensor in self.state_dict().items()
        }
        fewer.load_state_dict({"d2t": fewer.d2t, **own})
        return fewer

    def default_plan(self) -> Plan:
        """Return the draft to make if no plan was chosen: a chain."""
        return Plan((1,) * self.max_depth)

    def check_savable(self) -> None:
        """Refuse packed weights."""
        if self._weighed is not None:
            raise DraftsmithError("this drafter is packed for decoding; save the one it was made from.")

    def parameter_count(self) -> int:
        """Count the trained weights."""
        return self._weighed[0] if self._weighed else sum(parameter.numel() for parameter in self.parameters())

    def memory_bytes(self) -> int:
        """Return the memory of its weights as it decodes; before it is made ready, as it learns."""
        if self._weighed:
            return self._weighed[1]
        return sum(tensor.nbytes for tensor in (*self.parameters(), *self.buffers()))

    def pack(self, pack_layers: Callable[[nn.Module], bool]) -> None:
        """Convert to the form that decodes fastest, in place; with native layers and an operator, drafting is native.

        Families that merge layers, or make layers of borrowed tables, do so first.

        Args:
            pack_layers: packs a module's linear layers, and returns whether for native operators: `Backend.pack`.
        """
        if pack_layers(self):
            self._native = self.native_form()
            self.can_compile = self.can_compile and self._native is None

    def native_form(self) -> NativeObject | None:
        """Return the operator that drafts with the packed layers; None if the family has none."""
        return None

    def make_ready(self, target: "Target") -> Self:
        """Make it decode for this target, in place: the target's dtype and device, no gradients, packed."""
        # Count first: packing turns parameters into buffers, and binding adds tables of the target's.
        count = self.parameter_count()
        self.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
        self.bind(target)
        self.pack(target.backend.pack)
        theirs = {tensor.data_ptr() for tensor in (*target.model.parameters(), *target.model.buffers())}
        held = {tensor.data_ptr(): tensor.nbytes for tensor in (*self.parameters(), *self.buffers())}
        self._weighed = count, sum(size for place, size in held.items() if place not in theirs)
        return self

    @torch.no_grad()
    def for_decoding(self, target: "Target") -> Self:
        """Return a copy that decodes. The copy guesses; only the original can be trained or saved."""
        if self._weighed is not None:
            raise DraftsmithError("this drafter is packed for decoding already; use it, or load it anew.")
        return copy.deepcopy(self).make_ready(target)

    def best_tokens(self, logits_RW: Tensor, k: int, scores: bool) -> tuple[Tensor | None, Tensor]:
        """Return log q of the k best tokens (R, k), or None unless `scores`, and their ids (R, k)."""
        logits_Rk, indices_Rk = best(logits_RW, k)
        log_q_Rk = logits_Rk.float() - logits_RW.float().logsumexp(-1, keepdim=True) if scores else None
        return log_q_Rk, indices_Rk if self.d2t is None else self.d2t[indices_Rk]

    def propose(self, context: Context, plan: Plan) -> Draft:
        """Draft a chain or tree."""
        return grow(self, context, plan)

    @classmethod
    def load(cls, folder: Path, target: "Target") -> Self:
        """Load for decoding: in the target's dtype, on its device, packed; it cannot be trained."""
        return cls.from_pretrained(folder, target, dtype=target.dtype).make_ready(target)


class RowwiseDrafter(TrainableDrafter):
    """A drafter whose guesses depend on the root's state and the tokens after it, and on no other position.

    So every position of a text is an example of its own, and a few of them can be trained on alone. The family provides
    the three functions of its paper: the start, the step of a depth from state and token, and the scoring. If the
    family also has a native form, one operator makes the whole draft.
    """

    @abstractmethod
    def start(self, features: Tensor) -> Tensor:
        """Turn tapped states (…, F) into the input of the first depth."""

    @abstractmethod
    def stage(self, depth: int, state: Tensor, tokens: Tensor) -> Tensor:
        """Read a state (…, S) and the token chosen from it (…); return the next state (…, S')."""

    @abstractmethod
    def score(self, depth: int, state: Tensor) -> Tensor:
        """Return the logits (…, W) over the drafted vocabulary."""

    def begin(self, context: Context) -> tuple[Tensor, Any]:
        """Start from the root and the state that predicted it."""
        root_B, feature_BF = context.root()
        return root_B, self.start(feature_BF)

    def step(self, depth: int, state: Any, tokens_R: Tensor) -> tuple[Tensor, Any]:
        """Return log q (R, V) in fp32 and the state after stage `depth`."""
        state_RS = self.stage(depth, state, tokens_R)
        log_q_RW = torch.log_softmax(self.score(depth, state_RS).float(), dim=-1)
        return self.to_vocabulary(log_q_RW), state_RS

    def top_k(
        self, depth: int, state: Any, tokens_R: Tensor, k: int, scores: bool
    ) -> tuple[Tensor | None, Tensor, Any]:
        """Find the best k in the drafted vocabulary, without a softmax unless scores are wanted."""
        state_RS = self.stage(depth, state, tokens_R)
        return *self.best_tokens(self.score(depth, state_RS), k, scores), state_RS

    def propose(self, context: Context, plan: Plan) -> Draft:
        """Draft a chain or tree, natively where there is an operator that knows the plan."""
        general = plan.sampled or plan.choices
        if self._native is None or general or not 0 < plan.depth <= self.max_depth:
            return grow(self, context, plan)
        tokens_BN, parents_BN = self._native(
            context.tokens_BT, context.features_BTF.bfloat16().contiguous(), context.counts_B, plan.branching,
            plan.paths or 0, plan.beam or 0, plan.max_nodes, plan.confidence or 0.0, shared_noise(plan, context),
        )
        return Draft(tokens_BN, parents_BN, min(plan.depth, plan.max_nodes), branching=plan.branching)

    def forward(self, tokens_BT: Tensor, features_BTF: Tensor) -> list[Tensor]:
        """Predict at every depth, see `TrainableDrafter.forward`."""
        return self.predict(tokens_BT, self.start(features_BTF))

    def predict(self, tokens_BT: Tensor, state: Tensor) -> list[Tensor]:
        """Predict at every depth, given the start state of every position (B, T, S)."""
        length, logits = tokens_BT.shape[1], []
        for depth in range(min(self.max_depth, length)):
            state = self.stage(depth, state[:, : length - depth], tokens_BT[:, depth:])
            logits.append(self.to_vocabulary(self.score(depth, state)))
        return logits

    def states(self, state: Tensor, tokens_RN: Tensor) -> Iterator[Tensor]:
        """Yield the state (R, S) of every depth, given the roots' start states and the tokens that the depths read."""
        for depth, tokens_R in enumerate(tokens_RN.unbind(1)):
            state = self.stage(depth, state, tokens_R)
            yield state

    def losses(self, examples: TrainingBatch) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy of every depth, mixed with the divergence from the target if that is requested."""
        return self.losses_from(examples, self.start(examples.roots_RF()))

    def losses_from(self, examples: TrainingBatch, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return losses and accuracies of every depth, given the start states at the roots (R, S)."""
        depths = self.max_depth
        tokens_RN, soft = examples.tokens_RN(depths), examples.soft_labels(depths, self.d2t)
        labels_RN = examples.labels_RN(depths, self.d2t, self.vocab_size)
        losses, accuracies = [], []
        for depth, state_RS in enumerate(self.states(state, tokens_RN)):
            loss, accuracy = examples.loss_and_accuracy(depth, self.score(depth, state_RS), labels_RN, soft)
            losses.append(loss)
            accuracies.append(accuracy)
        return torch.stack(losses), torch.stack(accuracies)


class FrozenTable(nn.Module):
    """A table of the target's: a buffer that is never trained or saved, so that `.to()` cannot alter the target."""

    weight: Tensor

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(rows, width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Score with the table as a head; an embedding is looked up in `weight` instead."""
        return torch.nn.functional.linear(x, self.weight)

    def as_layer(self) -> nn.Linear:
        """Return a linear layer with this very weight, which packing then treats like any other layer."""
        rows, width = self.weight.shape
        layer = nn.Linear(width, rows, bias=False, device="meta")
        layer.weight = nn.Parameter(self.weight, requires_grad=False)
        return layer
