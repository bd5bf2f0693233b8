"""The MLP speculator: one small stage per depth, which reads the target's state and each drafted token in turn.

"Accelerating Production LLMs with Combined Token/Embedding Speculators" (arXiv:2404.19124), section 3:

    state_i = GELU(LN_i(proj_i state_{i-1} + (w_e / w_s) emb_i[token_{i-1}]))        logits_i = head_i state_i

Shapes: B rows, T positions, R rows of any origin, N stages, F target width, D inner width, S state width (F before the
first stage, D after it), V vocabulary, W drafted vocabulary (V, or the most frequent few tokens), k children.
"""

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.drafters.heads.mlp_config import MODEL_TYPE, MLPConfig
from draftsmith.drafters.trainable.drafter import FrozenTable, RowwiseDrafter
from draftsmith.native import NativeObject
from draftsmith.native.layers import packed_parts
from draftsmith.plan import Plan
from draftsmith.types import DraftsmithError

if TYPE_CHECKING:
    from draftsmith.targets import Target

EPSILON = 1e-6


def rms_normalise(x: Tensor) -> Tensor:
    """Divide by the root mean square over the last dimension, in fp32 or better."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)


class ScaleShiftNorm(nn.Module):
    """RMS normalisation with a learned scale and shift."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Keep shape and dtype."""
        return (rms_normalise(x) * self.weight + self.bias).to(x.dtype)


class MLPSpeculator(RowwiseDrafter):
    """The speculator itself. Weights start as N(0, 1/sqrt(D)) times `init_width`, norms at scale 1 and shift 0."""

    taps = (-1,)
    can_compile = True
    family_name = "an MLP speculator"
    model_type = MODEL_TYPE
    tensor_prefix = "speculator."
    config_class = MLPConfig
    config: MLPConfig

    def __init__(self, config: MLPConfig, draft_tokens: Tensor | None = None) -> None:
        super().__init__(config, draft_tokens)
        n, width = config.n_predict, config.width
        self.state_weight = 0.5 ** (0.5 / n)
        self.token_weight = math.sqrt((1 - self.state_weight**2) * width / 2)
        self.ratio = self.token_weight / self.state_weight

        def stages(make: Any, shared: bool) -> list[nn.Module]:
            return [make()] * n if shared else [make() for _ in range(n)]

        def table(rows: int, kind: type[nn.Module]) -> nn.Module:
            if config.tie_to_target:
                return FrozenTable(rows, width)
            return kind(rows, width) if kind is nn.Embedding else nn.Linear(width, rows, bias=False)

        share = config.tie_weights or config.tie_to_target
        reads = n if config.condition_on_tokens else 0
        self.emb = nn.ModuleList(stages(lambda: table(config.vocab_size, nn.Embedding), share)[:reads])
        self.head = nn.ModuleList(stages(lambda: table(config.scored, nn.Linear), share))
        self.ln = nn.ModuleList(stages(lambda: ScaleShiftNorm(width), config.tie_weights))
        first = nn.Linear(config.hidden_size, width, bias=False)
        rest = stages(lambda: nn.Linear(width, width, bias=False), config.tie_weights)[1:]
        self.proj = nn.ModuleList([first, *rest])
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=config.init_width * width**-0.5)

    def _weight(self, modules: nn.ModuleList, depth: int) -> Tensor:
        weight: Tensor = modules[depth].weight  # type: ignore[assignment]
        return weight

    def start(self, features: Tensor) -> Tensor:
        """Turn tapped states (…, F) into the input of the first stage, of the same shape."""
        features = features.to(self._weight(self.ln, 0).dtype)
        return (rms_normalise(features) / math.sqrt(2)).to(features.dtype) if self.config.scale_input else features

    def stage(self, depth: int, state: Tensor, tokens: Tensor) -> Tensor:
        """Read a state (…, S) and the token chosen from it (…); return the next state (…, D)."""
        read = F.embedding(tokens, self._weight(self.emb, depth)) if self.config.condition_on_tokens else None
        return self._next(depth, state, read)

    def _next(self, depth: int, state: Tensor, read: Tensor | None) -> Tensor:
        mixed = self.proj[depth](state)
        if read is not None:
            # Only the ratio of the two weights matters, because a norm follows.
            mixed = mixed + self.ratio * read
        return F.gelu(self.ln[depth](mixed))

    def states(self, state: Tensor, tokens_RN: Tensor) -> Iterator[Tensor]:
        """Yield the state of every depth; a table that all stages share is looked up only once.

        Each lookup would have a gradient of the whole table's size.
        """
        if not (self.config.condition_on_tokens and self.config.tie_weights):
            yield from super().states(state, tokens_RN)
            return
        for depth, read_RD in enumerate(F.embedding(tokens_RN, self._weight(self.emb, 0)).unbind(1)):
            state = self._next(depth, state, read_RD)
            yield state

    def score(self, depth: int, state: Tensor) -> Tensor:
        """Return the logits (…, W) over the drafted vocabulary."""
        return self.logit_form(self.head[depth](state))

    def pack(self, pack_layers: Callable[[nn.Module], bool]) -> None:
        """Pack as other families do, and a borrowed head too."""
        shared = self.head[0]
        if isinstance(shared, FrozenTable):
            self.head = nn.ModuleList([shared.as_layer()] * self.config.n_predict)
        super().pack(pack_layers)

    def native_form(self) -> NativeObject | None:
        """Return the operator of this family; None if scores are more than products."""
        if not self.logit_form.plain:
            return None
        weights, scales, sums, _ = packed_parts([*self.proj, *self.head])
        return NativeObject(
            "make_speculator", "draft_by_stages", weights, scales, sums,
            [self._weight(self.emb, depth).detach().contiguous() for depth in range(len(self.emb))],
            [self._weight(self.ln, depth).detach().float() for depth in range(len(self.ln))],
            [norm.get_parameter("bias").detach().float() for norm in self.ln],
            torch.empty(0, dtype=torch.long) if self.d2t is None else self.d2t,
            self.config.hidden_size, self.config.scored, self.ratio, self.config.scale_input,
        )

    def default_plan(self) -> Plan:
        """Return the tree that config.json asks for."""
        branching = self.config.default_branching or self.config.branching
        return Plan(branching, paths=self.config.n_candidates)

    @property
    def max_depth(self) -> int:
        """The number of stages."""
        return self.config.n_predict

    @torch.no_grad()
    def bind(self, target: "Target") -> None:
        """Point a speculator that is tied to its target at the target's embedding and head; leave others unchanged."""
        if self.config.tie_to_target:
            if self.config.width != target.hidden_size:
                raise DraftsmithError(
                    f"inner_dim is {self.config.width}, but the target's tables are {target.hidden_size} wide; "
                    f"set inner_dim to {target.hidden_size}, or tie_to_target to false."
                )
            embedding_VD, head_WD = target_tables(self, target)
            for module in self.emb:
                module.weight = embedding_VD
            for module in self.head:
                module.weight = head_WD
            self.logit_form = target.logit_form

    def hidden_matrices(self) -> list[nn.Parameter]:
        """Return the projections between states."""
        return list(dict.fromkeys(self.proj.parameters()))

    def describe(self) -> dict[str, Any]:
        """Return the published config.json.

        Readers of tied checkpoints differ: text-generation-inference reads stage 0 (and proj 1) only; vLLM ignores
        names that it does not look for, but its newer versions keep one head per stage and look for each.
        """
        return {"architectures": ["MLPSpeculatorPreTrainedModel"], **super().describe()}

    def start_new(self, target: "Target") -> None:
        """Initialise weights from the target's tables if the config says so."""
        initialise_from_target(self, target, self.config.init_from_target)


def target_tables(speculator: MLPSpeculator, target: "Target") -> tuple[Tensor, Tensor]:
    """Return the target's embedding (V, F) and the head rows of the drafted tokens (W, F)."""
    config = speculator.config
    like = speculator._weight(speculator.proj, 0)
    embedding_VD = target.embedding_weight_VF.detach().to(like)
    head_VD = target.head_weight_VF.detach().to(like)
    return embedding_VD[: config.vocab_size], head_VD if speculator.d2t is None else head_VD[speculator.d2t]


@torch.no_grad()
def initialise_from_target(speculator: MLPSpeculator, target: "Target", what: str) -> None:
    """Start emb, or emb and head, of every stage from the target's tables (section 5).

    Args:
        what: "none", "embeddings" or "embeddings+head".

    The embedding is scaled to the RMS 1/sqrt(D) for which the stage weights w_s and w_e are made. The head is copied
    unscaled, except for the scale of the target's logits if they have one. If D is not the target's width, both are
    rotated into D dimensions by one random orthogonal map, which keeps similar tokens similar.
    """
    if what == "none" or speculator.config.tie_to_target:
        return
    embedding_VD, head_WD = target_tables(speculator, target)
    width = speculator.config.width
    if width != target.hidden_size:
        turn_FD = torch.empty(target.hidden_size, width)
        nn.init.orthogonal_(turn_FD)
        turn_FD = turn_FD.to(embedding_VD.device)
        embedding_VD, head_WD = embedding_VD.float() @ turn_FD, head_WD.float() @ turn_FD
    scaled_VD = embedding_VD.float() * (speculator.config.width * embedding_VD.float().square().mean()).rsqrt()
    for module in speculator.emb:
        speculator_weight: Tensor = module.weight  # type: ignore[assignment]
        speculator_weight.copy_(scaled_VD)
    if what == "embeddings+head":
        for module in speculator.head:
            head_weight: Tensor = module.weight  # type: ignore[assignment]
            head_weight.copy_(target.logit_form.scaled(head_WD))
