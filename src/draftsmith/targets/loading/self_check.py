"""Holds a target that loads against its model's own code, on a few tokens: no model is taken on trust.

The reference is the model as it came, with its own attention, reading two short texts whole. Held against it are the
same texts read whole through `tree_attention`, as for training, and read as generation reads them: a few tokens into
the cache, then behind them a draft tree a row, with siblings and chains, at different lengths. Compared are the logits
and the states after every layer. Three forwards of a dozen tokens are what it costs, and they find attention that does
more than transformers' interface shows, other masks, positions that are not read from `position_ids`, and memory beside
keys and values. Sliding windows are shortened meanwhile, so that the texts reach past them. What else only long texts
show is out of reach.

Shapes: R = 2 texts, T tokens of each, M = 5 nodes a tree (root first), L layers, F hidden width, V vocabulary.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from draftsmith.targets.attention import ShapeProbe
from draftsmith.targets.cache.nodes import Nodes
from draftsmith.targets.encode import encode_by_model
from draftsmith.targets.layers import layer_stack
from draftsmith.targets.loading.support import original_attention, refuse_attention
from draftsmith.targets.loading.tokens import first_line
from draftsmith.types import DraftsmithError

if TYPE_CHECKING:
    from draftsmith.targets.target import Target

# How far logits and states of a layer may be from the model's own, as a part of their size. Two ways to compute the
# same differ by the rounding of their dtype, which grows from layer to layer; what is left out, masked or placed
# otherwise differs by a tenth and more. Some models compute norms and softmax in fp32 whatever their dtype, so that
# fp64 is held to a little more than the rounding of fp32.
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 0.004, torch.bfloat16: 0.03}
# In these all places have to agree. In fewer bits the choice between two experts of nearly the same score falls one
# way or the other with the shape of a forward, and one place is then far from itself, which is rounding and no fault:
# half of the places have to agree. A fault of attention, positions or memory moves all places behind the first.
ALL_BITS = frozenset({torch.float64, torch.float32})
# Deep models enlarge what rounding does. More than the above is rounding still up to so many times the model's own
# distance from itself when the states of all layers are moved by a rounding, but no further than this.
TIMES_ITS_OWN = 3
MOST = 0.3
PREFIX = 3
"""Tokens in the cache when the tree is read; with the tree they reach past a window of `SHORT_WINDOW`."""
DEPTH = 2

R = TypeVar("R")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sample:
    """Two texts that part behind their first `prefix` + 1 tokens, and the same tokens as trees behind a cache.

    Args:
        tokens_RT: the texts.
        prefix: tokens that are read into the cache.
        cached_R: how many of them each row keeps: the second one less, which makes the batch ragged.
        places_RM: of every node of the two trees, where in the flattened texts the same token stands.
        depths_RM: depth of every node.
        visible_RMM: which nodes each may see.
    """

    tokens_RT: Tensor
    prefix: int
    cached_R: Tensor
    places_RM: Tensor
    depths_RM: Tensor
    visible_RMM: Tensor


def draw_sample(vocabulary: int, prefix: int, shift: int, device: torch.device) -> Sample:
    """Take tokens from all over the vocabulary, others for another `shift`."""
    few = [(k * max(1, vocabulary // 9) + shift) % vocabulary for k in range(1, 9)]
    head = [few[k % 3] for k in range(prefix)] + [few[3]]
    length = prefix + 1 + DEPTH
    texts = [[*head, few[4], few[6]], [*head, few[5], few[7]]]
    first, second = prefix, length + prefix  # the root's place in either text
    # Row 0 has root, two children and a child of each; row 1 begins one token earlier and is one tree deeper.
    places = [
        [first, second + 1, first + 1, first + 2, second + 2],
        [first - 1, first, second + 1, first + 1, first + 2],
    ]
    parents = [[0, 0, 0, 2, 1], [0, 0, 1, 1, 3]]
    depths, visible = [], torch.eye(5, dtype=torch.bool).repeat(2, 1, 1)
    for row, above in enumerate(parents):
        depth = [0] * 5
        for node in range(1, 5):
            depth[node] = depth[above[node]] + 1
            visible[row, node] |= visible[row, above[node]]
        depths.append(depth)
    return Sample(
        torch.tensor(texts, device=device), prefix, torch.tensor([prefix, prefix - 1], device=device),
        torch.tensor(places, device=device), torch.tensor(depths, device=device), visible.to(device),
    )


@dataclass(frozen=True)
class LogitsAndStates:
    """What was read at some places: logits (…, V), and the states of all taps one behind the other (…, (L + 1) · F)."""

    logits: Tensor
    states: Tensor

    def at(self, places_RM: Tensor) -> "LogitsAndStates":
        """Take these places of the flattened texts."""
        return LogitsAndStates(self.logits.flatten(0, 1)[places_RM], self.states.flatten(0, 1)[places_RM])

    @property
    def finite(self) -> bool:
        """Whether all of it is a number."""
        return bool(self.logits.isfinite().all() and self.states.isfinite().all())


def distances(own: LogitsAndStates, other: LogitsAndStates, layers: int) -> Tensor:
    """Return of every place how far two readings are apart there, of the logits or the layer where that is most.

    Each is a part of its own size, that of logits being their distance from their mean.
    """
    parts = [(off / size).amax(-1) for off, size in _norms(own, other, layers)]
    return torch.maximum(*parts).flatten()


def distance(own: LogitsAndStates, other: LogitsAndStates, layers: int) -> float:
    """Return how far two readings are apart over all places together, of the logits or the layer where that is most."""
    norms = _norms(own, other, layers)
    return most(torch.cat([off.flatten(0, -2).norm(dim=0) / size.flatten(0, -2).norm(dim=0) for off, size in norms]))


def _norms(own: LogitsAndStates, other: LogitsAndStates, layers: int) -> list[tuple[Tensor, Tensor]]:
    """Return norms of the difference and of the model's own, of the logits (…, 1) and of the states (…, L + 1)."""
    wide = torch.float64 if own.logits.dtype == torch.float64 else torch.float32
    logits, states = own.logits.to(wide), own.states.to(wide).unflatten(-1, (layers + 1, -1))
    off_states = other.states.to(wide).unflatten(-1, (layers + 1, -1)) - states
    pairs = [
        ((other.logits.to(wide) - logits).unsqueeze(-2), (logits - logits.mean(-1, keepdim=True)).unsqueeze(-2)),
        (off_states, states),
    ]
    least = torch.finfo(wide).tiny
    return [(off.norm(dim=-1), size.norm(dim=-1).clamp(min=least)) for off, size in pairs]


def most(apart: Tensor) -> float:
    """Return the largest distance at any place; NaN if there is one."""
    return apart.max().item()


def usual(apart: Tensor) -> float:
    """Return the distance that half of the places have or pass, which a few far ones leave alone."""
    return apart.sort().values[len(apart) // 2].item()


class SelfCheck:
    """Has the model read a sample by itself, at once, and holds against that what the target reads afterwards.

    Args:
        target: set up as far as its hooks.
        own_attention: the name of the attention that the model came with.

    Raises:
        DraftsmithError: the model's own forward does not run.
    """

    def __init__(self, target: "Target", own_attention: str) -> None:
        self.target, self.own_attention = target, own_attention
        self.taps = (-1, *range(target.layers))
        prefix = min(PREFIX, target.max_length - 1 - DEPTH)
        if prefix < 1:
            raise DraftsmithError(
                f"{target.name} reads {target.max_length} tokens at most, and a target needs at least {2 + DEPTH}."
            )
        for shift in (0, 1):
            self.sample = draw_sample(target.vocab_size, prefix, shift, target.device)
            with original_attention(target.model, own_attention):
                self.own = self._guarded("its own forward does not run", self._read_whole)
            # Damaged weights are no reason for a refusal: rows that meet them end one by one. With other tokens there
            # may be something to compare; where there is not, nothing can be said of this model.
            self.comparable = self.own.finite
            if self.comparable:
                return
        log.warning("%s: its own logits are not finite, so the target could not be held against them.", target.name)

    def whole_texts(self) -> ShapeProbe:
        """Read whole texts through our attention, and return what its layers asked for.

        Refuses the target if that is not known, or if they are read otherwise than by the model itself.
        """
        target, probe = self.target, ShapeProbe()
        other = self._read_whole(probe)
        refuse_attention(probe, target.layers, f"{target.name} ({target.config.model_type})")
        if self.comparable:
            self._refuse_if_apart([distances(self.own, other, target.layers)], "a text")
        return probe

    def trees(self) -> None:
        """Refuse the target if it reads draft trees behind its cache otherwise than the model reads their texts."""
        pairs = self._tree_pairs()
        if self.comparable:
            self._refuse_if_apart(
                [distances(*pair, self.target.layers) for pair in pairs], "a draft tree behind its cache"
            )

    def tree_distance(self) -> float:
        """Return how far draft trees are read from what the model itself says, NaN where that is not finite."""
        pairs = self._tree_pairs()
        if not self.comparable:
            return math.nan
        return most(torch.tensor([distance(*pair, self.target.layers) for pair in pairs]))

    def _tree_pairs(self) -> list[tuple[LogitsAndStates, LogitsAndStates]]:
        """Read prefixes and trees; return each beside the model's own reading of the same places."""
        prefix, tree = self._guarded("it cannot read a draft tree behind a cache", self._read_trees)
        count = self.sample.prefix
        own = LogitsAndStates(self.own.logits[:, :count], self.own.states[:, :count])
        return [(own, prefix), (self.own.at(self.sample.places_RM), tree)]

    def _refuse_if_apart(self, parts: list[Tensor], what: str) -> None:
        target = self.target
        few_bits = target.dtype not in ALL_BITS
        apart = max(usual(part) for part in parts) if few_bits else most(torch.cat(parts))
        allowed = TOLERANCES.get(target.dtype, TOLERANCES[torch.bfloat16])
        log.info("%s: %s is read %.1e from the model's own code", target.name, what, apart)
        if not apart <= allowed and few_bits:
            allowed = min(max(allowed, TIMES_ITS_OWN * self._shaken()), MOST)
        if not apart <= allowed or not all(part.isfinite().all() for part in parts):
            raise DraftsmithError(
                f"{target.name} ({target.config.model_type}) as a target does not say what its own code says: {what} "
                f"is read {apart:.1e} of its size apart, where rounding explains {allowed:.0e}; its layers do more "
                "than transformers' attention interface shows, or do not take positions from position_ids, which is "
                "not supported yet."
            )

    def _shaken(self) -> float:
        """Return how far the model is from itself when the output of every layer is moved by a rounding."""
        target = self.target
        noise = torch.Generator(target.device).manual_seed(0)

        def move(_: nn.Module, __: Any, output: Any) -> Any:
            state = output if isinstance(output, Tensor) else output[0]
            by = torch.randn(state.shape, generator=noise, device=state.device) * torch.finfo(state.dtype).eps
            moved = state * (1 + by).to(state.dtype)
            return moved if isinstance(output, Tensor) else (moved, *output[1:])

        _, stack = layer_stack(target.model, target.layers, target.name)
        hooks = [layer.register_forward_hook(move) for layer in stack]
        try:
            with original_attention(target.model, self.own_attention):
                other = self._read_whole()
        finally:
            for hook in hooks:
                hook.remove()
        return usual(distances(self.own, other, target.layers))

    @torch.no_grad()
    def _read_whole(self, probe: ShapeProbe | None = None) -> LogitsAndStates:
        """Read the texts by the model's own code, through whichever attention it has now."""
        states, logits = encode_by_model(self.target, self.sample.tokens_RT, self.taps, logits=True, probe=probe)
        assert logits is not None
        return LogitsAndStates(logits, states)

    @torch.no_grad()
    def _read_trees(self) -> tuple[LogitsAndStates, LogitsAndStates]:
        """Read the prefixes into a cache and the trees behind them; the one place that calls `forward`."""
        target, sample = self.target, self.sample
        rows, length = sample.tokens_RT.shape
        cache = target.new_cache(rows, length + DEPTH + 1)
        nothing_R = torch.zeros_like(sample.cached_R)
        prefix_RP = sample.tokens_RT[:, : sample.prefix]
        prefix = target.read_chain(cache, prefix_RP, nothing_R, self.taps)
        nodes = Nodes(
            sample.tokens_RT.flatten()[sample.places_RM], sample.cached_R, None, sample.depths_RM, sample.visible_RMM,
            columns_S=target.backend.columns(lambda: cache.capacity),
        )
        tree = target.forward(cache, nodes, self.taps)
        return LogitsAndStates(*prefix), LogitsAndStates(*tree)

    def _guarded(self, what: str, read: Callable[[], R]) -> R:
        """Read, and turn what the model's code raises into one sentence."""
        try:
            return read()
        except (MemoryError, torch.OutOfMemoryError, DraftsmithError):
            raise
        except Exception as error:  # the code of two hundred kinds of models raises as many kinds
            target = self.target
            raise DraftsmithError(
                f"{target.name} ({target.config.model_type}) cannot be a target: {what} ({first_line(error)})."
            ) from error
