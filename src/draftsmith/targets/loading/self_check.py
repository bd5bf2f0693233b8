"""Compares a target, as it loads, with the model's own code on a few tokens, so that no model is taken on trust.

The reference is the model as it came: it reads two short texts whole, with its own attention. Two other readings of
the same texts are compared with it: whole through `tree_attention`, as in training, and as in generation, where a few
tokens go into the cache, and then each row reads a draft tree behind them, with siblings and chains, at different
lengths. Logits, and the states after every layer, are compared. This costs three forwards of a dozen tokens. It finds
attention that does more than transformers' interface shows, other masks, positions that are not read from
`position_ids`, and memory besides keys and values. Sliding windows are shortened for the check, so that the texts
reach past them. Other faults that only long texts show are not found.

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

# The largest allowed difference of logits and layer states from the model's own, relative to their size. Two ways of
# computing the same differ by the rounding of their dtype, which grows from layer to layer; a part that is left out,
# masked or placed wrongly makes a difference of a tenth or more. Some models compute norms and softmax in fp32 whatever
# their dtype, so fp64 is allowed a little more than the rounding of fp32 too.
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 0.004, torch.bfloat16: 0.03}
# In these dtypes all places have to agree. With fewer bits, the choice between two experts of nearly the same score may
# depend on the shape of a forward. One place is then far off, which is rounding and no fault, so only half of the
# places have to agree. A fault of attention, positions or memory moves all places behind the first.
ALL_BITS = frozenset({torch.float64, torch.float32})
# Deep models amplify rounding. A larger difference than above still counts as rounding up to this many times the
# difference that appears in the model's own output when all layer states are moved by a rounding, but never beyond
# MOST.
TIMES_ITS_OWN = 3
MOST = 0.3
PREFIX = 3
"""Tokens in the cache when the tree is read; together with the tree they reach past a window of `SHORT_WINDOW`."""
DEPTH = 2

R = TypeVar("R")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sample:
    """Two texts that differ behind their first `prefix` + 1 tokens, and the same tokens as trees behind a cache.

    Args:
        tokens_RT: the texts.
        prefix: tokens that are read into the cache.
        cached_R: how many of them each row keeps; the second row keeps one less, which makes the batch ragged.
        places_RM: for every node of the two trees, the index of the same token in the flattened texts.
        depths_RM: depth of every node.
        visible_RMM: the nodes that each node may see.
    """

    tokens_RT: Tensor
    prefix: int
    cached_R: Tensor
    places_RM: Tensor
    depths_RM: Tensor
    visible_RMM: Tensor


def draw_sample(vocabulary: int, prefix: int, shift: int, device: torch.device) -> Sample:
    """Take tokens from all over the vocabulary; another `shift` gives other tokens."""
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
    """What was read at some places: logits (…, V), and the states of all taps, concatenated (…, (L + 1) · F)."""

    logits: Tensor
    states: Tensor

    def at(self, places_RM: Tensor) -> "LogitsAndStates":
        """Select these places of the flattened texts."""
        return LogitsAndStates(self.logits.flatten(0, 1)[places_RM], self.states.flatten(0, 1)[places_RM])

    @property
    def finite(self) -> bool:
        """Whether all logits and states are finite."""
        return bool(self.logits.isfinite().all() and self.states.isfinite().all())


def distances(own: LogitsAndStates, other: LogitsAndStates, layers: int) -> Tensor:
    """Return the difference of two readings at every place, the largest among the logits and the layers.

    Each difference is relative to the size of the model's own value; that of logits is their distance from their mean.
    """
    parts = [(off / size).amax(-1) for off, size in _norms(own, other, layers)]
    return torch.maximum(*parts).flatten()


def distance(own: LogitsAndStates, other: LogitsAndStates, layers: int) -> float:
    """Return the difference of two readings over all places together, the largest among the logits and the layers."""
    norms = _norms(own, other, layers)
    return most(torch.cat([off.flatten(0, -2).norm(dim=0) / size.flatten(0, -2).norm(dim=0) for off, size in norms]))


def _norms(own: LogitsAndStates, other: LogitsAndStates, layers: int) -> list[tuple[Tensor, Tensor]]:
    """Return the norms of the differences and of the model's own values: logits (…, 1) and states (…, L + 1)."""
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
    """Return the largest difference at any place; NaN if there is one."""
    return apart.max().item()


def usual(apart: Tensor) -> float:
    """Return the difference that half of the places reach, which a few outliers do not change."""
    return apart.sort().values[len(apart) // 2].item()


class SelfCheck:
    """Lets the model read a sample by itself when it is made, and later compares with that what the target reads.

    Args:
        target: set up except for its backend.
        own_attention: the name of the attention that the model came with.
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
            # may be finite values to compare; if not, nothing can be said of this model.
            self.comparable = self.own.finite
            if self.comparable:
                return
        log.warning("%s: its own logits are not finite, so the target could not be held against them.", target.name)

    def whole_texts(self) -> ShapeProbe:
        """Read whole texts through our attention, and return what its layers asked for.

        Refuses the target if a layer asked for something unknown, or if the result differs from the model's own
        reading.
        """
        target, probe = self.target, ShapeProbe()
        other = self._read_whole(probe)
        refuse_attention(probe, target.layers, f"{target.name} ({target.config.model_type})")
        if self.comparable:
            self._refuse_if_apart([distances(self.own, other, target.layers)], "a text")
        return probe

    def trees(self) -> None:
        """Refuse the target if it reads draft trees behind its cache differently than the model reads their texts."""
        pairs = self._tree_pairs()
        if self.comparable:
            self._refuse_if_apart(
                [distances(*pair, self.target.layers) for pair in pairs], "a draft tree behind its cache"
            )

    def tree_distance(self) -> float:
        """Return how far the reading of draft trees differs from the model's own; NaN if values are not finite."""
        pairs = self._tree_pairs()
        if not self.comparable:
            return math.nan
        return most(torch.tensor([distance(*pair, self.target.layers) for pair in pairs]))

    def _tree_pairs(self) -> list[tuple[LogitsAndStates, LogitsAndStates]]:
        """Read prefixes and trees; return each together with the model's own reading of the same places."""
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
        """Return how far the model differs from itself when the output of every layer is moved by a rounding."""
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
        """Read the texts by the model's own code, with the attention that is set at the moment."""
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
        """Call `read`, and turn exceptions of the model's code into a one-sentence error."""
        try:
            return read()
        except (MemoryError, torch.OutOfMemoryError, DraftsmithError):
            raise
        except Exception as error:  # models come in two hundred kinds, and their code raises as many kinds
            target = self.target
            raise DraftsmithError(
                f"{target.name} ({target.config.model_type}) cannot be a target: {what} ({first_line(error)})."
            ) from error
