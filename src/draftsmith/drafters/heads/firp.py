"""FIRP: linear maps guess the intermediate states of future tokens, and the target's own last layers refine them.

"FIRP: Faster LLM inference via future intermediate representation prediction" (arXiv:2410.20488). Let h be the output
of layer l at the position that predicted the root. For every depth d from 0,

    x_d = M_d h                                     a guess at the output of layer l, d + 1 positions further on
    y_0 … y_{N-1} = layers l+1 … L (x_0 … x_{N-1})  each attends to the keys and values of the text and of x_0 … x_d
    logits_d = head(norm(y_d))                      guesses the token d + 1 after the root

The layers, the norm, the head and the keys and values of the text are the target's own, shared and frozen; only the
maps are trained. Guesses depend on the text before the root and on no drafted token, so a tree is a product of the
guesses of each depth.

The paper's abstract says that linear transformations at a middle layer predict the states of future tokens, which then
go through all later layers, in the context of the text and of each other. Only the abstract and the introduction of the
paper were at hand. The following points differ from the paper, or are not known to agree with it:
- The paper predicts the states in the forward that yields the next token. Here they go through the last layers in a
  separate pass right after it, behind the accepted path: from the same state, over the same keys and values, at the
  price of reading the last layers once more per step.
- Loss: cross-entropy, or with distillation the divergence from the target's distribution, plus `state_weight` times
  |x - h|² / |h|², h being the true state there.
- One map a depth, all at one layer, without bias, beginning as the identity.

There is no published checkpoint; config.json has `model_type` firp and the fields of `FIRPConfig`, tensors are
maps.{d}.weight, and d2t with a drafted vocabulary.

Shapes: B rows, T positions of a text, P positions that are drafted from, D depths (N in all),
M = P × D guessed states, F target width, V vocabulary, W drafted vocabulary.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from draftsmith.drafters.heads.firp_config import MODEL_TYPE, FIRPConfig
from draftsmith.drafters.trainable.batch import TrainingBatch
from draftsmith.drafters.trainable.drafter import FrozenTable
from draftsmith.drafters.trainable.parallel import ParallelDrafter
from draftsmith.plan import Plan
from draftsmith.targets.upper import UpperLayers
from draftsmith.types import Context, DraftsmithError

if TYPE_CHECKING:
    from draftsmith.targets import KVCache, Target

class FIRPDrafter(ParallelDrafter):
    """The drafter itself: one map a depth, and layers borrowed from the target."""

    family_name = "a FIRP drafter"
    model_type = MODEL_TYPE
    config_class = FIRPConfig
    config: FIRPConfig
    borrows_layers = True

    def __init__(self, config: FIRPConfig, draft_tokens: Tensor | None = None) -> None:
        """Build an untrained drafter, which cannot be used before `bind`."""
        super().__init__(config, draft_tokens)
        assert config.layer is not None
        self.taps = (config.layer,)
        width = config.hidden_size
        self.maps = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(config.n_predict))
        for one in self.maps:
            nn.init.eye_(one.get_parameter("weight"))
        self.head: nn.Module | None = None if self.d2t is None else FrozenTable(len(self.d2t), width)
        self._upper: UpperLayers | None = None
        self._cache: KVCache | None = None

    @property
    def upper(self) -> UpperLayers:
        """The borrowed layers."""
        if self._upper is None:
            raise DraftsmithError("a FIRP drafter works with its target's last layers only; bind it to that target.")
        return self._upper

    @torch.no_grad()
    def bind(self, target: "Target") -> None:
        """Borrow the target's last layers and head; DraftsmithError if the target has no layers behind `layer`."""
        self._upper = UpperLayers(target, self.taps[0])
        if isinstance(self.head, FrozenTable):
            # In the target's dtype, like the outputs of its layers.
            self.head.weight = target.head_weight_VF.detach()[self.d2t]
        self.logit_form = target.logit_form

    def pack(self, pack_layers: Callable[[nn.Module], bool]) -> None:
        """Pack the maps, and the rows of the head that a drafted vocabulary needs."""
        if isinstance(self.head, FrozenTable):
            self.head = self.head.as_layer()
        super().pack(pack_layers)

    def guess_states(self, roots: Tensor) -> Tensor:
        """Map outputs of the layer (…, F) to those of the next positions (…, D, F)."""
        return torch.stack([one(roots) for one in self.maps], dim=-2)

    def score(self, final: Tensor, upper: UpperLayers) -> Tensor:
        """Return the logits (…, W) of refined states (…, F)."""
        if isinstance(self.head, FrozenTable):
            final = final.to(self.head.weight.dtype)  # layers that teach may be more precise than the target
        return self.logit_form((upper.head if self.head is None else self.head)(final))

    def attach(self, cache: "KVCache", plan: Plan) -> None:
        """Keep a reference to the target's cache: guesses read its keys and values, and write theirs behind them."""
        self._cache = cache

    def guess(self, context: Context, root_B: Tensor, feature_BF: Tensor) -> Tensor:
        """Guess and refine the states of all depths in one pass behind the committed text.

        The cache has all committed tokens but the root, whose position is that of the first guessed state. The entries
        behind them may be overwritten until the next verification.
        """
        if self._cache is None:
            raise RuntimeError("a FIRP drafter drafts within an engine, which attaches its cache first.")
        cached_B, depths = context.lengths_B - 1, self.config.n_predict
        span = int(cached_B.max()) + depths
        states_BDF = self.guess_states(feature_BF.to(self.upper.target.dtype))
        chain = self.upper.chain(self._cache, cached_B, depths, span, context.slots_B)
        return self.score(self.upper.refine(states_BDF, chain), self.upper)

    def _refined(self, features_BTF: Tensor, positions_BP: Tensor) -> tuple[Tensor, Tensor]:
        """Guess and refine behind each of these positions of whole texts, as decoding would do there.

        The text is read into a scratch cache first, as the target read it. Entry t of the features is at position t,
        and the guesses behind it are at t + 1, t + 2 …; no other entry sees them.

        Returns:
            guessed states and refined ones, both (B, P, D, F).
        """
        upper = self.upper.differentiable
        batch, length, width = features_BTF.shape
        cache = upper.new_cache(batch, length + positions_BP.shape[1] * self.max_depth)
        upper.read_text(features_BTF, cache)
        index_BPF = positions_BP.unsqueeze(2).expand(-1, -1, width)
        roots_BPF = features_BTF.gather(1, index_BPF).to(self.maps[0].get_parameter("weight"))
        guessed_BPDF = self.guess_states(roots_BPF)
        branches = upper.branches(cache, length, positions_BP, self.max_depth)
        final_BMF = upper.refine(guessed_BPDF.flatten(1, 2), branches)
        return guessed_BPDF, final_BMF.unflatten(1, (-1, self.max_depth))

    def guess_at(self, tokens_BT: Tensor, features_BTF: Tensor, positions_BP: Tensor) -> Tensor:
        """Return the guesses behind these positions; the features must start at the beginning of the text."""
        return self.score(self._refined(features_BTF, positions_BP)[1], self.upper.differentiable)

    def losses(self, examples: TrainingBatch) -> tuple[Tensor, Tensor]:
        """Return the loss of every depth, from its guess and from the distance of its state from the true one."""
        guessed_BPDF, final_BPDF = self._refined(examples.features_BTF, examples.positions_BP)
        losses, accuracy = self.losses_from(examples, self.score(final_BPDF, self.upper.differentiable))
        batch, reads_BPN = examples.reads_BPN(self.max_depth)
        true_BPDF = examples.features_BTF[batch, reads_BPN + 1].float()
        error_RD = ((guessed_BPDF.float() - true_BPDF).square().sum(-1) / true_BPDF.square().sum(-1)).flatten(0, 1)
        errors = torch.stack([examples.mean(error_RD[:, depth], depth) for depth in range(self.max_depth)])
        return losses + self.config.state_weight * errors, accuracy

    def default_plan(self) -> Plan:
        """Return the tree that config.json asks for; a chain by default."""
        given = self.config.branching
        branching = given + (1,) * (self.max_depth - len(given))
        return Plan(branching, paths=None if set(branching) == {1} else self.config.n_candidates)

    @property
    def max_depth(self) -> int:
        """The number of maps."""
        return self.config.n_predict

    def hidden_matrices(self) -> list[nn.Parameter]:
        """Return the maps."""
        return list(self.maps.parameters())

    def describe(self) -> dict[str, Any]:
        """Return the object of config.json."""
        return {"architectures": ["FIRPDrafter"], **super().describe()}
